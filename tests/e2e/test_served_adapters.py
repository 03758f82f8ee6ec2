"""Adapters of an engine, from PEFT's folders to tokens: against Transformers with the merged weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.errors import MllmError
from tests.adapters.folders import PREFIX, peft_fields, write_adapter
from tests.adapters.tiny_adapters import Adapters

PROMPTS = ([41, 30, 77, 102, 5, 90, 12], [7, 7, 81], list(range(3, 40)))
TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"))


@pytest.fixture(scope="module")
def engine(adapters: Adapters, eager_cache: Path) -> Iterator[Engine]:
    with Engine(adapters.config(eager_cache, lora={"adapters": {"all": str(adapters.folder / "all")}})) as engine:
        engine.load_adapter("some", adapters.folder / "some")
        yield engine


def test_a_batch_of_adapters_and_none_is_as_each_alone(engine, adapters):
    names = ["all", None, "some"]
    for shift in range(3):
        each = names[shift:] + names[:shift]
        answers = engine.generate(list(PROMPTS), GREEDY, adapter=each)
        expected = [adapters.expected(prompt, name, TOKENS) for prompt, name in zip(PROMPTS, each, strict=True)]
        assert [answer.token_ids for answer in answers] == expected
    assert adapters.expected(PROMPTS[2], "all", TOKENS) != adapters.expected(PROMPTS[2], None, TOKENS)


def test_a_third_adapter_takes_a_place_over(engine, adapters):
    engine.load_adapter("again", adapters.folder / "all")
    for name, like in (("again", "all"), ("some", "some"), ("all", "all"), ("again", "all")):
        answer = engine.generate(PROMPTS[0], GREEDY, adapter=name)[0]
        assert answer.token_ids == adapters.expected(PROMPTS[0], like, TOKENS)
    engine.unload_adapter("again")


def test_prefix_hits_are_the_adapter_s_own(engine, adapters):
    prompt = [9, *PROMPTS[2]]
    for _ in range(2):
        for name in (None, "all", "some"):
            answer = engine.generate(prompt, GREEDY, adapter=name)[0]
            assert answer.token_ids == adapters.expected(prompt, name, TOKENS)
    assert answer.num_cached_tokens


def test_an_adapter_of_another_shape_is_refused_and_those_that_run_go_on(engine, adapters, tmp_path):
    running = engine.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), adapter="some")
    taken = list(next(running).token_ids)
    tensors = {f"{PREFIX}model.layers.0.self_attn.q_proj.lora_{one}.weight": torch.ones(3, 3) for one in ("A", "B")}
    with pytest.raises(MllmError, match="so the adapter is another model's"):
        engine.load_adapter("other", write_adapter(tmp_path, tensors, peft_fields(["q_proj"], 3)))
    taken += [token for output in running for token in output.token_ids]
    assert taken[:TOKENS] == adapters.expected(PROMPTS[0], "some", TOKENS)
