"""The protocols of towers, in the order in which a model is asked for them."""

from __future__ import annotations

import inspect

from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.towers.adapter import TowerAdapter
from mllm_compile.model.towers.crops import Crops
from mllm_compile.model.towers.fixed_size import FixedSizeImages
from mllm_compile.model.towers.packed_images import PackedImages
from mllm_compile.model.towers.placed_patches import PlacedPatches
from mllm_compile.model.towers.sound_chunks import SoundChunks
from mllm_compile.model.towers.sound_clips import SoundClips
from mllm_compile.model.towers.sound_conformers import SoundConformers
from mllm_compile.model.towers.sound_windows import SoundWindows
from mllm_compile.model.towers.visual_grids import VisualGrids

PROTOCOLS: tuple[type[TowerAdapter], ...] = (VisualGrids, PackedImages, PlacedPatches, Crops, FixedSizeImages)
SOUND_PROTOCOLS: tuple[type[TowerAdapter], ...] = (SoundChunks, SoundClips, SoundConformers, SoundWindows)


def tower_adapter(hf_model: HFModel) -> TowerAdapter | None:
    """The model's adapter of images; None: it takes none.

    Raises:
        UnsupportedModelError: it takes some, in a way that is not served.
    """
    if "cross_attention_states" in inspect.signature(type(hf_model.model).forward).parameters:
        return None  # its layers attend to images: sources/seen_images.py
    return _first(PROTOCOLS, hf_model)


def sound_adapter(hf_model: HFModel) -> TowerAdapter | None:
    """The model's adapter of sounds; otherwise as tower_adapter."""
    return _first(SOUND_PROTOCOLS, hf_model)


def _first(protocols: tuple[type[TowerAdapter], ...], hf_model: HFModel) -> TowerAdapter | None:
    found = (protocol.of(hf_model) for protocol in protocols)
    return next((adapter for adapter in found if adapter is not None), None)
