"""A request's images: keys, positions of any part of it, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.grids import GridTower
from mllm_compile.runtime.media.request import RequestMedia

TOWER = GridTower(
    merge=2, patch_width=3, feature_width=8, window=0, table_side=0, align_corners=False, image_token_id=90
)
IDS = [1, 2, *[90] * 6, 3, 4]


def tensors(rows: int = 4, columns: int = 6, **changes: Any) -> dict[str, np.ndarray]:
    pixels = np.zeros((rows * columns, 3), dtype=np.float32)
    return {"pixel_values": pixels, "image_grid_thw": np.array([[1, rows, columns]])} | changes


def media(
    ids: list[int] = IDS, start: int = 2, length: int = 6, digest: bytes = b"a" * 32, **changes: Any
) -> RequestMedia:
    return RequestMedia.of(TOWER, ids, np.array(ids) == 90, [(start, length, digest, tensors(**changes))])


def test_keys_are_ids_and_of_an_image_numbers_of_its_own_below_zero() -> None:
    one, again, other = media(), media(), media(digest=b"b" * 32)
    assert one.keys[[0, 1, 8, 9]].tolist() == [1, 2, 3, 4]
    assert (one.keys[2:8] < 0).all()
    assert len(set(one.keys[2:8].tolist())) == 6
    assert np.array_equal(one.keys, again.keys)
    assert not set(one.keys[2:8].tolist()) & set(other.keys[2:8].tolist())


def test_positions_of_a_part_go_on_behind_the_prompt() -> None:
    found = media()
    assert found.positions[:, 2:8].tolist() == [[2] * 6, [2, 2, 2, 3, 3, 3], [2, 3, 4, 2, 3, 4]]
    assert found.delta == -3
    assert found.text_positions(8, 4).tolist() == [5, 6, 7, 8]
    assert found.all_positions(6, 5).tolist() == [[2, 2, 5, 6, 7], [3, 3, 5, 6, 7], [3, 4, 5, 6, 7]]
    spans = (0, 2), (0, 3), (7, 9), (8, 10)
    assert [len(list(found.images_within(*span))) for span in spans] == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"start": 6}, r"6 to 11 of a prompt of 10"),
        ({"start": 1}, "an image has 6 features, and the prompt 5 tokens for it"),
        ({"length": 5}, "an image has 6 features, and the prompt 5 tokens for it"),
        ({"digest": b"short"}, "a digest has 5 bytes|an image's digest has 5 bytes"),
        ({"columns": 5}, "multiples of 2"),
        ({"pixel_values": np.zeros((24, 4))}, r"\[24, 4\]; expected \[24, 3\]"),
        ({"image_grid_thw": np.array([[1, 4]])}, "expected frames, rows and columns"),
        ({"pixel_values_videos": np.zeros(1)}, "expected pixel_values and image_grid_thw, or"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        media(**changes)


def test_placeholders_without_an_image_are_refused() -> None:
    with pytest.raises(RequestError, match=r"7 tokens of the prompt are placeholders \(90 of images\)"):
        RequestMedia.of(TOWER, [*IDS, 90], np.array([*IDS, 0]) == 90, [(2, 6, b"a" * 32, tensors())])


def test_an_image_of_too_many_features_is_refused() -> None:
    rows = columns = 258
    ids = [90] * (rows * columns // 4)
    with pytest.raises(RequestError, match="16641 features, and at most 16384 are served"):
        media(ids, 0, len(ids), rows=rows, columns=columns)
