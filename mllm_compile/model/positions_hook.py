"""The hook into models that count positions themselves: within it their tables are read at the tokens' own positions.

Some decoders ignore `position_ids` and count the tokens of a forward (the bart family). Some take them, but count from
another number than 0 by default (the roberta family). One checks the length of its table (xglm). In a flat batch of
several requests a token's place is not its position. Modules are known by their forward's arguments.
"""

from __future__ import annotations

import inspect
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

import mllm_compile.runtime.ops.trace  # noqa: F401  (defines torch.ops.mllm.counted_positions)
from mllm_compile.model.replaced_methods import with_forwards
from mllm_compile.passes.match.nodes import is_op

# Counted positions, of any shape with T elements → the positions to read instead, of that shape.
Positions = Callable[[torch.Tensor], torch.Tensor]


@contextmanager
def reading_positions(model: torch.nn.Module, positions: Positions) -> Iterator[None]:
    """Within the context, tables that are read at counted positions are read at `positions` of these."""
    hooked = {module: _forward_reading(module, positions) for module in model.modules() if _counts_tokens(module)}
    hooked |= {module: _forward_of_fixed_table(module) for module in model.modules() if _may_grow(module)}
    hooked |= {module: _forward_counting(module, positions) for module in model.modules() if _grows_by_ids(module)}
    with with_forwards(hooked):
        yield


def position_offset(model: torch.nn.Module) -> int:
    """The position of a text's first token, where the model counts them from token ids; else 0."""
    for module in model.modules():
        of_file = getattr(sys.modules.get(type(module).__module__), "create_position_ids_from_input_ids", None)
        has_table = hasattr(module, "position_embeddings")
        count: Any = getattr(module, "create_position_ids_from_input_ids", of_file if has_table else None)
        padding: Any = getattr(module, "padding_idx", None)
        if count is not None and isinstance(padding, int):
            counted = count(torch.tensor([[padding + 1, padding + 1]]), padding)[0].tolist()
            return int(counted[0]) if counted[1] == counted[0] + 1 else 0
    return 0


def as_positions(counted: torch.Tensor) -> torch.Tensor:
    """Stands for `positions` in a trace: an op that restore_positions replaces."""
    positions: torch.Tensor = torch.ops.mllm.counted_positions(counted)
    return positions


def restore_positions(gm: fx.GraphModule) -> None:
    """Puts the input `positions` [T] in the place of what was counted; positions that were read already stay."""
    counted = [node for node in gm.graph.nodes if is_op(node, "counted_positions")]
    if not counted:
        return
    given = next((node for node in gm.graph.nodes if node.meta.get("input_name") == "positions"), None)
    for node in counted:
        place: Any = node.args[0]
        if given is not None and _is_made_of(place, given):
            replacement = place
        else:
            given = given or add_input(gm, "positions", place)
            with gm.graph.inserting_before(node):
                replacement = given if place.meta["val"].dim() == 1 else as_rows(gm.graph, given, node.meta["val"])
        node.replace_all_uses_with(replacement)
        gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    gm.recompile()


def _counts_tokens(module: torch.nn.Module) -> bool:
    return {"past_key_values_length", "position_ids"} <= set(arguments_of(module)) and isinstance(
        module, torch.nn.Embedding
    )


def _may_grow(module: torch.nn.Module) -> bool:
    """True for a table that is made anew, with more rows, where a text is longer than it."""
    names = ("make_weights", "weights", "offset")
    return all(hasattr(module, name) for name in names) and arguments_of(module)[:1] == ["position_ids"]


def _grows_by_ids(module: torch.nn.Module) -> bool:
    """True for a table that may grow likewise, and that counts positions from token ids (the m2m_100 family)."""
    names = ("make_weights", "weights", "offset", "padding_idx")
    return all(hasattr(module, name) for name in names) and arguments_of(module)[:1] == ["input_ids"]


def arguments_of(module: torch.nn.Module) -> list[str]:
    """Names of what the module's forward takes."""
    return list(inspect.signature(type(module).forward).parameters)[1:]


def _forward_reading(module: Any, positions: Positions) -> Callable[..., torch.Tensor]:
    own = type(module).forward

    def forward(shaped: Any, *args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        if position_ids is None:
            num_tokens = (shaped.shape if isinstance(shaped, torch.Tensor) else shaped)[1]
            position_ids = torch.arange(num_tokens, device=module.weight.device)
        out: torch.Tensor = own(module, shaped, *args, position_ids=positions(position_ids), **kwargs)
        return out

    return forward


def _forward_of_fixed_table(module: Any) -> Callable[..., torch.Tensor]:
    """max_model_len is no longer than the table, so the table is never rebuilt."""

    def forward(position_ids: torch.Tensor, past_key_values_length: int = 0) -> torch.Tensor:
        rows = module.weights.index_select(0, (position_ids + module.offset).view(-1))
        rows_of_tokens: torch.Tensor = rows.view(*position_ids.shape, module.weights.shape[-1])
        return rows_of_tokens

    return forward


def _forward_counting(module: Any, positions: Positions) -> Callable[..., torch.Tensor]:
    """The rows of counted positions, behind the table's one for padding."""

    def forward(input_ids: Any = None, inputs_embeds: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        num_tokens = (input_ids if inputs_embeds is None else inputs_embeds).shape[1]
        counted = torch.arange(num_tokens, device=module.weights.device)
        places = positions(counted) + module.padding_idx + 1
        rows: torch.Tensor = module.weights.index_select(0, places.view(-1))[None]
        return rows

    return forward


def _is_made_of(node: Any, source: fx.Node) -> bool:
    wanted, seen = [node], set()
    while wanted:
        one = wanted.pop()
        if one is source:
            return True
        if one not in seen:
            seen.add(one)
            wanted += one.all_input_nodes
    return False


def add_input(gm: fx.GraphModule, name: str, like: fx.Node) -> fx.Node:
    """A new input [T] of the batch, for what `like` [T] or [1, T] holds: Dynamo makes none for an argument that the
    model does not read."""
    first = next(iter(gm.graph.nodes))
    with gm.graph.inserting_before(first):
        node = gm.graph.placeholder(f"l_{name}_")
    node.meta["input_name"] = name
    node.meta["val"] = like.meta["val"].flatten() if like.meta["val"].dim() > 1 else like.meta["val"]
    return node


def as_rows(graph: fx.Graph, given: fx.Node, val: torch.Tensor) -> fx.Node:
    """`given` [T] as `val` [1, T] is."""
    rows = graph.call_function(operator.getitem, (given, None))
    rows.meta["val"] = val
    return rows
