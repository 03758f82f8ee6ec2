"""A second form of each piece for steps of one token, with linears, norms, activations and residuals in few kernels."""

from __future__ import annotations

import copy
import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import SINGLE_TOKEN_PIECES, PassResult
from mllm_compile.passes.fx_match import LINEAR, is_call
from mllm_compile.passes.rms_norm_match import match_rms_norm
from mllm_compile.runtime.single_token_shapes import is_taken

DEVICE_TYPE = "cuda"  # where the kernels run
_SPLIT = (torch.split, torch.functional.split)


class FuseSingleToken:
    """Pieces for one token: a linear takes its norm, its gate or its residual with it.

    Why: at one token a decode step is launches and reads of weights. cuBLAS' matrix-vector kernels run at a third of
        the memory's speed for small weights, and norm, activation and residual cost a launch each (figures in
        runtime/single_token_ops.py).

    Before::

        h = norm_weight * to(x.to(f32) * rsqrt(mean(x.to(f32) ** 2) + eps)); y = linear(h, weight)
        gate, up = split(linear(h, gate_up)); a = silu(gate) * up; y = residual + linear(a, down)

    After::

        y = mllm.norm_linear(x, norm_weight, weight, eps)
        a = mllm.norm_gated_linear(x, norm_weight, gate_up, eps); y = mllm.linear_residual(a, down, residual)

    Requires: deduplicated pieces on CUDA in bfloat16 or float16. The pieces for any number of tokens stay as they are;
        the new forms are submodules named in gm.meta[SINGLE_TOKEN_PIECES], and are run when a step has one token.
    Preserves: roundings stand where the model has them; sums are in float32 in another order than cuBLAS'.
    """

    name: ClassVar[str] = "fuse_single_token"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        forms = gm.meta.setdefault(SINGLE_TOKEN_PIECES, {})
        matches = 0
        for name in dict.fromkeys(str(node.target) for node in gm.graph.nodes if node.op == "call_module"):
            piece: Any = gm.get_submodule(name)
            form = None if name in forms else single_token_form(piece)
            if form is not None:
                forms[name] = f"{name}_one_token"
                gm.add_module(forms[name], form)
                matches += 1
        return PassResult(gm, matches, before, len(gm.graph.nodes))


def single_token_form(piece: fx.GraphModule) -> fx.GraphModule | None:
    """The piece with its linears fused, or None where nothing matches."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(piece.graph, values)
    graph.output(output)
    for old, new in values.items():
        new.meta.update(copy.copy(old.meta))
    form = fx.GraphModule(piece, graph)
    # The gated form first: its linear reads a norm too.
    fused = sum(fuse(graph, node) for fuse in (_fuse_gated, _fuse_norm, _fuse_residual) for node in list(graph.nodes))
    graph.eliminate_dead_code()
    form.recompile()
    return form if fused else None


@dataclass(frozen=True)
class _Linear:
    node: fx.Node
    source: fx.Node
    weight: fx.Node


def _linear(node: object) -> _Linear | None:
    """A linear without bias that the kernels take."""
    if not is_call(node, LINEAR, torch.nn.functional.linear):
        return None
    operands: Any = node.args
    source, weight, *rest = operands
    bias = rest[0] if rest else node.kwargs.get("bias")
    if bias is not None or weight.op != "placeholder":
        return None
    val = weight.meta["val"]
    if val.device.type != DEVICE_TYPE or val.dtype not in (torch.bfloat16, torch.float16) or not is_taken(*val.shape):
        return None
    return _Linear(node, source, weight)


def _fuse_norm(graph: fx.Graph, node: fx.Node) -> bool:
    linear = _linear(node)
    norm = None if linear is None else match_rms_norm(linear.source)
    if linear is None or norm is None:
        return False
    _replace(graph, node, "norm_linear", norm.x, norm.weight, linear.weight, norm.eps)
    return True


def _fuse_gated(graph: fx.Graph, node: fx.Node) -> bool:
    """silu(gate) * up over the two halves of one linear of a norm."""
    if not is_call(node, operator.mul, torch.mul):
        return False
    silu, up = node.args[:2]
    if not is_call(silu, torch.nn.functional.silu):
        silu, up = up, silu
    if not is_call(silu, torch.nn.functional.silu) or len(silu.users) != 1:
        return False
    gate: Any = silu.args[0]
    if not (is_call(gate, operator.getitem) and is_call(up, operator.getitem) and gate.args[0] is up.args[0]):
        return False
    split = gate.args[0]
    if (gate.args[1], up.args[1]) != (0, 1) or not is_call(split, *_SPLIT) or len(split.users) != 2:
        return False
    linear = _linear(split.args[0])
    norm = None if linear is None else match_rms_norm(linear.source)
    sizes: Any = split.args[1]
    if linear is None or norm is None or len(sizes) != 2 or sizes[0] != sizes[1] or not is_taken(sizes[0], 1024):
        return False
    _replace(graph, node, "norm_gated_linear", norm.x, norm.weight, linear.weight, norm.eps)
    return True


def _fuse_residual(graph: fx.Graph, node: fx.Node) -> bool:
    if not is_call(node, operator.add, torch.add) or len(node.args) != 2:
        return False
    for residual, product in (node.args, node.args[::-1]):
        linear = _linear(product)
        if linear is None or len(linear.node.users) != 1 or not isinstance(residual, fx.Node):
            continue
        if residual.meta["val"].shape != linear.node.meta["val"].shape or match_rms_norm(linear.source):
            continue
        _replace(graph, node, "linear_residual", linear.source, linear.weight, residual)
        return True
    return False


def _replace(graph: fx.Graph, node: fx.Node, op_name: str, *args: Any) -> None:
    if not hasattr(torch.ops.mllm, op_name):
        import mllm_compile.runtime.single_token_ops  # noqa: F401  (defines the ops; needs Triton)
    op = getattr(torch.ops.mllm, op_name)
    with graph.inserting_before(node):
        fused = graph.call_function(op, args)
    fused.meta.update(node.meta)
    node.replace_all_uses_with(fused)
    graph.erase_node(node)
