"""Decode attention behind a shared prefix as pieces of the program: the kernels of runtime/ops/shared_prefix/.

They stand beside the layers' other kernels for decodes (decode_attention.py), and are compiled wherever the config has
cascades: which batches they pay in, and so which are captured, an engine decides (runtime/cuda_graph/decodes.py), as
configs of other sizes share a runtime. Layers that are alike share a piece.
"""

from __future__ import annotations

from dataclasses import replace

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.inductor.job import PieceInput
from mllm_compile.kernels.piece import WrittenPiece, made_by_kind, with_kernels
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.split.splits import OF_MANY
from mllm_compile.runtime.program.spec import Program


def add_cascade_attention(config: ResolvedConfig, program: Program) -> tuple[Program, tuple[WrittenPiece, ...]]:
    """Adds these pieces to the program, for the plain ones of the layers whose decodes it serves; returns them too."""
    served = [layer for layer in program.layers if layer.takes_cascade and program.kernels_of_layer(layer.name).decode]
    if program.state_layers or not config.runtime.cascade_attention:
        return program, ()  # captured beside layers with a state they have not been seen
    of_layers, written = made_by_kind(
        served,
        lambda layer: replace(layer, name="", layer_id=0),
        lambda kind, index: _piece(config, kind, f"cascade_{index}"),
    )
    found = {name: piece.name for name, piece in of_layers.items()}
    return with_kernels(program, "cascade", found), tuple(written)


def _piece(config: ResolvedConfig, layer: LayerSpec, name: str) -> WrittenPiece:
    dtype, heads, kv_heads, dim = config.model.dtype, layer.num_heads, layer.num_kv_heads, layer.head_dim
    of = PieceInput.contiguous
    return WrittenPiece.calling(
        "cascade_decode",
        {
            "q": of(("T", heads, dim), dtype),
            "keys": of(("P", kv_heads, dim), dtype),
            "values": of(("P", kv_heads, dim), dtype),
            "page_table": of(("T", "W"), "int32"),
            "seq_lens": of(("T",), "int32"),
            "out": of(("T", heads, dim), dtype),
            "partial": of(("T", "N", heads, dim), "float32"),
            "tops": of(("T", "N", heads), "float32"),
            "totals": of(("T", "N", heads), "float32"),
            "done": of(("T", kv_heads), "int32"),
            "shared_len": of((1,), "int32"),
            "shared_partial": of(("C", "T", heads, dim), "float32"),
            "shared_tops": of(("C", "T", heads), "float32"),
            "shared_totals": of(("C", "T", heads), "float32"),
            "log_sums": of(("T", heads), "float32"),
        },
        name=name,
        legend="T requests, N and C splits of own and of shared keys, W pages of the page table, P slots",
        options={"page_size": config.runtime.page_size, "max_splits": OF_MANY.most, "sm_scale": layer.sm_scale},
        gives_tensor=False,
    )
