"""The ops that stand for layers with a state while a model is traced; a pass lowers them to ops/states/run.py's
state_with_output.

Tokens are flat and requests packed, as with attention (ops/trace.py). Behind an op's operands are the settings of its
kind (runtime/state/layer.py), and `refusals` names for the gate what it cannot express. What they compute here is the
meaning of the op for ONE sequence, from no state: runtime/state/reference.py has it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mllm_compile.runtime.state.layer import KINDS, StateKind
from mllm_compile.runtime.state.reference import math_of

_LIBRARY = torch.library.Library("mllm", "FRAGMENT")
_LIBRARY.define("causal_conv(Tensor x, Tensor weight, Tensor? bias, str activation, str refusals) -> Tensor")
_LIBRARY.define(
    "gated_delta(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? A_log, Tensor? dt_bias, Tensor? z,"
    " Tensor? norm, bool qk_l2norm, float norm_eps, str norm_gate, str refusals) -> Tensor"
)
_LIBRARY.define(
    "ssd(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? dt_bias, Tensor? z, Tensor? norm,"
    " bool dt_softplus, float dt_min, float? dt_max, bool log_rates, float norm_eps, int norm_groups, str refusals)"
    " -> Tensor"
)
_LIBRARY.define(
    "selective_scan(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias,"
    " bool dt_softplus, bool log_rates, str refusals) -> Tensor"
)
_LIBRARY.define("wkv(Tensor k, Tensor v, Tensor decay, Tensor bonus, str refusals) -> Tensor")
_LIBRARY.define("matrix_memory(Tensor q, Tensor k, Tensor v, Tensor i, Tensor f, float eps, str refusals) -> Tensor")


def call_of(name: str, arguments: tuple[Any, ...]) -> tuple[StateKind, dict[str, Any]]:
    """The kind with its settings and the operands by name, those that the call has, of a traced op's arguments."""
    kind = KINDS[name]
    count = len(kind.operands)
    operands = {key: value for key, value in zip(kind.operands, arguments, strict=False) if value is not None}
    return kind(*arguments[count:-1]), operands


def _out_dtype(name: str, operands: Mapping[str, torch.Tensor]) -> torch.dtype:
    """The type of a call's outputs: its first operand's, except for Mamba-2's sums, which the norm rounds."""
    return torch.float32 if name == "ssd" and "z" not in operands else next(iter(operands.values())).dtype


def _reference(name: str) -> Callable[..., torch.Tensor]:
    def run(*arguments: Any) -> torch.Tensor:
        kind, operands = call_of(name, arguments)
        shapes = {key: value.shape for key, value in operands.items()}
        first = arguments[0]
        state = torch.zeros(1, *kind.state_shape(shapes), dtype=first.dtype, device=first.device)
        out, _ = math_of(kind).scan(kind, operands, state)
        return out.to(_out_dtype(name, operands))

    return run


def _fake(name: str) -> Callable[..., torch.Tensor]:
    def run(*arguments: Any) -> torch.Tensor:
        kind, operands = call_of(name, arguments)
        first = arguments[0]
        shape = kind.out_shape({key: value.shape for key, value in operands.items()})
        out: torch.Tensor = first.new_empty((first.shape[0], *shape), dtype=_out_dtype(name, operands))
        return out

    return run


for _name in KINDS:
    _LIBRARY.impl(_name, _reference(_name), "CompositeExplicitAutograd")
    torch.library.register_fake(f"mllm::{_name}", _fake(_name), lib=_LIBRARY)
