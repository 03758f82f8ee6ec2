"""Latent attention (MLA) is served over its latents alone as Transformers generates, whatever happens on the way.

Tiny random models in float32 on a CPU. Prompts are longer than a step, so that there are chunks, mixed steps and
preemption.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.runtime.attention import factory
from mllm_compile.runtime.attention.latent.choice import all_of_them
from mllm_compile.runtime.attention.latent.expanded import ExpandedPrompts
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model, tiny_config
from tests.sample import slow_but_a_sample
from tests.tiny_model import engine_of_pages

PROMPT_LENGTHS = (1, 2, 7, 23, 40)
MAX_TOKENS = 12
CHUNK = 32  # tokens of one step: the longest prompt takes two
PAGE = 4
RANK, ROPE = 16, 8  # of the tiny models
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


@dataclass(frozen=True)
class Served:
    model: Any
    folder: Path
    prompts: list[list[int]]

    def config(self, disabled: tuple[str, ...] = (), **runtime: Any) -> EngineConfig:
        sizes = {"device": "cpu", "max_model_len": 64, "max_num_batched_tokens": CHUNK, "page_size": PAGE}
        sections = {
            "model": {"path": str(self.folder / "model"), "dtype": "float32"},
            "compile": {"backend": "eager", "disable_passes": list(disabled)},
            "runtime": sizes | {"max_running_requests": 8} | runtime,
            "cache": {"dir": str(self.folder / "cache")},
        }
        return EngineConfig.from_dict(sections)

    @contextmanager
    def engine(self, num_pages: int | None = None, **options: Any) -> Iterator[Engine]:
        engine = engine_of_pages(self.config(**options), num_pages)
        try:
            yield engine
        finally:
            engine.close()

    def layers(self, **options: Any) -> tuple[LayerSpec, ...]:
        return load_or_compile(self.config(**options)).artifact.program.layers

    @torch.no_grad()
    def greedy(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
        generated = self.model.generate(ids, do_sample=False, max_new_tokens=MAX_TOKENS, **options)
        return generated[0, len(prompt) :].tolist()


def serve(name: str, folder: Path) -> Served:
    model = save_tiny_model(tiny_config(name, eos_token_id=None, bos_token_id=None), folder / "model")
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(0, FIRST_SPECIAL_TOKEN, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS]
    return Served(model, folder, prompts)


# minicpm3: no experts, and a rotation of another spelling; kimi_linear: beside layers with a state, without rotation.
@pytest.fixture(scope="module", params=slow_but_a_sample(["deepseek_v3", "minicpm3", "kimi_linear"], 1))
def served(request, tmp_path_factory) -> Served:
    return serve(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(served) -> list[list[int]]:
    return [served.greedy(prompt) for prompt in served.prompts]


def tokens_of(outputs) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def test_one_kv_head_of_latents_is_all_that_a_layer_caches(served):
    layers = served.layers()
    assert layers and all(layer.is_latent for layer in layers)
    assert {layer.cache_shape for layer in layers} == {(1, RANK + ROPE, 0)}
    expanded = served.layers(disabled=("absorb_latents",))
    assert not any(layer.is_latent for layer in expanded)
    assert all(layer.num_kv_heads == layer.num_heads for layer in expanded)


def test_a_mixed_batch_in_chunks_and_prefix_hits_give_what_transformers_gives(served, expected):
    with served.engine() as engine:
        assert tokens_of(engine.generate(served.prompts, GREEDY)) == expected
        assert engine.stats().prefix_hit_tokens == 0
        assert tokens_of(engine.generate(served.prompts, GREEDY)) == expected
        assert engine.stats().prefix_hit_tokens > 0


def test_preempted_requests_are_computed_again(served, expected):
    with served.engine(num_pages=1 + 24) as engine:
        assert tokens_of(engine.generate(served.prompts, GREEDY)) == expected
        assert engine.stats().preemptions > 0


@pytest.fixture
def parts(monkeypatch) -> list[int]:
    """Expands every prompt, in parts of about 13 tokens; lists the parts of each layer of each step."""
    run, counts = ExpandedPrompts.run, []

    def noted(prompts: ExpandedPrompts, *operands: Any) -> None:
        counts.append(len(prompts.parts))
        run(prompts, *operands)

    numbers = 4 * 2 * 16 + RANK + ROPE  # of a token, keys and values of 4 heads among them
    expanding = partial(TorchAttnBackend, choice=all_of_them, most_expanded_bytes=13 * 4 * numbers)
    monkeypatch.setattr(factory, "TorchAttnBackend", expanding)
    monkeypatch.setattr(ExpandedPrompts, "run", noted)
    return counts


def check_expanded(served: Served, expected: list[list[int]], parts: list[int]) -> None:
    """Mixed batches, chunks, prefix hits and preemption, each with prompts that are expanded."""
    with served.engine(num_pages=1 + 24) as engine:
        assert tokens_of(engine.generate(served.prompts, GREEDY)) == expected
        assert max(parts) > 2  # packed, of several prompts
        assert engine.stats().preemptions > 0
        parts.clear()
        assert tokens_of(engine.generate(served.prompts[-1:], GREEDY)) == expected[-1:]
        assert engine.stats().prefix_hit_tokens > 0 and max(parts) > 1


def test_prompts_over_keys_and_values_made_of_latents_give_the_same_tokens(served, expected, parts):
    check_expanded(served, expected, parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["deepseek_v2", "glm4_moe_lite", "youtu", "longcat_flash"])
def test_so_they_do_of_every_architecture(name, tmp_path, parts):
    served = serve(name, tmp_path)
    assert all(layer.up_projection for layer in served.layers())
    check_expanded(served, [served.greedy(prompt) for prompt in served.prompts], parts)


@pytest.mark.slow
def test_without_the_pass_the_pieces_have_the_products_and_the_tokens_are_the_same(served, expected, parts):
    assert not any(layer.up_projection for layer in served.layers(disabled=("expand_latents",)))
    with served.engine(disabled=("expand_latents",)) as engine:
        assert tokens_of(engine.generate(served.prompts, GREEDY)) == expected
    assert not parts


@pytest.mark.slow
def test_the_deterministic_mode_has_one_form_of_attention(served, expected, parts):
    assert not any(layer.up_projection for layer in served.layers(deterministic=True))
    with served.engine(deterministic=True) as engine:
        assert tokens_of(engine.generate(served.prompts, GREEDY)) == expected
    assert not parts


def test_keys_and_values_of_every_head_give_the_same_tokens(served, expected):
    with served.engine(disabled=("absorb_latents",)) as engine:
        assert tokens_of(engine.generate(served.prompts, GREEDY)) == expected


def test_transformers_own_layers_cannot_be_put_over_latents(served):
    said = r"absorb_latents|has one\). Set runtime.skip_compiled: false"
    with pytest.raises(UnsupportedModelError, match=said), served.engine(skip_compiled=True):
        pass
