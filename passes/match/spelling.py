"""Gives each operation one spelling in a canonical graph, out of Python's, torch's and Tensor's names for it.

Models write `x * y`, `torch.mul(x, y)` and `x.mul(y)`, and give arguments by place or by name. One of these is left by
canonicalise, by the table below. So a pass matches one target and reads arguments by place. Other operations have a
single spelling in practice, or are read by no pass; they stay as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.nn import functional

Target = Callable[..., Any] | str  # of a call_function node, or of a call_method one


class Operation(NamedTuple):
    """An operation of the table.

    Attributes:
        target: how a canonical graph calls it: the operator where Python has one, else torch's function, else the
            method.
        others: its other spellings; each takes the same operands in the same order.
        names: its arguments' names by place, the first included. A call with an argument beyond these (`alpha=`,
            `rounding_mode=`, `dtype=`) is another operation, and left as it is. `inplace` is the last, and left out:
            in a functional graph it says False.
        takes_many: the second argument may be given as several, as sizes are.
    """

    target: Target
    others: tuple[Target, ...] = ()
    names: tuple[str, ...] = ("input", "other")
    takes_many: bool = False


_UNARY = ("input",)

OPERATIONS = (
    Operation(operator.add, (torch.add, "add", "__add__")),
    Operation(operator.sub, (torch.sub, torch.subtract, "sub", "subtract", "__sub__")),
    Operation(operator.mul, (torch.mul, torch.multiply, "mul", "multiply", "__mul__")),
    Operation(operator.truediv, (torch.div, torch.divide, torch.true_divide, "div", "divide", "true_divide")),
    Operation(operator.pow, (torch.pow, "pow", "__pow__"), ("input", "exponent")),
    Operation(operator.neg, (torch.neg, torch.negative, "neg", "negative"), _UNARY),
    Operation(operator.matmul, (torch.matmul, "matmul", "__matmul__")),
    Operation(torch.bmm, ("bmm",), ("input", "mat2")),
    Operation(torch.square, ("square",), _UNARY),
    Operation(torch.sqrt, ("sqrt",), _UNARY),
    Operation(torch.rsqrt, ("rsqrt",), _UNARY),
    Operation(torch.tanh, ("tanh", functional.tanh), _UNARY),
    Operation(torch.sigmoid, ("sigmoid", functional.sigmoid), _UNARY),
    Operation(torch.relu, ("relu", functional.relu), ("input", "inplace")),
    Operation(torch.clamp, (torch.clip, "clamp", "clip"), ("input", "min", "max")),
    Operation(torch.mean, ("mean",), ("input", "dim", "keepdim")),
    Operation(torch.cat, (torch.concat, torch.concatenate), ("tensors", "dim")),
    Operation(torch.split, ("split",), ("tensor", "split_size_or_sections", "dim")),
    Operation(torch.chunk, ("chunk",), ("input", "chunks", "dim")),
    Operation(torch.transpose, ("transpose", torch.swapaxes, "swapaxes"), ("input", "dim0", "dim1")),
    Operation(torch.unsqueeze, ("unsqueeze",), ("input", "dim")),
    Operation(torch.flatten, ("flatten",), ("input", "start_dim", "end_dim")),
    Operation(torch.reshape, ("reshape",), ("input", "shape"), takes_many=True),
    Operation(functional.linear, (), ("input", "weight", "bias")),
    Operation(functional.silu, (), ("input", "inplace")),
    Operation(functional.layer_norm, (), ("input", "normalized_shape", "weight", "bias", "eps")),
    Operation(functional.dropout, (), ("input", "p", "training", "inplace")),
    Operation("to", (), ("input", "dtype")),
)
# Methods that are `to` with a dtype that their name, or their operand, says.
_TO_DTYPE = ("float", "half", "bfloat16", "double", "type_as")

OTHER_SPELLINGS: frozenset[Target] = frozenset(other for one in OPERATIONS for other in one.others)
_BY_SPELLING = {spelling: one for one in OPERATIONS for spelling in (one.target, *one.others)}
# Other names of an argument in torch's and Python's spellings.
_SYNONYMS = {"self": "input", "axis": "dim", "keepdims": "keepdim", "axis0": "dim0", "axis1": "dim1"}
_SYNONYMS |= {"split_size": "split_size_or_sections"}


def spell(gm: fx.GraphModule) -> int:
    """Gives every call of the table its one spelling; returns how many had another."""
    return sum(_spell(node) for node in gm.graph.nodes if node.op in ("call_function", "call_method"))


def is_spelled(node: fx.Node) -> bool:
    """True if `spell` would leave the node as it is."""
    return _spelled(node) is None


def _spell(node: fx.Node) -> bool:
    spelled = _spelled(node)
    if spelled is None:
        return False
    target, args, kwargs = spelled
    node.op = "call_method" if isinstance(target, str) else "call_function"
    node.target, node.args, node.kwargs = target, args, kwargs
    return True


def _spelled(node: fx.Node) -> tuple[Target, tuple[Any, ...], dict[str, Any]] | None:
    """The node's call in its one spelling, None if it has it already."""
    target = node.target
    if node.op == "call_method" and target in _TO_DTYPE:
        is_plain = not node.kwargs and len(node.args) == (2 if target == "type_as" else 1)
        return ("to", (node.args[0], node.meta["val"].dtype), {}) if is_plain else None
    if target == "scatter":
        return _with_a_number_of_its_dtype(node)
    if target is operator.getitem:
        return _by_slices(node)
    operation = _BY_SPELLING.get(target)
    if operation is None or not _is_of_tensors(node):
        return None
    arguments = _by_place(node, operation)
    if arguments is None or (target == operation.target and arguments == (node.args, node.kwargs)):
        return None
    return operation.target, *arguments


