"""Patches with places: put in the order of features, without padding, whatever order they come in."""

from __future__ import annotations

import numpy as np
import pytest

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.placed import PlacedTower

TOWER = PlacedTower(merge=2, patch_width=3, feature_width=8, image_token_id=1)
PLACES = [(column, row) for row in range(2) for column in range(4)]


def tensors(places: list[tuple[int, int]], width: int = 3) -> dict[str, np.ndarray]:
    """Patches whose numbers are their places', and padding behind them."""
    padded = np.array([*places, (-1, -1), (-1, -1)])
    pixels = np.stack([padded[:, 0], padded[:, 1], padded.sum(1)], -1)[:, :width]
    return {"pixel_values": pixels[None].astype(np.float32), "image_position_ids": padded[None]}


def test_patches_of_a_feature_are_together() -> None:
    for places in (PLACES, PLACES[::-1]):
        ((pixels, grid),) = TOWER.read(tensors(places)).images
        assert grid == (1, 2, 4)
        assert TOWER.num_features(grid) == 2
        found = pixels.reshape(2, 4, 3)[..., :2].astype(int).tolist()
        assert found == [[[0, 0], [1, 0], [0, 1], [1, 1]], [[2, 0], [3, 0], [2, 1], [3, 1]]]
        of_program = TOWER.inputs(grid)["position_ids"]  # row and column
        assert of_program[..., ::-1].tolist() == found


@pytest.mark.parametrize(
    ("places", "said"),
    [
        (PLACES[:-1], "has 7 places up to column 3 of row 1; expected each place of an image once"),
        ([*PLACES[:-1], (0, 0)], "expected each place of an image once"),
        ([(column, row) for row in range(3) for column in range(4)], "multiples of 2"),
    ],
)
def test_a_truncated_image_is_refused(places: list[tuple[int, int]], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        TOWER.read(tensors(places))


def test_patches_of_another_width_are_refused() -> None:
    with pytest.raises(RequestError, match=r"\[1, 10, 2\]; expected \[1, 10, 3\]"):
        TOWER.read(tensors(PLACES, width=2))
    with pytest.raises(RequestError, match="takes images, and no videos"):
        TOWER.read({"pixel_values": np.zeros((1, 4, 3))})
