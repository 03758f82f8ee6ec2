"""Layers with a state as pieces of the program: kernels of runtime/ops/states/, two for each kind of layer.

One computes decodes, a token of each request, the other prompts. Layers alike in kind, settings and operands share
them. A third computes decodes of a gated delta rule together with the convolution that makes its queries, keys and
values.
What no kernel serves is computed by runtime/state/torch_backend.py, as on a CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.inductor.job import PieceInput
from mllm_compile.kernels.piece import WrittenPiece
from mllm_compile.runtime.config_sections import RuntimeSection
from mllm_compile.runtime.program.spec import Program, StateForms, StateStep
from mllm_compile.runtime.state.layer import StateLayer
from mllm_compile.runtime.state.piece_backend import CONVOLVED

_LEGEND = "T tokens, B requests, R rows of the pool"
_MOST_STATE = 256  # columns of a state that a block has in registers
_MOST_MIXED = 128  # rows and columns of a head's state that a block has in registers as a whole
_CHUNKED = frozenset({"gated_delta", "ssd"})  # whose kernels take a prompt by chunks


def add_state_pieces(
    config: ResolvedConfig,
    program: Program,
    operands: Mapping[str, Sequence[PieceInput]],
    mixers: Mapping[str, str],
) -> tuple[Program, tuple[WrittenPiece, ...]]:
    """Adds kernels for the layers with a state to the program, on CUDA, where they run; returns the pieces too.

    Args:
        operands: layer → what its operands are, in order.
        mixers: gated delta rule → the convolution that makes its q, k and v.
    """
    if not config.runtime.device.startswith("cuda"):
        return program, ()
    forms: dict[str, StateForms] = {}
    of_kinds: dict[object, tuple[WrittenPiece, WrittenPiece]] = {}
    for layer in program.state_layers:
        if not _is_served(layer):
            continue
        given = tuple(operands[layer.name])
        kind = (replace(layer, name="", state_id=0), given)
        if kind not in of_kinds:
            of_kinds[kind] = _pieces(layer, given, config.runtime, len(of_kinds))
        forms[layer.name] = StateForms(*(piece.name for piece in of_kinds[kind]))
    written = [piece for pieces in of_kinds.values() for piece in pieces]
    layers = {layer.name: layer for layer in program.state_layers}
    of_mixers: dict[object, WrittenPiece] = {}
    for name, conv_name in mixers.items():
        rule, conv = layers[name], layers[conv_name]
        if name not in forms or conv_name not in forms or max(rule.state_shape[1:]) > _MOST_MIXED:
            continue
        of_both = tuple(operands[conv_name]), tuple(operands[name])
        key = (replace(conv, name="", state_id=0), replace(rule, name="", state_id=0), of_both)
        if key not in of_mixers:
            of_mixers[key] = _mixer(conv, rule, of_both, config.runtime, len(of_mixers))
        forms[name] = replace(forms[name], mixer=of_mixers[key].name, conv=conv_name)
    of_convs = {step.layer: step.operands for step in program.steps if isinstance(step, StateStep)}
    steps = tuple(
        replace(step, unconvolved=of_convs[str(forms[step.layer].conv)])
        if isinstance(step, StateStep) and step.layer in forms and forms[step.layer].mixer is not None
        else step
        for step in program.steps
    )
    return replace(program, state_forms=forms, steps=steps), (*written, *of_mixers.values())


def _is_served(layer: StateLayer) -> bool:
    """True if the layer's state has a size that the kernels' blocks hold."""
    return layer.state_shape[0] > 0 and (layer.kind.holds_inputs or layer.state_shape[-1] <= _MOST_STATE)


def _pieces(
    layer: StateLayer, operands: Sequence[PieceInput], runtime: RuntimeSection, index: int
) -> tuple[WrittenPiece, WrittenPiece]:
    """(decodes, prompts)"""
    of = PieceInput.contiguous
    given = {
        **dict(zip(layer.operands, operands, strict=True)),
        "states": of(("R", *layer.state_shape), layer.state_dtype(runtime.state_dtype)),
        "rows": of(("B",), "int64"),
        "has_state": of(("B",), "bool"),
    }
    out = {"out": of(("T", *layer.out_shape), layer.out_dtype)}
    bounds = {name: of(("B",), "int32") for name in ("starts", "ends")}
    absent = dict.fromkeys(name for name in layer.kind.operands if name not in layer.operands)
    settings = absent | asdict(layer.kind)
    # How a prompt is cut into chunks would show in its last bits.
    by_token = {"by_token": True} if runtime.deterministic and layer.kind.name in _CHUNKED else {}

    def piece(what: str, signature: dict[str, PieceInput], options: dict[str, object]) -> WrittenPiece:
        return WrittenPiece.calling(
            f"{layer.kind.name}_states",
            signature,
            name=f"states_{index}_{what}",
            legend=_LEGEND,
            options=options,
            gives_tensor=False,
        )

    return (
        piece("decodes", given | out, dict.fromkeys(bounds) | settings),
        piece("prompts", given | bounds | out, settings | by_token),
    )


def _mixer(
    conv: StateLayer,
    rule: StateLayer,
    given: tuple[Sequence[PieceInput], Sequence[PieceInput]],
    runtime: RuntimeSection,
    index: int,
) -> WrittenPiece:
    """The piece of both layers' decodes; `given` are the operands of each."""
    of = PieceInput.contiguous
    of_conv, of_rule = (
        dict(zip(layer.operands, one, strict=True)) for layer, one in zip((conv, rule), given, strict=True)
    )
    rest = {name: of_rule[name] for name in rule.operands[CONVOLVED:]}
    signature = {
        **of_conv,
        "kept": of(("R", *conv.state_shape), conv.state_dtype(runtime.state_dtype)),
        **rest,
        "states": of(("R", *rule.state_shape), rule.state_dtype(runtime.state_dtype)),
        "rows": of(("B",), "int64"),
        "has_state": of(("B",), "bool"),
        "out": of(("T", *rule.out_shape), rule.out_dtype),
    }
    possible = (*conv.kind.operands, *rule.kind.operands[CONVOLVED:])
    absent = dict.fromkeys(name for name in possible if name not in signature)
    return WrittenPiece.calling(
        "gated_delta_mixer",
        signature,
        name=f"states_mixer_{index}",
        legend=_LEGEND,
        options=absent | asdict(conv.kind) | asdict(rule.kind),
        gives_tensor=False,
    )
