"""RoPE that follows the length of a text is served as Transformers generates for each request alone. One batch has
texts on both sides of the length where frequencies change; a request may also grow beyond it.

Tiny random models in float32 on a CPU. Steps are shorter than prompts, the second round finds its prompts cached, and
the third has so few pages that requests are preempted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import SamplingParams
from mllm_compile.config.schema import EngineConfig
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, save_tiny_model, tiny_config
from tests.tiny_model import engine_of_pages

BOUNDARY = 32
# Some stay below the boundary, some begin beyond it, some grow over it: from below, from it, and from its neighbours.
PROMPT_LENGTHS = (3, 12, 27, 31, 32, 33, 40, 70)
MAX_TOKENS = 10
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


def longrope(pairs: int) -> dict[str, Any]:
    of_pairs = {"short_factor": [1.0] * pairs, "long_factor": [2.0 + index / 2 for index in range(pairs)]}
    return of_pairs | {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": BOUNDARY}


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    # Its generate computes a text anew that grows beyond the boundary.
    "phi3": ("phi3", {"rope_parameters": longrope(8), "original_max_position_embeddings": BOUNDARY}),
    "dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": BOUNDARY}),
    "longrope": ("llama", {"rope_parameters": longrope(8)}),
    "latents": ("minicpm3", {"rope_parameters": longrope(4)}),
    # Frequencies stay, and cosines and sines are scaled otherwise.
    "scales": ("phimoe", {"rope_parameters": longrope(8) | {"short_mscale": 1.25, "long_mscale": 1.5}}),
}
USUAL = ("phi3", "dynamic")


@dataclass(frozen=True)
class Served:
    folder: Path
    prompts: list[list[int]]

    def config(self, **runtime: Any) -> EngineConfig:
        sizes = {"device": "cpu", "max_model_len": 128, "max_num_batched_tokens": 24, "page_size": 4}
        sections = {
            "model": {"path": str(self.folder / "model"), "dtype": "float32"},
            "compile": {"backend": "eager"},
            "runtime": sizes | {"max_running_requests": 8} | runtime,
            "cache": {"dir": str(self.folder / "cache")},
        }
        return EngineConfig.from_dict(sections)

    @torch.no_grad()
    def expected(self) -> list[list[int]]:
        return [self._alone(prompt) for prompt in self.prompts]

    def _alone(self, prompt: list[int]) -> list[int]:
        from transformers import AutoModelForCausalLM

        folder = self.folder / "model"  # loaded anew: an embedding keeps the frequencies of the longest text so far
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "eos_token_id": None, "pad_token_id": 0}
        generated = model.generate(ids, do_sample=False, max_new_tokens=MAX_TOKENS, **options)
        return generated[0, len(prompt) :].tolist()

    def served(self, num_pages: int | None = None, rounds: int = 1, **runtime: Any) -> list[list[list[int]]]:
        """The tokens of each round."""
        engine = engine_of_pages(self.config(**runtime), num_pages)
        prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in self.prompts]
        try:
            found = [engine.generate(prompts, GREEDY) for _ in range(rounds)]
            assert num_pages is None or engine.stats().preemptions > 0
        finally:
            engine.close()
        return [[output.outputs[0].token_ids for output in one] for one in found]


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name in USUAL else pytest.mark.slow) for name in CASES]
)
def case(request, tmp_path_factory) -> Iterator[Served]:
    architecture, changes = CASES[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    save_tiny_model(tiny_config(architecture, sliding_window=None, **changes), folder / "model")
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(1, FIRST_SPECIAL_TOKEN, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS
    ]
    # Prompts of one beginning, some long and some short texts: their keys are not each other's.
    prompts += [prompts[-1][: BOUNDARY - 4], prompts[-1][: BOUNDARY + 4], prompts[-1][:60]]
    yield Served(folder, prompts)


def test_every_request_has_the_frequencies_of_its_own_length(case):
    expected = case.expected()
    assert case.served(rounds=2) == [expected, expected]
    assert case.served(num_pages=26) == [expected]


@pytest.mark.slow
def test_so_does_transformers_model_in_place_of_the_compiled_one(case):
    if "latents" in case.folder.name:
        pytest.skip("it attends over keys of every head")
    assert case.served(skip_compiled=True) == [case.expected()]


@pytest.mark.slow
def test_so_do_steps_that_are_all_alike(case):
    assert case.served(deterministic=True, max_num_batched_tokens=64) == [case.expected()]