def _with_a_number_of_its_dtype(node: fx.Node) -> tuple[Target, tuple[Any, ...], dict[str, Any]] | None:
    """`x.scatter(dim, index, 1)` into floats with 1.0, or None.

    Of an index of one column Inductor of torch 2.11 makes a tensor of the number, which then has the number's dtype.
    """
    is_whole = len(node.args) == 4 and type(node.args[3]) is int
    if not is_whole or not node.meta["val"].is_floating_point():
        return None
    return "scatter", (*node.args[:3], float(node.args[3])), node.kwargs  # type: ignore[arg-type]


def _by_slices(node: fx.Node) -> tuple[Target, tuple[Any, ...], dict[str, Any]] | None:
    """`x[..., [-2]]` as `x[..., -2:-1]`; None if there is no list, or one of several numbers.

    A list is brought to the GPU whenever it is read, which no captured graph can do.
    """
    index = node.args[1]
    lists = [part for part in index if isinstance(part, list)] if isinstance(index, tuple) else []
    if len(lists) != 1 or len(lists[0]) != 1 or type(lists[0][0]) is not int or not _is_of_tensors(node):
        return None
    (place,) = lists[0]
    sliced = slice(place, place + 1 or None)
    return operator.getitem, (node.args[0], tuple(sliced if part is lists[0] else part for part in index)), {}  # type: ignore[union-attr]


def _is_of_tensors(node: fx.Node) -> bool:
    """True for a call on tensors: sizes and lists of them are added too, by other operations."""
    return any(isinstance(arg.meta.get("val"), torch.Tensor) for arg in node.all_input_nodes) and isinstance(
        node.meta.get("val"), torch.Tensor | tuple | list
    )


def _is_of_sizes(arg: object) -> bool:
    """True for a value that is several sizes, as `x.shape[:-1] + (2, 4)` is."""
    return isinstance(arg, fx.Node) and isinstance(arg.meta.get("val"), tuple)


def _by_place(node: fx.Node, operation: Operation) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments by place, and by name those behind one that is left out; None where the call has others."""
    args, names = node.args, operation.names
    if operation.takes_many and len(args) > 1 and not _is_of_sizes(args[1]):
        sizes = args[1] if len(args) == 2 and isinstance(args[1], tuple | list) else args[1:]
        # `x.reshape(y.size())` is given all sizes as one value.
        is_one = len(sizes) == 1 and isinstance(sizes[0], fx.Node) and isinstance(sizes[0].meta.get("val"), torch.Size)
        args = (args[0], sizes[0] if is_one else tuple(sizes))
    given = {_SYNONYMS.get(name, name): value for name, value in node.kwargs.items()}
    if names[-1] == "inplace":
        given.pop("inplace", None)
        names, args = names[:-1], args[: len(names) - 1]
    if len(args) > len(names) or not given.keys() <= set(names):
        return None
    placed = list(args)
    for name in names[len(args) :]:
        if name not in given:
            break
        placed.append(given.pop(name))
    return tuple(placed), given
