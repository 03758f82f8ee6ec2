"""The collector is held while much is imported, and is afterwards as it was before."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from mllm_compile.process.no_gc import gc_paused


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()


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
