"""Ops of ours in plain torch, where the real ones, which need CUDA and Triton, cannot be defined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu as torch_gelu
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import silu

from mllm_compile.compiler import rewriting
from mllm_compile.passes.base import GraphPass
from mllm_compile.passes.match import nodes
from mllm_compile.passes.pack_linears import PackLinears
from mllm_compile.passes.pipeline import PASSES
from mllm_compile.runtime.ops.expert_tiles import ops as tile_ops  # noqa: F401  (defines the ops)
from mllm_compile.runtime.ops.expert_tiles.kernel import BLOCK
from mllm_compile.runtime.ops.experts import linear as experts  # noqa: F401  (defines the trace's op)
from mllm_compile.runtime.ops.experts import quantised as quantised_experts  # noqa: F401  (defines the op)
from mllm_compile.runtime.ops.experts.shapes import ELSEWHERE, ONE_ROW, SOFTMAX_OF_ALL, SOFTMAX_OF_CHOSEN, most_blocks
from mllm_compile.runtime.ops.few_tokens_shapes import num_norm_blocks
from mllm_compile.runtime.ops.gated_linear import ops as gated_ops  # noqa: F401  (defines the op)
from mllm_compile.runtime.ops.lora.reference import add_lora_reference as add_lora
from mllm_compile.runtime.ops.lora.shapes import chained_columns, num_splits
from mllm_compile.runtime.ops.segments import ops as segment_ops  # noqa: F401  (defines the op)
from mllm_compile.runtime.ops.segments.reference import segment_attention_with_output
from mllm_compile.runtime.ops.stream_expert_rows import ops as expert_rows_ops  # noqa: F401  (defines the op)
from mllm_compile.runtime.ops.stream_experts import ops as stream_expert_ops  # noqa: F401  (defines the ops)
from mllm_compile.runtime.ops.stream_experts.shapes import ROWS
from mllm_compile.runtime.ops.stream_linear import adapted_ops, one_order_ops, ops  # noqa: F401  (defines the ops)
from mllm_compile.runtime.ops.stream_linear.linear import NORM_ROWS
from mllm_compile.runtime.ops.stream_linear.shapes import num_streamed_norm_blocks
from mllm_compile.runtime.ops.stream_quantised import ops as quantised_ops  # noqa: F401  (defines the ops)
from mllm_compile.runtime.quantised.numbers import dequantised
from mllm_compile.runtime.quantised.scheme import SCALES, VALUES, ZEROS

# On a CPU linears end with the pass left out, so passes for a GPU would find none behind it: see test_pack_linears.py.
FOR_GPUS = [graph_pass for graph_pass in PASSES if graph_pass is not PackLinears]


def only_kernel_passes(patch: pytest.MonkeyPatch, *passes: type[GraphPass]) -> None:
    """Of the passes that put kernels into pieces these alone run, on a CPU as on a Hopper GPU, and on pieces that run
    as traced."""
    patch.setattr(nodes, "KERNEL_DEVICE_TYPE", "cpu")
    facts = {
        "device_type": "cpu",
        "compiles_pieces": True,
        "compiles_cuda": True,
        "hopper_decode": True,
        "has_panels": False,
    }
    real = rewriting.pass_target
    patch.setattr(rewriting, "pass_target", lambda config: replace(real(config), **facts))
    for graph_pass in PASSES:
        if graph_pass.needs and graph_pass not in passes:
            patch.setattr(graph_pass, "obstacle", classmethod(lambda cls, target: "its kernels need a GPU"))


@contextmanager
def stand_in_ops(functions: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Defines ops of the library `mllm`, by their schemas, and lets passes put them into pieces on a CPU."""
    if torch.cuda.is_available():
        pytest.skip("the real ops are defined where there is a GPU")
    library = torch.library.Library("mllm", "FRAGMENT")
    for schema, function in functions.items():
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, function, "CPU")
        if function in (silu_mul_in_fp8, dequantised_experts, dequantised_integers):  # a pass asks what they give
            torch.library.register_fake(f"mllm::{name}", function, lib=library)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "KERNEL_DEVICE_TYPE", "cpu")
        yield
    del library


