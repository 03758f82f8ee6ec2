"""Builds a model that pools without its weights: the class that config.json names, or its base where it embeds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.hf_model import HFModel, compute_constants, read_config
from mllm_compile.model.pooling.disentangled import with_distance_columns
from mllm_compile.model.positions_hook import position_offset
from mllm_compile.model.refusals import first_line
from mllm_compile.model.rope_hook import follow_rope

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_ANY = r""


def build_pooling_on_meta(folder: Path, dtype: torch.dtype, task: str, trust_remote_code: bool = False) -> HFModel:
    """Builds the model of a folder on meta.

    Args:
        task: embed | classify | rerank, as the resolved config has it.

    Raises:
        UnsupportedModelError: Transformers has no such class, it reads no token ids, or building it fails.
    """
    return build_pooling_config(read_config(folder, trust_remote_code), dtype, task)


def build_pooling_config(config: PreTrainedConfig, dtype: torch.dtype, task: str) -> HFModel:
    """Like build_pooling_on_meta, from a config object."""
    model_class = _class_of(config, task)
    if model_class.main_input_name != "input_ids":
        raise UnsupportedModelError(
            f"{config.model_type!r} models read {model_class.main_input_name}, and models that {task} are served with "
            "texts alone. Give a model whose input is token ids."
        )
    try:
        with torch.device("meta"):
            model: Any = model_class._from_config(config, attn_implementation="eager", dtype=dtype)
    except Exception as error:
        raise UnsupportedModelError(
            f"Transformers cannot build {model_class.__name__} of this config.json: {first_line(error)}"
        ) from error
    if task == "embed":
        _leave_heads_out(model)
    model.eval().requires_grad_(False)
    constants, unknown, tables = compute_constants(model)
    rope, of_rope = follow_rope(model)
    if rope is not None:
        raise UnsupportedModelError(
            f"{config.model_type!r} models with RoPE that follows the length of a text are not served for {task}"
        )
    return with_distance_columns(HFModel(model, constants | of_rope, unknown, position_offset(model), tables))


def body_of(model: PreTrainedModel) -> Any:
    """The part of a model that gives hidden states: its base, or the encoder of one with a decoder. A classifier of
    sequences reads those of the decoder, which is given the text again."""
    base: Any = model.base_model
    if is_with_decoder(model.base_model) and not reads_decoder(model):
        return base.get_encoder()
    return base


def is_with_decoder(body: Any) -> bool:
    """True for a base with an encoder and a decoder."""
    return bool(getattr(body.config, "is_encoder_decoder", False)) and hasattr(body, "decoder")


def reads_decoder(model: Any) -> bool:
    """True for a classifier whose head reads the decoder's hidden state at a text's end."""
    return is_with_decoder(model.base_model) and type(model).__name__.endswith("ForSequenceClassification")


def _class_of(config: PreTrainedConfig, task: str) -> Any:
    import transformers

    name = next(iter(getattr(config, "architectures", None) or ()), "")
    if task == "embed":
        return _base_class(config, name)
    found = getattr(transformers, name, None)
    if found is None:
        raise UnsupportedModelError(
            f"config.json names the class {name!r}, which Transformers {transformers.__version__} does not have. Set "
            "model.task: embed to serve the hidden states alone, or install a newer transformers."
        )
    return found


def _base_class(config: PreTrainedConfig, name: str) -> Any:
    import transformers

    stem = re.sub(r"(For\w+|LMHeadModel|EncoderModel|Model)$", "", name)
    if getattr(config, "is_encoder_decoder", False) or name.endswith("EncoderModel"):
        encoder = getattr(transformers, f"{stem}EncoderModel", None)
        if encoder is not None:
            return encoder
    found = transformers.AutoModel._model_mapping.get(type(config), None)
    if found is None:
        raise UnsupportedModelError(
            f"Transformers has no base model for {config.model_type!r}, which could embed texts"
        )
    return found[0] if isinstance(found, tuple) else found


def _leave_heads_out(model: Any) -> None:
    """Takes a pooler out, which checkpoints of embedders may lack, and makes their heads no error: nothing reads
    either."""
    for owner in (model, body_of(model)):
        if isinstance(getattr(owner, "pooler", None), torch.nn.Module):
            owner.pooler = None
    model._keys_to_ignore_on_load_unexpected = [_ANY]


def kinds_of_tokens(model: Any) -> int:
    """The kinds of tokens (token_type_ids) that a model tells apart; 0: it takes none."""
    import inspect

    if "token_type_ids" not in inspect.signature(type(model).forward).parameters:
        return 0
    return int(getattr(model.config, "type_vocab_size", 0) or 0)


def labels_of(config: Mapping[str, Any] | Any) -> tuple[str, ...]:
    """The names of a classifier's labels, in order."""
    names: dict[int, str] = dict(getattr(config, "id2label", None) or {})
    return tuple(str(names[index]) for index in sorted(names))
