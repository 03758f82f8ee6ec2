"""A served model gets other weights: it is then, to the bit, an engine that was started with them."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mllm_compile import Engine, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.errors import CheckpointError, WeightUpdateError
from mllm_compile.process.timeline import Timeline
from mllm_compile.runtime.updates.live import LiveWeights
from mllm_compile.runtime.updates.session import WeightUpdate
from mllm_compile.store.source import ArtifactSource
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as shape_of
from tests.quantised_checkpoints import LINEARS, quantise_folder
from tests.sample import slow_but_a_sample
from tests.tiny_model import TINY, tiny_config

Tensors = dict[str, torch.Tensor]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [41, 302, 77, 1024, 5, 900, 12]]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=1)


def tensors_of(folder: Path) -> Tensors:
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def write_changed(source: Path, folder: Path) -> Path:
    """The model with other numbers, as after a large step of training."""
    shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(3)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        for name, value in tensors.items():
            if value.is_floating_point() and value.dtype.itemsize > 1:
                noise = torch.randn(value.shape, generator=generator) * value.float().std().nan_to_num(1.0)
                tensors[name] = (value.float() + 0.1 * noise).to(value.dtype)
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def parameters_of(folder: Path) -> Tensors:
    """As a trainer has them: Transformers' model, each name of a tie."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return {name: value.detach() for name, value in model.state_dict().items()}


# --- the map ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """An architecture, how its linears are in memory, and what of it is told by its tensors' names."""

    architecture: str
    quantization: str = "auto"
    changes: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "-".join((self.architecture, self.quantization, *(name for name, _ in self.changes)))


TIED = (("tie_word_embeddings", True),)
MODELS = [
    Model("qwen3"),
    Model("qwen3", "int8", TIED),
    Model("qwen3", "int4"),
    Model("llama", "fp8", TIED),
    Model("gpt2"),  # tied, kernels the other way round
    Model("phi3"),  # fused projections
    Model("gemma3_text", "int4"),
    Model("falcon"),
    Model("bloom"),
    Model("mixtral"),
    Model("mixtral", "fp8"),
    Model("qwen3_moe", "int4"),
    Model("gpt_oss"),
    Model("deepseek_v3"),  # latents
    Model("mamba2"),  # states
    Model("qwen3_next"),
    Model("jamba"),
    Model("olmo_hybrid"),
    Model("hrm_text"),  # gate and up are one tensor
]


def config_of(cache: Path, folder: Path, quantization: str = "auto", backend: str = "eager", **runtime: Any) -> Any:
    model = {"path": str(folder), "quantization": quantization}
    return tiny_config(cache, model=model, compile={"backend": backend}, runtime={"max_model_len": 256} | runtime)


def live_of(config: Any) -> LiveWeights:
    live = ArtifactSource(load_or_compile(config), Timeline()).load(torch.device("cpu")).live
    assert live is not None
    return live


def updated(live: LiveWeights, tensors: Tensors, seed: int, **options: Any) -> LiveWeights:
    """The weights after an update in random order."""
    update = WeightUpdate(live, **options)
    names = sorted(tensors)
    random.Random(seed).shuffle(names)
    for name in names:
        update.take(name, tensors[name])
    update.check_complete()
    update.prepare()
    update.swap()
    return live


