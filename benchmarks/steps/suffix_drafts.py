"""Tokens a step and host microseconds of suffix drafts by kind of reply, beside the best that copies could give.

    python -m benchmarks.steps.suffix_drafts [--repository .] [--newest HEAD] [--commits 40] [--requests 32]
        [--drafted 7] [--factor 4.0] [--most 40]

Commits say the replies (benchmarks/replies/kinds.py), in tokens of the embedded model or of --tokenizer. No model
runs: a reply is known, so a draft is accepted as far as it agrees, and a step gives one token more. So many requests
are drafted for together, and past replies are remembered. Time is the process's own, of calls of the drafter. Beside
it, for one request at once: drafts of the longest match in all earlier text, one token at least, and those of the place
that is best, which nobody knows beforehand.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

import numpy as np

from benchmarks.replies.kinds import ANSWERED_BEFORE, KINDS, TINY, Known, known_replies
from benchmarks.script import names_of, parser_of, positive, told_in_one_line
from mllm_compile.runtime.config_sections import SpeculativeSection
from mllm_compile.runtime.speculation.drafter import Asked, Drafter
from mllm_compile.runtime.speculation.factory import make_speculation

_VOCAB_SIZE = 1 << 18  # above any id
_NO_PAGES = np.empty(0, dtype=np.int32)
_PLACES, _COMPARED = 4096, 64  # newest places that are looked at, and tokens before them


@dataclass(eq=False)
class Edit:
    """A request whose reply is known."""

    known: Known
    output_token_ids: list[int] = field(default_factory=list)
    cache_salt: None = None
    row: int = 0
    steps: int = 0

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.known.prompt

    @property
    def left(self) -> Sequence[int]:
        return self.known.reply[len(self.output_token_ids) :]

    def take(self, draft: Sequence[int]) -> None:
        """A verify step: the tokens of a draft that are right, and one more."""
        left = self.left
        right = sum(1 for _ in takewhile(lambda both: both[0] == both[1], zip(draft, left, strict=False)))
        self.output_token_ids += left[: right + 1]
        self.steps += 1


@dataclass
class Drafted:
    """Steps of requests, tokens that were drafted for them, and seconds of the drafter's calls."""

    steps: int = 0
    drafted: int = 0
    seconds: float = 0.0


def serve(replies: Sequence[Known], at_once: int, most: int, factor: float, *, were_answered: bool = False) -> Drafted:
    """Answers all, so many at once.

    Args:
        were_answered: once before, which is not counted.
    """
    section = SpeculativeSection(method="suffix", num_speculative_tokens=most, suffix_decoding_max_spec_factor=factor)
    speculation = make_speculation(section, _VOCAB_SIZE)
    assert speculation is not None, "the method drafts"
    if were_answered:
        _answer(replies, speculation.drafter, at_once, most)
    return _answer(replies, speculation.drafter, at_once, most)


def _answer(replies: Sequence[Known], drafter: Drafter, at_once: int, most: int) -> Drafted:
    result = Drafted()
    waiting, running = [Edit(one) for one in replies], list[Edit]()
    while waiting or running:
        while waiting and len(running) < at_once:
            running.append(waiting.pop(0))
        asked = [Asked(one, min(most, len(one.left)), len(one.output_token_ids), _NO_PAGES) for one in running]
        begin = time.process_time()
        drafts = drafter.propose(asked)
        result.seconds += time.process_time() - begin
        for one, draft in zip(running, drafts, strict=True):
            one.take(draft)
            result.drafted += len(draft)
        result.steps += len(running)
        begin = time.process_time()
        for one in running:
            if not one.left:
                drafter.end(one)
        result.seconds += time.process_time() - begin
        running = [one for one in running if one.left]
    return result


def best_steps(replies: Sequence[Known], most: int, *, is_known: bool, were_answered: bool = False) -> int:
    """Steps of all replies, one after another, where drafts go on from a place in all earlier text with the last token.

    Args:
        is_known: that place is the best one, which only the reply tells; else the newest of the longest match.
        were_answered: as `serve` takes it.
    """
    before = [token for one in replies for token in (*one.reply, -1)] if were_answered else []
    steps, past = 0, np.array(before, dtype=np.int32)
    for one in replies:
        text = np.array([*past, *one.prompt, *one.reply], dtype=np.int32)
        end = text.size - len(one.reply)
        while end < text.size:
            seen, ahead = text[:end], text[end:][:most]
            places = np.flatnonzero(seen[:-1] == seen[-1])[-_PLACES:] + 1
            if places.size and not is_known:
                lengths = _agreeing(seen, places[:, None] - np.arange(1, _COMPARED + 1), seen[: -_COMPARED - 1 : -1])
                places = places[lengths == lengths.max()][-1:]
            right = _agreeing(seen, places[:, None] + np.arange(ahead.size), ahead).max(initial=0)
            end += int(right) + 1
            steps += 1
        past = np.append(past, [*one.reply, -1])
    return steps


def _agreeing(text: np.ndarray, indices: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """How many of the tokens [n] stand in a text one after another, at the indices [P, n] of each place: [P]."""
    indices = indices[:, : tokens.size]
    differs = (text.take(indices, mode="clip") != tokens) | (indices < 0) | (indices >= text.size)
    differs = np.pad(differs, ((0, 0), (0, 1)), constant_values=True)
    lengths: np.ndarray = differs.argmax(axis=1)
    return lengths


def report(kind: str, replies: Sequence[Known], args: Namespace) -> None:
    tokens = sum(len(one.reply) for one in replies)
    before = {"were_answered": kind in ANSWERED_BEFORE}
    alone, together = (serve(replies, at_once, args.drafted, args.factor, **before) for at_once in (1, args.requests))
    others = [
        f"{tokens / best_steps(replies, args.drafted, is_known=is_known, **before):.2f}" for is_known in (False, True)
    ]
    print(
        f"{kind} | {len(replies)}, {tokens} | {tokens / alone.steps:.2f} | {' | '.join(others)} | "
        f"{alone.drafted / alone.steps:.1f} | {alone.seconds / alone.steps * 1e6:.1f} | "
        f"{tokens / together.steps:.2f} | {together.seconds / together.steps * 1e6:.1f}"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repository", type=Path, default=Path())
    parser.add_argument("--newest", default="HEAD", help="the last commit")
    parser.add_argument("--commits", type=positive, default=40)
    parser.add_argument("--kinds", type=names_of(KINDS), default=[*KINDS])
    parser.add_argument("--requests", type=positive, default=32, help="at once")
    parser.add_argument("--drafted", type=positive, default=7)
    parser.add_argument("--factor", type=float, default=4.0, help="suffix_decoding_max_spec_factor")
    parser.add_argument("--most", type=positive, default=40, help="replies of a kind, the newest")
    parser.add_argument("--tokenizer", type=Path, default=TINY, help="a tokenizer.json")
    args = parser.parse_args()
    print(
        "kind | replies, tokens | tokens a step | of the longest match | of the best place | drafted | µs a step "
        f"| tokens a step, {args.requests} at once | µs a request and step",
    )
    known = known_replies(args.repository, args.newest, args.commits, args.tokenizer)
    for kind in args.kinds:
        if known[kind]:
            report(kind, known[kind][-args.most :], args)


if __name__ == "__main__":
    with told_in_one_line():
        main()
