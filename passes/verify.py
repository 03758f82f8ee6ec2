"""Invariants of the graph after each stage, declared in one table; a compile checks them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import sympy
import torch
from torch import fx
from torch._guards import detect_fake_mode

from mllm_compile.passes.match.nodes import is_attention, is_attention_with_output, is_symbolic

Check = Callable[[fx.GraphModule], Iterator[str]]


class GraphInvariantError(AssertionError):
    """A pass broke an invariant: a bug of the pass, never a user's mistake."""


def verify_graph(gm: fx.GraphModule, after: str) -> None:
    """Checks what must hold after the pass called `after`.

    Raises:
        GraphInvariantError: naming the pass, the invariant and the node.
    """
    gm.graph.lint()
    problems = [problem for check in (*ALWAYS, *AFTER.get(after, ())) for problem in check(gm)]
    if problems:
        raise GraphInvariantError(f"after {after}: " + "; ".join(problems[:5]))


def size_equalities(gm: fx.GraphModule) -> frozenset[str]:
    """The equalities of sizes (`Eq(u2, u0)`) that were assumed while this graph's values were computed."""
    mode = detect_fake_mode([node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")])
    if mode is None or mode.shape_env is None:
        return frozenset()
    asserts = (one.expr for some in mode.shape_env.deferred_runtime_asserts.values() for one in some)
    return frozenset(str(expr) for expr in asserts if isinstance(expr, sympy.Eq))


def no_new_size_equalities(gm: fx.GraphModule, known: frozenset[str]) -> None:
    """Checks that a pass computed no value that is right for some sizes alone: fake tensors take a view of T tokens as
    S rows, note `Eq(u1, u0)`, and leave it to run time to fail.

    Args:
        known: the equalities that the trace assumed.

    Raises:
        GraphInvariantError: naming what is assumed.
    """
    new = size_equalities(gm) - known
    if new:
        raise GraphInvariantError(f"its values are right only where {', '.join(sorted(new))} of the graph's sizes")


def every_node_has_a_value(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method", "call_module", "placeholder") and "val" not in node.meta:
            yield f"{node.name} has no meta['val']"


def inputs_are_named_tensors(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            if is_symbolic(node.meta["val"]):
                yield f"input {node.name} is a size"
            elif not ("weight_name" in node.meta or "input_name" in node.meta):
                yield f"input {node.name} is neither a weight nor a batch input"


def attention_is_lowered(gm: fx.GraphModule) -> Iterator[str]:
    for node in gm.graph.nodes:
        if is_attention(node):
            yield f"{node.name} is still a trace-time attention"


def only_pieces_and_attention(gm: fx.GraphModule) -> Iterator[str]:
    """Checks that after the split the parent graph computes nothing but pieces and attention."""
    allowed = (torch.ops.aten.sym_size.int, torch.ops.aten.new_empty.default)
    for node in gm.graph.nodes:
        if node.op == "call_method" or (
            node.op == "call_function"
            and node.target not in allowed
            and getattr(node.target, "__name__", "") != "getitem"
            and not is_attention_with_output(node)
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
            if is_attention(node) or is_attention_with_output(node):
                yield f"{name}.{node.name}: attention inside a piece"


ALWAYS: tuple[Check, ...] = (every_node_has_a_value,)
_TRACED: tuple[Check, ...] = (inputs_are_named_tensors,)
_LOWERED: tuple[Check, ...] = (inputs_are_named_tensors, attention_is_lowered)
_SPLIT: tuple[Check, ...] = (attention_is_lowered, only_pieces_and_attention, pieces_are_functions_of_tensors)
# Every pass of the pipeline, in its order.
AFTER: dict[str, tuple[Check, ...]] = {
    "canonicalise": _TRACED,
    "multiply_outer_products": _TRACED,
    "pack_projections": _TRACED,
    "lower_attention": _LOWERED,
    "fuse_rope_cache": _LOWERED,
    "rotate_in_attention": _LOWERED,
    "gather_rows_early": _LOWERED,
    "split_at_attention": _SPLIT,
    "deduplicate_pieces": _SPLIT,
    "fuse_single_token": _SPLIT,
    "stream_linears": _SPLIT,
    "fuse_few_tokens": _SPLIT,
    "fuse_gated_linear": _SPLIT,
    "fuse_silu_mul": _SPLIT,
}
