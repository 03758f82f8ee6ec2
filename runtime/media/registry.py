"""The protocols of towers, by the names under which a program stores them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from mllm_compile.runtime.files.json_data import from_json
from mllm_compile.runtime.media.crops import CropTower
from mllm_compile.runtime.media.fixed_size import FixedSizeTower
from mllm_compile.runtime.media.grids import GridTower
from mllm_compile.runtime.media.packed import PackedTower
from mllm_compile.runtime.media.placed import PlacedTower
from mllm_compile.runtime.media.tower import Tower

TOWERS: dict[str, type[Tower]] = {
    "grids": GridTower,
    "images": FixedSizeTower,
    "packed": PackedTower,
    "placed": PlacedTower,
    "crops": CropTower,
}


def tower_to_json(tower: Tower) -> dict[str, Any]:
    """The tower with its protocol's name."""
    name = next(name for name, kind in TOWERS.items() if type(tower) is kind)
    return {"protocol": name, **asdict(tower)}


def tower_from_json(data: Any) -> Tower:
    """Raises KeyError, TypeError or ValueError for anything that tower_to_json would not have written."""
    fields = dict(data)
    return from_json(TOWERS[fields.pop("protocol")], fields)
