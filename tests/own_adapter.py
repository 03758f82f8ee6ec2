"""A model that computes prompts with sounds with an adapter of its own, and what Transformers says of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mllm_compile import SamplingParams
from mllm_compile.runtime.lora.pool import Factors
from tests.lora_factors import merged
from tests.tiny_vision import vision_engine_config

COUNT, RANK, ALPHA = 6, 24, 48
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)


@dataclass(frozen=True)
class OwnAdapter:
    """A folder with the model and its adapter.

    Args:
        folder: has the model in `model`.
        model: Transformers' own.
        factors: the adapter's, by the names of the model's parameters.
        greedy: the tokens that Transformers chooses, of the model, a prompt and a count.
    """

    folder: Path
    model: Any
    factors: Factors
    greedy: Callable[[Any, Any, int], list[int]]

    def expected(self, prompt: Any, is_adapted: bool | None = None) -> list[int]:
        is_adapted = not isinstance(prompt, list) if is_adapted is None else is_adapted
        with merged(self.model, self.factors) if is_adapted else nullcontext():
            return self.greedy(self.model, prompt, COUNT)

    def config(self, **sections: Any) -> dict[str, Any]:
        given = vision_engine_config(self.folder / "model", self.folder / "cache").model_dump(mode="json")
        return given | {name: {**(given.get(name) or {}), **section} for name, section in sections.items()}


def factors_of(tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, str]) -> Factors:
    """The factors in an adapter's tensors, by the names of the parameters that its modules' weights have."""
    return {
        parameter: (
            tensors[f"base_model.model.{module}.lora_A.weight"],
            tensors[f"base_model.model.{module}.lora_B.weight"] * (ALPHA / RANK),
        )
        for module, parameter in parameters.items()
    }


def tokens(engine: Any, prompts: list[Any], **given: Any) -> list[list[int]]:
    return [list(output.token_ids) for output in engine.generate(prompts, GREEDY, **given)]
