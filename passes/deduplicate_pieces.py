"""Makes equal pieces one module, named by the hash of what they compute."""

from __future__ import annotations

import hashlib
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import GraphPass, PassResult
from mllm_compile.passes.match.nodes import is_symbolic
from mllm_compile.passes.split_at_attention import PIECE_PREFIX


class DeduplicatePieces(GraphPass):
    """Shares one compiled binary among all layers that are alike.

    Why: a 36-layer model has three distinct pieces; compiling 37 costs twelve times as much for the same code.

    Before::

        a = piece_0(…); b = piece_1(…); c = piece_2(…); d = piece_3(…)

    After::

        a = piece_5f…(…); b = piece_91…(…); c = piece_91…(…); d = piece_c0…(…)

    Requires: pieces whose inputs are in order of first use. The hash is over canonical names (no layer strings), ops,
        constants, shapes with T and S, strides, dtypes and devices.
    Preserves: every value bitwise.
    """

    name: ClassVar[str] = "deduplicate_pieces"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        calls = [node for node in gm.graph.nodes if node.op == "call_module"]
        matches = 0
        for node in calls:
            old_name = str(node.target)
            piece = gm.get_submodule(old_name)
            new_name = PIECE_PREFIX + piece_hash(piece)
            if hasattr(gm, new_name):
                matches += old_name != new_name
            else:
                gm.add_module(new_name, piece)
            node.target = new_name
        gm.delete_all_unused_submodules()
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def piece_hash(piece: torch.nn.Module) -> str:
    """16 hex digits over all that decides Inductor's output for a piece's graph."""
    return hashlib.sha256(canonical_text(piece).encode()).hexdigest()[:16]


def canonical_text(piece: torch.nn.Module) -> str:
    """The piece's graph with nodes numbered in order, one a line."""
    assert isinstance(piece, fx.GraphModule), "pieces are graph modules"
    numbers: dict[fx.Node, str] = {}
    symbols: dict[str, str] = {}
    lines = []
    for node in piece.graph.nodes:
        numbers[node] = f"%{len(numbers)}"
        if node.op == "placeholder":
            lines.append(f"{numbers[node]} = input {_describe(node.meta['val'], symbols)}")
            continue
        args = fx.map_arg((node.args, node.kwargs), lambda arg: _Verbatim(numbers[arg]))
        lines.append(f"{numbers[node]} = {node.op} {_target(node.target)} {args}")
    return "\n".join(lines)


class _Verbatim(str):
    """Prints without quotes, so that a node's number is not taken for a string constant."""

    def __repr__(self) -> str:
        return str(self)


def _target(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return fx.node._get_qualified_name(target)


def _describe(val: Any, symbols: dict[str, str]) -> str:
    def size(value: Any) -> str:
        if not is_symbolic(value):
            return str(value)
        expression = str(value.node.expr)
        return symbols.setdefault(expression, f"s{len(symbols)}")

    shape = ", ".join(size(dim) for dim in val.shape)
    strides = ", ".join(size(stride) for stride in val.stride())
    return f"{val.dtype} {val.device} [{shape}] / [{strides}]"
