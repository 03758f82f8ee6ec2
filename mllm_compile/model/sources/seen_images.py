"""Models some of whose layers attend to the states of images (Mllama): a text without images passes over these layers.

Such a model is known by `cross_attention_states` among its forward's arguments. It has a `vision_model`, whose config
says `max_num_tiles`, a `multi_modal_projector` and a `language_model`. Three functions are traced.
The text alone is the model as any. The images' gives the keys and values that each layer attends to. The text with
images attends to these by an op of queries alone, as an encoder-decoder's decoder does.

Tokens are told apart by a number: 0 has no images, 1 has some and is ahead of them, 2 is at an image or behind one.
A token ahead of all attends to every tile, and adds nothing in its layer's feed-forward.

Shape legend: T tokens, I images, E states of images, S rows of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import AttentionInterface

from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.refusals import first_line
from mllm_compile.model.sources.cross import CrossAttention
from mllm_compile.model.sources.hook import attending_to_pages, begin_keeping, keeping_keys, kept, say_seen
from mllm_compile.model.sources.trace import drop_unused
from mllm_compile.model.towers.adapter import refusal
from mllm_compile.model.towers.masked_hook import attending_by_masks
from mllm_compile.model.towers.segments_hook import attending_by
from mllm_compile.model.trace import Trace, promise_sizes, sized, token_inputs, trace_text
from mllm_compile.runtime.media.tiles import TileTower
from mllm_compile.runtime.media.tower import MAX_FEATURES, Grid

_PROBE = "mllm_seen_images_probe"
_PARTS = ("vision_model", "multi_modal_projector", "language_model")
_SAMPLE_IMAGES, _SAMPLE_STATES, _TOKENS = 3, 40, 3
KINDS = "source_kinds"  # the input that tells tokens apart


class SeenImagesAdapter:
    """The layers of a model that attend to images, and its tower.

    Attributes:
        cross: its layers that attend to images.
        facts: its tower.
    """

    def __init__(self, hf_model: HFModel, cross: CrossAttention, facts: TileTower) -> None:
        self.hf_model, self.cross, self.facts = hf_model, cross, facts

    @classmethod
    def of(cls, hf_model: HFModel) -> SeenImagesAdapter:
        """The model's.

        Raises:
            UnsupportedModelError: it has other parts, or they do not run as they are called here.
        """
        base: Any = getattr(hf_model.model, "model", None)
        missing = [part for part in _PARTS if not hasattr(base, part)]
        if missing or not hasattr(base.vision_model.config, "max_num_tiles"):
            raise refusal(
                f"layers of its text attend to images (cross attention), and it has no {' and no '.join(missing)}"
                if missing
                else "layers of its text attend to images (cross attention), and its tower takes no tiles of them"
            )
        config, vision = hf_model.model.config, base.vision_model.config
        token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
        rows = base.language_model.get_input_embeddings().weight.shape[0]
        if not isinstance(token, int) or not 0 <= token < rows:
            raise refusal(f"its placeholder is {token!r}, and no row of its embedding")
        facts = TileTower(
            feature_width=hf_model.sizes().hidden_size,
            image_token_id=token,
            tiles=vision.max_num_tiles,
            shape=(vision.num_channels, vision.image_size, vision.image_size),
            states=base.vision_model.num_patches,
            ratios=vision.max_aspect_ratio_id,
        )
        return cls(hf_model, CrossAttention(_cross_modules(hf_model, facts.feature_width), facts.feature_width), facts)

    def trace_tower(self, device: str) -> Trace:
        """Keys [E, Hk, D] and values [E, Hk, Dv] of each layer that attends to images, of all tiles of each. Inputs as
        TileTower.input_names: `pixel_values` [I, pixel_width], `aspect_ratio_ids` [I], `aspect_ratio_mask` [I, tiles].

        Raises:
            UnsupportedModelError: it cannot be traced as one graph.
        """
        facts, model = self.facts, self.hf_model.model
        inputs = {
            "pixel_values": sized("F", (_SAMPLE_IMAGES, facts.pixel_width), model.dtype, device),
            "aspect_ratio_ids": sized("F", (_SAMPLE_IMAGES,), torch.int64, device),
            "aspect_ratio_mask": sized("F", (_SAMPLE_IMAGES, facts.tiles), torch.int64, device),
        }
        base: Any = model.model
        with keeping_keys(base.language_model, self.cross), attending_by_masks(base.vision_model):
            trace = trace_text(self.hf_model, _Images(base, facts), inputs, device, MAX_FEATURES)
        drop_unused(trace, keep=tuple(inputs))
        return trace

    def trace_text(self, device: str, max_tokens: int) -> Trace:
        """The logits of flat tokens, also with images; inputs as trace_model's, and `source_kinds` [T] int64.

        Raises:
            UnsupportedModelError: as trace_model.
        """
        inputs, model = token_inputs(device), self.hf_model.model
        inputs[KINDS] = sized("T", (len(inputs["input_ids"]),), torch.int64, device)
        inputs["states"] = sized("E", (_SAMPLE_STATES, self.cross.width), model.dtype, device)
        text = _TextWithImages(model, max_tokens)
        with attending_to_pages(model, self.cross):
            trace = trace_text(self.hf_model, text, inputs, device, max_tokens)
        drop_unused(trace, keep=("input_ids", "positions", "logits_indices", KINDS))
        return trace

    def said_of(self, images: Sequence[tuple[torch.Tensor, Grid]], ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arguments, beside its ids [n], that give the model's own forward a prompt's images."""
        facts, count = self.facts, len(images)
        places = torch.nonzero(ids == facts.image_token_id).flatten().tolist()
        mask = torch.zeros(1, len(ids), count, facts.tiles, dtype=torch.int64)
        for number, (_, grid) in enumerate(images):
            last = number  # of those that follow each other
            while last + 1 < count and places[last + 1] == places[last] + 1:
                last += 1
            end = places[last + 1] if last + 1 < count else len(ids)
            mask[0, places[number] : end, number, : grid[1]] = 1
        given = [facts.make_inputs(grid) for _, grid in images]
        ratios = {name: torch.from_numpy(np.concatenate([one[name] for one in given]))[None] for name in given[0]}
        pixels = torch.cat([pixels for pixels, _ in images]).view(1, count, facts.tiles, *facts.shape)
        found = {"pixel_values": pixels, "cross_attention_mask": mask, **ratios}
        return {name: value.to(ids.device) for name, value in found.items()}


