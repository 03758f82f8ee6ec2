"""Computes what each part of a decode step reads and multiplies, from a runtime's program alone: no device, no model.

A part is a step of the program: a piece, an attention, or a layer with a state. The parts' bytes add up to
limits.ModelFigures' bytes, without states. Activations and the rows that token ids look up are left out in both (under
1 %).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mllm_compile.bench.limits.limits import active_bytes, expert_flops
from mllm_compile.bench.measure.results import Ceilings
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.program.steps import AttentionStep, PieceStep, StateStep


@dataclass(frozen=True, slots=True)
class StepPart:
    """One step of the program in a decode step.

    Attributes:
        index: its place in program.steps.
        piece: the piece's id; None for an attention, and for a layer with a state.
        layer: how many of these come before it.
        weight_bytes: bytes of the weights that it reads, whole.
        kv_bytes: bytes of the KV cache that it reads, or of states that it reads and writes.
        flops, fp8_flops: operations of its products in the model's type, and of those that may be in fp8.
    """

    index: int
    piece: str | None
    layer: int
    weight_bytes: int
    kv_bytes: int
    flops: int
    fp8_flops: int = 0

    @property
    def num_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    def limit_s(self, ceilings: Ceilings) -> float:
        """The least seconds that the ceilings allow: reading or multiplying, whichever takes longer."""
        return max(self.num_bytes / ceilings.read_bytes_s, ceilings.products_s(self.flops, self.fp8_flops))


@dataclass(frozen=True)
class WeightSize:
    """A weight's shape, and the type of its numbers."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def step_parts(
    program: Program,
    weights: Mapping[str, WeightSize],
    kv_cache_dtype: torch.dtype,
    batch: int,
    context: int,
    state_dtype: str = "float32",
) -> list[StepPart]:
    """The parts of a decode step of `batch` requests with `context` tokens each, in the program's order.

    Of experts those count that so many tokens are expected to choose.
    """
    layers = {layer.name: layer for layer in program.layers}
    states = {layer.name: layer for layer in program.state_layers}
    quantised = program.quantised_weights
    scales = {name: of for of, one in quantised.items() for name in (one.scales, one.zeros) if name is not None}
    parts, seen = [], 0
    for index, step in enumerate(program.steps):
        if isinstance(step, AttentionStep):
            kv_bytes = batch * context_kv_bytes(layers[step.layer], context, kv_cache_dtype)
            up = weights.get(layers[step.layer].up_projection or "")  # of latents, whose attention has its products
            up_bytes, flops = (0, 0) if up is None else (up.num_bytes, 2 * batch * math.prod(up.shape))
            parts.append(StepPart(index, None, seen, up_bytes, kv_bytes, flops))
            seen += 1
        elif isinstance(step, StateStep):
            layer = states[step.layer]
            itemsize = getattr(torch, layer.state_dtype(state_dtype)).itemsize
            # Read and written once by each request, however long that is.
            parts.append(StepPart(index, None, seen, 0, 2 * batch * math.prod(layer.state_shape) * itemsize, 0))
        elif isinstance(step, PieceStep):
            num_bytes, flops, fp8_flops = 0.0, 0, 0
            for name in read_weights(step, weights):
                weight, experts = weights[name], program.expert_weights.get(scales.get(name, name))
                if experts is not None:
                    num_bytes += active_bytes(experts, batch, weight.num_bytes)
                    flops += 0 if name in scales else expert_flops(experts, batch)
                    continue
                num_bytes += weight.num_bytes
                if may_be_in_fp8(program, name, weight.dtype):
                    fp8_flops += 2 * batch * math.prod(weight.shape)
                elif name in quantised:
                    flops += 2 * batch * quantised[name].outputs * quantised[name].inputs
                elif len(weight.shape) > 1 and name not in scales:
                    flops += 2 * batch * math.prod(weight.shape)
            parts.append(StepPart(index, step.piece, seen, round(num_bytes), 0, flops, fp8_flops))
    return parts


def read_weights(step: PieceStep, weights: Mapping[str, WeightSize]) -> list[str]:
    """Weights that a piece reads whole, in order of use: not the table that token ids look up, which comes first."""
    names = [name for name in step.inputs if name in weights]
    if "input_ids" in step.inputs:
        table = next((name for name in names if len(weights[name].shape) > 1), None)
        names = [name for name in names if name != table]
    return names


def limit_s(parts: Sequence[StepPart], ceilings: Ceilings) -> float:
    """The least seconds of a step made of these parts, one after another."""
    return sum(part.limit_s(ceilings) for part in parts)


def may_be_in_fp8(program: Program, name: str, dtype: torch.dtype) -> bool:
    """True if a GPU may multiply with the weight `name` in fp8: its values are of that type, and it is no experts',
    whose products are in the model's. ModelFigures.fp8_params counts the same weights.

    Args:
        dtype: the weight's.
    """
    return name in program.quantised_weights and name not in program.expert_weights and dtype == torch.float8_e4m3fn


def context_kv_bytes(layer: LayerSpec, context: int, kv_cache_dtype: torch.dtype) -> int:
    """Bytes of the KV cache that attention reads for one request with `context` tokens."""
    seen = context if layer.window_left < 0 else min(context, layer.window_left + 1)
    return seen * token_kv_bytes(layer, kv_cache_dtype)


def token_kv_bytes(layer: LayerSpec, kv_cache_dtype: torch.dtype) -> int:
    """Bytes that one token's keys and values take in the KV cache."""
    kv_heads, width, v_width = layer.cache_shape
    return kv_heads * (width + v_width) * kv_cache_dtype.itemsize
