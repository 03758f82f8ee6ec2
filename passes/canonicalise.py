"""Brings a captured graph into the one form that the later passes read."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import fx
from torch.fx.node import map_aggregate
from torch.nn import functional

from mllm_compile.passes.base import GraphPass, PassResult
from mllm_compile.passes.match.in_place import make_functional
from mllm_compile.passes.match.nodes import (
    call,
    drop_dead_nodes,
    identifier,
    is_call,
    is_symbolic,
    is_weight,
    recompute_views,
)
from mllm_compile.passes.match.spelling import spell

_OF_ANY_STRIDES = (torch.reshape, torch.flatten, "contiguous")


class Canonicalise(GraphPass):
    """Normalises names, sizes, writes, spellings, copies that are undone, dropouts and dead ends.

    Why: Dynamo's graphs have sizes as inputs, range checks on them, and names made of module paths. A piece must be a
        function of tensors alone, and equal layers should read alike. An op that writes into a tensor changes it for
        all its users, which no pass would see (match/in_place.py). And an operation with three spellings would be three
        in every pass (match/spelling.py). Whisper copies heads between a transposition and its inverse: each copy is a
        kernel, and no pass would see heads as a projection gives them.

    Before::

        def forward(self, u0, l_input_ids_, l_self_…_q_proj_parameters_weight_):
            ge = u0 >= 1; _assert_scalar_default = aten._assert_scalar(ge, "…")
            x = embedding.view(1, u0, -1); x.mul_(2); y = x.float().mean(dim=-1)

    After::

        def forward(self, input_ids, model_layers_0_self_attn_q_proj_weight):
            sym_size = aten.sym_size.int(input_ids, 0)
            x = embedding.view(1, sym_size, -1); x_1 = x * 2; y = torch.mean(x_1.to(torch.float32), -1)

    Requires: a graph of mllm_compile.model.trace. The check of the trace has looked at the size checks before they are
    dropped here,
        and refused writes into inputs. A write of an unknown kind ends the compile with an error that names it.
    Preserves: every value bitwise.
    """

    name: ClassVar[str] = "canonicalise"
    is_required: ClassVar[bool] = True

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        matches = self._drop_checks(gm) + self._drop_size_inputs(gm) + self._name_no_gpu(gm) + make_functional(gm)
        self._rename_placeholders(gm)
        drop_dead_nodes(gm)
        spell(gm)
        matches += self._drop_copies(gm) + self._drop_dropouts(gm)
        self._drop_unused_weights(gm)
        return PassResult(gm, matches, before, len(gm.graph.nodes))

    @staticmethod
    def _drop_checks(gm: fx.GraphModule) -> int:
        """Drops range checks on sizes (the runner keeps them) and Dynamo's usage logging."""
        dropped = 0
        for node in reversed(list(gm.graph.nodes)):
            if node.op != "call_function" or node.users:
                continue
            is_check = node.target in (torch.ops.aten._assert_scalar.default, torch._check)
            if is_check or getattr(node.target, "__name__", "") == "_log_api_usage_once":
                gm.graph.erase_node(node)
                dropped += 1
        return dropped

    @staticmethod
    def _drop_size_inputs(gm: fx.GraphModule) -> int:
        """Replaces sizes that are inputs by the size of a tensor that has them."""
        dropped = 0
        for node in list(gm.graph.nodes):
            if node.op != "placeholder" or not is_symbolic(node.meta.get("val")):
                continue
            if node.users:
                owner = _owner_of_size(gm, node.meta["val"])
                last_placeholder = [n for n in gm.graph.nodes if n.op == "placeholder"][-1]
                with gm.graph.inserting_after(last_placeholder):
                    size = call(gm.graph, torch.ops.aten.sym_size.int, owner, 0)
                node.replace_all_uses_with(size)
            gm.graph.erase_node(node)
            dropped += 1
        return dropped

    @staticmethod
    def _name_no_gpu(gm: fx.GraphModule) -> int:
        """Says `cuda` for `cuda:0`: a program runs on whichever GPU is current, and ranks have one each."""
        changed = 0
        for node in gm.graph.nodes:
            before = (node.args, node.kwargs)
            node.args, node.kwargs = map_aggregate(before, _without_index)
            changed += before != (node.args, node.kwargs)
        return changed

    @staticmethod
    def _rename_placeholders(gm: fx.GraphModule) -> None:
        for node in gm.graph.nodes:
            if node.op != "placeholder":
                continue
            name = node.meta.get("weight_name") or node.meta["input_name"]
            node._rename(identifier(name))
            node.target = node.name  # unique, which identifiers of two names need not be

    @staticmethod
    def _drop_dropouts(gm: fx.GraphModule) -> int:
        """Drops dropouts that drop nothing, which hide what is around them."""
        found = [node for node in gm.graph.nodes if is_call(node, functional.dropout) and node.args[2:3] == (False,)]
        for node in found:
            source: Any = node.args[0]
            node.replace_all_uses_with(source)
            gm.graph.erase_node(node)
        return len(found)

    @staticmethod
    def _drop_copies(gm: fx.GraphModule) -> int:
        """Drops copies between a transposition and the same again, where only values of any strides are made of it."""
        dropped = 0
        for node in list(gm.graph.nodes):
            first: Any = node.args[0] if is_call(node, "contiguous") else None
            if not is_call(first, torch.transpose):
                continue
            are_inverse = all(is_call(user, torch.transpose) and user.args[1:] == first.args[1:] for user in node.users)
            if are_inverse and all(is_call(one, *_OF_ANY_STRIDES) for user in node.users for one in user.users):
                node.replace_all_uses_with(first)
                gm.graph.erase_node(node)
                recompute_views([first])
                dropped += 1
        return dropped

    @staticmethod
    def _drop_unused_weights(gm: fx.GraphModule) -> None:
        """Drops unused weights. Batch inputs stay, used or not: later passes look them up by name."""
        for node in list(gm.graph.nodes):
            if is_weight(node) and not node.users:
                gm.graph.erase_node(node)


def _without_index(value: Any) -> Any:
    is_of_one = isinstance(value, torch.device) and value.index is not None
    return torch.device(value.type) if is_of_one else value


def _owner_of_size(gm: fx.GraphModule, size: torch.SymInt) -> fx.Node:
    node: fx.Node
    for node in gm.graph.find_nodes(op="placeholder"):
        first: Any = node.meta["val"].shape[0] if "input_name" in node.meta else None
        if is_symbolic(first) and first.node.expr == size.node.expr:
            return node
    raise KeyError(f"no batch input has the size {size}")
