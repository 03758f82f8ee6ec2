"""Sounds for a conformer: chunks from the beginning of each, and rows that know their sound."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mllm_compile.model.towers.sound_rows import FILLING, convolve_within, sounds_of_rows
from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.conformers import ConformerTower
from mllm_compile.runtime.media.registry import tower_from_json, tower_to_json
from mllm_compile.runtime.media.tower_inputs import tower_inputs

LOCAL = ConformerTower(
    feature_width=4, image_token_id=9, bins=2, frames=16, halvings=2, window=1, edges="last"
)  # four rows a chunk
OF_BLOCKS = ConformerTower(
    feature_width=4,
    image_token_id=9,
    bins=2,
    frames=12,
    halvings=0,
    merge=4,
    of_group=2,
    is_masked=False,
    window=1,
    edges="last",
)


def frames(count: int) -> np.ndarray:
    return np.arange(count * 2, dtype=np.float32).reshape(1, count, 2)


def test_a_sound_is_whole_chunks_of_frames_and_ends_where_its_mask_says() -> None:
    mask = np.arange(40)[None] < 37
    ((pixels, grid),) = LOCAL.read({"input_features": frames(40), "input_features_mask": mask}).images
    assert grid == (3, 5, 0) and pixels.shape == (3, 32)
    assert np.array_equal(pixels.ravel()[: 37 * 2], frames(40).ravel()[: 37 * 2])
    assert not pixels.ravel()[37 * 2 :].any()
    assert LOCAL.filling(grid) is not None and np.array_equal(LOCAL.filling(grid), np.arange(96).reshape(3, 32) >= 74)
    assert LOCAL.num_features(grid) == 10  # 37 frames are 19, then 10 rows


def test_the_last_window_makes_all_its_features() -> None:
    ((_, grid),) = OF_BLOCKS.read({"input_features": frames(17)}).images
    assert grid == (2, 5, 0)
    assert OF_BLOCKS.num_features(grid) == 10 and OF_BLOCKS.num_counted(grid) == 12


def test_sounds_of_a_run_have_numbers_of_their_own() -> None:
    arrays, segments = tower_inputs(LOCAL, [(2, 5, 0), (1, 16, 0), (2, 16, 0)])
    assert not segments
    assert len(set(arrays["sounds"][[0, 2, 3]])) == 3
    assert arrays["sounds"].tolist() == sorted(arrays["sounds"]) and arrays["sounds"][0] == arrays["sounds"][1]
    assert arrays["edges"].tolist() == [16, 5, 16, 16, 16]
    assert arrays["taps"].tolist() == [0, 1, 2, 3, 4, 5, *range(8, 20)]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"pixel_values": frames(3)}, r"has pixel_values; expected input_features"),
        ({"input_features": frames(3)[0]}, r"the shape \[3, 2\]; expected \[1, frames, 2\]"),
        ({"input_features": frames(0)}, r"the shape \[1, 0, 2\]"),
        ({"input_features": frames(3).swapaxes(1, 2)}, r"the shape \[1, 2, 3\]"),
        (
            {"input_features": frames(3), "input_features_mask": np.array([[1, 0, 1]])},
            r"2 frames that are heard; expected \[1, 3\], and only those behind",
        ),
        ({"input_features": frames(3), "input_features_mask": np.zeros((1, 3))}, r"0 frames that are heard"),
        ({"input_features": frames(3), "input_features_mask": np.ones((1, 4))}, r"shape \[1, 4\]"),
        ({"input_features": np.zeros((1, 16384 * 16 + 1, 2), np.float32)}, r"262,145 frames; expected at most 262,144"),
    ],
)
def test_what_is_no_sound_is_refused(tensors: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        LOCAL.read(tensors)


def test_a_stored_tower_is_the_same() -> None:
    assert tower_from_json(tower_to_json(OF_BLOCKS)) == OF_BLOCKS


@pytest.mark.parametrize(("left", "width"), [(2, 3), (1, 3), (2, 5), (0, 1)])
def test_rows_of_a_sound_are_convolved_as_if_it_were_alone(left: int, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(3, 1, width, generator=generator)
    sounds = torch.tensor([0, 0, 0, FILLING, 4, 4, 4, 4, 8])
    hidden = torch.randn(len(sounds), 3, generator=generator)
    found = convolve_within(hidden, weight, left, sounds)
    for sound in (0, 4, 8):
        own = hidden[sounds == sound]
        padded = torch.nn.functional.pad(own.T[None], (left, width - 1 - left))
        alone = torch.nn.functional.conv1d(padded, weight, groups=3)[0].T
        assert torch.allclose(found[sounds == sound], alone, atol=1e-6)


def test_rows_behind_a_sounds_end_are_of_none() -> None:
    rows = sounds_of_rows(torch.tensor([0, 0, 8]), torch.tensor([4, 1, 4]), 4)
    assert rows.tolist() == [[0] * 4, [0, FILLING, FILLING, FILLING], [8] * 4]
