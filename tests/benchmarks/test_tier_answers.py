"""Answers behind loads have the bits of answers behind hits of the prefix cache, and the check of that can fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from benchmarks.script import greedy
from benchmarks.tiers.answers import compare_alone, compare_beside, compare_bits, compare_together
from benchmarks.tiers.behind import forget_cached, scheduler_of, tiers_of
from benchmarks.tiers.loads import LoadsAlone
from mllm_compile import Engine
from mllm_compile.runtime.tiers.copies import SlotCopies
from tests.tiny_model import engine_of_pages, tiny_config

PROMPTS = [[Random(number).randrange(100) for _ in range(60 + 90 * number)] for number in range(2)]
OTHERS = [[7, 1]]
RUNTIME = {"kv_offloading_size": 0.02, "kv_offloading_min_gain": 0, "page_size": 16}


@pytest.fixture(scope="module")
def engine(eager_cache: Path) -> Iterator[Engine]:
    with engine_of_pages(tiny_config(eager_cache, runtime=RUNTIME, compile={"backend": "eager"}), 200) as engine:
        yield engine


def test_answers_behind_loads_are_those_behind_hits_to_the_last_bit(engine: Engine) -> None:
    wrong, layers, loaded = compare_bits(engine, PROMPTS)
    assert (wrong, loaded) == (0, sum((len(one) - 1) // 16 * 16 for one in PROMPTS))
    assert layers > 0
    for found in (compare_alone(engine, PROMPTS), compare_together(engine, PROMPTS, OTHERS)):
        assert found.is_right, found


@pytest.mark.slow
def test_in_the_deterministic_mode_waiting_for_a_load_beside_others_changes_no_bit(eager_cache: Path) -> None:
    runtime = RUNTIME | {"deterministic": True}
    with engine_of_pages(tiny_config(eager_cache, runtime=runtime, compile={"backend": "eager"}), 200) as engine:
        found = compare_beside(engine, PROMPTS, OTHERS)
    assert found.is_right, found


def test_a_changed_bit_is_found(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the newest layer's values, in the memory behind the cache: what the check has to be able to tell."""
    copies = tiers_of(engine)[1]
    section = copies._places[False][0].sections[-1]
    begin = SlotCopies.begin

    def begin_with_damage(self: SlotCopies, ticket: object) -> None:
        if ticket.is_load:  # type: ignore[attr-defined]
            slots = self._places[False][1].slots
            slots[ticket.slots[0], section.offset : section.offset + section.num_bytes] ^= 0x20  # type: ignore[attr-defined]
        begin(self, ticket)  # type: ignore[arg-type]

    engine.flush_prefix_cache()
    monkeypatch.setattr(SlotCopies, "begin", begin_with_damage)
    wrong, _, loaded = compare_bits(engine, PROMPTS[:1])
    assert (wrong, loaded > 0) == (1, True)
    engine.flush_prefix_cache()
    alone, together = compare_alone(engine, PROMPTS), compare_together(engine, PROMPTS, OTHERS)
    assert alone.alike < alone.total
    assert together.alike < together.total
    assert not alone.is_right
    engine.flush_prefix_cache()


def test_loads_that_nobody_waits_for_give_all_pages_back(engine: Engine) -> None:
    engine.generate(PROMPTS, greedy(1))
    forget_cached(engine)
    free = scheduler_of(engine).pages.available_pages
    with LoadsAlone(engine, 8) as loads:
        engine.generate(OTHERS, greedy(200))
        answer = engine.generate([PROMPTS[-1]], greedy(1))  # others' tickets come through
    assert answer[0].num_host_tokens > 0
    assert loads.num_bytes > 0
    forget_cached(engine)
    assert scheduler_of(engine).pages.available_pages == free
