"""Adapters of an engine of two ranks, processes over gloo: tokens are one rank's, and all ranks have the same slots."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.errors import MllmError
from mllm_compile.runtime.lora.pool import LoraPool
from tests.adapters.tiny_adapters import Adapters
from tests.e2e.test_ranks import followers
from tests.sample import slow_but_a_sample

PROMPTS = ([41, 30, 77, 102, 5, 90, 12, 5], [7, 7, 81, 7, 7, 81, 7, 7, 81], list(range(3, 34)), [9])
NAMES = ("all", None, "some", "all")
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
SOME = ("q_proj", "v_proj", "embed_tokens", "lm_head")
TARGETS = {"targets": ["all-linear", "embed_tokens", "lm_head"]}
WITH_EXPERTS = {"targets": [*TARGETS["targets"], "experts"]}
TENSOR, EXPERTS = {"tensor_parallel_size": 2}, {"expert_parallel_size": 2}
RANKS = {"tensor": (TENSOR, TARGETS), "experts": (EXPERTS, WITH_EXPERTS), "parts of experts": (TENSOR, WITH_EXPERTS)}


@pytest.fixture(scope="module", params=slow_but_a_sample(RANKS, 1))
def kind(request: Any) -> str:
    return request.param


@pytest.fixture(scope="module")
def adapters(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """One is DoRA's, the other of the embedding, the head and experts."""
    folder = tmp_path_factory.mktemp("ranks")
    if kind == "tensor":
        return Adapters(folder, "qwen3", SOME, tie_word_embeddings=True).with_dora("all")
    return Adapters(folder, "qwen3_moe", (*SOME, "experts.gate_up_proj", "experts.down_proj")).with_dora("all")


@pytest.fixture(scope="module")
def engine(kind: str, adapters: Adapters, eager_cache: Path) -> Iterator[Engine]:
    ranks, lora = RANKS[kind]
    runtime = ranks | {"max_num_batched_tokens": 32}
    with Engine(adapters.config(eager_cache, runtime=runtime, lora=lora | {"dora": True})) as engine:
        adapters.load(engine)
        yield engine


def check_answers(engine: Engine, adapters: Adapters, names: Any = NAMES) -> None:
    answers = engine.generate(list(PROMPTS), GREEDY, adapter=list(names))
    for answer, prompt, name in zip(answers, PROMPTS, names, strict=True):
        assert answer.token_ids == adapters.expected(prompt, name, 8)


def test_a_batch_of_both_adapters_and_none_has_the_tokens_of_one_rank(engine, adapters):
    check_answers(engine, adapters)


def test_more_adapters_than_slots_take_turns_on_all_ranks(engine, adapters):
    for name in ("third", "fourth"):
        engine.load_adapter(name, adapters.folder / "some")
    asked = ["third", "all", "fourth", "some"]
    answers = engine.generate([PROMPTS[0]] * 4, GREEDY, adapter=asked)
    expected = {name: adapters.expected(PROMPTS[0], name, 8) for name in ("all", "some")}
    assert [answer.token_ids for answer in answers] == [expected.get(name, expected["some"]) for name in asked]
    for name in ("third", "fourth"):
        engine.unload_adapter(name)
    check_answers(engine, adapters)


def test_a_replaced_adapter_is_the_new_one_on_all_ranks(engine, adapters):
    assert engine.load_adapter("some", adapters.folder / "all", replace=True).version == 2
    answer = engine.generate(PROMPTS[0], GREEDY, adapter="some")[0]
    assert answer.token_ids == adapters.expected(PROMPTS[0], "all", 8)
    engine.load_adapter("some", adapters.folder / "some", replace=True)
    check_answers(engine, adapters)


def test_a_load_that_fails_on_rank_0_leaves_the_name_as_it_was_on_all_ranks(engine, adapters, monkeypatch):
    def write(self: LoraPool, slot: int, factors: object) -> None:
        raise RuntimeError("the device is full")

    with monkeypatch.context() as broken:
        broken.setattr(LoraPool, "write", write)
        with pytest.raises(RuntimeError, match="the device is full"):
            engine.unload_adapter("some")
            engine.load_adapter("broken", adapters.folder / "all")
    assert [adapter.name for adapter in engine.list_adapters()] == ["all"]
    engine.load_adapter("some", adapters.folder / "some")
    check_answers(engine, adapters)


@pytest.mark.slow
def test_quantised_weights_that_ranks_have_parts_of_work_with_adapters(kind, adapters, eager_cache):
    answers = []
    for runtime in (TENSOR, {}):
        lora = RANKS[kind][1] | {"dora": True}
        with Engine(adapters.config(eager_cache, runtime=runtime, model={"quantization": "int8"}, lora=lora)) as engine:
            adapters.load(engine)
            answers.append([one.token_ids for one in engine.generate(list(PROMPTS), GREEDY, adapter=list(NAMES))])
    assert answers[0] == answers[1]


def test_a_rank_that_is_lost_amid_a_load_ends_the_engine_with_its_reason(engine, adapters):
    for process in followers():  # the last test of this engine
        os.kill(process, signal.SIGKILL)
    with pytest.raises(MllmError, match=r"rank 1 .*was ended by signal 9"):
        for _ in range(1000):
            engine.load_adapter("late", adapters.folder / "all")
            engine.unload_adapter("late")
    assert "late" not in [adapter.name for adapter in engine.list_adapters()]
