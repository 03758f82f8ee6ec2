"""Crops of images of any size: which of a tower's features an image is made of, as Transformers has it."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.crops import CropTower
from mllm_compile.runtime.media.tower_inputs import tower_inputs

PINPOINTS = tuple((rows * 32, columns * 32) for rows in range(1, 5) for columns in range(1, 5) if rows * columns < 9)
COMMON: dict[str, Any] = {"feature_width": 8, "image_token_id": 1, "shape": (3, 32, 32), "rows": 16, "features": 16}
NEXT = CropTower(**COMMON, pinpoints=PINPOINTS)
ONEVISION = CropTower(**COMMON, pinpoints=PINPOINTS, most_crops=2, video_token_id=2)
SIZES = [(32, 64), (31, 200), (200, 31), (100, 100), (77, 123), (5, 9), (640, 479), (3, 1000), (1000, 1)]


def made_by(tower: CropTower, grids: list[Any], seen: torch.Tensor, newline: torch.Tensor) -> torch.Tensor:
    """The features of images of `seen` [images, 16, 8], by what the tower's program is told."""
    arrays, _ = tower_inputs(tower, grids)
    flat = seen.flatten(0, 1)
    given = {name: torch.from_numpy(array) for name, array in arrays.items()}
    weights = given.get("tap_weights", torch.ones(len(given["taps"]), 1))
    made = (flat[given["taps"]] * weights[..., None]).sum(1)
    return torch.where(given["is_row_end"][:, None], newline, made)


@pytest.mark.parametrize("tower", [NEXT, ONEVISION], ids=["llava_next", "llava_onevision"])
def test_features_are_put_together_as_transformers_does(tower: CropTower) -> None:
    from transformers.models.llava_next.modeling_llava_next import LlavaNextModel
    from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

    vision = SimpleNamespace(image_size=32, patch_size=8)
    config = SimpleNamespace(vision_config=vision, image_grid_pinpoints=[list(one) for one in PINPOINTS])
    grids = [(1 + math.prod(tower.crops(*size)), *size) for size in SIZES] + [(1, 50, 60)]
    seen = torch.randn(sum(count for count, _, _ in grids), 16, 8)
    newline = torch.randn(8)
    parts = seen.split([count for count, _, _ in grids])
    sizes = torch.tensor([grid[1:] for grid in grids])
    said: dict[str, Any] = {"image_newline": newline}
    kind: Any = LlavaOnevisionModel if tower.most_crops else LlavaNextModel
    said |= {"vision_aspect_ratio": "anyres_max_2"} if tower.most_crops else {"vision_feature_select_strategy": "full"}
    expected, lengths = kind.pack_image_features(SimpleNamespace(config=config), parts, sizes, **said)
    assert [tower.num_features(grid) for grid in grids] == lengths.tolist()
    torch.testing.assert_close(made_by(tower, grids, seen, newline), torch.cat(expected), atol=1e-5, rtol=1e-5)


def test_frames_of_a_video_have_a_quarter_of_the_features_and_one_end() -> None:
    from transformers.models.llava_onevision.modeling_llava_onevision import LlavaOnevisionModel

    frames = np.random.default_rng(0).normal(size=(1, 3, 3, 32, 32))
    images = ONEVISION.read({"pixel_values_videos": frames}).images
    grids = [grid for _, grid in images]
    assert [ONEVISION.num_features(grid) for grid in grids] == [4, 4, 5]
    assert np.array_equal(images[1][0], frames[0, 1].reshape(1, -1).astype(np.float32))
    seen, newline = torch.randn(3, 16, 8), torch.randn(8)
    config = SimpleNamespace(vision_config=SimpleNamespace(image_size=32, patch_size=8))
    pooled = LlavaOnevisionModel.apply_pooling(SimpleNamespace(config=config), seen).flatten(0, 1)
    made = made_by(ONEVISION, grids, seen, newline)
    torch.testing.assert_close(made, torch.cat((pooled, newline[None])), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "has nothing; expected pixel_values and image_sizes"),
        ({"pixel_values": np.zeros((1, 3, 3, 32, 32))}, "has pixel_values; expected pixel_values and image_sizes"),
        (
            {"pixel_values": np.zeros((1, 4, 3, 32, 32)), "image_sizes": np.array([[32, 64]])},
            r"\[1, 4, 3, 32, 32\]; expected \[1, 3, 3, 32, 32\]",
        ),
        (
            {"pixel_values": np.zeros((1, 3, 3, 32, 32)), "image_sizes": np.array([[0, 64]])},
            "expected rows and columns of one image's pixels",
        ),
        ({"pixel_values_videos": np.zeros((1, 2, 3, 32, 32))}, "takes images, and no videos"),
    ],
)
def test_an_image_that_the_tower_cannot_take_is_refused(tensors: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        NEXT.read(tensors)


def test_a_video_of_another_size_is_refused() -> None:
    for shape in ((1, 0, 3, 32, 32), (1, 2, 3, 16, 32), (2, 3, 32, 32)):
        with pytest.raises(RequestError, match="pixel_values_videos has the shape"):
            ONEVISION.read({"pixel_values_videos": np.zeros(shape)})


def test_memory_is_measured_with_the_image_of_most_crops() -> None:
    assert NEXT.largest(100) == [(9, 64, 128)]
    assert len(NEXT.largest(1000)) == math.ceil(1000 / 16)
