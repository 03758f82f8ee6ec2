"""Replays the experts that the forward chose in the pieces that gradients go through.

A router's scores there have other roundings, by which a token between two experts would go elsewhere. So the ids of
its choice are inputs, and the weights of the chosen are taken from its scores.

Shape legend: T tokens, k experts a token, L layers of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import fx

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.passes.match.experts import match_expert_linear
from mllm_compile.runtime.program.spec import ROW_INPUT
from mllm_compile.runtime.program.steps import PieceStep, Step
from mllm_compile.train.plain_program import PlainProgram

# What may stand between a choice and the linears that read it, with the ids as the first argument.
_PASSED_ON = ("to", "long", "contiguous", "clone", "view", "reshape", "type")


def with_routes(plain: PlainProgram, num_layers: int) -> PlainProgram:
    """The program whose pieces read `routes_of(…)`.

    Args:
        num_layers: L.

    Raises:
        UnsupportedModelError: the choice of some layer is not found.
    """
    pieces: dict[str, Callable[..., Any]] = dict(plain.pieces)
    counts: dict[str, int] = {}
    steps: list[Step] = []
    index = 0
    for step in plain.program.steps:
        if not isinstance(step, PieceStep):
            steps.append(step)
            continue
        if step.piece not in counts:
            rows = step.inputs.index(ROW_INPUT) if ROW_INPUT in step.inputs else None
            pieces[step.piece], counts[step.piece] = _replaying(plain.pieces[step.piece], rows)
        names = [_name(index + place) for place in range(counts[step.piece])]
        index += len(names)
        steps.append(replace(step, inputs=(*step.inputs, *names)))
    if index != num_layers:
        raise UnsupportedModelError(
            f"trainable: runtime.routed_experts keeps the choices of {num_layers} layers, and {index} are found where "
            "gradients go; expected as many. Set runtime.routed_experts: false"
        )
    return replace(plain, program=replace(plain.program, steps=tuple(steps)), pieces=pieces)


def routes_of(chosen: np.ndarray, device: torch.device) -> Mapping[str, torch.Tensor]:
    """The inputs that replay `chosen` [T, L, k] int16, by name; each [T, k] int64, -1 behind those of few experts."""
    found = torch.from_numpy(chosen.astype(np.int64)).to(device)
    return {_name(index): found[:, index] for index in range(found.shape[1])}


def _name(index: int) -> str:
    return f"routes.{index}"


def _replaying(piece: Any, rows_input: int | None) -> tuple[Callable[..., Any], int]:
    """A piece with a further input for each choice of experts, and how many those are.

    Args:
        rows_input: the piece's input that says for which tokens there are logits: it may drop the others ahead.
    """
    graph = fx.Tracer().trace(piece)
    ids = list(dict.fromkeys(node.args[1] for node in graph.nodes if match_expert_linear(node)))
    if not ids:
        return piece, 0
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    rows = None if rows_input is None else inputs[rows_input]
    for place, one in enumerate(ids):
        choice = _choice_of(one)
        with graph.inserting_after(inputs[-1]):
            inputs.append(graph.placeholder(f"routes_{place}"))
        _replay(graph, choice, inputs[-1], rows)
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(piece, graph), len(ids)


def _choice_of(ids: Any) -> fx.Node:
    """The call of topk that the ids come from."""
    node = ids
    while isinstance(node, fx.Node):
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if name == "topk":
            return node
        if name not in (*_PASSED_ON, "getitem", "count_experts"):
            break
        node = node.args[0]
    raise UnsupportedModelError(
        f"trainable: the experts of {ids} are not chosen by topk, so their choice cannot be replayed; expected a "
        "router that takes the largest scores. Set runtime.routed_experts: false."
    )


def _replay(graph: fx.Graph, choice: fx.Node, routes: fx.Node, rows: fx.Node | None) -> None:
    """Puts ids that are given in the place of a choice, and the scores of these in that of the largest ones."""
    scores: Any = choice.args[0]
    number: Any = choice.args[1] if len(choice.args) > 1 else choice.kwargs["k"]
    with graph.inserting_before(choice):
        given = graph.call_function(_given, (routes, scores, rows, number))
        values = graph.call_method("gather", (scores, -1, given))
    for part in list(choice.users):
        of: Sequence[fx.Node] = (values, given)
        part.replace_all_uses_with(of[int(part.args[1])])  # type: ignore[arg-type]


def _given(routes: torch.Tensor, scores: torch.Tensor, rows: torch.Tensor | None, number: int) -> torch.Tensor:
    """The ids [S, number] that are given for the tokens that have scores [S, E]: all, or `rows` of them."""
    own = routes if rows is None or len(scores) == len(routes) else routes.index_select(0, rows)
    return own[:, :number]