def linear(x, weight, squares, eps, gated, bias=None, squared_relu=False, gelu=False):
    """The computation of `few_linear` and `stream_linear`."""
    product = torch_linear(x.float(), weight.float())
    if squares is not None:
        product = product * torch.rsqrt(squares.sum(-1, keepdim=True) / x.shape[-1] + eps)
    if bias is not None:
        product = product + bias.float()
    product = product.to(x.dtype)
    if not gated:
        return product.relu().square() if squared_relu else torch_gelu(product) if gelu else product
    gate, up = product.chunk(2, -1)
    return silu(gate) * up


def linear_residual(x, weight, residual, bias=None):
    return residual + torch_linear(x, weight, bias)


def linear_residual_norm(x, weight, residual, norm_weight, num_blocks, plus_one=False):
    """With the sums of squares of `num_blocks` blocks of columns."""
    return outputs_for_norm(linear_residual(x, weight, residual), norm_weight, num_blocks, plus_one)


def outputs_for_norm(out, norm_weight, num_blocks, plus_one):
    """A norm's input, that times its weight, and the input's sums of squares."""
    return (
        out,
        times_norm_weight(out, norm_weight, plus_one),
        out.float().pow(2).unflatten(-1, (num_blocks, -1)).sum(-1),
    )


def times_norm_weight(x, weight, plus_one):
    return (x.float() * (weight.float() + plus_one)).to(x.dtype)


def scaled(x, squares, eps):
    """A norm's output, of its input times its weight and the input's sums of squares."""
    return x if squares is None else (x * torch.rsqrt(squares.sum(-1, keepdim=True) / x.shape[-1] + eps)).to(x.dtype)


def gated_linear(x, weight):
    gate, up = torch_linear(x, weight).chunk(2, -1)
    return silu(gate) * up


def lora_linear(x, weight, a, b, slots, starts, rows):
    return add_lora(torch_linear(x, weight), x, a, b, slots, starts, rows)


def gated_linear_lora(x, weight, shrunk, b, slots):
    half = weight.shape[0] // 2
    parts = [0, half], [half, half]
    gate, up = lora_expand(torch_linear(x, weight), shrunk[None], b, slots, *parts, False, True).chunk(2, -1)
    return silu(gate) * up


