"""The language model with features of images in place of some tokens' embeddings, traced apart from its tower.

Models whose positions have three axes take features for deeper layers too (DeepStack); their language model is called
alone, as the model's own forward finds positions in data. Others are called whole: with embeddings given, a forward
does with them what it does with a text's.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mllm_compile.model.hf_model import HFModel
from mllm_compile.model.trace import Trace, promise_sizes, sized, token_inputs, trace_text
from mllm_compile.runtime.media.tower import Tower


def trace_with_features(hf_model: HFModel, facts: Tower, device: str, max_tokens: int) -> Trace:
    """The language model with `features` [T, feature_width] in place of embeddings where `is_feature` [T] says so, and
    `positions` [3, T] if it has three axes.

    Raises:
        UnsupportedModelError: it cannot be traced as one graph.
    """
    inputs = token_inputs(device)
    num_tokens, dtype = len(inputs["input_ids"]), hf_model.model.dtype
    inputs["features"] = sized("T", (num_tokens, facts.feature_width), dtype, device)
    inputs["is_feature"] = sized("T", (num_tokens,), torch.bool, device)
    if facts.axes == 1:
        whole = _WholeWithFeatures(hf_model.model, max_tokens, hf_model.position_offset)
        return trace_text(hf_model, whole, inputs, device, max_tokens)
    inputs["positions"] = sized("T", (facts.axes, num_tokens), torch.int64, device, dim=1)
    deeper = facts.feature_width // hf_model.sizes().hidden_size - 1
    flat = _WithFeatures(hf_model.model, deeper, max_tokens)
    with _dense_additions(flat.model.model.language_model):
        return trace_text(hf_model, flat, inputs, device, max_tokens)


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


class _WholeWithFeatures(torch.nn.Module):
    def __init__(self, model: Any, max_tokens: int, position_offset: int) -> None:
        super().__init__()
        self.model, self.max_tokens, self.position_offset = model, max_tokens, position_offset
        self.takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        text = model.config.get_text_config()
        # Where layers have embeddings of their own, a feature's are the padding's.
        self.padding = text.pad_token_id if getattr(text, "hidden_size_per_layer_input", 0) else None

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        logits_indices: torch.Tensor,
        features: torch.Tensor,
        is_feature: torch.Tensor,
    ) -> torch.Tensor:
        promise_sizes(self.max_tokens, input_ids, logits_indices)
        ids = input_ids if self.padding is None else torch.where(is_feature, self.padding, input_ids)
        embeddings = _embedded(self.model.model, self.model.get_input_embeddings()(ids), ids)
        given = torch.where(is_feature[:, None], features, embeddings)[None]
        place = positions[None] + self.position_offset if self.position_offset else positions[None]
        said: dict[str, Any] = {"inputs_embeds": given, "position_ids": place, "use_cache": False}
        if self.padding is not None:
            of_layers = self.model.model.language_model.get_per_layer_inputs
            takes_both = len(inspect.signature(of_layers).parameters) > 1
            said["per_layer_inputs"] = of_layers(ids[None], *([embeddings[None]] if takes_both else []))
        logits: torch.Tensor
        if self.takes_rows:
            logits = self.model(**said, logits_to_keep=logits_indices).logits[0]
        else:
            logits = self.model(**said).logits[0].index_select(0, logits_indices)
        return logits


def _embedded(base: Any, embeddings: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Embeddings [T, hidden] of ids; some tokens have rows of their own beside a tower (Gemma 3n)."""
    for name in ("embed_vision", "embed_audio"):
        table: Any = getattr(base, name, None)
        if hasattr(table, "vocab_offset"):
            first, end = table.vocab_offset, table.vocab_offset + table.vocab_size
            is_own = (ids >= first) & (ids < end)
            embeddings = torch.where(is_own[:, None], table(input_ids=torch.where(is_own, ids, first)), embeddings)
    return embeddings


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
        promise_sizes(self.max_tokens, input_ids, logits_indices)
        embeddings = self.model.get_input_embeddings()(input_ids)
        own, *deeper = features.chunk(1 + self.deeper, -1)
        said: dict[str, Any] = {"inputs_embeds": torch.where(is_feature[:, None], own, embeddings)[None]}
        if deeper:
            said |= {"visual_pos_masks": is_feature[None], "deepstack_visual_embeds": deeper}
        language_model = self.model.model.language_model
        if "ple_input_ids" in inspect.signature(language_model.forward).parameters:  # which its layers hash
            said["ple_input_ids"] = input_ids[None]
        hidden = language_model(**said, position_ids=positions[:, None], use_cache=False).last_hidden_state
        logits: torch.Tensor = self.model.get_output_embeddings()(hidden[:, logits_indices])[0]
        return logits
