"""The protocols of towers, in the order in which a model is asked for them."""

from __future__ import annotations

from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.towers.adapter import TowerAdapter
from mllm_compile.model.towers.crops import Crops
from mllm_compile.model.towers.fixed_size import FixedSizeImages
from mllm_compile.model.towers.packed_images import PackedImages
from mllm_compile.model.towers.placed_patches import PlacedPatches
from mllm_compile.model.towers.visual_grids import VisualGrids

PROTOCOLS: tuple[type[TowerAdapter], ...] = (VisualGrids, PackedImages, PlacedPatches, Crops, FixedSizeImages)


def tower_adapter(hf_model: HFModel) -> TowerAdapter | None:
    """The model's adapter; None: it takes no images.

    Raises:
        UnsupportedModelError: it takes some, in a way that is not served.
    """
    found = (protocol.of(hf_model) for protocol in PROTOCOLS)
    return next((adapter for adapter in found if adapter is not None), None)
