"""The collector is held while much is imported, and is afterwards as it was before."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from mllm_compile.process import no_gc
from mllm_compile.process.no_gc import gc_paused, imports_unseen


@pytest.fixture(autouse=True)
def collector(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(no_gc._Frozen, "by_us", False)
    was_frozen = gc.get_freeze_count() > 0  # by another test, or the process of tests
    gc.unfreeze()
    yield
    gc.enable()
    gc.unfreeze()
    if was_frozen:
        gc.freeze()


def test_nothing_is_collected_inside():
    before = sum(stats["collections"] for stats in gc.get_stats())
    with gc_paused():
        made = [[] for _ in range(100_000)]
        assert sum(stats["collections"] for stats in gc.get_stats()) == before
    assert gc.isenabled() and made


def test_what_a_user_has_dropped_is_collected_afterwards():
    dropped = type("Dropped", (), {})()
    dropped.itself = dropped
    reference = weakref.ref(dropped)
    del dropped
    with gc_paused():
        pass
    gc.collect()
    assert reference() is None


def test_the_collector_comes_back_after_an_error():
    with pytest.raises(ImportError), gc_paused():
        raise ImportError
    assert gc.isenabled()


def test_whoever_has_switched_it_off_finds_it_so():
    gc.disable()
    with gc_paused():
        pass
    assert not gc.isenabled()


def test_behind_torch_what_was_made_inside_is_old_at_once_and_is_collected_when_all_is(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", gc)  # any module
    kind = type("Made", (), {})
    with imports_unseen():
        made = [kind() for _ in range(1_000)]
        made[0].itself = made[0]
    young = {id(one) for generation in (0, 1) for one in gc.get_objects(generation=generation)}
    assert not young & set(map(id, made))
    reference = weakref.ref(made[0])
    del made, young
    gc.collect(1)
    assert reference() is not None
    gc.collect()
    assert reference() is None


def test_what_a_caller_has_frozen_stays_so():
    gc.freeze()
    try:
        with imports_unseen():
            pass
        assert gc.get_freeze_count()
    finally:
        gc.unfreeze()


def test_imports_ahead_of_torch_are_never_looked_at_again_nor_are_those_that_follow(monkeypatch):
    kind = type("Made", (), {})
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    references = []
    for _ in range(2):
        with imports_unseen():
            made = kind()
            made.itself = made
        references.append(weakref.ref(made))
    del made
    gc.collect()
    assert all(reference() is not None for reference in references)
    monkeypatch.setitem(sys.modules, "torch", gc)  # any module: a caller's objects are among what is there
    with imports_unseen():
        late = kind()
        late.itself = late
    references.append(weakref.ref(late))
    del late
    gc.collect()
    assert [reference() is None for reference in references] == [False, False, True]
