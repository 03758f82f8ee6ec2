"""The protocol of towers that take packed patches with grids: Qwen2-VL, Qwen2.5-VL, Qwen3-VL and what is built alike.

A model has it if its base has a `visual` with a `spatial_merge_size`, a `language_model`, and counts positions on three
axes (`get_rope_index`). Its own forward finds sizes in data; so tower and language model are traced apart, and what
follows from a grid (runtime/media/grids.py) is an input: the tower takes each such tensor from its keywords if it is
there. Whatever else a model does between the two shows in check/media.py, which compares with its forward.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.towers.varlen_hook import packed
from mllm_compile.model.trace import Trace, capture, sized, token_inputs, trace_text
from mllm_compile.runtime.media.grids import MAX_FEATURES, GridTower

_SAMPLE_FEATURES = 12
_SAMPLE_BOUNDS = 3
_AXES = 3


def tower_of(model: Any) -> Any:
    """The tower of a model, as a module; None: it has none where this protocol looks for one."""
    return getattr(getattr(model, "model", None), "visual", None)


def grid_tower(hf_model: HFModel) -> GridTower | None:
    """Facts of the model's tower; None: it has none of this protocol.

    Raises:
        UnsupportedModelError: it has one that differs in what this adapter relies on.
    """
    base: Any = getattr(hf_model.model, "model", None)
    tower = tower_of(hf_model.model)
    config = hf_model.model.config
    if not hasattr(tower, "spatial_merge_size") or not hasattr(base, "language_model"):
        return None
    if not hasattr(base, "get_rope_index"):
        raise _refusal("its positions have one axis, beside a tower with grids")
    for needed in ("cu_seqlens", "position_ids", "kwargs"):
        if needed not in inspect.getsource(type(tower).forward):
            raise _refusal(f"its tower takes no {needed!r}")
    vision = tower.config
    deeper = len(getattr(tower, "deepstack_visual_indexes", ()))
    if getattr(tower, "interpolation_mode", "bilinear") != "bilinear":
        raise _refusal(f"its table of places is interpolated by {tower.interpolation_mode!r}, not 'bilinear'")
    window = getattr(tower, "window_size", 0) // tower.spatial_merge_size // vision.patch_size
    return GridTower(
        merge=tower.spatial_merge_size,
        patch_width=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
        feature_width=hf_model.sizes().hidden_size * (1 + deeper),
        window=window,
        table_side=getattr(tower, "num_grid_per_side", 0),
        align_corners=getattr(tower, "interpolation_align_corners", False),
        image_token_id=config.image_token_id,
        video_token_id=-1 if config.video_token_id is None else config.video_token_id,
        ticks_per_second=int(getattr(vision, "tokens_per_second", 0)),
    )


def trace_tower(hf_model: HFModel, facts: GridTower, device: str) -> Trace:
    """The tower as a program: inputs as GridTower.input_names, outputs [F, hidden], those for deeper layers last.

    Raises:
        UnsupportedModelError: it cannot be traced as one graph.
    """
    unit, count = facts.merge**2, _SAMPLE_FEATURES
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "pixel_values": ((count, unit * facts.patch_width), hf_model.model.dtype),
        "position_ids": ((count, unit, 2), torch.int64),
        "interp_indices": ((count, unit, 4), torch.int64),
        "interp_weights": ((count, unit, 4), torch.float32),
        "window_index": ((count,), torch.int64),
    }
    inputs = {}
    for name in facts.input_names():
        if name in shapes:
            inputs[name] = sized("F", *shapes[name], device)
        else:
            inputs[name] = sized(name, (_SAMPLE_BOUNDS,), torch.int32, device)
    tower: Any = hf_model.model.model.visual  # type: ignore[union-attr]
    with packed(tower):
        graph = capture(hf_model, _Tower(tower, facts.patch_width), inputs, device)
    return Trace(graph, MAX_FEATURES, device)


def trace_with_features(hf_model: HFModel, facts: GridTower, device: str, max_tokens: int) -> Trace:
    """The language model with `features` [T, feature_width] in place of embeddings where `is_feature` [T] says so, and
    `positions` [3, T].

    Raises:
        UnsupportedModelError: it cannot be traced as one graph.
    """
    inputs = token_inputs(device)
    num_tokens, dtype = len(inputs["input_ids"]), hf_model.model.dtype
    inputs["positions"] = sized("T", (_AXES, num_tokens), torch.int64, device, dim=1)
    inputs["features"] = sized("T", (num_tokens, facts.feature_width), dtype, device)
    inputs["is_feature"] = sized("T", (num_tokens,), torch.bool, device)
    deeper = facts.feature_width // hf_model.sizes().hidden_size - 1
    flat = _WithFeatures(hf_model.model, deeper, max_tokens)
    with _dense_additions(flat.model.model.language_model):
        return trace_text(hf_model, flat, inputs, device, max_tokens)


def _refusal(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"the model's images cannot be served: {what}. docs/images.md lists what is.")


@contextmanager
def _dense_additions(language_model: Any) -> Iterator[None]:
    """Within the context features for deeper layers are added as they are, zeros for text, not at places that a mask
    names: their number is data."""
    if hasattr(language_model, "_deepstack_process"):
        language_model._deepstack_process = lambda hidden, mask, features: hidden + features[None]
    try:
        yield
    finally:
        vars(language_model).pop("_deepstack_process", None)


class _Tower(torch.nn.Module):
    def __init__(self, tower: Any, patch_width: int) -> None:
        super().__init__()
        self.tower, self.patch_width = tower, patch_width

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
        said = {"position_ids": position_ids.flatten(0, 1), "cu_seqlens": cu_seqlens, "max_seqlen": 1}
        if interp_indices is not None and interp_weights is not None:
            said |= {"interp_indices": interp_indices.flatten(0, 1), "interp_weights": interp_weights.flatten(0, 1)}
        if window_index is not None:
            said |= {"window_index": window_index, "cu_window_seqlens": cu_window_seqlens, "max_window_seqlen": 1}
        out = self.tower(pixel_values.view(-1, self.patch_width), grid_thw=None, **said)
        return (out.pooler_output, *(getattr(out, "deepstack_features", None) or ()))


class _WithFeatures(torch.nn.Module):
    def __init__(self, model: Any, deeper: int, max_tokens: int) -> None:
        super().__init__()
        self.model, self.deeper, self.max_tokens = model, deeper, max_tokens

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_indices: torch.Tensor,
        features: torch.Tensor,
        is_feature: torch.Tensor,
    ) -> torch.Tensor:
        for one in (input_ids, logits_indices):
            torch._check(one.shape[0] >= 1)
            torch._check(one.shape[0] <= self.max_tokens)
        embeddings = self.model.get_input_embeddings()(input_ids)
        own, *deeper = features.chunk(1 + self.deeper, -1)
        said: dict[str, Any] = {"inputs_embeds": torch.where(is_feature[:, None], own, embeddings)[None]}
        if deeper:
            said |= {"visual_pos_masks": is_feature[None], "deepstack_visual_embeds": deeper}
        language_model = self.model.model.language_model
        hidden = language_model(**said, position_ids=positions[:, None], use_cache=False).last_hidden_state
        return self.model.get_output_embeddings()(hidden[:, logits_indices])[0]