def small_weight(values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """The weight in float32, of fp8 or four bits."""
    kind = "int4_lanes" if values.dtype == torch.uint8 else "fp8"
    columns = values.shape[1] * (1 if kind == "fp8" else 2)
    tensors = {VALUES: values, SCALES: scales, ZEROS: zeros}
    return dequantised(tensors, kind, columns // scales.shape[1], columns, torch.float32)


@contextmanager
def streamed_ops_on_cpu() -> Iterator[None]:
    """The ops whose kernels NVRTC compiles, which are defined everywhere, but whose kernels need a Hopper GPU."""

    def residual_norm(x, weight, residual, norm_weight, plus_one=False):
        num_blocks = num_streamed_norm_blocks(*weight.shape)
        return linear_residual_norm(x, weight, residual, norm_weight, num_blocks, plus_one)

    def quantised_linear(x, values, scales, zeros, squares, eps, gated, bias=None, squared_relu=False, gelu=False):
        return linear(x, small_weight(values, scales, zeros), squares, eps, gated, bias, squared_relu, gelu)

    def quantised_residual(x, values, scales, zeros, residual, bias=None):
        return linear_residual(x, small_weight(values, scales, zeros).to(x.dtype), residual, bias)

    def quantised_residual_norm(x, values, scales, zeros, residual, norm_weight, plus_one=False):
        weight = small_weight(values, scales, zeros).to(x.dtype)
        return linear_residual_norm(x, weight, residual, norm_weight, len(values) // NORM_ROWS, plus_one)

    def adapted(x, weight, a, b, slots, starts, rows, early_slots, squares, eps, gated):
        product = add_lora(linear(x, weight, squares, eps, False), scaled(x, squares, eps), a, b, slots, starts, rows)
        gate, up = product.chunk(2, -1)
        return silu(gate) * up if gated else product

    def adapted_residual(x, weight, a, b, slots, starts, rows, early_slots, residual):
        return residual + add_lora(torch_linear(x, weight), x, a, b, slots, starts, rows)

    def adapted_residual_norm(x, weight, a, b, slots, starts, rows, early_slots, residual, norm_weight, plus_one=False):
        out = adapted_residual(x, weight, a, b, slots, starts, rows, early_slots, residual)
        return outputs_for_norm(out, norm_weight, num_streamed_norm_blocks(*weight.shape), plus_one)

    library = torch.library.Library("mllm", "IMPL")
    library.impl("stream_linear_lora", adapted, "CPU")
    library.impl("stream_linear_lora_residual", adapted_residual, "CPU")
    library.impl("stream_linear_lora_residual_norm", adapted_residual_norm, "CPU")
    library.impl("stream_quantised_linear", quantised_linear, "CPU")
    library.impl("stream_quantised_linear_residual", quantised_residual, "CPU")
    library.impl("stream_quantised_linear_residual_norm", quantised_residual_norm, "CPU")
    library.impl("stream_linear", linear, "CPU")
    library.impl("stream_linear_residual", linear_residual, "CPU")
    library.impl("linear_in_one_order", linear_in_one_order, "CPU")
    library.impl("gated_linear_in_one_order", gated_linear, "CPU")
    library.impl("gated_linear", gated_linear, "CPU")
    library.impl("gated_linear_lora", gated_linear_lora, "CPU")
    library.impl("gated_expert_tiles", gated_expert_tiles, "CPU")
    library.impl("expert_tiles", expert_tiles, "CPU")
    library.impl("stream_linear_residual_norm", residual_norm, "CPU")
    library.impl("segment_attention_by_kernel", segment_attention_with_output, "CPU")
    library.impl("stream_expert_up", stream_expert_up, "CPU")
    library.impl("stream_expert_down", stream_expert_down, "CPU")
    library.impl("stream_expert_down_norm", stream_expert_down_norm, "CPU")
    library.impl("stream_expert_rows", stream_expert_rows, "CPU")
    yield
    del library


def _choice(choice, weights, slots, num_chosen, softmax, renormalise, wide):
    """Weights and ids of each token's experts."""
    if weights is None:
        weights, ids = choose_experts(choice, num_chosen, softmax, renormalise)
    else:
        ids = choice
    return weights.to(torch.float32 if wide else torch.bfloat16), ids


def stream_expert_up(x, weight, squares, eps, *router):
    """Rows of padding hold NaN."""
    _, ids = _choice(*router)
    rows = [
        linear(token, weight[expert], None if squares is None else squares.flatten(0, -2)[index], eps, True)
        if router[2][index] > 0
        else torch.full((weight.shape[1] // 2,), torch.nan, dtype=x.dtype)
        for index, token in enumerate(x.flatten(0, -2))
        for expert in ids[index].tolist()
    ]
    return torch.stack(rows)


def stream_expert_down(x, weight, residual, *router):
    weights, ids = _choice(*router)
    rows = torch.stack(
        [torch_linear(row, weight[expert]) for row, expert in zip(x, ids.flatten().tolist(), strict=True)]
    )
    total = sum_experts(rows, weights)
    return residual + torch.where((router[2] > 0)[:, None], total, 0).view(residual.shape)


def stream_expert_down_norm(x, weight, residual, norm_weight, plus_one, *router):
    out = stream_expert_down(x, weight, residual, *router)
    return out, times_norm_weight(out, norm_weight, plus_one), out.float().pow(2).unflatten(-1, (-1, ROWS)).sum(-1)


def few_linear_residual_norm(x, weight, residual, norm_weight, plus_one=False):
    return linear_residual_norm(x, weight, residual, norm_weight, num_norm_blocks(*weight.shape), plus_one)


def norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float, plus_one: bool = False) -> torch.Tensor:
    if weight is None:
        return x
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * (1.0 + weight.float())).to(x.dtype) if plus_one else weight * scaled.to(x.dtype)


def norm_linear(x, norm_weight, weight, eps, plus_one=False):
    return torch_linear(norm(x, norm_weight, eps, plus_one), weight)


def norm_gated_linear(x, norm_weight, weight, eps, plus_one=False):
    return gated_linear(norm(x, norm_weight, eps, plus_one), weight)


def _rotate(x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
    if cos is None or sin is None:
        return x.clone()
    x, rest = x.tensor_split([cos.shape[-1]], -1)
    first, second = x.chunk(2, -1)
    return torch.cat((x * cos[:, :, None] + torch.cat((-second, first), -1) * sin[:, :, None], rest), -1)


def rope_and_cache(q, k, v, cos, sin, q_weight, k_weight, eps, slots, keys, values, plus_one=False):
    q, k = rotate_heads(q, k, cos, sin, q_weight, k_weight, eps, plus_one)
    if not len(slots):  # it is left to attention
        return torch.full_like(q, torch.nan), torch.full_like(k, torch.nan)
    keys[slots] = k
    values[slots] = v
    return q, k


def rotate_heads(q, k, cos, sin, q_weight, k_weight, eps, plus_one=False):
    made = (_rotate(norm(x, weight, eps, plus_one), cos, sin)[0] for x, weight in ((q, q_weight), (k, k_weight)))
    return tuple(one.contiguous() for one in made)


def choose_experts(scores, num_chosen, softmax, renormalise):
    if softmax == SOFTMAX_OF_ALL:
        scores = scores.float().softmax(-1)
    weights, ids = scores.topk(num_chosen, -1)
    if softmax == SOFTMAX_OF_CHOSEN:
        weights = weights.softmax(-1)
    return weights / weights.sum(-1, keepdim=True) if renormalise else weights, ids


def order_experts(ids, slots, num_experts, block, most_rows):
    """Blocks of rows, of each expert and then of none, as the kernel makes them."""
    is_padding = (slots <= 0).repeat_interleave(ids.shape[1]) | (ids.reshape(-1) == ELSEWHERE)
    flat = torch.where((ids.reshape(-1) < 0) | (ids.reshape(-1) >= num_experts), num_experts, ids.reshape(-1))
    owners = torch.where(is_padding, num_experts, flat)
    num_blocks = most_blocks(len(flat), num_experts, block)
    order = torch.full((num_blocks, block), 2**30, dtype=torch.int32)
    blocks = torch.tensor([[-1, 0]] * num_blocks, dtype=torch.int32)
    at = 0
    for expert in range(num_experts + 1):
        for rows in (owners == expert).nonzero()[:, 0].split(block):
            if len(rows):
                is_broken = (owners[rows] == num_experts) & ~is_padding[rows]
                order[at, : len(rows)] = torch.where(is_broken, -1 - rows, rows)
                blocks[at] = torch.tensor([expert if expert < num_experts else -1, len(rows)])
                at += 1
    return order.flatten(), blocks


def grouped_linear(x, order, blocks, weight, bias, num_chosen, is_transposed, of_tokens, is_gated, block):
    """By the order, as the kernel reads it: rows in no block stay undefined."""
    if block == ONE_ROW:
        order, blocks = torch.arange(num_chosen), torch.stack((order.flatten(), torch.ones(num_chosen)), 1).int()
    num_rows = len(x) * num_chosen if of_tokens else len(x)
    out = torch.full((num_rows, weight.shape[2 if is_transposed else 1]), torch.nan, dtype=x.dtype)
    for rows, (expert, count) in zip(order.split(block), blocks.tolist(), strict=True):
        rows = rows[:count].long()
        if expert < 0:
            out[rows[rows >= 0]] = 0
        elif count:
            inputs = x[rows // num_chosen if of_tokens else rows]
            product = inputs @ (weight[expert] if is_transposed else weight[expert].T)
            out[rows] = product if bias is None else product + bias[expert]
    return silu(out.chunk(2, -1)[0]) * out.chunk(2, -1)[1] if is_gated else out


def quantised_grouped_linear(
    x, order, blocks, values, scales, zeros, bias, kind, group, num_chosen, of_tokens, is_gated, block
):
    tensors = {VALUES: values, SCALES: scales, ZEROS: zeros}
    weight = dequantised(tensors, kind, group, x.shape[1], x.dtype)
    return grouped_linear(x, order, blocks, weight, bias, num_chosen, False, of_tokens, is_gated, block)


def stream_expert_rows(
    x, order, blocks, values, scales, bias, num_chosen, of_tokens, swiglu, alpha, limit, is_early, block
):
    weight = dequantised({VALUES: values, SCALES: scales}, "mxfp4", 32, x.shape[1], torch.float32)
    if block == ONE_ROW:  # what is no expert's is broken
        is_expert = ((order >= 0) & (order < len(values))).flatten()
        order = order.clamp(0, len(values) - 1)
    bias = None if bias is None else bias.float()
    wide = grouped_linear(x.float(), order, blocks, weight, bias, num_chosen, False, of_tokens, False, block)
    out = wide.to(x.dtype)
    if swiglu:
        is_none = (out == 0).all(-1, keepdim=True)  # of padding
        gate, up = out.float()[:, ::2].clamp(max=limit), out.float()[:, 1::2].clamp(-limit, limit)
        out = ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(x.dtype).masked_fill(is_none, 0)
    return out.masked_fill(~is_expert[:, None], torch.nan) if block == ONE_ROW else out


def gated_expert_tiles(x, order, blocks, weight, num_chosen):
    """Places of no row hold NaN."""
    out = torch.full((len(order), weight.shape[1]), torch.nan, dtype=x.dtype)
    for block, (expert, count) in enumerate(blocks.tolist()):
        places = slice(block * BLOCK, block * BLOCK + count)
        if expert >= 0:
            out[places] = x[order[places].long() // num_chosen] @ weight[expert].T
    return silu(out.chunk(2, -1)[0]) * out.chunk(2, -1)[1]


def sum_experts(rows, weights):
    return (rows * weights.reshape(-1, 1)).view(*weights.shape, -1).sum(1).to(rows.dtype)


def expert_tiles(x, order, blocks, weight, ids):
    out = torch.full((ids.numel(), weight.shape[1]), torch.nan, dtype=x.dtype)
    for block, (expert, count) in enumerate(blocks.tolist()):
        places = slice(block * BLOCK, block * BLOCK + count)
        rows = order[places].long()
        out[rows] = x[places] @ weight[expert].T if expert >= 0 else 0
    return out


# The ops whose modules need Triton, by pass.
FEW_TOKENS = {
    "few_linear(Tensor x, Tensor weight, Tensor? squares, float eps, bool gated) -> Tensor": linear,
    "few_linear_residual(Tensor x, Tensor weight, Tensor residual) -> Tensor": linear_residual,
    "few_linear_residual_norm(Tensor x, Tensor weight, Tensor residual, Tensor norm_weight, bool plus_one=False)"
    " -> (Tensor, Tensor, Tensor)": few_linear_residual_norm,
}
SINGLE_TOKEN = {
    "norm_linear(Tensor x, Tensor norm_weight, Tensor weight, float eps, bool plus_one=False) -> Tensor": norm_linear,
    "norm_gated_linear(Tensor x, Tensor norm_weight, Tensor weight, float eps, bool plus_one=False)"
    " -> Tensor": norm_gated_linear,
    "linear_residual(Tensor x, Tensor weight, Tensor residual) -> Tensor": linear_residual,
}


def silu_mul_in_fp8(x: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = x.flatten(0, -2).chunk(2, -1)
    parts = (silu(gate) * up).float().unflatten(-1, (groups, -1))
    scales = (parts.abs().amax(-1, True) / 448).clamp(1e-12)
    return (parts / scales).clamp(-448, 448).to(torch.float8_e4m3fn).flatten(-2), scales.squeeze(-1)


def dequantised_experts(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return dequantised({VALUES: values, SCALES: scales}, "mxfp4", 32, 2 * values.shape[-1], dtype)


def dequantised_integers(
    values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    columns = 2 * values.shape[1]
    tensors = {VALUES: values, SCALES: scales, ZEROS: zeros}
    return dequantised(tensors, "int4_lanes", columns // scales.shape[1], columns, dtype)


def lora_shrink(x: torch.Tensor, a: torch.Tensor, slots: torch.Tensor, is_few: bool, early_slots: bool) -> torch.Tensor:
    factors = torch.where((slots >= 0)[:, None, None], a[slots.clamp(min=0)], 0)
    splits = num_splits(x.shape[-1])
    size = -(-x.shape[-1] // splits)
    parts = zip(x.flatten(0, -2).split(size, -1), factors.split(size, -1), strict=True)
    sums = torch.stack([torch.einsum("tk,trk->tr", *part) for part in parts])
    return sums if is_few else sums.sum(0, keepdim=True).to(x.dtype)


def lora_expand(y, shrunk, b, slots, starts, rows, is_few, early_slots, squares=None, eps=0.0, width=0):
    out, first, rank = y.clone(), 0, b.shape[2]
    inputs = shrunk.sum(0)
    if squares is not None:
        inputs = inputs * torch.rsqrt(squares.flatten(0, -2).sum(-1, keepdim=True) / width + eps)
    inputs = inputs.to(b.dtype)
    for part, (start, count) in enumerate(zip(starts, rows, strict=True)):
        factors = b[slots.clamp(min=0), first : first + count]
        added = torch.einsum("tr,tnr->tn", inputs[:, part * rank : (part + 1) * rank], factors)
        out.flatten(0, -2)[:, start : start + count] += torch.where((slots >= 0)[:, None], added, 0)
        first += count
    return out


def lora_expand_gated(y, shrunk, b, slots, starts, rows, is_few, early_slots, squares=None, eps=0.0, width=0):
    gate, up = lora_expand(y, shrunk, b, slots, starts, rows, is_few, early_slots, squares, eps, width).chunk(2, -1)
    return silu(gate) * up


def lora_expand_norm(y, shrunk, b, slots, residual, norm_weight, plus_one, next_a):
    out = residual + lora_expand(y, shrunk, b, slots, [0], [y.shape[-1]], True, True)
    scaled = (out.float() * (norm_weight.float() + plus_one)).to(out.dtype)
    squares = out.float().pow(2).unflatten(-1, (-1, chained_columns(y.shape[-1]))).sum(-1)
    return out, scaled, squares, _in_blocks(scaled, next_a, slots)


def lora_expand_gated_chained(y, shrunk, b, slots, starts, rows, squares, eps, width, next_a):
    out = lora_expand_gated(y, shrunk, b, slots, starts, rows, True, True, squares, eps, width)
    return out, _in_blocks(out, next_a, slots)


def _in_blocks(x: torch.Tensor, a: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    factors = torch.where((slots >= 0)[:, None, None], a[slots.clamp(min=0)], 0).float()
    blocks = -1, chained_columns(a.shape[2])
    return torch.einsum("tbk,trbk->btr", x.flatten(0, -2).float().unflatten(-1, blocks), factors.unflatten(-1, blocks))


def linear_in_one_order(x, weight, bias, ahead=None):
    return torch_linear(x, weight, bias)


def rms_norm(x, weight, eps, plus_one=False):
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (scaled * (weight.float() + plus_one)).to(x.dtype)


def add_rms_norm(x, residual, weight, eps, plus_one=False):
    total = x + residual
    return total, rms_norm(total, weight, eps, plus_one)


NORMS = {
    "rms_norm(Tensor x, Tensor weight, float eps, bool plus_one=False) -> Tensor": rms_norm,
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, bool plus_one=False) -> (Tensor, Tensor)": (
        add_rms_norm
    ),
}
SILU_MUL = {
    "silu_mul(Tensor x) -> Tensor": lambda x: silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "silu_mul_in_fp8(Tensor x, int groups) -> (Tensor, Tensor)": silu_mul_in_fp8,
}
INTEGERS = {
    "dequantised_experts(Tensor values, Tensor scales, ScalarType dtype) -> Tensor": dequantised_experts,
    "dequantised_integers(Tensor values, Tensor scales, Tensor? zeros, ScalarType dtype) -> Tensor": (
        dequantised_integers
    ),
}
LORA = {
    "lora_shrink(Tensor x, Tensor a, Tensor slots, bool is_few, bool early_slots) -> Tensor": lora_shrink,
    "lora_expand(Tensor y, Tensor shrunk, Tensor b, Tensor slots, SymInt[] starts, SymInt[] rows, "
    "bool is_few, bool early_slots, Tensor? squares=None, float eps=0.0, int width=0) -> Tensor": lora_expand,
    "lora_expand_gated(Tensor y, Tensor shrunk, Tensor b, Tensor slots, SymInt[] starts, SymInt[] rows, "
    "bool is_few, bool early_slots, Tensor? squares=None, float eps=0.0, int width=0) -> Tensor": lora_expand_gated,
    "lora_expand_norm(Tensor y, Tensor shrunk, Tensor b, Tensor slots, Tensor residual, Tensor norm_weight, "
    "bool plus_one, Tensor next_a) -> (Tensor, Tensor, Tensor, Tensor)": lora_expand_norm,
    "lora_linear(Tensor x, Tensor weight, Tensor a, Tensor b, Tensor slots, SymInt[] starts, SymInt[] rows) "
    "-> Tensor": lora_linear,
    "lora_expand_gated_chained(Tensor y, Tensor shrunk, Tensor b, Tensor slots, SymInt[] starts, SymInt[] rows, "
    "Tensor? squares, float eps, int width, Tensor next_a) -> (Tensor, Tensor)": lora_expand_gated_chained,
}
ROPE_AND_CACHE = {
    "rope_and_cache(Tensor q, Tensor k, Tensor v, Tensor? cos, Tensor? sin, Tensor? q_weight, Tensor? k_weight, "
    "float eps, Tensor slots, Tensor(a!) keys, Tensor(b!) values, bool plus_one=False) -> (Tensor, Tensor)": (
        rope_and_cache
    ),
    "rotate_heads(Tensor q, Tensor k, Tensor? cos, Tensor? sin, Tensor? q_weight, Tensor? k_weight, float eps, "
    "bool plus_one=False) -> (Tensor, Tensor)": rotate_heads,
}
EXPERTS = {
    "choose_experts(Tensor scores, int num_chosen, int softmax, bool renormalise) -> (Tensor, Tensor)": choose_experts,
    "order_experts(Tensor ids, Tensor slots, int num_experts, int block, int most_rows) -> (Tensor, Tensor)": (
        order_experts
    ),
    "grouped_linear(Tensor x, Tensor order, Tensor? blocks, Tensor weight, Tensor? bias, int num_chosen, "
    "bool is_transposed, bool of_tokens, bool is_gated, int block) -> Tensor": grouped_linear,
    "quantised_grouped_linear(Tensor x, Tensor order, Tensor? blocks, Tensor values, Tensor scales, Tensor? zeros, "
    "Tensor? bias, str kind, int group, int num_chosen, bool of_tokens, bool is_gated, int block) -> Tensor": (
        quantised_grouped_linear
    ),
    "sum_experts(Tensor rows, Tensor weights) -> Tensor": sum_experts,
}
ALL = EXPERTS | FEW_TOKENS | SINGLE_TOKEN | NORMS | SILU_MUL | INTEGERS | ROPE_AND_CACHE | LORA
