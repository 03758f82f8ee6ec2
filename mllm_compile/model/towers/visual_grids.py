"""The protocol of towers that take packed patches with grids: Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4V and what is
built alike.

A model has it if its base has a `visual` with a `spatial_merge_size`, a `language_model`, and counts positions on three
axes (`get_rope_index`). Its own forward finds sizes in data. So tower and language model are traced apart, and tensors
that follow from a grid (runtime/media/grids.py) are inputs: the tower takes each from its keywords if given. Whatever
else a model does between the two shows in check/media.py, which compares with its forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.towers.adapter import TowerAdapter, placeholder_of, refusal, traced_tower
from mllm_compile.model.towers.places_table import position_table, say_taps, spread_by_taps
from mllm_compile.model.towers.segments_hook import packed, say_bounds
from mllm_compile.model.trace import Trace, sized
from mllm_compile.runtime.media.grids import GridTower
from mllm_compile.runtime.media.tower import MAX_FEATURES, Grid

_SAMPLE_FEATURES = 12
_SAMPLE_BOUNDS = 3


class VisualGrids(TowerAdapter):
    """The adapter; see the module's header."""

    facts: GridTower

    @classmethod
    def of(cls, hf_model: HFModel) -> VisualGrids | None:
        facts = grid_tower(hf_model)
        return None if facts is None else cls(hf_model, facts)

    @property
    def marks(self) -> tuple[int, int] | None:
        config: Any = self.hf_model.model.config
        if not hasattr(config, "position_id_per_seconds"):
            return None
        return config.vision_start_token_id, config.vision_end_token_id

    def trace_tower(self, device: str) -> Trace:
        """Inputs as GridTower.input_names, outputs [F, hidden], those for deeper layers last."""
        facts, hf_model = self.facts, self.hf_model
        unit, count = facts.merge**2, _SAMPLE_FEATURES
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
            "pixel_values": ((count, unit * facts.patch_width), hf_model.model.dtype),
            "position_ids": ((count, unit, 2), torch.int64),
            "interp_indices": ((count, unit, facts.taps), torch.int64),
            "interp_weights": ((count, unit, facts.taps), torch.float32),
            "window_index": ((count,), torch.int64),
        }
        inputs = {}
        for name in facts.input_names():
            if name in shapes:
                inputs[name] = sized("F", *shapes[name], device)
            else:
                inputs[name] = sized(name, (_SAMPLE_BOUNDS,), torch.int32, device)
        tower = tower_of(hf_model.model)
        with packed(tower), spread_by_taps(tower):
            return traced_tower(hf_model, _Tower(tower, facts.patch_width), inputs, device)

    def said_of(self, images: Sequence[tuple[torch.Tensor, Grid]], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        # Omni's counts positions on one axis where it is told no mask.
        mask = {} if self.marks is None else {"attention_mask": torch.ones_like(ids)[None]}
        return mask | {
            "pixel_values": torch.cat([pixels for pixels, _ in images]).view(-1, self.facts.patch_width).to(ids.device),
            "image_grid_thw": torch.tensor([grid for _, grid in images], device=ids.device),
            "mm_token_type_ids": (ids == self.facts.image_token_id).long()[None],
        }


def tower_of(model: Any) -> Any:
    """The tower of a model, as a module; None: it has none where this protocol looks for one."""
    return getattr(getattr(model, "model", None), "visual", None)


def grid_tower(hf_model: HFModel) -> GridTower | None:
    """Facts of the model's tower; None: it has another protocol or no tower.

    Raises:
        UnsupportedModelError: it has one that differs in what this adapter relies on.
    """
    base: Any = getattr(hf_model.model, "model", None)
    tower = tower_of(hf_model.model)
    config = hf_model.model.config
    if not hasattr(tower, "spatial_merge_size") or not hasattr(base, "language_model"):
        return None
    if not hasattr(base, "get_rope_index"):
        raise refusal("its positions have one axis, beside a tower with grids")
    for needed in ("cu_seqlens", "position_ids", "kwargs"):
        if needed not in inspect.getsource(type(tower).forward):
            raise refusal(f"its tower takes no {needed!r}")
    vision = tower.config
    deeper = len(getattr(tower, "deepstack_visual_indexes", ()))
    if getattr(tower, "interpolation_mode", "bilinear") != "bilinear":
        raise refusal(f"its table of places is interpolated by {tower.interpolation_mode!r}, not 'bilinear'")
    table, side = position_table(tower), getattr(tower, "num_grid_per_side", 0)
    if table is not None:
        side = int(table.num_positions**0.5)
        if table.interpolated_method != "bicubic":
            raise refusal(f"its table of places is interpolated by {table.interpolated_method!r}, not 'bicubic'")
    video_token = config.image_token_id if _has_frames_as_images(base) else config.video_token_id
    if hasattr(config, "position_id_per_seconds"):  # Omni's videos have sounds among their frames
        video_token = None
    window = getattr(tower, "window_size", 0) // tower.spatial_merge_size // vision.patch_size
    return GridTower(
        merge=tower.spatial_merge_size,
        patch_width=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        feature_width=hf_model.sizes().hidden_size * (1 + deeper),
        window=window,
        table_side=side,
        bicubic=table is not None,
        align_corners=getattr(tower, "interpolation_align_corners", False),
        image_token_id=placeholder_of(hf_model, config.image_token_id),
        video_token_id=-1 if video_token is None else video_token,
        ticks_per_second=int(getattr(vision, "tokens_per_second", 0)),
    )


def _has_frames_as_images(base: Any) -> bool:
    """True if the features of a video's frames go where images' tokens are (GLM-4V)."""
    look_for = inspect.getsource(type(base).get_placeholder_mask)
    return "special_video_mask = input_ids == self.config.image_token_id" in look_for


class _Tower(torch.nn.Module):
    def __init__(self, tower: Any, patch_width: int) -> None:
        super().__init__()
        self.tower, self.patch_width = tower, patch_width
        self.reads_position_table = position_table(tower) is not None

    def forward(
        self,
        pixel_values: torch.Tensor,
        position_ids: torch.Tensor,
        cu_seqlens: torch.Tensor,
        interp_indices: torch.Tensor | None = None,
        interp_weights: torch.Tensor | None = None,
        window_index: torch.Tensor | None = None,
        cu_window_seqlens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        torch._check(pixel_values.shape[0] >= 1)
        torch._check(pixel_values.shape[0] <= MAX_FEATURES)
        said: dict[str, Any] = {"position_ids": position_ids.flatten(0, 1), "cu_seqlens": cu_seqlens, "max_seqlen": 1}
        if interp_indices is not None and interp_weights is not None:
            taps = interp_indices.flatten(0, 1), interp_weights.flatten(0, 1)
            if self.reads_position_table:
                say_taps(*taps)
                say_bounds(cu_seqlens)  # it would take their differences, whose number torch 2.11 calls data
                said["cu_seqlens"] = torch.zeros(2, dtype=torch.int32, device=cu_seqlens.device)
            else:
                said |= {"interp_indices": taps[0], "interp_weights": taps[1]}
        if window_index is not None:
            said |= {"window_index": window_index, "cu_window_seqlens": cu_window_seqlens, "max_window_seqlen": 1}
        out = self.tower(pixel_values.view(-1, self.patch_width), grid_thw=None, **said)
        say_taps()  # or the trace gives what was said as outputs
        return (out.pooler_output, *(getattr(out, "deepstack_features", None) or ()))
