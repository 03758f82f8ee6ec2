"""The tree that this one is compared with: a commit, checked out beside it, or a folder."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mllm_compile.errors import ConfigError

MAIN = ("origin/main", "main")
COMMITS_BACK = 20
TRAILER = "Slower"  # of a commit: `Slower: STAGE: the reason`


class NoBaseError(ConfigError):
    """No base exists to compare with."""


def find_base(root: Path, asked: str | None) -> tuple[str, str]:
    """The commit to compare with, and what it is.

    It is the merge base with main. On main itself that is this commit: with changes that are not committed it still is
    the base; without, the last tag is, or the commit twenty ahead of it.

    Raises:
        NoBaseError: no base exists.
    """
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        raise NoBaseError(
            f"{root} is no repository of git, so no commit can be compared with. Give another tree's folder: "
            "make bench BASE_DIR=FOLDER."
        )
    if asked:
        commit = _git(root, "rev-parse", "--verify", f"{asked}^{{commit}}")
        if commit is None:
            raise NoBaseError(f"BASE is {asked!r}; expected a commit of {root}, as git names it.")
        return commit, f"as asked: {asked}"
    for main in MAIN:
        merged = _git(root, "merge-base", "HEAD", main)
        if merged and merged != head:
            return merged, f"the merge base with {main}"
    if _git(root, "status", "--porcelain", "-uno"):
        return head, "this commit without the changes that are not committed"
    tagged = _git(root, "describe", "--tags", "--abbrev=0", "HEAD^")
    if tagged and (commit := _git(root, "rev-parse", f"{tagged}^{{commit}}")):
        return commit, f"the last tag, {tagged}"
    before = (_git(root, "rev-list", "--first-parent", f"--max-count={COMMITS_BACK + 1}", "HEAD") or "").split()[1:]
    if not before:
        raise NoBaseError(
            f"{root} has one commit alone, as in a shallow clone: there is nothing to compare with. Fetch more "
            "(git fetch --unshallow), or give another tree's folder: make bench BASE_DIR=FOLDER."
        )
    return before[-1], f"{len(before)} commits ahead of this one, as this is main"


def slower_on_purpose(root: Path, base: str) -> dict[str, str]:
    """Stages that commits since the base say are slower, with the reasons: `Slower: STAGE: reason`."""
    told = _git(root, "log", f"--format=%(trailers:key={TRAILER},valueonly)", f"{base}..HEAD") or ""
    pairs = (line.partition(":") for line in told.splitlines() if line.strip())
    return {stage.strip(): reason.strip() for stage, _, reason in pairs if reason.strip()}


@contextmanager
def checked_out(root: Path, commit: str) -> Iterator[Path]:
    """A folder with the commit's files, for as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="mllm-base-") as parent:
        folder = Path(parent) / "base"
        subprocess.run(
            ["git", "-C", str(root), "worktree", "add", "--quiet", "--detach", str(folder), commit], check=True
        )
        try:
            yield folder
        finally:
            subprocess.run(["git", "-C", str(root), "worktree", "remove", "--force", str(folder)], check=False)


def _git(root: Path, *arguments: str) -> str | None:
    """The answer; None: git has none."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
