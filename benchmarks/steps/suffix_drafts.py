"""Tokens a step and host microseconds of suffix drafts where answers are files again with a change.

    python -m benchmarks.steps.suffix_drafts [--repository .] [--commits 40] [--requests 32] [--drafted 8]

Agents write such answers. A prompt is a Python file as it was before a commit, and its answer the file behind it, in
tokens of the embedded model.
No model runs: an answer is known, so a draft is accepted as far as it agrees, and a step gives one token more. Such
requests are drafted for together, and past answers are remembered. Time is the process's own, of calls of the drafter.
With random answers, as a second line has them, nothing can be drafted.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import mllm_compile
from benchmarks.script import parser_of, positive, told_in_one_line
from mllm_compile.runtime.config_sections import SpeculativeSection
from mllm_compile.runtime.speculation.drafter import Asked, Drafter
from mllm_compile.runtime.speculation.factory import make_speculation

TINY = Path(mllm_compile.__file__).parent / "model" / "tiny"
MOST_TOKENS = 4096  # of a prompt and of an answer
_NO_PAGES = np.empty(0, dtype=np.int32)


@dataclass(eq=False)
class Edit:
    """A request whose answer is known."""

    prompt_token_ids: list[int]
    answer: list[int]
    output_token_ids: list[int] = field(default_factory=list)
    cache_salt: None = None
    row: int = 0
    steps: int = 0

    @property
    def left(self) -> Sequence[int]:
        return self.answer[len(self.output_token_ids) :]

    def take(self, draft: Sequence[int]) -> None:
        """A verify step: the tokens of a draft that are right, and one more."""
        left, right = self.left, 0
        while right < min(len(draft), len(left)) and draft[right] == left[right]:
            right += 1
        self.output_token_ids += left[: right + 1]
        self.steps += 1


def edits_of(repository: Path, num_commits: int) -> list[tuple[str, str]]:
    """Python files before and behind the newest commits that change some."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(repository), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    found = []
    for commit in git("log", f"-{num_commits}", "--no-merges", "--format=%H").split():
        for path in git("diff", "--name-only", "--diff-filter=M", f"{commit}~", commit, "--", "*.py").split():
            found.append((git("show", f"{commit}~:{path}"), git("show", f"{commit}:{path}")))
    return found


def serve(drafter: Drafter, edits: Sequence[Edit], at_once: int, most: int) -> float:
    """Answers all, so many at once; seconds of the drafter's calls."""
    waiting, running, seconds = list(edits), list[Edit](), 0.0
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(waiting.pop(0))
        asked = [Asked(one, min(most, len(one.left)), len(one.output_token_ids), _NO_PAGES) for one in running]
        begin = time.process_time()
        drafts = drafter.propose(asked)
        seconds += time.process_time() - begin
        for one, draft in zip(running, drafts, strict=True):
            one.take(draft)
        begin = time.process_time()
        for one in running:
            if not one.left:
                drafter.end(one)
        seconds += time.process_time() - begin
        running = [one for one in running if one.left]
    return seconds


def report(name: str, edits: Sequence[Edit], at_once: int, most: int, vocab_size: int) -> None:
    section = SpeculativeSection(method="suffix", num_speculative_tokens=most)
    speculation = make_speculation(section, vocab_size)
    assert speculation is not None, "the method drafts"
    seconds = serve(speculation.drafter, edits, at_once, most)
    steps, tokens = sum(one.steps for one in edits), sum(len(one.answer) for one in edits)
    each = statistics.quantiles([len(one.answer) / one.steps for one in edits], n=4)
    print(
        f"{name}: {len(edits)} answers, {tokens / steps:.2f} tokens a step (quartiles {each[0]:.2f}, {each[1]:.2f} and "
        f"{each[2]:.2f}), {seconds / steps * 1e6:.1f} µs of the host a request and step",
    )


def tokens_of(texts: Iterable[tuple[str, str]]) -> tuple[list[Edit], int]:
    tokenizer = Tokenizer.from_file(str(TINY / "tokenizer.json"))
    encoded = [tuple(tokenizer.encode(text, add_special_tokens=False).ids for text in pair) for pair in texts]
    fitting = [Edit(*pair) for pair in encoded if pair[1] and max(map(len, pair)) <= MOST_TOKENS]
    return fitting, tokenizer.get_vocab_size()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repository", type=Path, default=Path())
    parser.add_argument("--commits", type=positive, default=40)
    parser.add_argument("--requests", type=positive, default=32, help="at once")
    parser.add_argument("--drafted", type=positive, default=8)
    args = parser.parse_args()
    edits, vocab_size = tokens_of(edits_of(args.repository, args.commits))
    draw = random.Random(0)
    others = [Edit(one.prompt_token_ids, [draw.randrange(vocab_size) for _ in one.answer[:500]]) for one in edits]
    report("files written again", edits, args.requests, args.drafted, vocab_size)
    report("random answers", others, args.requests, args.drafted, vocab_size)


if __name__ == "__main__":
    with told_in_one_line():
        main()
