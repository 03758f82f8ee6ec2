"""The protocols of towers, by the names under which a program stores them."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from mllm_compile.runtime.files.json_data import from_json
from mllm_compile.runtime.media.clips import ClipTower
from mllm_compile.runtime.media.conformers import ConformerTower
from mllm_compile.runtime.media.crops import CropTower
from mllm_compile.runtime.media.fixed_size import FixedSizeTower
from mllm_compile.runtime.media.grids import GridTower
from mllm_compile.runtime.media.packed import PackedTower
from mllm_compile.runtime.media.placed import PlacedTower
from mllm_compile.runtime.media.sounds import SoundTower
from mllm_compile.runtime.media.tiles import TileTower
from mllm_compile.runtime.media.tower import Tower

TOWERS: dict[str, type[Tower]] = {
    "grids": GridTower,
    "images": FixedSizeTower,
    "packed": PackedTower,
    "placed": PlacedTower,
    "crops": CropTower,
    "sounds": SoundTower,
    "conformers": ConformerTower,
    "clips": ClipTower,
    "tiles": TileTower,
}


def tower_to_json(tower: Tower) -> dict[str, Any]:
    """The tower with its protocol's name."""
    name = next(name for name, kind in TOWERS.items() if type(tower) is kind)
    sound = None if tower.sound is None else tower_to_json(tower.sound)
    return {"protocol": name, **asdict(tower), "sound": sound}


def tower_from_json(data: Any) -> Tower:
    """Raises KeyError, TypeError or ValueError for anything that tower_to_json would not have written."""
    fields = dict(data)
    sound, kind = fields.pop("sound"), TOWERS[fields.pop("protocol")]
    tower: Tower = from_json(kind, {**fields, "sound": None})
    return tower if sound is None else replace(tower, sound=tower_from_json(sound))
