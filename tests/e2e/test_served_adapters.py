"""Adapters of an engine, from PEFT's folders to tokens: against Transformers with the merged weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import MllmError
from tests.adapters.folders import PREFIX, peft_fields, write_adapter
from tests.lora_factors import greedy_of
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as config_of

PROMPTS = ([41, 30, 77, 102, 5, 90, 12], [7, 7, 81], list(range(3, 40)))
TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
Factors = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class Adapters:
    """A tiny model, and two adapters of it: one of all linears, one of queries and values alone."""

    def __init__(self, folder: Path) -> None:
        self.model = save_tiny_model(config_of("qwen3"), folder / "model")
        self.folder = folder
        shapes = {
            name.removesuffix(".weight"): tuple(weight.shape)
            for name, weight in self.model.named_parameters()
            if name.endswith("_proj.weight")
        }
        some = {module: shape for module, shape in shapes.items() if module.endswith(("q_proj", "v_proj"))}
        self.factors: dict[str | None, Factors] = {None: {}}
        self._write("all", shapes, "all-linear", rank=8, lora_alpha=4)
        self._write("some", some, ["q_proj", "v_proj"], rank=3, lora_alpha=6, use_rslora=True)

    def _write(self, name: str, shapes: Any, targets: Any, rank: int, **fields: Any) -> None:
        chance = torch.Generator().manual_seed(rank)
        scale = fields["lora_alpha"] / (rank**0.5 if fields.get("use_rslora") else rank)
        tensors, factors = {}, {}
        for module, (outputs, inputs) in shapes.items():
            down = torch.randn(rank, inputs, generator=chance) / inputs**0.5
            up = torch.randn(outputs, rank, generator=chance) * 0.1
            tensors[f"{PREFIX}{module}.lora_A.weight"], tensors[f"{PREFIX}{module}.lora_B.weight"] = down, up
            factors[f"{module}.weight"] = (down, up * scale)
        self.factors[name] = factors
        write_adapter(self.folder / name, tensors, peft_fields(targets, rank, **fields))

    def config(self, cache: Path, **sections: Any) -> EngineConfig:
        given: dict[str, Any] = {
            "model": {"path": str(self.folder / "model"), "dtype": "float32"},
            "compile": {"backend": "eager"},
            "runtime": {"device": "cpu", "max_model_len": 64, "max_running_requests": 8, "page_size": 4},
            "lora": {"max_adapters": 2, "max_rank": 8},
            "cache": {"dir": str(cache)},
        }
        return EngineConfig.from_dict({name: keys | sections.get(name, {}) for name, keys in given.items()})

    def expected(self, prompt: list[int], name: str | None) -> list[int]:
        return greedy_of(self.model, prompt, TOKENS, self.factors[name])


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
        expected = [adapters.expected(prompt, name) for prompt, name in zip(PROMPTS, each, strict=True)]
        assert [answer.token_ids for answer in answers] == expected
    assert adapters.expected(PROMPTS[2], "all") != adapters.expected(PROMPTS[2], None)


def test_a_third_adapter_takes_a_place_over(engine, adapters):
    engine.load_adapter("again", adapters.folder / "all")
    for name, like in (("again", "all"), ("some", "some"), ("all", "all"), ("again", "all")):
        answer = engine.generate(PROMPTS[0], GREEDY, adapter=name)[0]
        assert answer.token_ids == adapters.expected(PROMPTS[0], like)
    engine.unload_adapter("again")


def test_prefix_hits_are_the_adapter_s_own(engine, adapters):
    prompt = [9, *PROMPTS[2]]
    for _ in range(2):
        for name in (None, "all", "some"):
            answer = engine.generate(prompt, GREEDY, adapter=name)[0]
            assert answer.token_ids == adapters.expected(prompt, name)
    assert answer.num_cached_tokens


def test_an_adapter_of_another_shape_is_refused_and_those_that_run_go_on(engine, adapters, tmp_path):
    running = engine.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), adapter="some")
    taken = list(next(running).token_ids)
    tensors = {f"{PREFIX}model.layers.0.self_attn.q_proj.lora_{one}.weight": torch.ones(3, 3) for one in ("A", "B")}
    with pytest.raises(MllmError, match="so the adapter is another model's"):
        engine.load_adapter("other", write_adapter(tmp_path, tensors, peft_fields(["q_proj"], 3)))
    taken += [token for output in running for token in output.token_ids]
    assert taken[:TOKENS] == adapters.expected(PROMPTS[0], "some")
