"""Requests with images for the scheduler: of towers whose images see what is ahead in them, or do not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mllm_compile.runtime.media.grids import GridTower
from mllm_compile.runtime.media.request import RequestMedia
from mllm_compile.runtime.media.tower import Grid
from mllm_compile.runtime.schedule.request import Request
from tests.runtime.schedule.scheduler_simulation import FREE, make_request

TOKEN = 90
TOWER = GridTower(
    merge=1, patch_width=1, feature_width=8, window=0, table_side=0, align_corners=False, image_token_id=TOKEN
)
AHEAD = replace(TOWER, sees_ahead=True)


Part = int | tuple[int, bytes]


def request_of(name: str, *parts: Part, tower: GridTower = TOWER, **params: Any) -> Request:
    """Parts are lengths of texts, or the number of an image's features and its digest's first letter; `params` are
    make_request's."""
    ids: list[int] = []
    items = []
    for part in parts:
        if isinstance(part, int):
            ids += [3] * part
            continue
        count, letter = part
        grid: Grid = (1, 1, count)
        tensors = {"pixel_values": np.zeros((count, 1)), "image_grid_thw": np.array([grid])}
        items.append((len(ids), count, letter * 32, tensors))
        ids += [TOKEN] * count
    request = make_request(name, ids, **({"max_tokens": 2} | FREE | params))
    request.media = RequestMedia.of(tower, ids, np.array(ids) == TOKEN, items)
    return request
