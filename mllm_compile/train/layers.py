"""Layers between pieces in differentiable form: outputs and gradients of packed sequences.

Attention takes a block of queries at a time, and a recurrence a stretch of tokens, each from where it began. So what
autograd keeps does not grow with a sequence's square, nor with its number of states.

Shape legend: T tokens, H query heads, Hk kv heads, D head dim, Dv value head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from mllm_compile.runtime.attention.layer import AttentionLayer, LayerSpec
from mllm_compile.runtime.attention.torch_backend import QUERY_BLOCK, attend_block
from mllm_compile.runtime.state.layer import StateLayer
from mllm_compile.runtime.state.reference import math_of

_STRETCH = 64  # tokens of a recurrence between two states that are kept

Bounds = Sequence[tuple[int, int]]  # of each sequence among packed tokens


class AttentionOperands(NamedTuple):
    """q [T, H, D], k [T, Hk, D], v [T, Hk, Dv] and sinks [H] or None; or the gradients of these."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None


def attend(layer: LayerSpec, operands: AttentionOperands, bounds: Bounds) -> torch.Tensor:
    """Attention within each sequence, [T, H, Dv]."""
    out = operands.q.new_empty(*operands.q.shape[:2], layer.v_head_dim)
    for block, first, keys in _blocks(layer, bounds):
        out[block] = _attend(layer, operands.q[block], operands.k[keys], operands.v[keys], operands.sinks, first)
    return out


def attention_gradients(
    layer: LayerSpec, operands: AttentionOperands, bounds: Bounds, grad: torch.Tensor
) -> AttentionOperands:
    """Gradients of the operands, by the output's: `grad` [T, H, Dv]."""
    q, k, v, sinks = operands
    found = AttentionOperands(*(None if one is None else torch.zeros_like(one) for one in operands))  # type: ignore[arg-type]
    for block, first, keys in _blocks(layer, bounds):
        own_q, own_k, own_v = (one.detach().requires_grad_() for one in (q[block], k[keys], v[keys]))
        own_sinks = None if sinks is None else sinks.detach().requires_grad_()
        with torch.enable_grad():
            out = _attend(layer, own_q, own_k, own_v, own_sinks, first)
        inputs = [one for one in (own_q, own_k, own_v, own_sinks) if one is not None]
        grads = torch.autograd.grad(out, inputs, grad[block])
        found.q[block] += grads[0]
        found.k[keys] += grads[1]
        found.v[keys] += grads[2]
        if found.sinks is not None:
            found.sinks.add_(grads[3])
    return found


def _attend(
    layer: LayerSpec, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, first: int
) -> torch.Tensor:
    bound = AttentionLayer.of(layer, {} if layer.sinks is None or sinks is None else {layer.sinks: sinks})
    return attend_block(q, k, v, first, bound, sees_ahead=False)


def _blocks(layer: LayerSpec, bounds: Bounds) -> Iterator[tuple[slice, int, slice]]:
    """(queries, the first one's place among the keys, keys) of each block of queries."""
    for start, end in bounds:
        for at in range(start, end, QUERY_BLOCK):
            stop = min(at + QUERY_BLOCK, end)
            first_key = max(start, at - layer.window_left) if layer.window_left >= 0 and not layer.chunk else start
            yield slice(at, stop), at - first_key, slice(first_key, stop)


StateOperands = Mapping[str, torch.Tensor]


def recur(layer: StateLayer, operands: StateOperands, bounds: Bounds) -> torch.Tensor:
    """A layer with a state over each sequence, [T, …]."""
    outs = [out for start, end in bounds for out, _ in _stretches(layer, operands, start, end)]
    return torch.cat(outs)


def state_gradients(
    layer: StateLayer, operands: StateOperands, bounds: Bounds, grad: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Gradients of the operands, by the output's: `grad` [T, …]."""
    found = {name: torch.zeros_like(value) for name, value in operands.items()}
    for start, end in bounds:
        before = [_no_state(layer, operands)]
        before += [state for _, state in _stretches(layer, operands, start, end)]
        of_state = torch.zeros_like(before[-1])
        for index in reversed(range(len(before) - 1)):
            at = start + index * _STRETCH
            tokens = slice(at, min(at + _STRETCH, end))
            leaves = {name: value.detach().requires_grad_() for name, value in _of(layer, operands, tokens).items()}
            state = before[index].detach().requires_grad_()
            with torch.enable_grad():
                outputs = math_of(layer.kind).scan(layer.kind, leaves, state)
            inputs = [*leaves.values(), state]
            grads = torch.autograd.grad(outputs, inputs, (grad[tokens], of_state), materialize_grads=True)
            of_state = grads[-1]
            for name, one in zip(leaves, grads, strict=False):
                place = found[name] if name in layer.kind.constants else found[name][tokens]
                place += one
    return found


def _stretches(
    layer: StateLayer, operands: StateOperands, start: int, end: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(outputs, state behind them) of each stretch of a sequence."""
    state = _no_state(layer, operands)
    for at in range(start, end, _STRETCH):
        tokens = _of(layer, operands, slice(at, min(at + _STRETCH, end)))
        out, state = math_of(layer.kind).scan(layer.kind, tokens, state)
        yield out, state


def _no_state(layer: StateLayer, operands: StateOperands) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, layer.state_dtype("float32"))
    return torch.zeros(1, *layer.state_shape, dtype=dtype, device=next(iter(operands.values())).device)


def _of(layer: StateLayer, operands: StateOperands, tokens: slice) -> dict[str, torch.Tensor]:
    return {name: value if name in layer.kind.constants else value[tokens] for name, value in operands.items()}
