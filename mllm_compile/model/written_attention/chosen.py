"""Sparse attention of long texts: the indexer's queries, weights and keys become operands of attention.

An indexer (indexed.py) computes scores of all pairs of tokens and takes the best keys of each. A trace has its own
code, with one key, or block of one, to choose. That ends in a call of attention that is told `indices`. Here the graph
is read backwards from these to what the scores are made of, and the scores go. What a score is has one form for keys
and one for blocks (runtime/attention/index.py); any other is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import fx

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.model.replaced_methods import with_forwards
from mllm_compile.model.written_attention.indexed import (
    OF_KEYS,
    attending_to_every_key,
    indexers_of,
    settings_of,
)
from mllm_compile.model.written_attention.score_rule import is_named, operands_of
from mllm_compile.passes.match.nodes import call, is_attention, recompute_value
from mllm_compile.runtime.attention.layer import KeyChoice

_INDEX = 13  # the place of mllm::attention's `index`
_ONE_KEY = KeyChoice(1, 1)
_MOVES = ("to", "squeeze", "unsqueeze", "float", "int", "contiguous")


@contextmanager
def scoring_keys(model: torch.nn.Module) -> Iterator[None]:
    """Within the context indexers compute scores of packed tokens, without a mask, and choose one key."""
    forwards: dict[Any, Callable[..., Any]] = {
        module: partial(_scored, type(module).forward, module)
        for module in indexers_of(model)
        if settings_of(module) == OF_KEYS
    }
    with attending_to_every_key(model), choosing_few(model, _ONE_KEY), with_forwards(forwards):
        yield


@contextmanager
def choosing_few(model: torch.nn.Module, few: KeyChoice) -> Iterator[None]:
    """Within the context indexers choose so."""
    indexers: list[Any] = list(indexers_of(model))
    before = [{name: getattr(module, name) for name in settings_of(module)} for module in indexers]
    for module, own in zip(indexers, before, strict=True):
        vars(module).update(zip(own, few, strict=False))
    try:
        yield
    finally:
        for module, own in zip(indexers, before, strict=True):
            vars(module).update(own)


def attend_to_chosen_keys(gm: fx.GraphModule, choice: KeyChoice) -> None:
    """Gives each attention that is told indices the operands of their indexer in their place.

    Raises:
        UnsupportedModelError: an indexer's scores are of another form.
    """
    for node in gm.graph.nodes:
        if is_attention(node) and len(node.args) > _INDEX and node.args[_INDEX] is not None:
            told: Any = node.args[_INDEX]
            indices: fx.Node = told[0]
            with gm.graph.inserting_before(node):
                operands = _operands_of_blocks(gm.graph, indices) if choice.block else _operands(gm.graph, indices)
            node.args = (*node.args[:_INDEX], operands, *choice)
            _drop_unread(gm.graph, indices)
    gm.recompile()


def _drop_unread(graph: fx.Graph, node: fx.Node) -> None:
    """Drops a node that nothing reads, and what it alone has read; nothing else, as writes in place have no readers."""
    wanted, dropped = [node], set[fx.Node]()
    while wanted:
        one = wanted.pop()
        if not one.users and one.op in ("call_function", "call_method") and one not in dropped:
            inputs = one.all_input_nodes
            graph.erase_node(one)
            dropped.add(one)
            wanted += inputs


def _scored(own: Callable[..., Any], module: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    names = ("q_resid", "position_embeddings", "attention_mask", "position_ids", "past_key_values")
    said = dict(zip(names, args, strict=False)) | kwargs
    no_mask = hidden_states.new_zeros(1, 1, 1, dtype=torch.float32)
    return own(module, hidden_states, **said | {"attention_mask": no_mask, "past_key_values": None})


def _operands(graph: fx.Graph, indices: fx.Node) -> list[fx.Node]:
    """Queries [T, H, D], weights [T, H] and keys [T, D] of the scores that `indices` [1, T, 1] are the best of."""
    best = _source(indices)
    if is_named(best, "getitem", "getattr"):
        best = best.args[0]
    if not is_named(best, "topk"):
        _refuse(f"{best} chooses them")
    scores = _source(best.args[0])
    if is_named(scores, "add"):
        scores = _source(scores.args[0])  # what is added are _scored's zeros
    weights, of_heads = _factors(scores)
    weights = _source(weights)
    relu, factor = _without_scale(_source(of_heads))
    if not is_named(relu, "relu"):
        _refuse(f"{relu} are scores of heads")
    product, inner = _without_scale(_source(relu.args[0]))
    queries, keys = map(_source, _factors(product))
    if is_named(keys, "transpose"):
        keys = keys.args[0]
    # relu(s · x) is s · relu(x) for a factor above 0, which goes into the weights.
    if not factor * inner > 0:
        _refuse(f"a factor of {factor * inner:g} is of another sign")
    rows = [_row(graph, one) for one in (queries, weights, keys)]
    if [one.meta["val"].dim() for one in rows] != [3, 2, 2]:
        _refuse("operands are of other shapes")
    return [rows[0], call(graph, operator.mul, rows[1], factor * inner), rows[2]]


def _operands_of_blocks(graph: fx.Graph, indices: fx.Node) -> list[fx.Node]:
    """Queries [T, H, D] and keys [T, D] of the scores that `indices` [1, H, T, 1] are the best of: q · k, whose
    blocks, here of one key, count as their best."""
    best = _without(indices, "masked_fill")
    if is_named(best, "getitem", "getattr"):
        best = best.args[0]
    scores = _without(best.args[0], "amax", "view", "masked_fill") if is_named(best, "topk") else best
    queries, keys = map(_source, _factors(scores))
    if is_named(keys, "transpose"):
        keys = _source(keys.args[0])
    if [one.meta["val"].dim() for one in (queries, keys)] != [4, 4] or keys.meta["val"].shape[1] != 1:
        _refuse("operands are of other shapes")
    return [call(graph, torch.transpose, _row(graph, queries), 0, 1), _row(graph, _row(graph, keys))]


def _without(node: Any, *names: str) -> Any:
    """The value that `node` hides parts of, or takes the largest of."""
    while is_named(node, *_MOVES, *names):
        node = node.args[0]
    return node


def _source(node: Any) -> Any:
    """The value that `node` moves or converts."""
    while is_named(node, *_MOVES):
        node = node.args[0]
    return node


def _without_scale(node: Any) -> tuple[Any, float]:
    if is_named(node, "mul") and isinstance(node.args[1], int | float):
        return _source(node.args[0]), float(node.args[1])
    return node, 1.0


def _factors(product: Any) -> list[Any]:
    if not is_named(product, "matmul"):
        _refuse(f"{product} is no product")
    return operands_of(product)


def _row(graph: fx.Graph, node: Any) -> fx.Node:
    """The node's value of the one text, whose dimension of 1 is first."""
    row = graph.call_function(operator.getitem, (node, 0))
    recompute_value(row)
    return row


def _refuse(what: str) -> NoReturn:
    raise UnsupportedModelError(
        f"its indexer's scores are no weighted sum over heads of relu(q · k), nor q · k of blocks: {what}. Set "
        "runtime.max_model_len to the keys that it chooses, or less"
    )
