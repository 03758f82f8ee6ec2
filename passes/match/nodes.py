"""Small questions about FX nodes, and the making of new ones that carry `meta["val"]`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, TypeGuard

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch.fx.experimental.symbolic_shapes import statically_known_true

LINEAR = torch._C._nn.linear
# Where the kernels run that passes put into pieces, and on what.
KERNEL_DEVICE_TYPE = "cuda"
KERNEL_DTYPES = (torch.bfloat16, torch.float16)


def is_call(node: object, *targets: Callable[..., Any] | str) -> TypeGuard[fx.Node]:
    """True for a call of one of `targets`: functions, or methods by their names. In a canonical graph an operation has
    one target, and its arguments are by place (spelling.py)."""
    return isinstance(node, fx.Node) and node.op in ("call_function", "call_method") and node.target in targets


def are_alike(one: fx.Node, other: fx.Node) -> bool:
    """True if both values surely have one shape."""
    shapes = [node.meta["val"].shape for node in (one, other)]
    return len(shapes[0]) == len(shapes[1]) and all(statically_known_true(a == b) for a, b in zip(*shapes, strict=True))


def linear_operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """Input, weight and bias of a call of LINEAR."""
    source, weight, *bias = node.args
    return source, weight, bias[0] if bias else None  # type: ignore[return-value]


def takes_kernels(node: fx.Node) -> bool:
    """True if our kernels take values of this device and dtype."""
    val = node.meta["val"]
    return val.device.type == KERNEL_DEVICE_TYPE and val.dtype in KERNEL_DTYPES


def is_op(node: object, *names: str) -> TypeGuard[fx.Node]:
    """True for a call of one of these ops of ours (runtime/ops), as a trace or as a pass has it; defines none."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    packet = getattr(node.target, "overloadpacket", node.target)
    namespace, _, name = getattr(packet, "_qualified_op_name", "").partition("::")
    return namespace == "mllm" and name in names


def is_attention(node: object) -> TypeGuard[fx.Node]:
    """True for the trace-time attention op."""
    return is_op(node, "attention")


def is_attention_with_output(node: object) -> TypeGuard[fx.Node]:
    """True for the run-time attention op."""
    return is_op(node, "attention_with_output")


def is_weight(node: object) -> TypeGuard[fx.Node]:
    """True for a placeholder that stands for a parameter, a buffer or a packed weight."""
    return isinstance(node, fx.Node) and node.op == "placeholder" and "weight_name" in node.meta


def input_node(gm: fx.GraphModule, name: str) -> fx.Node:
    """The placeholder of the batch input `name`."""
    node: fx.Node
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node.meta.get("input_name") == name:
            return node
    raise KeyError(f"the graph has no batch input {name!r}")


def has_input(gm: fx.GraphModule, name: str) -> bool:
    """True if the graph has the batch input `name`."""
    return any(node.meta.get("input_name") == name for node in gm.graph.find_nodes(op="placeholder"))


def identifier(name: str) -> str:
    """`name` as a Python identifier, for a placeholder's target: 'a.q+k.weight' → 'a_q_k_weight'."""
    return re.sub(r"\W", "_", name)


def is_symbolic(value: object) -> bool:
    """True for a SymInt (or SymBool, SymFloat): a number that depends on T or S."""
    return isinstance(value, torch.SymInt | torch.SymBool | torch.SymFloat)


def size_text(size: object) -> str:
    """A size as text; torch writes strides for a T that may be 0."""
    return re.sub(r"Max\(1, (\w+)\)", r"\1", str(size))


def drop_dead_nodes(gm: fx.GraphModule) -> None:
    """Erases calls whose result is unused. The graph is functional: an unused op is kept only if its schema says that
    it writes, as in ops of attention and of the KV cache."""
    gm.graph.eliminate_dead_code()


def called_pieces(gm: fx.GraphModule) -> list[str]:
    """The submodules that a parent graph calls, each once, in order of first use."""
    return list(dict.fromkeys(str(node.target) for node in gm.graph.nodes if node.op == "call_module"))


def rewrite_pieces(gm: fx.GraphModule, names: Iterable[str], rewrite: Callable[[fx.Graph, fx.Node], bool]) -> int:
    """Offers every node of these submodules to `rewrite`, which says whether it has put something in its place.

    Returns:
        How often it has.
    """
    matches = 0
    for name in names:
        piece: Any = gm.get_submodule(name)
        found = sum(rewrite(piece.graph, node) for node in list(piece.graph.nodes))
        if found:
            drop_dead_nodes(piece)
            piece.recompile()
        matches += found
    return matches


def replace_by_op(graph: fx.Graph, node: fx.Node, op: Callable[..., Any], *operands: Any) -> fx.Node:
    """Puts a call of `op`, which gives what `node` gave, in its place; returns it."""
    with graph.inserting_before(node):
        fused = graph.call_function(op, operands)
    fused.meta.update(node.meta)
    node.replace_all_uses_with(fused)
    graph.erase_node(node)
    return fused


def replace_pair_by_op(
    graph: fx.Graph, first: fx.Node, second: fx.Node, op: Callable[..., Any], *operands: Any
) -> None:
    """Puts a call of `op`, which gives what `first` and then `second` gave, in their place; both are dead then."""
    with graph.inserting_before(first):
        together = graph.call_function(op, operands)
        outputs = [graph.call_function(operator.getitem, (together, index)) for index in range(2)]
    together.meta["val"] = (first.meta["val"], second.meta["val"])
    for node, output in zip((first, second), outputs, strict=True):
        output.meta.update(node.meta)
        node.replace_all_uses_with(output)


def recompute_value(node: fx.Node) -> None:
    """Sets `meta["val"]` of a call whose arguments have other values than those that it was copied with."""
    args, kwargs = fx.map_arg(node.args, _value), fx.map_arg(node.kwargs, _value)
    target = getattr(args[0], str(node.target)) if node.op == "call_method" else node.target
    node.meta["val"] = _computed(target, args[1:] if node.op == "call_method" else args, kwargs, args)


def recompute_views(nodes: Iterable[fx.Node]) -> None:
    """Recomputes values behind `nodes`, whose strides have changed, as far as the change goes.

    A piece is compiled for its inputs' strides as `meta["val"]` has them.
    """
    changed = list(nodes)
    while changed:
        for user in changed.pop().users:
            if user.op in ("call_function", "call_method"):
                before = _strides(user)
                recompute_value(user)
                if _strides(user) != before:
                    changed.append(user)


def _strides(node: fx.Node) -> list[str]:
    val = node.meta["val"]
    values = val if isinstance(val, tuple | list) else (val,)
    return [str(value.stride()) for value in values if isinstance(value, torch.Tensor)]


def call(graph: fx.Graph, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Adds a call_function node at the graph's insertion point, its `meta["val"]` computed on fake tensors."""
    node = graph.call_function(target, args, kwargs)
    values = fx.map_arg(args, _value)
    node.meta["val"] = _computed(target, values, fx.map_arg(kwargs, _value), values)
    return node


def _computed(target: Any, args: Any, kwargs: Any, operands: Any) -> Any:
    """The result of a call, in the fake mode of the tensors among `operands`."""
    mode = detect_fake_mode(operands)
    # The Python dispatcher: without it torch 2.11 asks for the number of elements of a tensor of T tokens.
    with enable_python_dispatcher(), mode or nullcontext():
        return target(*args, **kwargs)


def _value(node: fx.Node) -> Any:
    if "val" not in node.meta:
        raise ValueError(f"{node.name} has no meta['val'], which each new node must have (passes/base.py)")
    return node.meta["val"]
