"""Models that count positions themselves read their tokens' positions, compiled or not, as far as their table goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import ConfigError
from mllm_compile.model.hf_model import build_config_on_meta
from mllm_compile.model.positions_hook import position_offset, reading_positions
from mllm_compile.model.trace import trace_model
from mllm_compile.passes.match.nodes import is_op
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model, tiny_config
from tests.sample import slow_but_a_sample

MAX_TOKENS = 12
PADDING = FIRST_SPECIAL_TOKEN


def config_of(folder: Any, **runtime: Any) -> EngineConfig:
    said = {"device": "cpu", "max_model_len": 64, "max_num_batched_tokens": 32, "page_size": 4} | runtime
    return EngineConfig.from_dict(
        {
            "model": {"path": str(folder / "model"), "dtype": "float32"},
            "compile": {"backend": "eager"},
            "runtime": said,
            "cache": {"dir": str(folder / "cache")},
        }
    )


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    """By the whole text each time, as the model counts positions when it is given nothing else; up to a padding token,
    which Transformers would not count."""
    ids = list(prompt)
    while len(ids) < len(prompt) + MAX_TOKENS and ids[-1] != PADDING:
        ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    return ids[len(prompt) :]


# bart ignores position_ids, roberta counts from behind its padding token, pegasus has sinusoids, opt reads ours.
@pytest.mark.parametrize("architecture", slow_but_a_sample(["bart", "roberta", "pegasus", "opt"], 2))
def test_a_mixed_batch_has_the_tokens_of_transformers_compiled_or_not(architecture, tmp_path):
    tokens = {"eos_token_id": None, "bos_token_id": None, "decoder_start_token_id": None}
    model = save_tiny_model(tiny_config(architecture, pad_token_id=PADDING, **tokens), tmp_path / "model")
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, FIRST_SPECIAL_TOKEN, (n,), generator=generator).tolist() for n in (1, 5, 40)]
    wanted = [greedy(model, prompt) for prompt in prompts]
    assert sum(map(len, wanted)) > 2 * MAX_TOKENS
    for skip_compiled in (False, True):
        with Engine(config_of(tmp_path, skip_compiled=skip_compiled)) as engine:
            found = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
        ours = [output.token_ids[: len(ids)] for output, ids in zip(found, wanted, strict=True)]
        assert ours == wanted


def test_a_table_that_is_counted_from_beyond_0_bounds_the_length(tmp_path):
    save_tiny_model(tiny_config("roberta", pad_token_id=PADDING), tmp_path / "model")
    most = 256 - (PADDING + 1)
    for _ in range(2):  # compiled, and found
        with pytest.raises(
            ConfigError, match=f"max_model_len is {most + 1}, .*Set runtime.max_model_len: {most} or less"
        ):
            Engine(config_of(tmp_path, max_model_len=most + 1))
    prompt = [7] * (most - 1)
    with Engine(config_of(tmp_path, max_model_len=most, max_num_batched_tokens=256)) as engine:
        (output,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    assert len(output.token_ids) == 1


@pytest.mark.parametrize(("architecture", "offset"), [("roberta", 102), ("bart", 0), ("opt", 0), ("llama", 0)])
def test_the_offset_is_what_transformers_counts_from(architecture, offset):
    config = tiny_config(architecture, pad_token_id=101)
    assert build_config_on_meta(config, torch.float32).position_offset == offset


@pytest.mark.parametrize("architecture", ["bart", "opt"])
def test_a_trace_has_one_input_of_positions_and_none_of_what_stood_for_them(architecture):
    graph = trace_model(build_config_on_meta(tiny_config(architecture), torch.float32), "cpu", 128).graph_module.graph
    assert sum(node.meta.get("input_name") == "positions" for node in graph.nodes) == 1
    assert not [node for node in graph.nodes if is_op(node, "counted_positions")]
    assert not [node for node in graph.nodes if "arange" in str(node.target)]


def test_the_model_is_its_own_again_afterwards():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny_config("bart")).eval()
    ids = torch.arange(5)[None]
    with torch.no_grad():
        before = model(ids, use_cache=False).logits
        with reading_positions(model, lambda counted: counted + 3):
            shifted = model(ids, use_cache=False).logits
        assert not torch.allclose(shifted, before)
        assert torch.equal(model(ids, use_cache=False).logits, before)
    assert position_offset(model) == 0
