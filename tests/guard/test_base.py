"""The tree that the guard compares with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.guard.base import COMMITS_BACK, NoBaseError, checked_out, find_base, slower_on_purpose


def git(root: Path, *arguments: str) -> str:
    names = ["-c", "user.name=A", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(root), *names, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(root: Path, text: str, message: str = "A change") -> str:
    (root / "file").write_text(text)
    git(root, "add", "file")
    git(root, "commit", "-q", "-m", message)
    return git(root, "rev-parse", "HEAD")


@pytest.fixture
def repository(tmp_path) -> Path:
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path, "0")
    return tmp_path


def test_a_branch_is_compared_with_the_commit_that_it_left_main_at(repository):
    left = commit(repository, "1")
    git(repository, "checkout", "-q", "-b", "branch")
    commit(repository, "2")
    git(repository, "checkout", "-q", "main")
    commit(repository, "3")
    git(repository, "checkout", "-q", "branch")
    assert find_base(repository, None) == (left, "the merge base with main")


def test_changes_that_are_not_committed_on_main_are_compared_with_its_last_commit(repository):
    head = commit(repository, "1")
    (repository / "file").write_text("2")
    found, told = find_base(repository, None)
    assert (found, "not committed" in told) == (head, True)


def test_main_itself_is_compared_with_the_last_tag_or_an_earlier_commit(repository):
    commits = [commit(repository, str(index)) for index in range(1, COMMITS_BACK + 3)]
    assert find_base(repository, None)[0] == commits[-1 - COMMITS_BACK]
    git(repository, "tag", "v1", commits[3])
    assert find_base(repository, None) == (commits[3], "the last tag, v1")
    git(repository, "tag", "v2")
    assert find_base(repository, None)[0] == commits[3], "the tag of this commit itself is no other tree"


def test_a_young_main_is_compared_with_its_first_commit(repository):
    first = git(repository, "rev-parse", "HEAD")
    commit(repository, "1")
    assert find_base(repository, None) == (first, "1 commits ahead of this one, as this is main")


def test_a_commit_that_is_asked_for_is_taken_or_refused_by_name(repository):
    first = git(repository, "rev-parse", "HEAD")
    commit(repository, "1")
    assert find_base(repository, "HEAD^")[0] == first
    with pytest.raises(NoBaseError, match="BASE is 'nosuch'; expected a commit"):
        find_base(repository, "nosuch")


def test_a_tree_without_history_says_what_to_do(repository, tmp_path_factory):
    with pytest.raises(NoBaseError, match=r"one commit alone, .*git fetch --unshallow.*BASE_DIR=FOLDER"):
        find_base(repository, None)
    with pytest.raises(NoBaseError, match="is no repository of git"):
        find_base(tmp_path_factory.mktemp("copy"), None)


def test_a_commit_may_say_that_a_stage_is_slower_and_why(repository):
    base = git(repository, "rev-parse", "HEAD")
    commit(repository, "1", "A change\n\nWhy.\n\nSlower: scheduler step: it checks every page")
    commit(repository, "2", "Another\n\nSlower: sampler:")
    assert slower_on_purpose(repository, base) == {"scheduler step": "it checks every page"}, "a reason is needed"


def test_the_files_of_the_base_are_there_while_they_are_needed(repository):
    first = git(repository, "rev-parse", "HEAD")
    commit(repository, "1")
    with checked_out(repository, first) as folder:
        assert (folder / "file").read_text() == "0"
    assert not folder.exists()
    assert len(git(repository, "worktree", "list").splitlines()) == 1
