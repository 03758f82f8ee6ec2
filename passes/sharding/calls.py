"""Calls by what they do to the elements of a value: move them, work on each, or multiply them with a weight."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from mllm_compile.passes.match.nodes import LINEAR, is_call, is_op, is_weight

VIEWS = frozenset(
    [
        "view",
        "reshape",
        "transpose",
        "permute",
        "contiguous",
        "unsqueeze",
        "squeeze",
        "getitem",
        "split",
        "chunk",
        "expand",
        "flatten",
        "unflatten",
        "unbind",
        "narrow",
        "repeat_interleave",
        "flip",
        "clone",
        "swapaxes",
        "movedim",
        "t",
        "repeat",
        "index_select",
    ]
)
POINTWISE = frozenset(
    [
        "add",
        "sub",
        "mul",
        "truediv",
        "neg",
        "pow",
        "silu",
        "gelu",
        "relu",
        "sigmoid",
        "tanh",
        "square",
        "sqrt",
        "rsqrt",
        "exp",
        "log",
        "softplus",
        "clamp",
        "clip",
        "where",
        "abs",
        "mish",
        "hardtanh",
        "leaky_relu",
        "minimum",
        "maximum",
        "erf",
        "cos",
        "sin",
        "log1p",
        "masked_fill",
        "elu",
        "floor_divide",
        "to",
        "dropout",
        "relu6",
        "hardswish",
        "reciprocal",
        "expm1",
        "gt",
        "ge",
        "lt",
        "le",
    ]
)

COMPLEX = frozenset(["view_as_complex", "view_as_real"])  # of two numbers, in the last dimension


def name_of(node: fx.Node) -> str:
    """The name of what a node calls; of the lesser or greater of two values, the one that cannot be a reduction."""
    target: Any = node.target
    name: str = target if isinstance(target, str) else getattr(target, "__name__", str(target)).partition(".")[0]
    is_of_two = name in ("min", "max") and len(node.args) == 2 and isinstance(node.args[1], fx.Node)
    return f"{name}imum" if is_of_two else name


class Product:
    """A product with a weight: which dimension of it makes outputs, and which its inputs meet.

    Attributes:
        source, weight, bias: the nodes.
        outputs, inputs: dimensions of the weight.
        is_from_left: the weight times the source, whose features are its last dimension but one.
    """

    def __init__(
        self,
        source: fx.Node,
        weight: fx.Node,
        bias: fx.Node | None,
        outputs: int,
        inputs: int,
        is_from_left: bool = False,
    ) -> None:
        self.source, self.weight, self.bias = source, weight, bias
        self.outputs, self.inputs = outputs, inputs
        self.is_from_left = is_from_left

    @classmethod
    def of(cls, node: fx.Node) -> Product | None:
        """None where the node is no product with a weight as it is."""
        args: Any = node.args
        found = None
        if is_call(node, LINEAR):
            found = cls(args[0], args[1], args[2] if len(args) > 2 else None, 0, 1)
        elif is_call(node, torch.addmm) and not node.kwargs:
            found = cls(args[1], args[2], args[0], 1, 0)
        elif is_call(node, operator.matmul) and is_weight(args[0]) and args[0].meta["val"].dim() == 2:
            found = cls(args[1], args[0], None, 0, 1, is_from_left=True)
        elif is_op(node, "expert_linear"):
            is_transposed = bool(args[4])
            found = cls(args[0], args[2], args[3], 2 if is_transposed else 1, 1 if is_transposed else 2)
        if found is None or not is_weight(found.weight) or not (found.bias is None or is_weight(found.bias)):
            return None
        return found
