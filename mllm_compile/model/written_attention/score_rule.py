"""Tells what a model does to the scores q·kᵀ before their softmax, by running that stretch of its graph.

The stretch is a function of the scores and of places alone, or nothing is told of it. It is run on the CPU with scores
of our own, for few tokens and for many: what it gives shows the scale, which keys are seen, and what else there is.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from mllm_compile.passes.match.nodes import is_symbolic

_FEW_TOKENS = 6
_MOST_TOKENS = 1024
_MOST_SCORES = 1 << 24
_HIDDEN = -1e3  # a score that a mask has left; in float32 its weight is 0
_TOLERANCE = 1e-5


class NoRuleError(Exception):
    """The stretch does more to scores than a ScoreRule says."""


@dataclass(frozen=True)
class ScoreRule:
    """score = sm_scale · q·k + slope · (key's place − query's), for the keys that are seen.

    Attributes:
        alibi_slopes: of each head; () for none.
        is_causal: the stretch hides keys behind the query; if not, it hides none, and the mask is made elsewhere.
        window_left: earlier keys that are seen; -1: all.
    """

    sm_scale: float
    is_causal: bool
    window_left: int
    alibi_slopes: tuple[float, ...]


@dataclass
class ScoreRules:
    """Tells rules of stretches of one graph, of each kind of stretch once.

    Attributes:
        gm: the traced graph.
        constants: the values of its weights that are in no checkpoint, by name.
        max_positions: tokens of the longest text.
    """

    gm: fx.GraphModule
    constants: Mapping[str, torch.Tensor]
    max_positions: int
    _known: dict[str, ScoreRule] = field(default_factory=dict)

    def rule(self, product: fx.Node, scores: fx.Node) -> ScoreRule:
        """The rule of the stretch from `product`, q·kᵀ, to `scores`, what softmax is taken of.

        Raises:
            NoRuleError: it depends on more than scores and places, or is no such rule.
        """
        stretch = _Stretch(self.gm, product, scores, self.constants)
        key = stretch.text()
        if key not in self._known:
            self._known[key] = _rule_of(stretch, self.max_positions)
        return self._known[key]


def _rule_of(stretch: _Stretch, max_positions: int) -> ScoreRule:
    few = min(_FEW_TOKENS, max_positions)
    zero, one = (stretch.run(few, torch.full(stretch.shape(few), x, dtype=torch.float64)) for x in (0.0, 1.0))
    seen = zero > _HIDDEN
    if not bool(seen.diagonal(dim1=-2, dim2=-1).all()):
        raise NoRuleError("a token does not see itself")
    scale = float((one - zero)[seen].mean())
    some = torch.randn(stretch.shape(few), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted = zero + scale * some
    if not torch.allclose(stretch.run(few, some)[seen], wanted[seen], rtol=_TOLERANCE, atol=_TOLERANCE):
        raise NoRuleError("scores are not scaled alone")
    many = min(_MOST_TOKENS, max_positions, math.isqrt(_MOST_SCORES // stretch.num_heads()))
    bias = _run_of_many(stretch, many)
    many = bias.shape[-1]
    distance = torch.arange(many)[:, None] - torch.arange(many)
    seen = bias > _HIDDEN
    is_causal = not bool(seen.all())
    window = int(distance[seen.reshape(-1, many, many)[0]].max())
    window_left = -1 if window == many - 1 else window
    if is_causal and not bool((seen == ((distance >= 0) & (distance <= window))).all()):
        raise NoRuleError("what it hides is neither causal nor a causal window")
    return ScoreRule(scale, is_causal, window_left, _slopes_of(zero, bias, seen, stretch.num_heads()))


def _run_of_many(stretch: _Stretch, num_tokens: int) -> torch.Tensor:
    """Runs the stretch on zeros, of `num_tokens` tokens or half as many where its tables end before."""
    while True:
        try:
            return stretch.run(num_tokens, torch.zeros(stretch.shape(num_tokens)))
        except NoRuleError:
            num_tokens //= 2
            if num_tokens <= _FEW_TOKENS:
                raise


def _slopes_of(few: torch.Tensor, many: torch.Tensor, seen: torch.Tensor, num_heads: int) -> tuple[float, ...]:
    """The slopes of a bias [.., T, T] for few tokens and for many; of those that are `seen` no other may be there."""
    tokens = few.shape[-1]
    by_head = few.reshape(-1, tokens, tokens)
    slopes = (by_head[:, 1, 1] - by_head[:, 1, 0]).expand(num_heads) if tokens > 1 else by_head.new_zeros(num_heads)
    places = torch.arange(many.shape[-1], dtype=torch.float64)
    # A term that all keys of a query share changes no weight.
    relative = (many - many.diagonal(dim1=-2, dim2=-1)[..., None]).reshape(-1, *many.shape[-2:])
    wanted = slopes.view(-1, 1, 1) * (places - places[:, None])
    is_near = torch.isclose(relative, wanted, rtol=_TOLERANCE, atol=1e-4)
    if not bool((is_near | ~seen.reshape(relative.shape)).all()):
        raise NoRuleError("it adds a bias to scores that is not by distance")
    return tuple(slopes.tolist()) if bool(slopes.any()) else ()


class _Stretch:
    """The nodes between a product and the scores, in order."""

    def __init__(
        self, gm: fx.GraphModule, product: fx.Node, scores: fx.Node, constants: Mapping[str, torch.Tensor]
    ) -> None:
        self._product, self._scores, self._constants = product, scores, constants
        ids = next(node for node in gm.graph.nodes if node.meta.get("input_name") == "input_ids")
        self._symbol = ids.meta["val"].shape[0].node.expr
        wanted, found = [scores], set()
        while wanted:
            node = wanted.pop()
            if node not in found and not _is_of_sizes(node):
                found.add(node)
                wanted += operands_of(node)[2:] if node is product else node.all_input_nodes
        self._nodes = [node for node in gm.graph.nodes if node in found]

    def shape(self, num_tokens: int) -> tuple[int, ...]:
        """The product's shape for a text of so many tokens."""
        return tuple(self._size(size, num_tokens) for size in self._product.meta["val"].shape)

    def num_heads(self) -> int:
        return math.prod(self.shape(1))

    def text(self) -> str:
        """The same for stretches that compute the same."""
        names = {node: f"n{index}" for index, node in enumerate(self._nodes)}
        lines = [str(self._product.meta["val"].shape)]
        for node in self._nodes:
            name = node.meta.get("weight_name")
            value = node.meta.get("input_name") if name is None else self._digest(name)
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: names.get(arg, str(arg.meta["val"])))
            if node is self._product:
                args = tuple(names[operand] for operand in operands_of(node)[2:])
            lines.append(f"{node.op} {node.target if node.op != 'placeholder' else value} {args} {kwargs}")
        return "\n".join(lines)

    def run(self, num_tokens: int, product: torch.Tensor) -> torch.Tensor:
        """Runs the stretch on scores, on the CPU. Raises NoRuleError if it cannot be run."""
        values: dict[fx.Node, Any] = {}

        def value(arg: fx.Node) -> Any:
            return values[arg] if arg in values else self._of_sizes(arg, num_tokens)

        try:
            for node in self._nodes:
                if node is self._product:
                    values[node] = self._of_product(product, value)
                    continue
                args, kwargs = map(_in_float32_on_cpu, fx.map_arg((node.args, node.kwargs), value))
                if node.op == "placeholder":
                    values[node] = self._input(node, num_tokens)
                elif node.op == "call_function":
                    values[node] = node.target(*args, **kwargs)
                else:
                    values[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
        except NoRuleError:
            raise
        except Exception as error:  # a model's code, run with other sizes and dtypes than it was written for
            raise NoRuleError(f"it does not run by itself: {error}") from error
        scores: torch.Tensor = values[self._scores].double()
        return scores

    def _of_product(self, product: torch.Tensor, value: Any) -> torch.Tensor:
        if not is_named(self._product, "baddbmm"):
            return product
        beta, alpha = (float(self._product.kwargs.get(name, 1.0)) for name in ("beta", "alpha"))  # type: ignore[arg-type]
        total: torch.Tensor = beta * value(operands_of(self._product)[2]) + alpha * product
        return total

    def _input(self, node: fx.Node, num_tokens: int) -> torch.Tensor:
        if node.meta.get("input_name") == "positions":
            return torch.arange(num_tokens)
        name = node.meta.get("weight_name", "")
        if name not in self._constants:
            raise NoRuleError(f"it depends on {name or node.name}")
        return self._constants[name]

    def _digest(self, name: str) -> str:
        value = self._constants.get(name)
        if value is None:
            raise NoRuleError(f"it depends on {name}")
        return hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()

    def _of_sizes(self, node: fx.Node, num_tokens: int) -> Any:
        val = node.meta["val"]
        return (
            tuple(self._size(size, num_tokens) for size in val)
            if isinstance(val, tuple)
            else self._size(val, num_tokens)
        )

    def _size(self, size: Any, num_tokens: int) -> Any:
        if not is_symbolic(size):
            return size
        result = size.node.expr.subs({self._symbol: num_tokens})
        if result.free_symbols:
            raise NoRuleError(f"it depends on a size, {size}")
        return int(result)


def is_named(node: object, *names: str) -> bool:
    """True for a call of a function or a method of one of these names, of any module."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return False
    return (node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")) in names


def operands_of(product: fx.Node) -> list[Any]:
    """The factors of a product, and for baddbmm what is added to it."""
    if not is_named(product, "baddbmm"):
        return list(product.args)[:2]
    names = ("input", "batch1", "batch2")
    operands: list[Any] = list(product.args)
    operands += [product.kwargs[name] for name in names[len(operands) :]]
    return [*operands[1:3], operands[0]]


def _is_of_sizes(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return is_symbolic(val) or isinstance(val, torch.Size)


def _in_float32_on_cpu(arguments: Any) -> Any:
    """The arguments on the CPU, where the constants are, and in float32 instead of types that round more."""
    if isinstance(arguments, torch.device):
        return torch.device("cpu")
    if arguments is torch.bfloat16 or arguments is torch.float16:
        return torch.float32
    if isinstance(arguments, dict):
        return {name: _in_float32_on_cpu(one) for name, one in arguments.items()}
    if isinstance(arguments, tuple | list) and not isinstance(arguments, torch.Size):
        return type(arguments)(_in_float32_on_cpu(one) for one in arguments)
    return arguments


def nodes_of_scores(scores: fx.Node, tokens: Any) -> Iterator[fx.Node]:
    """The nodes of [.., T, T] that `scores` is made of, itself first; products are not looked into."""
    wanted, seen = [scores], set()
    while wanted:
        node = wanted.pop()
        if node in seen or not is_of_scores(node, tokens):
            continue
        seen.add(node)
        yield node
        if not is_named(node, "matmul", "bmm", "baddbmm"):
            wanted += node.all_input_nodes


def is_of_scores(node: fx.Node, tokens: Any) -> bool:
    """True for a tensor of [.., T, T]."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor) or val.dim() < 2:
        return False
    return all(is_number_of(size, tokens) for size in val.shape[-2:])


def is_number_of(size: Any, tokens: Any) -> bool:
    """True for T, and for what is T in all texts that are tried: a view's last size may be written T²·H // (T·H)."""
    if not is_symbolic(size) or size.node.expr.free_symbols != {tokens}:
        return False
    return size.node.expr == tokens or all(size.node.expr.subs({tokens: number}) == number for number in (7, 12, 8191))
