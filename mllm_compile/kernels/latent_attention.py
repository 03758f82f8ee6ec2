"""Attention over latents as pieces of the program: the kernels of runtime/ops/attention/latent.py, for decodes, for
prompts, and for prompts over keys and values made of latents.

Layers alike in heads, widths and scale share their pieces.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.inductor.job import PieceInput
from mllm_compile.kernels.piece import WrittenPiece, made_by_kind, with_kernels
from mllm_compile.runtime.attention.latent.tiles import TILE_FIELDS
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.layer_kernels import LatentKernels
from mllm_compile.runtime.program.spec import Program


def add_latent_attention(config: ResolvedConfig, program: Program) -> tuple[Program, tuple[WrittenPiece, ...]]:
    """Adds these pieces to the program, for its layers over latents, unless torch attends; returns the pieces too."""
    if config.runtime.attention_backend == "torch":
        return program, ()
    of_layers, written = made_by_kind(
        (layer for layer in program.layers if layer.is_latent),
        lambda layer: replace(layer, name="", layer_id=0, up_projection=layer.up_projection and "up_projection"),
        partial(_pieces, config),
    )
    variants = {name: LatentKernels(*(piece.name for piece in pieces)) for name, pieces in of_layers.items()}
    return with_kernels(program, "latent", variants), tuple(piece for pieces in written for piece in pieces)


def _pieces(config: ResolvedConfig, layer: LayerSpec, index: int) -> tuple[WrittenPiece, ...]:
    dtype, heads, width, value_width = config.model.dtype, layer.num_heads, layer.head_dim, layer.v_head_dim
    of = PieceInput.contiguous
    options = {"page_size": config.runtime.page_size, "sm_scale": layer.sm_scale}
    decode = WrittenPiece.calling(
        "latent_decode",
        {
            "q": of(("T", heads, width), dtype),
            "latents": of(("P", 1, width), dtype),
            "page_table": of(("T", "W"), "int32"),
            "seq_lens": of(("T",), "int32"),
            "out": of(("T", heads, value_width), dtype),
            "partial": of(("C",), "float32"),
            "tops": of(("T", "N", heads), "float32"),
            "totals": of(("T", "N", heads), "float32"),
        },
        name=f"latent_{index}_decode",
        legend="T requests, N splits, W pages of the page table, P slots, C numbers of scratch",
        options=options,
        gives_tensor=False,
    )
    prefill = WrittenPiece.calling(
        "latent_prefill",
        {
            "q": of(("T", heads, width), dtype),
            "latents": of(("P", 1, width), dtype),
            "page_table": of(("R", "W"), "int32"),
            "seq_lens": of(("R",), "int32"),
            "tiles": of(("C", 4), "int32"),
            "out": of(("T", heads, value_width), dtype),
        },
        name=f"latent_{index}_prefill",
        legend="T tokens, R requests, W pages of the page table, P slots, C tiles",
        options=options,
        gives_tensor=False,
    )
    if layer.up_projection is None:
        return decode, prefill
    return decode, prefill, _expanded(config, layer, index)


def _expanded(config: ResolvedConfig, layer: LayerSpec, index: int) -> WrittenPiece:
    dtype, heads, of = config.model.dtype, layer.num_heads, PieceInput.contiguous
    return WrittenPiece.calling(
        "expanded_prefill",
        {
            "q": of(("T", heads, layer.query_dim), dtype),
            "expanded": of(("P", heads, layer.up_key_dim + layer.up_value_dim), dtype),
            "gathered": of(("P", layer.head_dim), dtype),
            "tiles": of(("C", TILE_FIELDS), "int32"),
            "out": of(("T", heads, "N", layer.out_dim), dtype),
            "log_sums": of(("T", heads, "N"), "float32"),
        },
        name=f"latent_{index}_expanded",
        legend="T tokens, P keys of a part, C tiles, N blocks that share a tile's keys",
        options={"sm_scale": layer.sm_scale},
        gives_tensor=False,
    )
