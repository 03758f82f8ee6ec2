"""Prompts and replies of some kinds, as agents write them, from the commits of a repository.

A commit says what somebody wrote behind what he saw: its files before and behind it, its change and its message. So no
model is needed, and nothing is made up but the form of a reply. Commits are taken in the order of time: a reply that is
remembered is an older one. Beside them are the replies of an agents' trace, of words by chance.
"""

from __future__ import annotations

import json
import lzma
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePosixPath

from tokenizers import Encoding, Tokenizer

import mllm_compile
from benchmarks.server.agent_trace import PRESETS, Generator, prompts_of, text_of
from mllm_compile.errors import ConfigError

TINY = Path(mllm_compile.__file__).parent / "model" / "tiny" / "tokenizer.json"

KINDS = {
    "files": "files written again with a change",
    "edits": "edits: the lines of a file to search, and those in their place",
    "quotes": "the added lines of a change quoted, file by file",
    "new": "new files beside one of their folder",
    "messages": "a change's message",
    "agents": "an agents' trace, whose texts are 98 words by chance",
    "again": "the same calls, each answered once before",
}
ANSWERED_BEFORE = frozenset({"again"})  # kinds of which past answers have all replies

_CALLS = 128  # of the trace


@dataclass(frozen=True)
class Known:
    """Token ids of a prompt and of the reply to it."""

    prompt: list[int]
    reply: list[int]

    def cut(self, most: int) -> Known:
        return Known(self.prompt, self.reply[:most])


def write(file: Path, replies: Mapping[str, Sequence[Known]]) -> None:
    """Writes the replies of each kind as compressed JSON."""
    plain = {kind: [[one.prompt, one.reply] for one in known] for kind, known in replies.items()}
    file.write_bytes(lzma.compress(json.dumps(plain).encode()))


def read(file: Path) -> dict[str, list[Known]]:
    """The replies that `write` wrote.

    Raises:
        ConfigError: the file is another one.
    """
    try:
        plain = json.loads(lzma.decompress(file.read_bytes()))
        return {kind: [Known(*one) for one in known] for kind, known in plain.items()}
    except (lzma.LZMAError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} has no replies; expected a file that `python -m benchmarks.replies` wrote"
        ) from error


def known_replies(
    repository: Path, newest: str, num_commits: int, tokenizer: Path = TINY, most_prompt: int = 4096
) -> dict[str, list[Known]]:
    """The replies of each kind, oldest first.

    Args:
        newest: the last of the commits.
        most_prompt: tokens of a prompt; longer ones are left out.
    """
    encode = Tokenizer.from_file(str(tokenizer)).encode
    found: dict[str, list[Known]] = {kind: [] for kind in KINDS}
    for kind, prompt, reply in _texts(repository, newest, num_commits):
        one = Known(*(encode(text, add_special_tokens=False).ids for text in (prompt, reply)))
        if one.reply and len(one.prompt) <= most_prompt:
            found[kind].append(one)
    found["agents"] = found["again"] = [*_of_agents(encode, most_prompt)]
    return found


def _of_agents(encode: Callable[..., Encoding], most_prompt: int) -> Iterator[Known]:
    """The first calls of a trace, whose prompts are cut to their newest tokens."""
    calls = Generator(PRESETS["agentx"], seed=1, scale=1.0, pace=1.0, longest_pause_s=0.0).sessions(8)
    for call, prompt in islice(prompts_of(calls), _CALLS):
        newest = list[int]()
        for _, tokens, seed in reversed(prompt):
            if len(newest) >= most_prompt:
                break
            newest = encode(text_of(seed, tokens), add_special_tokens=False).ids + newest
        reply = encode(text_of(call["reply_seed"], call["out_tokens"]), add_special_tokens=False).ids
        yield Known(newest[-most_prompt:], reply)


def _texts(repository: Path, newest: str, num_commits: int) -> Iterator[tuple[str, str, str]]:
    """(kind, prompt, reply) of each commit."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(repository), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def paths(commit: str, kind: str) -> list[str]:
        names = git("diff", "--name-only", f"--diff-filter={kind}", f"{commit}~", commit, "--", "*.py")
        return names.splitlines()

    with_one_before = ("--no-merges", "--min-parents=1")
    for commit in git("log", f"-{num_commits}", "--reverse", *with_one_before, "--format=%H", newest).split():
        message = git("log", "-1", "--format=%B", commit)
        change = git("diff", f"{commit}~", commit, "--", "*.py", "*.md")
        yield "messages", change, message
        quoted = ""
        for path in paths(commit, "M"):
            before, behind = git("show", f"{commit}~:{path}"), git("show", f"{commit}:{path}")
            yield "files", before, behind
            hunks = [*_hunks(git("diff", f"{commit}~", commit, "--", path))]
            yield "edits", f"{message}\n{before}", "".join(_edit(path, hunk) for hunk in hunks)
            added = "\n".join(line[1:] for hunk in hunks for line in hunk if line.startswith("+"))
            quoted += f"\n`{path}`:\n```\n{added}\n```\n" if added else ""
        if quoted:
            yield "quotes", change, message.partition("\n")[0] + quoted
        for path in paths(commit, "A"):
            folder = f"{PurePosixPath(path).parent}/"
            beside = [
                name for name in git("ls-tree", "--name-only", f"{commit}~", folder).split() if name[-3:] == ".py"
            ]
            seen = git("show", f"{commit}~:{beside[-1]}") if beside else ""
            yield "new", f"{message}\n{seen}", git("show", f"{commit}:{path}")


def _hunks(change: str) -> Iterator[list[str]]:
    """The lines of each hunk of a file's change."""
    for hunk in change.split("\n@@ ")[1:]:
        yield [line for line in hunk.split("\n")[1:] if line.startswith((" ", "+", "-"))]


def _edit(path: str, hunk: Sequence[str]) -> str:
    before, behind = ("\n".join(line[1:] for line in hunk if line[0] in f" {sign}") for sign in "-+")
    return f"{path}\n<<<<<<< SEARCH\n{before}\n=======\n{behind}\n>>>>>>> REPLACE\n"
