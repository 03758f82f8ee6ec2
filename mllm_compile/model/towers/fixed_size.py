"""The protocol of towers that take whole images of one size: LLaVA, Gemma 3, InternVL, Idefics3, SmolVLM and the like.

A model has it if its base has `get_image_features`, a tower whose config has the size of its images, and a text model
that takes embeddings. Its way from images to features is traced (image_features.py). If it takes the kind of each
token, an image's tokens see ahead.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Sequence
from types import CodeType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.refusals import first_line
from mllm_compile.model.towers.adapter import TowerAdapter, placeholder_of, refusal, traced_tower
from mllm_compile.model.towers.image_features import ImageFeatures, has_connector, image_tower_of
from mllm_compile.model.towers.segments_hook import IMAGES_IMPLEMENTATION, packed, say_bounds
from mllm_compile.model.trace import Trace, sized
from mllm_compile.runtime.media.fixed_size import FixedSizeTower
from mllm_compile.runtime.media.tower import MAX_FEATURES, Grid

SAMPLE_IMAGES = 3


class FixedSizeImages(TowerAdapter):
    """The adapter; see the module's header."""

    facts: FixedSizeTower

    @classmethod
    def of(cls, hf_model: HFModel) -> FixedSizeImages | None:
        base: Any = getattr(hf_model.model, "model", None)
        if not hasattr(base, "get_image_features"):
            return None
        adapter = cls(hf_model, fixed_size_tower(hf_model, base))
        adapter.attends_by_itself = not adapter.facts.rows
        return adapter

    def trace_tower(self, device: str) -> Trace:
        """Inputs: `pixel_values` [F images, pixel_width], and of one that attends by segments `cu_seqlens` [F + 1]."""
        base: Any = self.hf_model.model.model
        shape = SAMPLE_IMAGES, self.facts.pixel_width
        inputs = {"pixel_values": sized("F", shape, self.hf_model.model.dtype, device)}
        if self.facts.rows:
            inputs["cu_seqlens"] = sized("cu_seqlens", (SAMPLE_IMAGES + 1,), torch.int32, device)
        with packed(image_tower_of(base), IMAGES_IMPLEMENTATION):
            return traced_tower(self.hf_model, _Tower(base, self.facts.shape), inputs, device)

    def said_of(self, images: Sequence[tuple[torch.Tensor, Grid]], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        pixels = torch.cat([pixels for pixels, _ in images]).view(-1, *self.facts.shape).to(ids.device)
        kinds = {"token_type_ids": (ids == self.facts.image_token_id).long()[None]} if self.facts.sees_ahead else {}
        return {"pixel_values": pixels[None] if has_connector(self.hf_model.model.model) else pixels, **kinds}


def fixed_size_tower(hf_model: HFModel, base: Any) -> FixedSizeTower:
    """Facts of the tower in a model's base.

    Raises:
        UnsupportedModelError: its images have no size, or it does not run on them alone.
    """
    config, tower = hf_model.model.config, image_tower_of(base)
    vision = getattr(tower, "config", None)
    token = placeholder_of(hf_model, getattr(config, "image_token_id", None))
    channels, rows, columns = _shape_of(tower, vision)
    if not isinstance(channels, int) or not isinstance(rows, int) or not isinstance(columns, int):
        raise refusal("its tower's config names no image_size and num_channels")
    shape = (channels, rows, columns)
    counted, features = _probe(hf_model, base, shape)
    return FixedSizeTower(
        shape=shape,
        features=features.shape[-2],
        rows=counted,
        feature_width=features.shape[-1],
        image_token_id=token,
        sees_ahead=_sees_ahead(hf_model),
    )


def _is_of_timm(tower: Any) -> bool:
    """True for timm's, which are convolutions, and attend within the maps of an image by functions of their own."""
    return hasattr(tower, "timm_model")


def _shape_of(tower: Any, vision: Any) -> tuple[Any, Any, Any]:
    """Channels, rows and columns of the tower's images, by its config or as timm has them."""
    if _is_of_timm(tower):
        channels, rows, columns = tower.timm_model.pretrained_cfg["input_size"]
        return channels, rows, columns
    size = getattr(vision, "image_size", None)
    rows, columns = size if isinstance(size, Sequence) and len(size) == 2 else (size, size)
    return getattr(vision, "num_channels", None), rows, columns


def _probe(hf_model: HFModel, base: Any, shape: tuple[int, int, int]) -> tuple[int, torch.Tensor]:
    """Runs the tower on a fake image: rows of its attention by segments, and features [1, features, hidden]."""
    weight: Any = next(hf_model.model.parameters())
    mode = weight.fake_mode if isinstance(weight, FakeTensor) else FakeTensorMode(allow_non_fake_inputs=True)
    rows: set[int] = set()

    def count(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        rows.update(x.shape[1] for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.dim() == 3)

    attentions = [
        module for module in image_tower_of(base).modules() if "scaling" in vars(module) or "scale" in vars(module)
    ]
    hooks = [module.register_forward_pre_hook(count, with_kwargs=True) for module in attentions]
    try:
        with mode, packed(image_tower_of(base), IMAGES_IMPLEMENTATION), torch.no_grad():
            say_bounds(torch.zeros(2, dtype=torch.int32, device=weight.device))
            pixels = torch.zeros(1, *shape, device=weight.device, dtype=hf_model.model.dtype)
            features = ImageFeatures(base)(pixels)
    except Exception as error:  # whatever a model raises that is called otherwise
        raise refusal(f"its tower does not run on images of {list(shape)} alone ({first_line(error)})") from error
    finally:
        for hook in hooks:
            hook.remove()
    if _is_of_timm(image_tower_of(base)):
        rows = {0}
    if len(rows) != 1 or features.dim() != 3:
        raise refusal("its tower does not attend within whole images")
    return rows.pop(), features


def _sees_ahead(hf_model: HFModel) -> bool:
    """True if tokens of an image see its later ones: the model's base reads the kind of each token, which others take
    and never read (Gemma 3n)."""
    return reads(inspect.unwrap(type(hf_model.model.model).forward).__code__, "token_type_ids")


def reads(code: CodeType, name: str) -> bool:
    """True if a function's code reads a variable. One instruction of Python 3.13 and later may read two."""
    loads = (one.argval for one in dis.get_instructions(code) if "LOAD" in one.opname)
    return any(name in (one if isinstance(one, tuple) else (one,)) for one in loads)


class _Tower(torch.nn.Module):
    def __init__(self, base: Any, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.features, self.shape = ImageFeatures(base), shape

    def forward(self, pixel_values: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        torch._check(pixel_values.shape[0] >= 1)
        torch._check(pixel_values.shape[0] <= MAX_FEATURES)
        if cu_seqlens is not None:
            say_bounds(cu_seqlens)
        features: torch.Tensor = self.features(pixel_values.view(-1, *self.shape)).flatten(0, 1)
        return features
