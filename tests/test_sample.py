"""tests/sample.py: a red run repeats."""

from __future__ import annotations

import subprocess

import pytest

from tests import sample


@pytest.fixture(autouse=True)
def no_seed_yet(monkeypatch):
    monkeypatch.delenv(sample.VARIABLE, raising=False)
    sample.seed.cache_clear()
    yield
    sample.seed.cache_clear()


def answer(monkeypatch, text: str) -> None:
    done = subprocess.CompletedProcess([], 0, text, "")
    monkeypatch.setattr(sample.subprocess, "run", lambda *args, **kwargs: done)


def test_a_commit_has_its_sample_and_another_one_another(monkeypatch):
    samples = []
    for commit in ("0123abcd", "0123abcd", "9876fedc"):
        answer(monkeypatch, commit + "\n")
        sample.seed.cache_clear()
        samples.append(sample.sample_of(range(1000), 5))
    assert samples[0] == samples[1] != samples[2]


def test_what_is_said_when_it_fails_gives_the_same_sample_at_another_commit(monkeypatch):
    answer(monkeypatch, "0123abcd\n")
    taken = sample.sample_of(range(1000), 5)
    name, _, value = sample.how_to_repeat().split()[0].partition("=")
    answer(monkeypatch, "9876fedc\n")
    monkeypatch.setenv(name, value)
    sample.seed.cache_clear()
    assert sample.sample_of(range(1000), 5) == taken


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.CalledProcessError(128, "git")])
def test_without_git_there_is_a_sample_too(monkeypatch, error):
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(sample.subprocess, "run", fail)
    assert sample.seed() == 0 and len(sample.sample_of(range(10), 3)) == 3


def test_of_fewer_all_are_taken():
    assert sorted(sample.sample_of([1, 2], 3)) == [1, 2]


def test_all_of_a_list_are_parameters_and_all_but_a_sample_are_slow(monkeypatch):
    answer(monkeypatch, "0123abcd\n")
    parameters = sample.slow_but_a_sample([("a", 1), "b", ("c", 3), "d", "e"], 2)
    assert [one.values for one in parameters] == [("a", 1), ("b",), ("c", 3), ("d",), ("e",)]
    assert sorted(len(one.marks) for one in parameters) == [0, 0, 1, 1, 1]
    assert {mark.name for one in parameters for mark in one.marks} == {"slow"}


def test_of_each_kind_there_is_a_sample():
    parameters = sample.slow_but_a_sample_of_each(lambda one: one % 3, [*range(30), 30, 33, 36], 4)
    assert {one.values[0] for one in parameters} == {*range(30), 30, 33, 36}
    usual = [one.values[0] for one in parameters if not one.marks]
    assert [sum(one % 3 == kind for one in usual) for kind in range(3)] == [4, 4, 4]
