"""Checks invariants of a graph and its pieces, each from some pass on; a compile checks them after every pass.

A pass need not be named here: what the passes ahead of it have brought about holds after it as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx
from torch._guards import detect_fake_mode

from mllm_compile.passes.base import VARIANTS
from mllm_compile.passes.match.in_place import writes_in_place
from mllm_compile.passes.match.layer_kinds import is_layer, is_traced_layer, traced_name
from mllm_compile.passes.match.nodes import is_symbolic
from mllm_compile.passes.match.spelling import is_spelled

Check = Callable[[fx.GraphModule], Iterator[str]]


class GraphInvariantError(AssertionError):
    """A pass broke an invariant: a bug of the pass, never a user's mistake."""


def verify_graph(gm: fx.GraphModule, done: Sequence[str]) -> None:
    """Checks what must hold when the passes called `done` have run, in the graph and in its pieces.

    Raises:
        GraphInvariantError: naming the last pass, the invariant and the node.
    """
    checks = [*ALWAYS, *(check for name in done for check in FROM.get(name, ()))]
    try:
        for _, graph in _graphs(gm):
            graph.lint()
        problems = [problem for check in checks for problem in check(gm)]
    except Exception as error:  # of FX, or of a check that meets what no graph should have
        raise GraphInvariantError(f"after {done[-1]}: {error}") from error
    if problems:
        raise GraphInvariantError(f"after {done[-1]}: " + "; ".join(problems[:5]))


def _graphs(gm: fx.GraphModule) -> Iterator[tuple[str, fx.Graph]]:
    """The graph and its pieces' graphs, each with the prefix of its nodes' names."""
    yield "", gm.graph
    for name, piece in gm.named_children():
        if isinstance(piece, fx.GraphModule):
            yield f"{name}.", piece.graph


