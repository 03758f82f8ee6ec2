"""Decides whether a traced model will be served right; a model that will not is refused with the reason.

Tracing proves nothing by itself: a model may bypass the attention interface, carry state from token to token, or branch
on sizes. check_trace reads the graph before any pass; self_check.py then runs the compiled program on small inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.hf_model import HFModel
from mllm_compile.passes.fx_match import is_attention, is_symbolic
from mllm_compile.trace import Trace


def check_trace(trace: Trace, hf_model: HFModel) -> None:
    """Raises UnsupportedModelError with every reason why the traced model would not be served right."""
    model_type = hf_model.model.config.model_type
    reasons = list(dict.fromkeys(_reasons(trace, hf_model)))
    if reasons:
        shown = "; ".join(reasons[:3]) + (f"; and {len(reasons) - 3} more" if len(reasons) > 3 else "")
        raise UnsupportedModelError(
            f"{model_type!r} models would not be served right: {shown}. docs/models.md lists what is."
        )


def _reasons(trace: Trace, hf_model: HFModel) -> Iterator[str]:
    gm = trace.graph_module
    attentions = [node for node in gm.graph.nodes if is_attention(node)]
    yield from _direct_attention(gm)
    if not attentions:
        yield "no attention goes through Transformers' attention interface"
    for node in attentions:
        yield from _attention_reasons(node)
    yield from _window_reasons(attentions, hf_model.text_config)
    yield from _state_reasons(gm)
    yield from _size_reasons(trace)


def _direct_attention(gm: fx.GraphModule) -> Iterator[str]:
    names = ("scaled_dot_product_attention", "flex_attention")
    for node in gm.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "__name__", "") in names:
            yield f"{node.name} calls {node.target.__name__} directly, past the attention interface ({_where(node)})"


def _attention_reasons(node: fx.Node) -> Iterator[str]:
    refusals = str(node.args[7])
    if refusals:
        yield f"its attention passes {refusals} ({_where(node)})"
    sinks = node.args[3]
    if isinstance(sinks, fx.Node) and "weight_name" not in sinks.meta:
        yield f"its attention sinks are computed, not a weight ({_where(node)})"


def _window_reasons(attentions: list[fx.Node], config: Any) -> Iterator[str]:
    """Windows may live in a model's mask alone, which was never built: compare with what the config says of layers."""
    layer_types = getattr(config, "layer_types", None) or []
    if any("chunked" in kind for kind in layer_types):
        yield "chunked local attention lives only in its mask"
    windowed = sum(int(node.args[6]) >= 0 for node in attentions)  # type: ignore[arg-type]
    sliding = sum("sliding" in kind for kind in layer_types)
    if layer_types and len(layer_types) == len(attentions) and windowed != sliding:
        yield f"its config says {sliding} sliding-window layers, its attention calls {windowed}"
    if not layer_types and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        if windowed == 0:
            yield f"its config has sliding_window {config.sliding_window}, which no attention call passes on"


def _state_reasons(gm: fx.GraphModule) -> Iterator[str]:
    """In-place writes on inputs would change weights or constants from step to step."""
    for node in gm.graph.nodes:
        in_place = node.op == "call_method" and node.target.endswith("_") and not node.target.endswith("__")
        in_place |= node.op == "call_function" and node.target in (operator.setitem, operator.iadd, operator.imul)
        target = node.args[0] if in_place and node.args else None
        if isinstance(target, fx.Node) and target.op == "placeholder":
            yield f"{node.name} writes into {target.meta.get('weight_name', target.name)}"


def _size_reasons(trace: Trace) -> Iterator[str]:
    """No T×T tensor, no size that depends on data, no branch on the number of tokens."""
    gm = trace.graph_module
    known = {node.meta["val"].shape[0].node.expr for node in gm.graph.nodes if node.meta.get("input_name")}
    tokens = _input_size(gm, "input_ids")
    for node in gm.graph.nodes:
        for dims in _shapes(node.meta.get("val")):
            symbols = {symbol for dim in dims if is_symbolic(dim) for symbol in dim.node.expr.free_symbols}
            if symbols - known:
                yield f"{node.name} has a size that depends on data ({_where(node)})"
            if sum(is_symbolic(dim) and tokens in dim.node.expr.free_symbols for dim in dims) > 1:
                yield f"{node.name} is a tokens × tokens tensor: attention or a mask of its own ({_where(node)})"
        if node.op == "call_function" and node.target is torch.ops.aten._assert_scalar.default:
            yield from _guard_reasons(node, trace.max_tokens)


def _guard_reasons(node: fx.Node, max_tokens: int) -> Iterator[str]:
    """The range that the trace was made for, and equal sizes of equal inputs, are no branches."""
    condition = node.args[0]
    if not isinstance(condition, fx.Node) or not is_symbolic(condition.meta.get("val")):
        return
    operands = [arg for arg in condition.args if not isinstance(arg, fx.Node)]
    in_range = (condition.target is operator.ge and operands == [1]) or (
        condition.target is operator.le and operands == [max_tokens]
    )
    if not in_range and condition.target is not operator.eq:
        yield f"it branches on the number of tokens: {condition.meta['val']}"


def _input_size(gm: fx.GraphModule, name: str) -> Any:
    return next(n.meta["val"].shape[0].node.expr for n in gm.graph.nodes if n.meta.get("input_name") == name)


def _shapes(val: Any) -> Iterator[tuple[Any, ...]]:
    for tensor in val if isinstance(val, tuple | list) else (val,):
        if isinstance(tensor, torch.Tensor):
            yield tuple(tensor.shape)


def _where(node: fx.Node) -> str:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0].partition("].model.")[2] or "the model itself" if stack else "the model itself"
