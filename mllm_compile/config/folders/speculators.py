"""Heads that draft for a model, in the Speculators library's format: what their config.json says, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.runtime.short_repr import short_repr
from mllm_compile.runtime.speculation.block import DraftBlock

TYPE_KEY = "speculators_model_type"
LAYER_CONFIG_KEY = "transformer_layer_config"
KINDS_OF_METHODS = {"eagle3": ("eagle3", "peagle"), "dflash": ("dflash",)}
_LAYER_IDS = {"eagle3": "eagle_aux_hidden_state_layer_ids", "dflash": "aux_hidden_state_layer_ids"}
_NUM_READ = 3  # layers that an EAGLE-3 head reads where its config.json names none
_MOST_OF_EAGLE = 32  # masks are a chain, whose length its format does not bound
_MOST_BLOCK = 256  # tokens; those that are published have 8 to 16


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """The facts of a head.

    Attributes:
        method: of speculative.method.
        layer_config: of its layers, as config.json of a model has it.
        draft_vocab_size: rows of its logits.
        layer_ids: places of the hidden states that it reads (model/hidden_states.py); None: those that the format says.
        block: how it drafts several tokens in a pass; None: one each.
    """

    method: str
    layer_config: Mapping[str, Any]
    draft_vocab_size: int
    layer_ids: tuple[int, ...] | None
    block: DraftBlock | None

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
                f"{_LAYER_IDS[self.method]} are {list(places)}, and the model has {num_layers} layers: expected "
                f"different numbers from 0 to {num_layers}. Use the head that was made for this model."
            )
        return places


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """An EAGLE-3 head, or one of P-EAGLE, which has a `block`.

    Attributes:
        norm_before_residual: the first layer's residual stream begins behind the norm of hidden states.
        norm_before_fc: the hidden states have one norm together; `fc_norm`: one each.
        norm_output: further passes read hidden states behind the last norm, not ahead of it.
    """

    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


def head_type(config: Mapping[str, Any]) -> str | None:
    """The kind of head that config.json is of; None: it is a model's."""
    found = config.get(TYPE_KEY)
    return None if found is None else str(found)


def read_head(config: Mapping[str, Any], where: object, method: str | None = None) -> HeadConfig:
    """Reads config.json of a head.

    Args:
        where: the file, for messages.
        method: the one that it is to serve; None: whichever it does.

    Raises:
        UnsupportedModelError: it is of another kind.
        CheckpointError: a value is none that the format has.
    """
    kind = head_type(config)
    methods = [name for name, kinds in KINDS_OF_METHODS.items() if kind in kinds and method in (None, name)]
    if not methods:
        known = [one for name, kinds in KINDS_OF_METHODS.items() for one in kinds if method in (None, name)]
        said = "is a model's" if kind is None else f"is of a head of kind {short_repr(kind)}"
        raise UnsupportedModelError(
            f"{where} {said}: expected {TYPE_KEY}: {' or '.join(known)}, as the Speculators library writes it. Give "
            "the folder of such a head."
        )
    values = _Values(config, where)
    return _read_dflash(values) if methods[0] == "dflash" else _read_eagle3(values, kind == "peagle")


def _read_eagle3(values: _Values, is_parallel: bool) -> Eagle3Config:
    names = "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"
    flags: dict[str, Any] = {name: values.flag(name) for name in names}
    if flags["fc_norm"] and flags["norm_before_fc"]:
        raise values.fault("fc_norm", "false beside norm_before_fc")
    head = Eagle3Config(method="eagle3", block=None, **values.common("eagle3"), **flags)
    if not is_parallel:
        return head
    block = DraftBlock(values.mask(head), _MOST_OF_EAGLE, sees_ahead=False, from_newest=True)
    return replace(head, block=block)


def _read_dflash(values: _Values) -> HeadConfig:
    block_size = values.count("block_size", 8, _MOST_BLOCK)
    from_newest = values.flag("sample_from_anchor")
    head = HeadConfig(method="dflash", block=None, **values.common("dflash"))
    if head.layer_ids is None:
        raise values.fault(_LAYER_IDS["dflash"], "numbers of layers")
    most = block_size - (not from_newest)
    if not most:
        raise values.fault("block_size", "2 or more where sample_from_anchor is false")
    if (size := values.given.get("target_hidden_size")) not in (None, head.layer_config.get("hidden_size")):
        raise UnsupportedModelError(
            f"{values.where}: target_hidden_size is {short_repr(size)}, and hidden_size of its layers "
            f"{head.layer_config.get('hidden_size')}: expected one size. Use a head whose layers are as wide as the "
            "model."
        )
    return replace(head, block=DraftBlock(values.mask(head), most, sees_ahead=True, from_newest=from_newest))


@dataclass(frozen=True)
class _Values:
    """Values of a config.json, which are checked as they are read; each method raises CheckpointError."""

    given: Mapping[str, Any]
    where: object

    def fault(self, name: str, expected: str) -> CheckpointError:
        found = short_repr(self.given.get(name))
        return CheckpointError(f"{self.where}: {name} is {found}; expected {expected}. Is the file damaged?")

    def common(self, method: str) -> dict[str, Any]:
        """The values that every head has, as HeadConfig names them."""
        layers, name = self.given.get(LAYER_CONFIG_KEY), _LAYER_IDS[method]
        if not isinstance(layers, dict) or not isinstance(layers.get("model_type"), str):
            raise self.fault(LAYER_CONFIG_KEY, "a section with a model_type")
        ids = self.given.get(name)
        if ids is not None and not (isinstance(ids, list) and ids and all(type(one) is int for one in ids)):
            raise self.fault(name, "numbers of layers")
        size = self.count("draft_vocab_size", 32000)
        return {
            "layer_config": layers,
            "draft_vocab_size": size,
            "layer_ids": None if ids is None else tuple(ids),
        }

    def flag(self, name: str) -> bool:
        value = self.given.get(name, False)
        if not isinstance(value, bool):
            raise self.fault(name, "true or false")
        return value

    def count(self, name: str, default: int, most: int | None = None) -> int:
        value = self.given.get(name, default)
        if type(value) is not int or value < 1 or (most is not None and value > most):
            raise self.fault(name, "a positive number" if most is None else f"a number from 1 to {most}")
        return value

    def mask(self, head: HeadConfig) -> int:
        """The id of masks."""
        value, count = self.given.get("mask_token_id"), head.layer_config.get("vocab_size")
        if type(value) is not int or value < 0 or (isinstance(count, int) and value >= count):
            raise self.fault("mask_token_id", f"a token from 0 to {count - 1}" if isinstance(count, int) else "a token")
        return value