class _Images(torch.nn.Module):
    def __init__(self, base: Any, facts: TileTower) -> None:
        super().__init__()
        self.base, self.facts = base, facts

    def forward(
        self, pixel_values: torch.Tensor, aspect_ratio_ids: torch.Tensor, aspect_ratio_mask: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        torch._check(pixel_values.shape[0] >= 1)
        torch._check(pixel_values.shape[0] <= MAX_FEATURES)
        base, facts = self.base, self.facts
        tiles = pixel_values.view(-1, 1, facts.tiles, *facts.shape)
        seen = base.vision_model(tiles, aspect_ratio_ids[:, None], aspect_ratio_mask[:, None]).last_hidden_state
        states = base.multi_modal_projector(seen).flatten(0, 3)
        begin_keeping()
        ids = torch.zeros(states.shape[0], dtype=torch.int64, device=states.device)
        base.language_model(input_ids=ids[None], cross_attention_states=states[None], use_cache=False)
        return kept()


class _TextWithImages(torch.nn.Module):
    def __init__(self, model: Any, max_tokens: int) -> None:
        super().__init__()
        self.model, self.max_tokens = model, max_tokens

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_indices: torch.Tensor,
        source_kinds: torch.Tensor,
        states: torch.Tensor,
    ) -> torch.Tensor:
        promise_sizes(self.max_tokens, input_ids, logits_indices)
        say_seen(source_kinds > 0)
        hidden = self.model.model.language_model(
            input_ids=input_ids[None],
            position_ids=positions[None],
            cross_attention_states=states[None],
            full_text_row_masked_out_mask=(source_kinds == 2).to(states.dtype)[None, None, :, None],
            use_cache=False,
        ).last_hidden_state
        say_seen(None)
        logits: torch.Tensor = self.model.get_output_embeddings()(hidden[:, logits_indices])[0]
        return logits


def _cross_modules(hf_model: HFModel, width: int) -> tuple[torch.nn.Module, ...]:
    """The modules that attend to images, in the order of their calls."""
    language_model: Any = hf_model.model.model.language_model
    modules: list[torch.nn.Module] = []

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        if key.shape[2] != query.shape[2]:
            modules.append(module)
        return value.new_zeros(*query.transpose(1, 2).shape[:3], value.shape[3]), None

    AttentionInterface.register(_PROBE, attend)
    weight: Any = next(hf_model.model.parameters())
    mode = weight.fake_mode if isinstance(weight, FakeTensor) else FakeTensorMode(allow_non_fake_inputs=True)
    try:
        with mode, attending_by(language_model, _PROBE), torch.no_grad(), torch.device(weight.device):
            states = torch.zeros(1, _TOKENS + 2, width, dtype=hf_model.model.dtype)
            ids = torch.zeros(1, _TOKENS, dtype=torch.int64)
            language_model(input_ids=ids, cross_attention_states=states, use_cache=False)
    except Exception as error:  # whatever a model raises that is called otherwise
        raise refusal(f"its text does not run beside states of images ({first_line(error)})") from error
    if not modules:
        raise refusal("no layer attends to images by Transformers' attention interface")
    return tuple(modules)
