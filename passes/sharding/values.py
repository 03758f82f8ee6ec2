"""A graph's values with a few tokens in place of T and S: their shapes in numbers, and views that run on integers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import fx

from mllm_compile.passes.match.nodes import is_symbolic

_TOKENS, _ROWS = 3, 2  # in place of T and S


class Values:
    """The values of one graph."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self._sizes: dict[str, int] = {}  # the number in place of each symbol but T
        for node in gm.graph.find_nodes(op="placeholder"):
            if node.meta.get("input_name") == "logits_indices":
                self._sizes[str(node.meta["val"].shape[0].node.expr)] = _ROWS

    def shape(self, node: fx.Node) -> tuple[int, ...]:
        """The shape of a value, with a few tokens."""
        return tuple(self.number(size) for size in node.meta["val"].shape)

    def number(self, value: Any) -> Any:
        """A size as a number."""
        if not is_symbolic(value):
            return value
        expr = value.node.expr
        return int(expr.subs({symbol: self._sizes.get(str(symbol), _TOKENS) for symbol in expr.free_symbols}))

    def run(self, node: fx.Node, operand: Callable[[fx.Node], np.ndarray], args: Any = None, target: Any = None) -> Any:
        """Runs a view on integers in its operands' places."""

        def argument(one: fx.Node) -> Any:
            val = one.meta["val"]
            if isinstance(val, torch.Size | tuple | list) and not any(isinstance(v, torch.Tensor) for v in val):
                return type(val)(self.number(size) for size in val)
            if isinstance(val, torch.Tensor):
                return torch.from_numpy(np.ascontiguousarray(operand(one)))
            if isinstance(val, tuple | list):
                return [torch.from_numpy(np.ascontiguousarray(part)) for part in operand(one)]
            return self.number(val)

        args = fx.map_arg(node.args if args is None else args, argument)
        kwargs = fx.map_arg(node.kwargs, argument)
        target = node.target if target is None else target
        result = getattr(args[0], target)(*args[1:], **kwargs) if isinstance(target, str) else target(*args, **kwargs)
        return [part.numpy() for part in result] if isinstance(result, tuple | list) else result.numpy()

    def zeros(self, node: fx.Node) -> Any:
        """Labels of a whole value."""
        val = node.meta["val"]
        if isinstance(val, tuple | list):
            return [np.zeros([self.number(size) for size in one.shape], dtype=np.int64) for one in val]
        return np.zeros(self.shape(node), dtype=np.int64)
