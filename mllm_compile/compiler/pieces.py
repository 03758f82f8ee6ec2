"""Pieces as their compiler takes them: sources, and operands whose sizes are numbers or symbols."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx

from mllm_compile.compiler.lowered import Lowered
from mllm_compile.compiler.piece_source import piece_source, size_of
from mllm_compile.errors import CompileError
from mllm_compile.inductor.job import PieceInput, PieceJob
from mllm_compile.passes.match.layer_kinds import PackedAttentionKind, StateLayerKind, lowered_kind
from mllm_compile.passes.match.nodes import is_call, is_weight
from mllm_compile.passes.sharding.calls import name_of
from mllm_compile.runtime.program.pieces import PACKAGE_SUFFIX, SOURCE_SUFFIX
from mllm_compile.runtime.program.steps import OF_SCORES
from mllm_compile.runtime.state.layer import StateLayer

_VIEWS = frozenset(
    ["view", "squeeze", "unsqueeze", "transpose", "permute", "t", "select", "narrow", "expand", "detach"]
)
_SIZE_NAMES = {
    "input_ids": "T",
    "hidden_states": "T",
    "logits_indices": "S",
    "keys": "P",
    "slots": "L",
    "pixel_values": "F",
    "taps": "G",
    "rows": "S",
}


def write_pieces(lowered: Lowered, folder: Path) -> list[PieceJob]:
    """Writes the source of every distinct piece; returns the jobs, beside the sources."""
    sources = []
    written: set[str] = set()
    for one in lowered.every:
        variants = {variant.piece: variant for variant in one.program.all_variants()}
        for piece in (*one.program.step_pieces(), *variants):
            if piece in written:  # programs share it
                continue
            written.add(piece)
            graph: Any = one.graph.get_submodule(piece)
            inputs = piece_inputs(graph, one.symbols)
            if piece in variants and variants[piece].max_size == 1:
                size = inputs[variants[piece].input].shape[variants[piece].dim]  # T, or S behind the gather
                inputs = tuple(spec.of_one(str(size)) for spec in inputs)
            sources.append((piece, piece_source(graph, piece, one.symbols), inputs))
    # The smallest last: with few workers the others begin first.
    sources += [(piece.name, piece.source, piece.inputs) for piece in lowered.written_pieces]
    jobs = []
    for piece, source, inputs in sources:
        source_path = folder / (piece + SOURCE_SUFFIX)
        source_path.write_text(source, encoding="utf-8")
        jobs.append(PieceJob(piece, source_path, inputs, folder / (piece + PACKAGE_SUFFIX)))
    return jobs


def size_symbols(graph: fx.GraphModule) -> dict[str, str]:
    """The symbols by their public names: {"u0": "T", "u2": "S"}, of a tower {"u0": "F"}, and G where it puts crops
    together; P (slots of the KV cache) where pieces write it, and L (slots to write) where they may leave that to
    attention: else there are T."""
    symbols: dict[str, str] = {}
    for node in graph.graph.nodes:
        if node.meta.get("input_name") in _SIZE_NAMES:
            symbols.setdefault(str(node.meta["val"].shape[0].node.expr), _SIZE_NAMES[node.meta["input_name"]])
    return symbols


def piece_inputs(piece: fx.GraphModule, symbols: dict[str, str]) -> tuple[PieceInput, ...]:
    """The piece's inputs, as the piece compiler needs them.

    Raises:
        CompileError: an input has a size that is neither a number nor a multiple of a symbol.
    """
    return tuple(_input_of(node, symbols) for node in piece.graph.nodes if node.op == "placeholder")


def state_operands(graph: fx.GraphModule) -> dict[str, tuple[PieceInput, ...]]:
    """Layer with a state → its operands, as the piece compiler needs them.

    Raises:
        CompileError: an operand has a size that is neither a number nor a multiple of a symbol.
    """
    symbols = size_symbols(graph)
    layers = [node for node in graph.graph.nodes if isinstance(lowered_kind(node), StateLayerKind)]
    return {str(node.args[2]): tuple(_input_of(value, symbols) for value in node.args[0]) for node in layers}


def packed_operands(graph: fx.GraphModule) -> dict[str, dict[str, PieceInput]]:
    """Attention over packed rows → its q, k and v, and what its scores get beside, as the piece compiler needs
    them, by the op's arguments. A value whose strides are no numbers stands as a contiguous one: it is copied.

    Raises:
        CompileError: one has a size that is neither a number nor a multiple of a symbol.
    """
    symbols = size_symbols(graph)
    found = {}
    for node in graph.graph.nodes:
        if isinstance(lowered_kind(node), PackedAttentionKind):
            operands: Any = node.args
            named = dict(zip("qkv", operands[:3], strict=True)) | of_scores(node)
            given = {name: _input_of(one, symbols) for name, one in named.items()}
            found[str(operands[6])] = {
                name: one
                if all(isinstance(step, int) for step in one.stride) and one.stride[-1] == 1
                else PieceInput.contiguous(one.shape, one.dtype)
                for name, one in given.items()
            }
    return found


def of_scores(node: fx.Node) -> dict[str, fx.Node]:
    """The values that scores over packed rows get beside queries and keys, by the op's arguments."""
    given: Any = dict(zip(OF_SCORES, node.args[10:], strict=False))
    return {name: value for name, value in given.items() if value is not None}


