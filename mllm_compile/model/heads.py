"""Builds a head that drafts, of a folder in the Speculators library's format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from mllm_compile.config.folders.hub import CONFIG_FILE
from mllm_compile.config.folders.speculators import Eagle3Config, read_head
from mllm_compile.errors import UnsupportedModelError
from mllm_compile.files.json_file import read_json_object
from mllm_compile.model.attention_hook import ATTENTION_IMPLEMENTATION, register_attention_hook
from mllm_compile.model.dflash import dflash_model
from mllm_compile.model.eagle3 import eagle3_model
from mllm_compile.model.head import OWN_HIDDEN_STATE, Head
from mllm_compile.model.hf_model import HFModel, compute_constants
from mllm_compile.model.refusals import refusing
from mllm_compile.model.rope_hook import follow_rope


def build_head_on_meta(folder: Path, dtype: torch.dtype) -> HFModel:
    """Builds the head of a folder on meta, with our attention implementation.

    Raises:
        UnsupportedModelError: its layers are of a kind that no head has, or do not attend to all tokens.
        CheckpointError: config.json is not one of a head.
    """
    path = folder / CONFIG_FILE
    head = read_head(read_json_object(path, UnsupportedModelError) or {}, path)
    register_attention_hook()
    with refusing(f"{path} is not of a head that can be built"):
        said = {name: value for name, value in head.layer_config.items() if name != "model_type"}
        config = AutoConfig.for_model(head.layer_config["model_type"], **said)
        config.tie_word_embeddings = False
        if head.block is not None and head.block.mask_token_id >= config.vocab_size:  # which the file need not name
            raise UnsupportedModelError(
                f"mask_token_id is {head.block.mask_token_id}; expected a token from 0 to {config.vocab_size - 1}"
            )
        with torch.device("meta"):
            template = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_IMPLEMENTATION).model
            _check_layers(template.layers, config)
            model: Head
            if isinstance(head, Eagle3Config):
                model, projection = eagle3_model(config, head, template)
            else:
                model, projection = dflash_model(config, head, template)
            nn.Module.to(model, dtype)
    nn.Module.eval(model).requires_grad_(False)
    constants, unknown, tables = compute_constants(model)
    rope, of_rope = follow_rope(model)
    return HFModel(
        model,
        constants | of_rope,
        unknown,
        tables=tables,
        rope=rope,
        hidden_states=(OWN_HIDDEN_STATE,) if isinstance(head, Eagle3Config) else (),
        projection=projection,
        block=head.block,
    )


def _check_layers(layers: Sequence[nn.Module], config: PreTrainedConfig) -> None:
    """Raises UnsupportedModelError for layers that no head's can be made from."""
    wanted = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
    if {name for name, _ in layers[0].named_children()} != wanted:
        raise UnsupportedModelError(f"its layers are of {config.model_type!r}; expected layers as llama's or qwen3's")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise UnsupportedModelError(f"its layers are of kind {min(kinds)}; expected full_attention")
