"""Finds softmax(q·kᵀ)·v in a trace, and puts the op of attention in its place.

The graph may define the visible keys. Otherwise Transformers' masks do, and a trace has no masks: the check of the
trace then asks for them (model/mask_probe.py). The self-check is the proof of the whole.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mllm_compile.model.written_attention.score_rule import (
    NoRuleError,
    ScoreRule,
    ScoreRules,
    is_named,
    is_number_of,
    is_of_scores,
    nodes_of_scores,
    operands_of,
)
from mllm_compile.passes.match.nodes import call, is_symbolic, recompute_value

logger = logging.getLogger(__name__)

# node.meta key of an attention that was found so: True where the graph says which keys it sees.
KNOWS_ITS_MASK = "knows_its_mask"

# Ops that may be between softmax and the product with values, and change no number.
_BETWEEN = ("to", "type_as", "type", "float", "half", "dropout", "view", "reshape", "contiguous", "clone")


def find_attention(gm: fx.GraphModule, constants: Mapping[str, torch.Tensor], max_positions: int) -> int:
    """Replaces attention that the graph writes out by calls of mllm::attention; returns how often.

    Args:
        gm: a traced graph; each node has `meta["val"]`.
        constants: values of weights that are in no checkpoint, by name.
        max_positions: tokens of the longest text.
    """
    ids = next((node for node in gm.graph.nodes if node.meta.get("input_name") == "input_ids"), None)
    if ids is None:
        return 0
    tokens = ids.meta["val"].shape[0].node.expr
    rules = ScoreRules(gm, constants, max_positions)
    count = 0
    for softmax in [node for node in gm.graph.nodes if is_named(node, "softmax") and is_of_scores(node, tokens)]:
        scores: Any = softmax.args[0] if softmax.args else softmax.kwargs["input"]
        product = _only_product(scores, tokens)
        output = _product_with_values(softmax, tokens)
        if product is None or output is None or not _is_over_keys(softmax):
            continue
        try:
            rule = rules.rule(product, scores)
        except NoRuleError as reason:
            logger.info("%s is no attention that is known: %s", softmax.name, reason)
            continue
        _replace(gm.graph, product, output, rule)
        count += 1
    if count:
        gm.graph.eliminate_dead_code()
        gm.recompile()
    return count


def _is_over_keys(softmax: fx.Node) -> bool:
    dim = softmax.kwargs.get("dim", softmax.args[1] if len(softmax.args) > 1 else None)
    return isinstance(dim, int) and dim % softmax.meta["val"].dim() == softmax.meta["val"].dim() - 1


def _only_product(scores: fx.Node, tokens: Any) -> fx.Node | None:
    """The product q·kᵀ that scores are made of; None unless there is exactly one."""
    found = [node for node in nodes_of_scores(scores, tokens) if is_named(node, "matmul", "bmm", "baddbmm")]
    if len(found) != 1 or len(_factors(found[0])) != 2:
        return None
    q, k = _factors(found[0])
    (*_, rows, width), (*_, depth, columns) = q.meta["val"].shape, k.meta["val"].shape
    is_of_tokens = is_number_of(rows, tokens) and is_number_of(columns, tokens) and not is_symbolic(width)
    return found[0] if is_of_tokens and width == depth and _has_heads(q) and _has_heads(k) else None


def _product_with_values(softmax: fx.Node, tokens: Any) -> fx.Node | None:
    """The product of the softmax with values [.., T, Dv]."""
    wanted = [softmax]
    while wanted:
        node = wanted.pop()
        for user in node.users:
            if is_named(user, "matmul", "bmm") and len(_factors(user)) == 2 and user.args[0] is node:
                values: Any = user.args[1]
                if is_number_of(values.meta["val"].shape[-2], tokens) and _has_heads(values):
                    return user
            elif is_named(user, *_BETWEEN) and user.args[0] is node and is_of_scores(user, tokens):
                wanted.append(user)
    return None


def _factors(product: fx.Node) -> list[Any]:
    factors = operands_of(product)[:2]
    return [one for one in factors if isinstance(one, fx.Node) and isinstance(one.meta.get("val"), torch.Tensor)]


def _has_heads(node: fx.Node) -> bool:
    """True for [H, .., ..] and [1, H, .., ..]."""
    shape = node.meta["val"].shape
    return len(shape) == 3 or (len(shape) == 4 and isinstance(shape[0], int) and shape[0] == 1)


def _replace(graph: fx.Graph, product: fx.Node, output: fx.Node, rule: ScoreRule) -> None:
    q, k = _factors(product)
    v: Any = output.args[1]
    dtype, dim = output.meta["val"].dtype, output.meta["val"].dim()
    with graph.inserting_before(output):
        k = call(graph, torch.transpose, k, -2, -1)
        operands = [_by_token(graph, one, dtype) for one in (q, k, v)]
        said = (None, rule.sm_scale, 0.0, rule.window_left, "", list(rule.alibi_slopes) or None)
        attention = call(graph, torch.ops.mllm.attention.default, *operands, *said)
        attention.meta["nn_module_stack"] = output.meta.get("nn_module_stack", {})
        attention.meta[KNOWS_ITS_MASK] = rule.is_causal
        by_head = call(graph, torch.transpose, attention, 0, 1)
        by_head = call(graph, torch.unsqueeze, by_head, 0) if dim == 4 else by_head
        by_head = _method(graph, "contiguous", by_head)
    output.replace_all_uses_with(by_head)
    graph.erase_node(output)


def _by_token(graph: fx.Graph, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    """[T, H, D] of [1, H, T, D] or [H, T, D], in the values' type: some models compute scores in float32."""
    if node.meta["val"].dim() == 4:
        node = call(graph, operator.getitem, node, 0)
    node = call(graph, torch.transpose, node, 0, 1)
    if node.meta["val"].dtype != dtype:
        node = _method(graph, "to", node, dtype)
    return _method(graph, "contiguous", node)


def _method(graph: fx.Graph, name: str, *args: Any) -> fx.Node:
    node = graph.call_method(name, args)
    recompute_value(node)
    return node
