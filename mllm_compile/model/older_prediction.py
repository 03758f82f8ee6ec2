"""Conversions of weights to Transformers' MtpModel, and a layer's pass, by versions older than 5.23 too.

They have both within longer methods, and lack the rules for Qwen's names of tensors, which begin with `mtp.`. Their
rotary embeddings of models that may see images take three positions of a token and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming

# Pattern → name, behind `mtp.`: Transformers 5.23 has these last among the rules of MtpModel.
QWEN_NAMES = {
    r"^layers\.(\d+)\.(?!(?:mtp_block|enorm|hnorm|eh_proj|post_norm)\.)": r"layers.\1.mtp_block.",
    r"^fc\.": "layers.0.eh_proj.",
    r"^pre_fc_norm_embedding\.": "layers.0.enorm.",
    r"^pre_fc_norm_hidden\.": "layers.0.hnorm.",
    r"^norm\.": "layers.0.post_norm.",
}


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
    of_qwen = [WeightRenaming(source_patterns=pattern, target_patterns=name) for pattern, name in QWEN_NAMES.items()]
    return [*renamed, *of_model, *of_qwen, *get_model_conversion_mapping(main_model)]


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
    rotary = None
    if model.rotary_emb is not None:
        places = position_ids.expand(3, -1, -1) if hasattr(model.rotary_emb, "mrope_section") else position_ids
        rotary = model.rotary_emb(embedded, position_ids=places)
    masks = model.create_masks_for_mtp_layer(number, embedded, None, position_ids)
    around = {"position_embeddings": rotary, "position_ids": position_ids, "past_key_values": None, **masks}
    out = model.layers[number](embedded, hidden_states, **around)
    return model.shared_post_norm(out) if model.use_shared_post_norm else out
