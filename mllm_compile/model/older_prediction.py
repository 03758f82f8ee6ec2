"""Conversions of weights to Transformers' MtpModel, and a layer's pass, by versions older than 5.23 too.

They have both within longer methods. Names of tensors that begin with `mtp.` are unknown to them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel, __version__
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.modeling_layers import MtpModel

from mllm_compile.errors import UnsupportedModelError


def check_names(name: str) -> None:
    """
    Args:
        name: of a checkpoint's tensor for a prediction layer.

    Raises:
        UnsupportedModelError: this version does not know where it belongs.
    """
    if name.startswith("mtp.") and not hasattr(MtpModel, "get_weight_conversions"):
        raise UnsupportedModelError(
            f"speculative.method is mtp, and Transformers {__version__} does not know where the checkpoint's {name!r} "
            "belongs. Expected 5.23 or a later version: install one, or use another method."
        )


def conversions_of(model: Any, main_model: PreTrainedModel, count: int) -> list[Any]:
    """The conversions of a checkpoint's tensors to a MtpModel's with `count` layers."""
    if hasattr(model, "get_weight_conversions"):
        found: list[Any] = model.get_weight_conversions(main_model)
        return found
    first = main_model.config.get_text_config().num_hidden_layers
    renamed = [
        WeightRenaming(source_patterns=f"layers.{first + number}.", target_patterns=f"layers.{number}.mtp_block.")
        for number in range(count)
    ]
    of_model = get_model_conversion_mapping(model, add_legacy=False)
    return [*renamed, *of_model, *get_model_conversion_mapping(main_model)]


def run_layer(
    model: Any, number: int, hidden_states: torch.Tensor, position_ids: torch.Tensor, input_ids: torch.Tensor
) -> torch.Tensor:
    """The hidden states [1, T, hidden] of a MtpModel's layer, without a cache.

    Args:
        hidden_states: [1, T, hidden], of the model or of the layer before.
        position_ids, input_ids: [1, T].
    """
    if hasattr(model, "forward_layer"):
        out: torch.Tensor = model.forward_layer(number, hidden_states, position_ids, None, input_ids=input_ids)
        return out
    embedded = model.embed_tokens(input_ids)
    rotary = None if model.rotary_emb is None else model.rotary_emb(embedded, position_ids=position_ids)
    masks = model.create_masks_for_mtp_layer(number, embedded, None, position_ids)
    around = {"position_embeddings": rotary, "position_ids": position_ids, "past_key_values": None, **masks}
    out = model.layers[number](embedded, hidden_states, **around)
    return model.shared_post_norm(out) if model.use_shared_post_norm else out
