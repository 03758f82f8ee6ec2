"""Decode attention as pieces of the program: the kernel of runtime/split_decode_ops.py, for the model's layers.

Layers alike in heads, scale, soft cap and window share two pieces: one for few requests, where all is latency, and one
for many, where it is bandwidth. On Hopper kernels of runtime/cluster_decode/ stand for the first where they serve the
layer. FlashInfer's kernels serve what these do not, and every prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mllm_compile.cuda_kernels import can_compile_kernels
from mllm_compile.piece_compiler import PieceInput
from mllm_compile.resolve import ResolvedConfig
from mllm_compile.runtime.attention.flashinfer_kernels import HEAD_DIMS
from mllm_compile.runtime.attention.split_decode import MAX_SPLITS_OF_FEW, MAX_SPLITS_OF_MANY
from mllm_compile.runtime.cluster_decode.shapes import (
    MOST_TOKENS_OF_FEW_BLOCKS,
    MOST_WIDTH_OF_FEW_BLOCKS,
    ClusterKernel,
    cluster_kernels,
    has_few_blocks,
    is_served,
)
from mllm_compile.runtime.program import DecodeForms, LayerSpec, Program
from mllm_compile.written_piece import WrittenPiece

_MAX_GROUP = 16  # query heads a KV head; all of them are rows of one product, more would not stay in registers

_SOURCE = '''"""{name}"""

import torch


class Piece(torch.nn.Module):
    # R requests (the dynamic size T), N splits, W pages of the page table, P slots
    # q, out: [R, {heads}, {dim}] {dtype}; keys, values: [P, {kv_heads}, {dim}] {dtype}
    # page_table: [R, W] int32; seq_lens: [R] int32; partial: [R, N, {heads}, {dim}] float32
    # tops, totals: [R, N, {heads}] float32; done: [R, {kv_heads}] int32

    def forward(self, q, keys, values, page_table, seq_lens, out, partial, tops, totals, done):
        torch.ops.mllm.split_decode(
            q, keys, values, page_table, seq_lens, out, partial, tops, totals, done, page_size={page_size},
            max_splits={max_splits}, sm_scale={sm_scale!r}, soft_cap={soft_cap!r}, window_left={window_left},
            fetch_first={fetch_first}
        )
        return ()
'''


def add_decode_attention(config: ResolvedConfig, program: Program) -> tuple[Program, tuple[WrittenPiece, ...]]:
    """The program with decode pieces for the layers that the kernel serves, and those pieces."""
    if not config.compile.split_decode:
        return program, ()
    forms: dict[str, DecodeForms] = {}
    pieces: dict[LayerSpec, tuple[WrittenPiece, WrittenPiece]] = {}
    written: list[WrittenPiece] = []
    for layer in program.layers:
        if _is_served(layer):
            kind = replace(layer, name="", layer_id=0)
            if kind not in pieces:
                pieces[kind] = _pieces(config, kind, len(pieces))
            few, many = pieces[kind]
            clusters = _clusters(config, layer)
            if clusters and not _needs_few_beside_clusters(config, layer):
                forms[layer.name] = DecodeForms(None, many.name, clusters)
                written.append(many)
            else:
                forms[layer.name] = DecodeForms(few.name, many.name, clusters)
                written += [few, many]
    return replace(program, decode_attention=forms), tuple({piece.name: piece for piece in written}.values())


def _is_served(layer: LayerSpec) -> bool:
    return (
        layer.sinks is None
        and layer.head_dim == layer.v_head_dim
        and layer.head_dim in HEAD_DIMS
        and layer.num_heads // layer.num_kv_heads <= _MAX_GROUP
    )


def _clusters(config: ResolvedConfig, layer: LayerSpec) -> tuple[ClusterKernel, ...]:
    """The kernels for few requests; none where they do not serve the layer."""
    runtime = config.runtime
    if (
        not config.compile.cluster_decode
        or layer.window_left >= 0
        or layer.logits_soft_cap > 0
        or not is_served(layer.num_heads, layer.num_kv_heads, layer.head_dim, runtime.page_size)
        or not can_compile_kernels(runtime.device)
    ):
        return ()
    return cluster_kernels(layer.num_heads, layer.num_kv_heads, runtime.page_size)


def _needs_few_beside_clusters(config: ResolvedConfig, layer: LayerSpec) -> bool:
    """Whether a request alone, which has few blocks, may be too long for these, or the model too wide."""
    is_long = config.runtime.max_model_len > MOST_TOKENS_OF_FEW_BLOCKS
    is_wide = layer.num_heads * layer.head_dim > MOST_WIDTH_OF_FEW_BLOCKS
    return has_few_blocks(layer.num_kv_heads) and (is_long or is_wide)


def _pieces(config: ResolvedConfig, layer: LayerSpec, index: int) -> tuple[WrittenPiece, WrittenPiece]:
    """(for few requests, for many); the same one twice in deterministic mode.

    There a step may hold many tokens of one request, so that no key can be fetched before the kernel ahead has ended;
    and a request's numbers must not depend on how many others there are.
    """
    many = _piece(config, layer, f"decode_{index}_many", MAX_SPLITS_OF_MANY, fetch_first=False)
    if config.runtime.deterministic:
        return many, many
    return _piece(config, layer, f"decode_{index}_few", MAX_SPLITS_OF_FEW, fetch_first=True), many


def _piece(config: ResolvedConfig, layer: LayerSpec, name: str, max_splits: int, fetch_first: bool) -> WrittenPiece:
    dtype, heads, kv_heads, dim = config.model.dtype, layer.num_heads, layer.num_kv_heads, layer.head_dim
    source = _SOURCE.format(
        name=name,
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        dtype=dtype,
        page_size=config.runtime.page_size,
        max_splits=max_splits,
        sm_scale=layer.sm_scale,
        soft_cap=layer.logits_soft_cap,
        window_left=layer.window_left,
        fetch_first=fetch_first,
    )
    shapes: Sequence[tuple[tuple[int | str, ...], str]] = (
        (("T", heads, dim), dtype),
        (("P", kv_heads, dim), dtype),
        (("P", kv_heads, dim), dtype),
        (("T", "W"), "int32"),
        (("T",), "int32"),
        (("T", heads, dim), dtype),
        (("T", "N", heads, dim), "float32"),
        (("T", "N", heads), "float32"),
        (("T", "N", heads), "float32"),
        (("T", kv_heads), "int32"),
    )
    return WrittenPiece(name, source, tuple(PieceInput.contiguous(shape, kind) for shape, kind in shapes))
