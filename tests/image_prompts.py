"""The prompts with images that models of every protocol are tried with, and their tokens. A child process imports it:
it knows neither Transformers nor what compiles."""

from __future__ import annotations

from typing import Any

from mllm_compile import SamplingParams
from mllm_compile.engine.engine import Engine
from tests.tiny_vision import (
    CROP_MODELS,
    IMAGE_MODELS,
    PACKED_MODELS,
    PLACED_MODELS,
    VISION_MODELS,
    OfPlaces,
    OfRows,
    OfSize,
    crop_tower,
    image,
    media_prompt,
    picture,
)

MAX_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
TEXT = [3, 4, 5, 6, 7]
GROUPS = (VISION_MODELS, PACKED_MODELS, PLACED_MODELS, CROP_MODELS, IMAGE_MODELS)  # a protocol each
MODELS = tuple(name for group in GROUPS for name in group)
# The sizes of images where they may have some, by kind of tower: small, wide, small, large and large. Patches, rows and
# columns of features, or pixels.
SMALL, WIDE, SMALL_TOO, LARGE, LARGE_TOO = range(1, 6)
SIZES = {
    "patches": {1: (4, 6), 2: (8, 14), 3: (4, 6), 4: (16, 22)},
    "rows": {1: (2, 3), 2: (3, 6), 3: (1, 4), 4: (5, 8)},
    "crops": {1: (32, 64), 2: (60, 40), 3: (20, 21), 4: (64, 60)},
}


def shown(kind: str, seed: int) -> Any:
    """A part of a prompt: an image as the model's processor gives it. Those of seeds above LARGE are as large."""
    size = min(seed, LARGE)
    if kind in CROP_MODELS:
        return OfSize(seed, *SIZES["crops"][size], crop_tower(kind))
    if kind in PACKED_MODELS:
        return OfRows(seed, *SIZES["rows"][size])
    if kind in PLACED_MODELS:
        return OfPlaces(seed, *SIZES["rows"][size])
    return image(seed, (1, *SIZES["patches"][size])) if kind in VISION_MODELS else picture(seed)


class Prompts:
    """The prompts of one kind of model."""

    def __init__(self, kind: str) -> None:
        small, wide, small_too, large, large_too = (shown(kind, seed) for seed in range(SMALL, LARGE_TOO + 1))
        self.one = media_prompt([5, 6, 92], small, [93, 7, 8])
        self.two = media_prompt([5, 6, 92], wide, [93, 7, 8, 92], small_too, [93, 9])
        self.long = media_prompt([11, 92], large, [93] * 9, wide, [93, 12, 92], small_too, [4] * 5)  # than a step
        self.last = media_prompt([4, 3], small)  # the first token follows a feature
        self.like_long = media_prompt([11, 92], large_too, [93] * 9)  # with another image
        self.large_again = media_prompt([7, 92], large, [93, 20])
        self.every: list[Any] = [self.one, self.two, TEXT, self.long, self.last]


def tokens(engine: Engine, prompts: list[Any], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(output.token_ids) for output in engine.generate(prompts, params)]
