"""Attention of prompts as pieces of the program, for layers that no kernel of FlashInfer serves.

Those have a bias by distance (ALiBi, T5's) or attend in chunks. The kernel is runtime/ops/attention/prefill.py's;
layers that are alike share a piece.
"""

from __future__ import annotations

from functools import partial

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.inductor.job import PieceInput
from mllm_compile.kernels.decode_attention import inputs_by_distance, is_beyond_flashinfer, options_by_distance
from mllm_compile.kernels.piece import WrittenPiece, attention_inputs, with_piece_each
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.program.spec import Program


def add_prefill_attention(config: ResolvedConfig, program: Program) -> tuple[Program, tuple[WrittenPiece, ...]]:
    """Adds these pieces to the program, where its decodes have some too; returns the pieces as well."""
    served = [
        layer
        for layer in program.layers
        if is_beyond_flashinfer(config, layer) and _is_served(layer) and program.kernels_of_layer(layer.name).decode
    ]
    return with_piece_each(program, "prefill", served, partial(_piece, config))


def _is_served(layer: LayerSpec) -> bool:
    return layer.window_left < 0 and layer.logits_soft_cap == 0 and layer.sinks is None


def _piece(config: ResolvedConfig, layer: LayerSpec, name: str) -> WrittenPiece:
    of, heads = PieceInput.contiguous, layer.num_heads
    return WrittenPiece.calling(
        "paged_prefill",
        {
            **attention_inputs(config, layer, rows="R"),
            "tiles": of(("C", 4), "int32"),
            "out": of(("T", heads, layer.head_dim), config.model.dtype),
            **inputs_by_distance(config, layer),
        },
        name=name,
        legend="T tokens, R requests, W pages of the page table, P slots, C tiles, B distances",
        options={
            **options_by_distance(layer),
            "page_size": config.runtime.page_size,
            "sm_scale": layer.sm_scale,
            "chunk": layer.chunk,
        },
        gives_tensor=False,
    )
