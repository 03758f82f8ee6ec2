"""Decode attention behind a shared prefix as pieces of the program: the kernels of runtime/ops/attention/cascade.py.

They are beside the layers' other kernels for decodes (decode_attention.py), and are compiled wherever the config has
cascades: which batches they pay in, and so which are captured, an engine decides (runtime/cuda_graph/decodes.py), as
configs of other sizes share a runtime. Layers that are alike share a piece.
"""

from __future__ import annotations

from functools import partial

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.inductor.job import PieceInput
from mllm_compile.kernels.piece import WrittenPiece, attention_inputs, split_outputs, with_piece_each
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.split.splits import OF_MANY
from mllm_compile.runtime.program.spec import Program


def add_cascade_attention(config: ResolvedConfig, program: Program) -> tuple[Program, tuple[WrittenPiece, ...]]:
    """Adds these pieces to the program, for the plain ones of the layers whose decodes it serves; returns them too."""
    served = [layer for layer in program.layers if layer.takes_cascade and program.kernels_of_layer(layer.name).decode]
    if program.state_layers or not config.runtime.cascade_attention:
        return program, ()  # captured beside layers with a state they have not been seen
    return with_piece_each(program, "cascade", served, partial(_piece, config))


def _piece(config: ResolvedConfig, layer: LayerSpec, name: str) -> WrittenPiece:
    of, heads = PieceInput.contiguous, layer.num_heads
    return WrittenPiece.calling(
        "cascade_decode",
        {
            **attention_inputs(config, layer),
            **split_outputs(config, layer),
            "shared_len": of((1,), "int32"),
            "shared_partial": of(("C", "T", heads, layer.head_dim), "float32"),
            "shared_tops": of(("C", "T", heads), "float32"),
            "shared_totals": of(("C", "T", heads), "float32"),
            "log_sums": of(("T", heads), "float32"),
        },
        name=name,
        legend="T requests, N and C splits of own and of shared keys, W pages of the page table, P slots",
        options={"page_size": config.runtime.page_size, "max_splits": OF_MANY.most, "sm_scale": layer.sm_scale},
        gives_tensor=False,
    )
