"""Finds what of an encoder-decoder attends to its encoder's states: it runs once, on meta, and calls are looked at.

Shape legend: E tokens of a source, W width of the encoder's states.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.modeling_outputs import BaseModelOutput

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.attention_hook import attention_implementation
from mllm_compile.model.refusals import first_line

_IMPLEMENTATION = "mllm_cross_probe"
_SOURCE_TOKENS, _TOKENS = 5, 3  # different, so that the two are told apart


@dataclass(frozen=True, eq=False)
class CrossAttention:
    """
    Attributes:
        modules: those that attend to the encoder's states, in the order of their calls.
        width: W.
        sound_shape: (mel bins, frames) of the windows that the encoder reads; None: it reads token ids.
        states_of_sound: E of a window.
    """

    modules: tuple[torch.nn.Module, ...]
    width: int
    sound_shape: tuple[int, int] | None = None
    states_of_sound: int = 0


def find_cross_attention(model: Any) -> CrossAttention:
    """Looks at a model on meta.

    Raises:
        UnsupportedModelError: it does not run, or nothing of it attends to the encoder by Transformers' interface.
    """
    modules: list[torch.nn.Module] = []

    def attend(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **kwargs: Any) -> Any:
        if key.shape[2] != query.shape[2]:
            modules.append(module)
        return value.new_zeros(*query.transpose(1, 2).shape[:3], value.shape[3]), None

    AttentionInterface.register(_IMPLEMENTATION, attend)
    encoder = model.get_encoder()
    sound_shape = _sound_shape(model)
    try:
        with torch.device("meta"), attention_implementation(model, _IMPLEMENTATION), torch.no_grad():
            if sound_shape is None:
                states = encoder(input_ids=torch.zeros(1, _SOURCE_TOKENS, dtype=torch.int64))[0]
            else:
                states = encoder(torch.zeros(1, *sound_shape, dtype=model.dtype))[0]
            modules.clear()
            model(**decoder_inputs(states), decoder_input_ids=torch.zeros(1, _TOKENS, dtype=torch.int64))
    except Exception as error:
        raise UnsupportedModelError(
            f"{model.config.model_type!r} models with an encoder cannot be looked at: {first_line(error)}"
        ) from error
    if not modules:
        raise UnsupportedModelError(
            f"{model.config.model_type!r} models would not be served right: nothing attends to the encoder's states "
            "by Transformers' attention interface. docs/models.md lists what is."
        )
    return CrossAttention(tuple(modules), int(states.shape[2]), sound_shape, int(states.shape[1]) if sound_shape else 0)


def decoder_inputs(states: torch.Tensor) -> dict[str, Any]:
    """The arguments by which a model's forward takes encoder states [1, E, W] as they are."""
    return {"encoder_outputs": BaseModelOutput(last_hidden_state=states), "use_cache": False}


def _sound_shape(model: Any) -> tuple[int, int] | None:
    """(bins, frames) of an encoder of sounds; None of one that reads token ids."""
    encoder = model.get_encoder()
    if "input_ids" in inspect.signature(type(encoder).forward).parameters:
        return None
    config = encoder.config
    bins, states = getattr(config, "num_mel_bins", None), getattr(config, "max_source_positions", None)
    if model.main_input_name != "input_features" or not bins or not states:
        raise UnsupportedModelError(
            f"{model.config.model_type!r} models read {model.main_input_name}, not windows of mel bins: their encoder "
            "is not served. docs/models.md lists what is."
        )
    return int(bins), int(states) * encoder.conv1.stride[0] * encoder.conv2.stride[0]
