"""Images that a batch brings: their tokens by request, positions as each request has them, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.batch_images import find_images, place_tokens
from tests.runtime.media.test_request import IDS, TOWER, media

OTHER = [5, *[90] * 6, 6, *[90] * 6]
GRID = (1, 4, 6)  # six features
TEXT = [7, 8, 9]
STARTS = np.array([0, len(IDS), len(IDS) + len(TEXT), len(IDS) + len(TEXT) + len(OTHER)])


def test_images_of_several_requests_have_the_positions_of_each() -> None:
    ids = np.array([*IDS, *TEXT, *OTHER])
    images = find_images(TOWER, ids, STARTS, [GRID] * 3)
    assert [(image.request, image.start, image.end) for image in images] == [(0, 2, 8), (2, 14, 20), (2, 21, 27)]
    as_text = np.array([*range(len(IDS)), *range(20, 23), *range(len(OTHER))])
    positions, deltas = place_tokens(TOWER, as_text, STARTS, np.array([0, 20, 0]), images)
    first = media()
    assert np.array_equal(positions[:, :10], first.positions)
    assert np.array_equal(positions[:, 10:13], np.broadcast_to([20, 21, 22], (3, 3)))
    assert deltas.tolist() == [first.delta, 0, 2 * first.delta]
    assert positions[:, -1].tolist() == [5, 6, 7], "time, row and column of the last feature"


@pytest.mark.parametrize(
    ("ids", "starts", "grids", "reason"),
    [
        (IDS, [0, 10], [], r"6 placeholders \(token 90\), and its images have 0 features"),
        (IDS, [0, 10], [GRID] * 2, "6 placeholders .* have 12 features"),
        (IDS, [0, 5, 10], [GRID], "the image at token 2 has placeholders in two requests"),
    ],
)
def test_placeholders_that_do_not_fit_are_refused(ids, starts, grids, reason) -> None:
    with pytest.raises(RequestError, match=reason):
        find_images(TOWER, np.array(ids), np.array(starts), grids)


def test_images_that_see_ahead_are_kept_apart() -> None:
    ids = np.array([1, *[90] * 12])
    assert len(find_images(TOWER, ids, np.array([0, 13]), [GRID] * 2)) == 2
    with pytest.raises(RequestError, match="two images follow each other at token 7"):
        find_images(replace(TOWER, sees_ahead=True), ids, np.array([0, 13]), [GRID] * 2)


def test_a_prompt_in_parts_has_no_positions_by_itself() -> None:
    images = find_images(TOWER, np.array(IDS), np.array([0, 10]), [GRID])
    with pytest.raises(
        RequestError, match=r"request 0 brings images behind 4 tokens .* give the batch `mrope_positions`"
    ):
        place_tokens(TOWER, np.arange(4, 14), np.array([0, 10]), np.array([4]), images)


def test_a_batch_without_images_has_none() -> None:
    assert find_images(TOWER, np.array(TEXT), np.array([0, 3]), []) == []
