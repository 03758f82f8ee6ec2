"""The inputs of towers are those that Transformers makes of the same grids; rope positions likewise."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile.runtime.media.grids import GridTower
from mllm_compile.runtime.media.patches import patch_places, table_taps, windows
from mllm_compile.runtime.media.positions import Placed, positions_of
from mllm_compile.runtime.media.tower import Grid
from mllm_compile.runtime.media.tower_inputs import tower_inputs

GRIDS: list[Grid] = [(1, 2, 2), (1, 4, 6), (2, 8, 14), (1, 16, 22), (3, 6, 4)]
TOWER = GridTower(
    merge=2, patch_width=3, feature_width=8, window=3, table_side=5, align_corners=True, image_token_id=90
)


def tensor(grids: list[Grid]) -> torch.Tensor:
    return torch.tensor(grids)


@pytest.mark.parametrize("grid", GRIDS)
def test_places_and_windows_and_taps_match_transformers(grid: Grid) -> None:
    from transformers.vision_utils import (
        get_vision_interpolation_indices_and_weights,
        get_vision_position_ids,
        get_vision_window_index,
    )

    assert np.array_equal(patch_places(grid, 2), get_vision_position_ids(tensor([grid]), 2))
    index, bounds = get_vision_window_index(tensor([grid]), 2, window_size=12, patch_size=2)
    order, lengths = windows(grid, 2, 3)
    assert np.array_equal(order, index)
    assert np.array_equal(np.cumsum(lengths), bounds[1:])
    for align_corners in (False, True):
        taps = get_vision_interpolation_indices_and_weights(
            tensor([grid]), 5, align_corners=align_corners, spatial_merge_size=2
        )
        indices, weights = table_taps(grid, 2, 5, align_corners)
        assert np.array_equal(indices, taps[0])
        assert np.allclose(weights, taps[1], atol=1e-6)


def test_several_images_are_one_run_of_the_tower() -> None:
    from transformers.vision_utils import get_vision_cu_seqlens, get_vision_position_ids, get_vision_window_index

    arrays, segments = tower_inputs(TOWER, GRIDS)
    assert {"pixel_values", *arrays, *segments} == set(TOWER.input_names())
    features = sum(TOWER.num_features(grid) for grid in GRIDS)
    assert {len(array) for array in arrays.values()} == {features}
    assert np.array_equal(arrays["position_ids"].reshape(-1, 2), get_vision_position_ids(tensor(GRIDS), 2))
    index, bounds = get_vision_window_index(tensor(GRIDS), 2, window_size=12, patch_size=2)
    assert np.array_equal(arrays["window_index"], index)
    assert np.array_equal(segments["cu_window_seqlens"].bounds, bounds)
    assert np.array_equal(segments["cu_seqlens"].bounds, get_vision_cu_seqlens(tensor(GRIDS)))
    assert segments["cu_seqlens"].longest == 16 * 22


def test_positions_match_transformers() -> None:
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

    ids = [1, 2, *[90] * 6, 3, *[90] * 88, 4, 5, 6]
    images = [Placed(2, (1, 4, 6)), Placed(9, (1, 16, 22))]
    model: Any = Qwen3VLModel
    self = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)))
    self.get_vision_position_ids = lambda *args, **kwargs: model.get_vision_position_ids(self, *args, **kwargs)
    tokens = torch.tensor([ids])
    theirs, delta = model.get_rope_index(
        self, tokens, (tokens == 90).int(), image_grid_thw=tensor([one.grid for one in images])
    )
    ours, our_delta = positions_of(len(ids), images, 2)
    assert np.array_equal(ours, theirs[:, 0])
    assert our_delta == int(delta)


@pytest.mark.parametrize("grid", GRIDS)
def test_bicubic_taps_match_grid_sample(grid: Grid) -> None:
    side, merge = 5, 2
    table = torch.randn(side * side, 3)
    places = torch.from_numpy(patch_places(grid, merge)).float()
    rows, columns = ((places[:, axis] + 0.5) / grid[1 + axis] * 2 - 1 for axis in (0, 1))
    expected = torch.nn.functional.grid_sample(
        table.view(1, side, side, 3).permute(0, 3, 1, 2),
        torch.stack((columns, rows), -1)[None, :, None],
        mode="bicubic",
        align_corners=False,
        padding_mode="border",
    )[0, :, :, 0].T
    indices, weights = table_taps(grid, merge, side, align_corners=False, bicubic=True)
    found = (table[torch.from_numpy(indices)] * torch.from_numpy(weights)[..., None]).sum(1)
    assert indices.shape == (len(places), 16)
    assert torch.allclose(found, expected, atol=1e-5)
