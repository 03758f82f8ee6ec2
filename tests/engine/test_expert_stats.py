"""Engine.stats().experts: every real token's choices are counted, of each layer, and nothing when nobody asks."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.errors import ConfigError
from mllm_compile.process.progress import NullReporter
from mllm_compile.store.source import ArtifactSource
from tests.model.tiny_configs import LAYERS, save_tiny_model, tiny_config

PROMPTS = [[5, 6, 7, 8, 9], [10, 11, 12]]
NEW = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts") / "model"
    save_tiny_model(tiny_config("qwen3_moe", num_experts=4, num_experts_per_tok=2), folder)
    return folder


def config_of(folder, tmp_path, **runtime) -> EngineConfig:
    sections = {
        "model": {"path": str(folder), "dtype": "float32"},
        "compile": {"backend": "eager"},
        "runtime": {"device": "cpu", "max_model_len": 64, **runtime},
        "cache": {"dir": str(tmp_path)},
    }
    return EngineConfig.from_dict(sections)


def engine(folder, tmp_path, **runtime) -> Engine:
    return Engine(config_of(folder, tmp_path, **runtime))


def chosen_by_transformers(folder, texts) -> list[list[int]]:
    """How often each expert is chosen, by layer, when a model reads these tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    counts = torch.zeros(LAYERS, 4, dtype=torch.int64)

    def count(index: int, module, args, output) -> None:
        counts[index] += torch.bincount(output[2].flatten(), minlength=4)

    for index, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(partial(count, index))
    with torch.no_grad():
        for text in texts:
            model(input_ids=torch.tensor([text]), use_cache=False)
    return counts.tolist()


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_counts_match_the_tokens_that_were_computed(folder, tmp_path, num_ranks):
    how = {"expert_parallel_size": num_ranks, "enable_prefix_cache": False}
    params = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    with engine(folder, tmp_path, expert_stats=True, **how) as served:
        outputs = served.generate(PROMPTS, params)
        experts = served.stats().experts
    # The last token is handed out and not read; of the step that overlaps its end nothing is said here.
    texts = [prompt + list(output.token_ids) for prompt, output in zip(PROMPTS, outputs, strict=True)]
    fewest, most = (chosen_by_transformers(folder, [text[: len(text) - unread] for text in texts]) for unread in (1, 0))
    assert [one.layer for one in experts] == [f"model.layers.{index}.mlp.experts" for index in range(LAYERS)]
    for one, low, high in zip(experts, fewest, most, strict=True):
        assert all(a <= count <= b for a, count, b in zip(low, one.counts, high, strict=True)), (one, low, high)


@pytest.mark.parametrize(
    ("architecture", "runtime", "refusal"),
    [
        ("qwen3", {"expert_stats": True}, "runtime.expert_stats is set, and this model has no experts"),
        ("mamba2", {"kv_cache_dtype": "fp8_e4m3"}, "kv_cache_dtype is fp8_e4m3, and this model has no attention"),
    ],
)
def test_what_is_asked_of_layers_that_a_model_does_not_have_is_refused(tmp_path, architecture, runtime, refusal):
    save_tiny_model(tiny_config(architecture), tmp_path / "model")
    with pytest.raises(ConfigError, match=refusal):
        load_or_compile(config_of(tmp_path / "model", tmp_path, **runtime), NullReporter())


def test_nothing_is_counted_unless_the_config_asks(folder, tmp_path):
    with engine(folder, tmp_path) as served:
        served.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=2))
        assert served.stats().experts == ()
    compiled = load_or_compile(config_of(folder, tmp_path), NullReporter())
    model = ArtifactSource(compiled, NullReporter()).load(torch.device("cpu"))
    assert model.has_experts and not model.num_experts, "it is a mixture all the same"