def layers_with_made_constants(graph: fx.GraphModule, layers: Sequence[StateLayer]) -> frozenset[str]:
    """The layers with a state for which a piece computes an operand without tokens: one that is neither a stored weight
    nor a view of one."""
    operands = {
        str(node.args[2]): node.args[0] for node in graph.graph.nodes if isinstance(lowered_kind(node), StateLayerKind)
    }
    return frozenset(
        layer.name
        for layer in layers
        for name, value in zip(layer.operands, operands[layer.name], strict=True)
        if name in layer.kind.constants and not _is_stored(graph, value)
    )


def _is_stored(graph: fx.GraphModule, node: fx.Node) -> bool:
    """True for a weight and a view of one, also where a piece makes the view."""
    if is_weight(node):
        return True
    if is_call(node, operator.getitem) and node.args[0].op == "call_module":  # type: ignore[union-attr]
        return _is_stored_by(graph, *node.args)  # type: ignore[arg-type]
    return False


def _is_stored_by(graph: fx.GraphModule, call: fx.Node, index: int) -> bool:
    """True if an output of a piece is a view of a weight that the piece is given."""
    piece: Any = graph.get_submodule(str(call.target))
    inputs = dict(zip((node for node in piece.graph.nodes if node.op == "placeholder"), call.args, strict=True))
    (outputs,) = piece.graph.output_node().args
    node = outputs[index] if isinstance(outputs, list | tuple) else outputs
    while node not in inputs and _is_view(node):
        node = node.args[0]
    return node in inputs and _is_stored(graph, inputs[node])


def _is_view(node: fx.Node) -> bool:
    """True for a call that copies nothing."""
    if is_call(node, operator.getitem):
        indices = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return all(index is None or index is ... or isinstance(index, int | slice) for index in indices)
    return name_of(node) in _VIEWS


def _input_of(node: fx.Node, symbols: dict[str, str]) -> PieceInput:
    val = node.meta["val"]
    shape = tuple(size_of(size, symbols) for size in val.shape)
    stride = tuple(size_of(step, symbols) for step in val.stride())
    if any(isinstance(size, str) and not _is_multiple(size, symbols) for size in shape):
        raise CompileError(
            f"input {node.name} has shape {list(shape)}: a size must be a number, one of "
            f"{', '.join(symbols.values())}, or a number times that"
        )
    return PieceInput(shape, stride, str(val.dtype).removeprefix("torch."))


def _is_multiple(size: str, symbols: dict[str, str]) -> bool:
    *factors, symbol = size.split("*")
    return symbol in symbols.values() and len(factors) <= 1 and all(factor.isdecimal() for factor in factors)
