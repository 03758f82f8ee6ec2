"""Runs the compiled programs for images on small ones before they are published: against Transformers' own forward.

One batch has a prompt with two images of different sizes and text between, and one of text alone. What a model does
with features beside what was traced (scales them, adds to them, attends otherwise) shows in the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.check.kernels import relative_error
from mllm_compile.errors import CompileError, UnsupportedModelError
from mllm_compile.model.attention_choice import attention_implementation
from mllm_compile.model.refusals import first_line, refusing
from mllm_compile.runtime.media.grids import Grid, GridTower
from mllm_compile.runtime.media.positions import Placed, positions_of
from mllm_compile.runtime.media.tower_inputs import tower_inputs
from mllm_compile.runtime.program.executor import ProgramExecutor, Segments

if TYPE_CHECKING:
    from mllm_compile.model.hf_model import HFModel

_TEXT_LENGTHS = (3, 2, 4)  # before, between and behind the images
_IMAGE, _TEXT = 1, 0  # as Transformers tells tokens apart
Prompt = tuple[torch.Tensor, torch.Tensor]  # ids [n], and positions [3, n]


class MediaCase:
    """A prompt with two images, and their pixels: the same for every program of a model."""

    def __init__(self, facts: GridTower, vocab_size: int, special: set[int], device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        side = facts.window + 1  # features, so that there are a whole window and parts of some
        merge = facts.merge
        self.grids: tuple[Grid, Grid] = ((1, 2 * merge, 3 * merge), (1, side * merge, (side + 1) * merge))
        patches = [frames * rows * columns for frames, rows, columns in self.grids]
        self.pixels = [torch.randn(count, facts.patch_width, generator=generator) for count in patches]
        ordinary = torch.tensor([token for token in range(min(vocab_size, 1000)) if token not in special])
        texts = [ordinary[torch.randint(0, len(ordinary), (n,), generator=generator)] for n in _TEXT_LENGTHS]
        features = [facts.num_features(grid) for grid in self.grids]
        places = [torch.full((count,), facts.image_token_id) for count in features]
        ids = torch.cat([texts[0], places[0], texts[1], places[1], texts[2]])
        starts = (len(texts[0]), len(texts[0]) + features[0] + len(texts[1]))
        positions, _ = positions_of(len(ids), map(Placed, starts, self.grids), merge)
        text = torch.arange(len(texts[2])).expand(3, -1)
        self.prompts: list[Prompt] = [
            (ids.to(device), torch.from_numpy(positions).to(device)),
            (texts[2].to(device), text.to(device)),
        ]
        self.is_feature = torch.cat([(ids == facts.image_token_id), torch.zeros(len(texts[2]), dtype=torch.bool)])


def special_ids(hf_model: HFModel) -> set[int]:
    """Ids that stand for something else than text."""
    values = vars(hf_model.model.config)
    return {value for name, value in values.items() if name.endswith("_token_id") and isinstance(value, int)}


def logits_of_transformers(hf_model: HFModel, case: MediaCase) -> torch.Tensor:
    """Logits [T, V] of each prompt alone, one after another."""
    model: Any = hf_model.model
    (ids, _), (text, _) = case.prompts
    kinds = torch.where(case.is_feature[: len(ids)], _IMAGE, _TEXT).to(ids.device)
    said = {
        "pixel_values": torch.cat(case.pixels).to(ids.device),
        "image_grid_thw": torch.tensor(case.grids, device=ids.device),
        "mm_token_type_ids": kinds[None],
    }

    def run(implementation: str) -> torch.Tensor:
        with torch.no_grad(), attention_implementation(model, implementation):
            with_images = model(input_ids=ids[None], use_cache=False, **said).logits[0]
            return torch.cat([with_images, model(input_ids=text[None], use_cache=False).logits[0]])

    with refusing(f"{model.config.model_type!r} does not run with images"):
        try:
            return run("eager")
        except Exception:  # not every tower has it
            return run("sdpa")


def features_of(
    tower: ProgramExecutor, facts: GridTower, case: MediaCase, dtype: torch.dtype, device: str
) -> torch.Tensor:
    """The features [F, W] of the case's images, by the compiled tower of a model in `dtype`."""
    arrays, segments = tower_inputs(facts, case.grids)
    given: dict[str, Any] = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    given["pixel_values"] = torch.cat(case.pixels).view(len(arrays["position_ids"]), -1).to(device, dtype)
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
        "positions": torch.cat([positions for _, positions in case.prompts], 1),
        "features": dense,
        "is_feature": is_feature,
    }


def compare_media(hf_model: HFModel, case: MediaCase, ours: torch.Tensor | Exception, limit: float, hint: str) -> None:
    """
    Args:
        ours: logits [T, V], or why there are none.
        limit: of the relative error of the worst token.
        hint: what a user can do.

    Raises:
        UnsupportedModelError: logits are not Transformers'.
        CompileError: the programs do not run.
    """
    model_type = hf_model.model.config.model_type
    if isinstance(ours, Exception):
        raise CompileError(
            f"what was compiled of {model_type!r} does not run with images: {first_line(ours)}.{hint}"
        ) from ours
    error = relative_error(ours, logits_of_transformers(hf_model, case))
    if not error <= limit:
        raise UnsupportedModelError(
            f"{model_type!r} would not be served right: with two images in a prompt its logits are off by {error:.2g} "
            f"from Transformers' (limit {limit:g}). Usual causes: features that the model changes on their way to its "
            f"text, or other positions.{hint}"
        )
