"""Attention of prompts as pieces of the program, for layers that no kernel of FlashInfer serves.

Those have a bias by distance (ALiBi) or attend in chunks. The kernel is runtime/ops/prompts/attend.py's; layers that
are alike share a piece.
"""

from __future__ import annotations

from dataclasses import replace

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.inductor.job import PieceInput
from mllm_compile.kernels.decode_attention import needs_own_kernels
from mllm_compile.kernels.piece import WrittenPiece, made_by_kind, with_kernels
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.program.spec import Program


def add_prefill_attention(config: ResolvedConfig, program: Program) -> tuple[Program, tuple[WrittenPiece, ...]]:
    """Adds these pieces to the program, where its decodes have some too; returns the pieces as well."""
    served = [
        layer
        for layer in program.layers
        if needs_own_kernels(config, layer) and _is_served(layer) and program.kernels_of_layer(layer.name).decode
    ]
    of_layers, written = made_by_kind(
        served,
        lambda layer: replace(layer, name="", layer_id=0),
        lambda kind, index: _piece(config, kind, f"prefill_{index}"),
    )
    found = {name: piece.name for name, piece in of_layers.items()}
    return with_kernels(program, "prefill", found), tuple(written)


def _is_served(layer: LayerSpec) -> bool:
    return layer.window_left < 0 and layer.logits_soft_cap == 0 and layer.sinks is None


def _piece(config: ResolvedConfig, layer: LayerSpec, name: str) -> WrittenPiece:
    dtype, heads, kv_heads, dim = config.model.dtype, layer.num_heads, layer.num_kv_heads, layer.head_dim
    of = PieceInput.contiguous
    return WrittenPiece.calling(
        "paged_prefill",
        {
            "q": of(("T", heads, dim), dtype),
            "keys": of(("P", kv_heads, dim), dtype),
            "values": of(("P", kv_heads, dim), dtype),
            "page_table": of(("R", "W"), "int32"),
            "seq_lens": of(("R",), "int32"),
            "tiles": of(("C", 4), "int32"),
            "out": of(("T", heads, dim), dtype),
            **({"slopes": of((heads,), "float32")} if layer.alibi_slopes else {}),
        },
        name=name,
        legend="T tokens, R requests, W pages of the page table, P slots, C tiles",
        options={
            **({} if layer.alibi_slopes else {"slopes": None}),
            "page_size": config.runtime.page_size,
            "sm_scale": layer.sm_scale,
            "chunk": layer.chunk,
        },
        gives_tensor=False,
    )
