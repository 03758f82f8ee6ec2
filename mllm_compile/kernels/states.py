"""Layers with a state as pieces of the program: kernels of runtime/ops/states/, two or three for each kind of layer.

One computes decodes, a token of each request, another prompts, and one prompts of few tokens. Layers alike in kind,
settings and operands share them. Layers without a kernel are computed by runtime/state/torch_backend.py, as on a CPU.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.inductor.job import PieceInput
from mllm_compile.kernels.piece import WrittenPiece, made_by_kind, with_kernels
from mllm_compile.runtime.attention.layer_kernels import StateKernels
from mllm_compile.runtime.config_sections import RuntimeSection
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.state.layer import StateLayer

_LEGEND = "T tokens, B requests, R rows of the pool"
_BY_REFERENCE = frozenset({"wkv", "matrix_memory"})  # kinds without kernels
_MOST_STATE = 256  # columns of a state that a block has in registers
_CHUNKED = frozenset({"gated_delta", "ssd"})  # whose kernels take a prompt by chunks
_WITH_FEW = _CHUNKED | {"causal_conv"}  # which have one for few tokens


def add_state_pieces(
    config: ResolvedConfig,
    program: Program,
    operands: Mapping[str, Sequence[PieceInput]],
    with_made_constants: Collection[str] = (),
) -> tuple[Program, tuple[WrittenPiece, ...]]:
    """Adds kernels for the layers with a state to the program, on CUDA, where they run; returns the pieces too.

    Args:
        operands: layer → what its operands are, in order.
        with_made_constants: layers whose piece computes an operand without tokens; their kernels may not read it before
            that piece has ended, as they read weights.
    """
    if not config.runtime.device.startswith("cuda"):
        return program, ()
    # No piece computes the operands that the delta rule's kernel reads before its wait. Mamba's rates and steps may be
    # made by one.
    is_delta = {layer.kind.name for layer in program.state_layers} == {"causal_conv", "gated_delta"}
    of_layers, written = made_by_kind(
        filter(_is_served, program.state_layers),
        lambda layer: (
            *(replace(layer, name="", state_id=0), tuple(operands[layer.name])),
            layer.name in with_made_constants,
        ),
        lambda kind, index: _pieces(*kind, config.runtime, index, is_delta),
    )
    variants = {name: StateKernels(*(piece.name for piece in pieces)) for name, pieces in of_layers.items()}
    return with_kernels(program, "state", variants), tuple(piece for pieces in written for piece in pieces)


def _is_served(layer: StateLayer) -> bool:
    """True if there are kernels of the layer's kind, whose blocks hold a state of its size."""
    if layer.kind.name in _BY_REFERENCE:
        return False
    return layer.state_shape[0] > 0 and (layer.kind.holds_inputs or layer.state_shape[-1] <= _MOST_STATE)


def _pieces(
    layer: StateLayer,
    operands: Sequence[PieceInput],
    waits_first: bool,
    runtime: RuntimeSection,
    index: int,
    is_delta: bool,
) -> tuple[WrittenPiece, ...]:
    """(decodes, prompts, few), the last of some kinds.

    Args:
        is_delta: behind each convolution is another one, or a delta rule.
    """
    of = PieceInput.contiguous
    given = {
        **dict(zip(layer.operands, operands, strict=True)),
        "states": of(("R", *layer.state_shape), layer.state_dtype(runtime.state_dtype)),
        "rows": of(("B",), "int64"),
        "has_state": of(("B",), "bool"),
    }
    out = {"out": of(("T", *layer.out_shape), layer.out_dtype)}
    bounds = {"sources": of(("B",), "int64"), **{name: of(("B",), "int32") for name in ("starts", "ends")}}
    absent = dict.fromkeys(name for name in layer.kind.operands if name not in layer.operands)
    settings = absent | asdict(layer.kind) | ({"waits_first": True} if waits_first else {})
    ahead = {"lets_in_at_once": True} if is_delta and layer.kind.name == "causal_conv" else {}
    # How a prompt is cut into chunks would show in its last bits.
    by_token = {"by_token": True} if layer.kind.name in _CHUNKED and runtime.deterministic else {}

    def piece(what: str, signature: dict[str, PieceInput], options: dict[str, object]) -> WrittenPiece:
        return WrittenPiece.calling(
            f"{layer.kind.name}_states",
            signature,
            name=f"states_{index}_{what}",
            legend=_LEGEND,
            options=options,
            gives_tensor=False,
        )

    pieces = (
        piece("decodes", given | out, dict.fromkeys(bounds) | settings | ahead),
        piece("prompts", given | bounds | out, settings | by_token),
    )
    if layer.kind.name not in _WITH_FEW or runtime.deterministic:
        return pieces
    return *pieces, piece("few", given | bounds | out, settings | ahead | {"few_tokens": True})
