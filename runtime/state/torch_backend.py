"""Layers with a state in plain torch over GDNPool: all decodes of a batch at once, prompts one after another."""

from __future__ import annotations

import torch

from mllm_compile.runtime.memory_pool import GDNPool
from mllm_compile.runtime.state.base import StateBackend, StateInputs
from mllm_compile.runtime.state.metadata import Segment
from mllm_compile.runtime.state.reference import Operands, math_of


class TorchStateBackend(StateBackend):
    """Computes layers by reference.py, and keeps each request's state in its row of the pool.

    Args:
        deterministic: take every token by itself: sums over tensors of another shape may differ in their last bits.
    """

    def __init__(self, pool: GDNPool, deterministic: bool = False) -> None:
        self._pool = pool
        self._deterministic = deterministic

    def forward(self, inputs: StateInputs) -> None:
        states = self._pool.get_state(inputs.layer.state_id)
        if inputs.metadata.num_decodes:
            self._decode(inputs, states)
        for segment in inputs.metadata.segments:
            self._prefill(inputs, segment, states)
        if self._deterministic:  # its padding are tokens of the batch, and what they leave must be numbers
            end = inputs.metadata.segments[-1].end if inputs.metadata.segments else 0
            inputs.out[end:].zero_()

    def _decode(self, inputs: StateInputs, states: torch.Tensor) -> None:
        metadata, kind = inputs.metadata, inputs.layer.kind
        span = slice(metadata.num_decodes)
        rows = metadata.rows[span]
        has_state = metadata.has_state[span] & (rows > 0)
        before = states.index_select(0, rows)
        before = torch.where(has_state.view(-1, *[1] * (states.dim() - 1)), before, 0)
        out, after = math_of(kind).step(kind, _tokens(inputs, span), before)
        inputs.out[span].copy_(out)
        states.index_copy_(0, rows, after.to(states.dtype))

    def _prefill(self, inputs: StateInputs, segment: Segment, states: torch.Tensor) -> None:
        kind, row = inputs.layer.kind, inputs.metadata.rows[segment.request : segment.request + 1]
        state = states.index_select(0, row)
        state = state if segment.has_state else torch.zeros_like(state)
        length = 1 if self._deterministic else segment.end - segment.start
        for start in range(segment.start, segment.end, length):
            span = slice(start, start + length)
            out, state = math_of(kind).scan(kind, _tokens(inputs, span), state)
            inputs.out[span].copy_(out)
            state = state.to(states.dtype)  # after every token in deterministic mode, wherever a prompt is cut
        if segment.start >= inputs.metadata.num_held_tokens:
            states.index_copy_(0, row, state)


def _tokens(inputs: StateInputs, span: slice) -> Operands:
    """The operands of some of the batch's tokens."""
    constants = inputs.layer.kind.constants
    return {name: value if name in constants else value[span] for name, value in inputs.operands.items()}
