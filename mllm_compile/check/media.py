"""Runs the compiled programs for images on small ones before they are published: against Transformers' own forward.

One batch has a prompt with two images of different sizes and text between, and one of text alone. If a model does more
with features than was traced (scales them, adds to them, attends otherwise), the logits differ.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.check.kernels import relative_error
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.attention_hook import attention_implementation
from mllm_compile.model.refusals import first_line, refusing
from mllm_compile.runtime.media.positions import Placed, positions_of
from mllm_compile.runtime.media.tower import Grid
from mllm_compile.runtime.media.tower_inputs import tower_inputs
from mllm_compile.runtime.program.executor import ProgramExecutor
from mllm_compile.runtime.program.linked_steps import Segments

if TYPE_CHECKING:
    from mllm_compile.model.hf_model import HFModel
    from mllm_compile.model.towers.adapter import TowerAdapter

_TEXT_LENGTHS = (3, 2, 4)  # before, between and behind the images
Prompt = tuple[torch.Tensor, torch.Tensor]  # ids [n], and positions [n] or [3, n]
# Lets a model add what the adapter of a prompt, which is numbered, changes.
AddedToPrompts = Callable[[Any, int], AbstractContextManager[object]]


class MediaCase:
    """A prompt with two images, or two sounds, and their pixels: the same for every program of a model; positions have
    so many axes."""

    def __init__(self, adapter: TowerAdapter, vocab_size: int, special: set[int], device: str, axes: int) -> None:
        facts = adapter.facts
        generator = torch.Generator().manual_seed(0)
        self.facts = facts
        self.grids = facts.sample_grids()
        self.pixels = [
            torch.randn(facts.pixel_rows(grid), facts.pixel_width, generator=generator) for grid in self.grids
        ]
        for pixels, grid in zip(self.pixels, self.grids, strict=True):
            if (filling := facts.filling(grid)) is not None:
                pixels[torch.from_numpy(filling)] = 0
        ordinary = torch.tensor([token for token in range(min(vocab_size, 1000)) if token not in special])
        texts = [ordinary[torch.randint(0, len(ordinary), (n,), generator=generator)] for n in _TEXT_LENGTHS]
        if adapter.marks is not None:
            texts[0][-1], texts[1][-1] = (adapter.marks[0],) * 2
            texts[1][0], texts[2][0] = (adapter.marks[1],) * 2
        features = [facts.num_features(grid) for grid in self.grids]
        places = [torch.full((count,), facts.image_token_id) for count in features]
        ids = torch.cat([texts[0], places[0], texts[1], places[1], texts[2]])
        starts = (len(texts[0]), len(texts[0]) + features[0] + len(texts[1]))
        self.blocks = tuple(zip(starts, map(sum, zip(starts, features, strict=True)), strict=True))
        positions, text = torch.arange(len(ids)), torch.arange(len(texts[2]))
        if axes > 1:
            grids = map(Placed, starts, self.grids) if facts.axes > 1 else ()
            placed, _ = positions_of(len(ids), grids, facts.merge)
            positions, text = torch.from_numpy(placed), text.expand(axes, -1)
        self.prompts: list[Prompt] = [(ids.to(device), positions.to(device)), (texts[2].to(device), text.to(device))]
        self.is_feature = torch.cat([(ids == facts.image_token_id), torch.zeros(len(texts[2]), dtype=torch.bool)])

    def images(self) -> list[tuple[torch.Tensor, Grid]]:
        return list(zip(self.pixels, self.grids, strict=True))


def special_ids(hf_model: HFModel) -> set[int]:
    """Ids of special tokens."""
    values = vars(hf_model.model.config)
    return {value for name, value in values.items() if name.endswith("_token_id") and isinstance(value, int)}


def logits_of_transformers(model: Any, adapter: TowerAdapter, case: MediaCase, added: AddedToPrompts) -> torch.Tensor:
    """Logits [T, V] of each prompt alone, one after another."""
    (ids, _), (text, _) = case.prompts
    said = adapter.said_of(case.images(), ids)

    def run(implementation: str) -> torch.Tensor:
        with torch.no_grad(), attention_implementation(model, implementation):
            with added(model, 0):
                with_images = model(input_ids=ids[None], use_cache=False, **said).logits[0]
            with added(model, 1):
                return torch.cat([with_images, model(input_ids=text[None], use_cache=False).logits[0]])

    with refusing(f"{model.config.model_type!r} does not run with images"):
        try:
            return run("eager")
        except Exception:  # not every tower has it
            return run("sdpa")


def features_of(tower: ProgramExecutor, case: MediaCase, dtype: torch.dtype, device: str) -> torch.Tensor:
    """The features [F, W] of the case's images, by the compiled tower of a model in `dtype`."""
    arrays, segments = tower_inputs(case.facts, case.grids)
    given: dict[str, Any] = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    given["pixel_values"] = torch.cat(case.pixels).to(device, dtype)
    given |= {name: Segments(torch.from_numpy(one.bounds).to(device), one.longest) for name, one in segments.items()}
    with torch.no_grad():
        return torch.cat(tower.run_tower(given), -1)


def inputs_with_features(case: MediaCase, features: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """The inputs of the text's program, slots and rows apart."""
    is_feature = case.is_feature.to(features.device)
    dense = features.new_zeros(len(is_feature), features.shape[1])
    dense[is_feature] = features
    return {
        "input_ids": torch.cat([ids for ids, _ in case.prompts]),
        "positions": torch.cat([positions for _, positions in case.prompts], -1),
        "features": dense,
        "is_feature": is_feature,
    }


def compare_media(
    hf_model: HFModel,
    adapter: TowerAdapter,
    case: MediaCase,
    ours: torch.Tensor | Exception,
    limit: float,
    hint: str,
    added: AddedToPrompts,
) -> str | None:
    """The reason why images would not be served right; None: logits are Transformers'.

    In 16 bits it may be Transformers that is further off: of gemma4 one token was off by 0.11 from float32, and ours by
    0.02. So what is too far from Transformers in the model's type is held against Transformers in float32.

    Args:
        ours: logits [T, V], or the reason why they are missing.
        limit: of the relative error of the worst token.
        hint: what a user can do.
        added: the adapters of the prompts.
    """
    if isinstance(ours, Exception):
        return f"what was compiled of it does not run with images: {first_line(ours)}.{hint}"
    try:
        error = relative_error(ours, logits_of_transformers(hf_model.model, adapter, case, added))
        if error > limit and ours.dtype != torch.float32:
            in_float32 = copy.deepcopy(hf_model.model).float()
            error = relative_error(ours, logits_of_transformers(in_float32, adapter, case, added))
    except UnsupportedModelError as failure:
        return str(failure)
    if error <= limit:
        return None
    return (
        f"with two {case.facts.noun}s in a prompt its logits are off by {error:.2g} from Transformers' (limit "
        f"{limit:g}). Usual causes: features that the model changes on their way to its text, or other positions.{hint}"
    )