def size_equalities(gm: fx.GraphModule) -> frozenset[str]:
    """The equalities of sizes (`Eq(u2, u0)`) that were assumed while this graph's values were computed."""
    mode = detect_fake_mode([node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")])
    if mode is None or mode.shape_env is None:
        return frozenset()
    asserts = (one.expr for some in mode.shape_env.deferred_runtime_asserts.values() for one in some)
    return frozenset(str(expr) for expr in asserts if isinstance(expr, sympy.Eq))


def no_new_size_equalities(gm: fx.GraphModule, known: frozenset[str]) -> None:
    """Checks that no pass computed a value that is right for some sizes alone. Fake tensors take a view of T tokens as
    S rows, note `Eq(u1, u0)`, and the failure would come at run time.

    Args:
        known: the equalities that the trace assumed.

    Raises:
        GraphInvariantError: naming what is assumed.
    """
    new = size_equalities(gm) - known
    if new:
        raise GraphInvariantError(f"its values are right only where {', '.join(sorted(new))} of the graph's sizes")


def every_node_has_a_value(gm: fx.GraphModule) -> Iterator[str]:
    for prefix, graph in _graphs(gm):
        for node in graph.nodes:
            if node.op in ("call_function", "call_method", "call_module", "placeholder") and "val" not in node.meta:
                yield f"{prefix}{node.name} has no meta['val']"


def inputs_are_named_tensors(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if is_symbolic(node.meta["val"]):
                yield f"input {node.name} is a size"
            elif not ("weight_name" in node.meta or "input_name" in node.meta):
                yield f"input {node.name} is neither a weight nor a batch input"


def nothing_writes_in_place(gm: fx.GraphModule) -> Iterator[str]:
    for prefix, graph in _graphs(gm):
        for node in graph.nodes:
            if writes_in_place(node):
                yield f"{prefix}{node.name} ({node.target}) writes into a tensor that others may read"


def operations_have_one_spelling(gm: fx.GraphModule) -> Iterator[str]:
    for prefix, graph in _graphs(gm):
        for node in graph.nodes:
            if not is_spelled(node):
                yield f"{prefix}{node.name} is not spelled as match/spelling.py has it: {node.format_node()}"


def layers_are_lowered(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        if is_traced_layer(node):
            yield f"{node.name} is still a trace-time {traced_name(node)}"


def only_pieces_and_layers(gm: fx.GraphModule) -> Iterator[str]:
    """Checks that after the split the parent graph computes nothing but pieces and layers."""
    allowed = (torch.ops.aten.sym_size.int, torch.ops.aten.new_empty.default)
    for node in gm.graph.nodes:
        if node.op == "call_method" or (
            node.op == "call_function"
            and node.target not in allowed
            and getattr(node.target, "__name__", "") != "getitem"
            and not is_layer(node)
        ):
            yield f"{node.name} ({node.target}) computes outside of a piece"


def pieces_are_functions_of_tensors(gm: fx.GraphModule) -> Iterator[str]:
    for name, piece in gm.named_children():
        if not isinstance(piece, fx.GraphModule):
            yield f"{name} is not a graph"
            continue
        for node in piece.graph.nodes:
            if node.op == "get_attr":
                yield f"{name}.{node.name} reads an attribute"
            if node.op == "placeholder" and is_symbolic(node.meta["val"]):
                yield f"{name}.{node.name}: a size crosses a cut"
            if is_traced_layer(node) or is_layer(node):
                yield f"{name}.{node.name}: a layer inside a piece"


def pieces_fit_their_calls(gm: fx.GraphModule) -> Iterator[str]:
    """Inputs and outputs of a piece are what its callers give and read."""
    for node in gm.graph.find_nodes(op="call_module"):
        piece: Any = gm.get_submodule(str(node.target))
        given = [arg.meta["val"] for arg in node.args]
        yield from _misfits(f"{node.target}, called by {node.name},", _ends_of(piece), (given, node.meta["val"]))


def variants_fit_their_pieces(gm: fx.GraphModule) -> Iterator[str]:
    """A variant for few tokens is in its piece's place."""
    for name, variants in gm.meta.get(VARIANTS, {}).items():
        piece: Any = gm.get_submodule(name)
        for variant_name in variants.values():
            variant: Any = gm.get_submodule(variant_name)
            yield from _misfits(f"{variant_name}, a variant of {name},", _ends_of(variant), _ends_of(piece))


_Ends = tuple[Sequence[Any], Sequence[Any]]  # values of inputs, and of outputs


def _ends_of(piece: fx.GraphModule) -> _Ends:
    output = piece.graph.output_node().args[0]
    inputs = [node.meta["val"] for node in piece.graph.find_nodes(op="placeholder")]
    return inputs, [node.meta["val"] for node in output]  # type: ignore[union-attr]


def _misfits(who: str, ours: _Ends, theirs: _Ends) -> Iterator[str]:
    symbols: dict[str, str] = {}  # equal pieces may be of T tokens at one call and of S rows at another
    for what, our_vals, their_vals in zip(("input", "output"), ours, theirs, strict=True):
        if len(our_vals) != len(their_vals):
            yield f"{who} has {len(our_vals)} {what}s in place of {len(their_vals)}"
            continue
        for index, (our_val, their_val) in enumerate(zip(our_vals, their_vals, strict=True)):
            if not _is_alike(our_val, their_val, symbols):
                yield f"{who} has {what} {index} {_form_of(our_val)} in place of {_form_of(their_val)}"


def _is_alike(ours: torch.Tensor, theirs: torch.Tensor, symbols: dict[str, str]) -> bool:
    sizes = [(str(one), str(other)) for one, other in zip(ours.shape, theirs.shape, strict=False)]
    return (
        (ours.dtype, ours.device, ours.dim()) == (theirs.dtype, theirs.device, theirs.dim())
        and all(one.isdecimal() == other.isdecimal() for one, other in sizes)
        and all(one == other if one.isdecimal() else symbols.setdefault(one, other) == other for one, other in sizes)
    )


def _form_of(val: torch.Tensor) -> str:
    return f"{str(val.dtype).removeprefix('torch.')} {[str(size) for size in val.shape]}"


ALWAYS: tuple[Check, ...] = (every_node_has_a_value,)
# By pass: what it brings about, and all after it leave.
FROM: dict[str, tuple[Check, ...]] = {
    "canonicalise": (inputs_are_named_tensors, nothing_writes_in_place, operations_have_one_spelling),
    "lower_attention": (layers_are_lowered,),
    "split_at_attention": (
        only_pieces_and_layers,
        pieces_are_functions_of_tensors,
        pieces_fit_their_calls,
        variants_fit_their_pieces,
    ),
}
