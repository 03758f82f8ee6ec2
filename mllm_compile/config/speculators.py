"""Heads that draft for a model, in the Speculators library's format: what their config.json says, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.runtime.short_repr import short_repr

TYPE_KEY = "speculators_model_type"
LAYER_CONFIG_KEY = "transformer_layer_config"
_EAGLE3 = "eagle3"
_NUM_READ = 3  # layers that a head reads where its config.json names none


@dataclass(frozen=True)
class Eagle3Config:
    """The facts of an EAGLE-3 head.

    Attributes:
        layer_config: of its layers, as config.json of a model has it.
        draft_vocab_size: rows of its logits.
        layer_ids: places of the hidden states that it reads (model/hidden_states.py); None: those that the format says.
        norm_before_residual: the first layer's residual stream begins behind the norm of hidden states.
        norm_before_fc: the hidden states have one norm together; `fc_norm`: one each.
        norm_output: further passes read hidden states behind the last norm, not ahead of it.
    """

    layer_config: Mapping[str, Any]
    draft_vocab_size: int
    layer_ids: tuple[int, ...] | None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def num_read(self) -> int:
        return _NUM_READ if self.layer_ids is None else len(self.layer_ids)

    def places(self, num_layers: int) -> tuple[int, ...]:
        """The places that it reads of a model of so many layers.

        Raises:
            UnsupportedModelError: the model has fewer layers.
        """
        places = (2, num_layers // 2, num_layers - 3) if self.layer_ids is None else self.layer_ids
        if not all(0 <= place <= num_layers for place in places) or len(set(places)) < len(places):
            raise UnsupportedModelError(
                f"eagle_aux_hidden_state_layer_ids are {list(places)}, and the model has {num_layers} layers: expected "
                f"different numbers from 0 to {num_layers}. Use the head that was made for this model."
            )
        return places


def head_type(config: Mapping[str, Any]) -> str | None:
    """The kind of head that config.json is of; None: it is a model's."""
    found = config.get(TYPE_KEY)
    return None if found is None else str(found)


def read_eagle3(config: Mapping[str, Any], where: object) -> Eagle3Config:
    """Reads config.json of an EAGLE-3 head.

    Args:
        where: the file, for messages.

    Raises:
        UnsupportedModelError: it is of another kind.
        CheckpointError: a value is none that the format has.
    """
    kind = head_type(config)
    if kind != _EAGLE3:
        said = "is a model's" if kind is None else f"is of a head of kind {short_repr(kind)}"
        raise UnsupportedModelError(
            f"{where} {said}: expected {TYPE_KEY}: {_EAGLE3}, as the Speculators library writes it. Give the folder of "
            "an EAGLE-3 head."
        )
    layer_config, layer_ids = config.get(LAYER_CONFIG_KEY), config.get("eagle_aux_hidden_state_layer_ids")
    flags = {
        name: config.get(name, False) for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    draft_vocab_size = config.get("draft_vocab_size", 32000)
    faults = [
        *([] if _has_type(layer_config) else [(LAYER_CONFIG_KEY, layer_config, "a section with a model_type")]),
        *([] if _are_ids(layer_ids) else [("eagle_aux_hidden_state_layer_ids", layer_ids, "numbers of layers")]),
        *([(name, value, "true or false") for name, value in flags.items() if not isinstance(value, bool)]),
        *([] if _is_count(draft_vocab_size) else [("draft_vocab_size", draft_vocab_size, "a positive number")]),
        *(
            [("fc_norm", True, "false beside norm_before_fc")]
            if all((flags["fc_norm"], flags["norm_before_fc"]))
            else []
        ),
    ]
    for name, value, expected in faults:
        raise CheckpointError(f"{where}: {name} is {short_repr(value)}; expected {expected}. Is the file damaged?")
    return Eagle3Config(
        layer_config=layer_config or {},
        draft_vocab_size=draft_vocab_size,
        layer_ids=None if layer_ids is None else tuple(layer_ids),
        **flags,
    )


def _has_type(layer_config: object) -> bool:
    return isinstance(layer_config, dict) and isinstance(layer_config.get("model_type"), str)


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _are_ids(value: object) -> bool:
    return value is None or (isinstance(value, list) and len(value) > 0 and all(type(one) is int for one in value))
