"""The collector is held while much is imported, and is afterwards as it was before."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from mllm_compile.uncollected import uncollected


@pytest.fixture(autouse=True)
def collector() -> Iterator[None]:
    yield
    gc.enable()
    gc.unfreeze()


def test_nothing_is_collected_inside_and_what_was_made_is_not_looked_at_again():
    gc.unfreeze()
    before = sum(stats["collections"] for stats in gc.get_stats())
    with uncollected():
        made = [[] for _ in range(100_000)]
        assert sum(stats["collections"] for stats in gc.get_stats()) == before
    assert gc.isenabled()
    assert gc.get_freeze_count() > len(made)


def test_the_collector_comes_back_after_an_error():
    with pytest.raises(ImportError), uncollected():
        raise ImportError
    assert gc.isenabled()


def test_whoever_has_switched_it_off_finds_it_so():
    gc.unfreeze()
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled() and gc.get_freeze_count() == 0
