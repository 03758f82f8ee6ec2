"""The collector is held while much is imported, and is afterwards as it was before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from mllm_compile.process.no_gc import gc_paused, imports_unseen


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    was_frozen = gc.get_freeze_count() > 0  # by another test, or the process of tests
    gc.unfreeze()
    yield
    gc.enable()
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


def test_what_was_made_inside_is_old_at_once_and_is_collected_when_all_is():
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