def assert_same(ours: LiveWeights, theirs: LiveWeights) -> None:
    for name, tensor in theirs.tensors.items():
        assert torch.equal(ours.tensors[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


@pytest.mark.parametrize("model", slow_but_a_sample(MODELS, 1), ids=str)
def test_every_name_of_a_tensor_leads_to_its_place(model, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    save_tiny_model(shape_of(model.architecture, **dict(model.changes)), first)
    write_changed(first, second)
    configs = [config_of(tmp_path / "cache", folder, model.quantization) for folder in (first, second)]
    fresh = live_of(configs[1])
    for seed, tensors in enumerate((tensors_of(second), parameters_of(second))):
        for options in ({}, {"is_direct": True}, {"is_partial": True}):
            assert_same(updated(live_of(configs[0]), tensors, seed, **options), fresh)
    back = updated(fresh, tensors_of(first), 1)
    assert_same(back, live_of(configs[0]))


# A small tensor of theirs holds numbers of the weight, which are compared with those that were compiled for.
NAMED_BY_VALUES = ("bitsandbytes nf4, twice",)


@pytest.mark.parametrize("name", slow_but_a_sample(LINEARS, 1))
def test_quantised_tensors_take_quantised_ones_and_plain_ones(name, tmp_path):
    source, packed, plain = tmp_path / "source", tmp_path / "packed", tmp_path / "plain"
    save_tiny_model(shape_of("llama", num_hidden_layers=1, hidden_size=128, intermediate_size=256), source)
    quantise_folder(source, packed, plain, LINEARS[name])
    second = write_changed(source, tmp_path / "second")
    quantise_folder(second, tmp_path / "packed second", tmp_path / "plain second", LINEARS[name])
    first = live_of(config_of(tmp_path / "cache", packed))
    if name not in NAMED_BY_VALUES:
        fresh = live_of(config_of(tmp_path / "cache", tmp_path / "packed second"))
        assert_same(updated(first, tensors_of(tmp_path / "packed second"), 0), fresh)
    by_name = [updated(first, tensors, 1) for tensors in (tensors_of(second), parameters_of(second))]
    assert_same(*by_name)


# --- answers ----------------------------------------------------------------------------------------------------------


def answers(engine: Engine, prompts: Any = PROMPTS) -> list[Any]:
    return [
        (one.token_ids, [entry.logprob for scores in one.logprobs for entry in scores.values()])
        for one in engine.generate(prompts, GREEDY)
    ]


@pytest.fixture(scope="module")
def changed_tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_changed(TINY, tmp_path_factory.mktemp("changed") / "model")


def assert_answers_follow(engine: Engine, old: Any, new: Any, expected: tuple[Any, Any], prompts: Any) -> None:
    """Answers are by the old weights or the new ones, whatever the mode of a pause, and while requests run.

    Args:
        old, new: gives the engine these weights.
        expected: the answers of each.
    """
    assert expected[0] != expected[1]
    for mode in (None, "abort", "wait", "keep", "retract"):
        running = [engine.stream(prompt, GREEDY) for prompt in prompts]
        if mode is not None:
            engine.pause(mode)
        new(engine)
        engine.resume()
        ends = {list(stream)[-1].finish_reason for stream in running}
        assert ends <= ({"abort", "length"} if mode == "abort" else {"length"})
        assert answers(engine, prompts) == expected[1]
        old(engine, direct=mode == "keep")
        assert answers(engine, prompts) == expected[0]


def test_answers_are_those_of_a_fresh_engine_whatever_the_pause(inductor_cache, changed_tiny):
    config, other = tiny_config(inductor_cache), tiny_config(inductor_cache, model={"path": str(changed_tiny)})
    with Engine(other) as fresh:
        expected = answers(fresh)

    def old(engine: Engine, **options: Any) -> None:
        engine.update_weights(tensors_of(TINY).items(), version="old", **options)

    def new(engine: Engine) -> None:
        engine.update_weights_from_folder(changed_tiny, version="new")

    with Engine(config) as engine:
        assert_answers_follow(engine, old, new, (answers(engine), expected), PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_through_inductor_answers_are_those_of_a_fresh_engine(model, tmp_path):
    first = tmp_path / "first"
    save_tiny_model(shape_of(model.architecture, **dict(model.changes)), first)
    second = write_changed(first, tmp_path / "second")
    configs = [config_of(tmp_path / "cache", one, model.quantization, "inductor") for one in (first, second)]
    prompts = [[token % 97 for token in prompt] for prompt in PROMPTS]

    def old(engine: Engine, **options: Any) -> None:
        engine.update_weights(parameters_of(first).items(), **options)

    def new(engine: Engine) -> None:
        engine.update_weights(parameters_of(second).items())

    with Engine(configs[1]) as fresh:
        expected = answers(fresh, prompts)
    with Engine(configs[0]) as engine:
        assert_answers_follow(engine, old, new, (answers(engine, prompts), expected), prompts)


def test_half_of_a_tie_must_be_the_other_half(eager_cache):
    with Engine(tiny_config(eager_cache, compile={"backend": "eager"})) as engine:
        tensors = tensors_of(TINY)
        embedding = next(name for name in tensors if name.endswith("embed_tokens.weight"))
        both = tensors | {"lm_head.weight": tensors[embedding]}
        assert engine.update_weights(both.items()).num_tensors == len(both)
        both["lm_head.weight"] = both["lm_head.weight"] + 1
        with pytest.raises(WeightUpdateError, match="are one weight of this model, and they differ"):
            engine.update_weights(both.items())
        with pytest.raises(CheckpointError, match="expected a folder with safetensors files"):
            engine.update_weights_from_folder("/nothing/there")
