"""Pads queries, keys and values with zeros to a width of heads that the attention kernels have."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
from torch import fx

from mllm_compile.passes.base import GraphPass, PassResult, PassTarget
from mllm_compile.passes.match.nodes import call, drop_dead_nodes, is_attention, is_call
from mllm_compile.runtime.attention.layer import KERNEL_HEAD_DIMS


class PadHeads(GraphPass):
    """Pads heads to the next width that kernels have, and drops the added columns of the output.

    Why: the GPU's kernels have heads of 64, 128 and 256, and values as wide as keys. A zero adds nothing to a product
        of a query and a key, and a value's zeros give outputs that nobody reads. The KV cache holds the zeros too:
        heads of 80 take 1.6 times their bytes, heads of 96 1.33 times.

    Before::

        out = mllm.attention(q, k, v, None, 0.112, 0.0, -1, "")                           # heads of 80

    After::

        q, k, v = (constant_pad_nd(x, [0, 48]) for x in (q, k, v))
        out = split(mllm.attention(q, k, v, None, 0.112, 0.0, -1, ""), [80, 48], -1)[0]   # the same scale

    Requires: FlashInfer's attention; torch's takes any width. Heads wider than the widest of the kernels stay, and so
        does attention over latents, which has kernels of its own.
    Preserves: every value, except the order of sums.
    """

    name: ClassVar[str] = "pad_heads"

    @classmethod
    def obstacle(cls, target: PassTarget) -> str | None:
        if target.attention_backend == "flashinfer":
            return None
        return f"runtime.attention_backend {target.attention_backend} takes heads of any width"

    def __call__(self, gm: fx.GraphModule) -> PassResult:
        before = len(gm.graph.nodes)
        found = [(node, width) for node in gm.graph.nodes if is_attention(node) for width in [_width_of(node)] if width]
        for node, width in found:
            _pad(gm.graph, node, width)
        drop_dead_nodes(gm)
        return PassResult(gm, len(found), before, len(gm.graph.nodes))


def _width_of(attention: fx.Node) -> int | None:
    """The width that this attention's heads are padded to; None: they have one of the kernels', or are too wide."""
    if any(attention.args[10:]):  # over latents
        return None
    widths = {_last_size(operand) for operand in attention.args[:3]}
    width = next((one for one in KERNEL_HEAD_DIMS if one >= max(widths)), None)
    return None if widths == {width} else width


def _pad(graph: fx.Graph, attention: fx.Node, width: int) -> None:
    v_width = _last_size(attention.args[2])
    operands: list[Any] = []
    with graph.inserting_before(attention):
        for operand in attention.args[:3]:
            missing = width - _last_size(operand)
            pad = torch.ops.aten.constant_pad_nd.default
            operands.append(call(graph, pad, operand, [0, missing]) if missing else operand)
        wide = call(graph, attention.target, *operands, *attention.args[3:])  # type: ignore[arg-type]
        wide.meta = attention.meta | {"val": wide.meta["val"]}  # it says which module attends
        out = wide
        if width != v_width:
            parts = call(graph, torch.split, wide, [v_width, width - v_width], -1)
            out = call(graph, operator.getitem, parts, 0)
    attention.replace_all_uses_with(out)
    graph.erase_node(attention)
    if out is not wide:
        _reshape_views(graph, out)


def _reshape_views(graph: fx.Graph, part: fx.Node) -> None:
    """Makes views of parts of heads reshapes: a part is not contiguous with the next head's."""
    for reader in list(part.users):
        if is_call(reader, torch.unsqueeze):
            _reshape_views(graph, reader)
        elif is_call(reader, "view") and not isinstance(reader.args[1], torch.dtype):
            shape: Any = reader.args[1] if isinstance(reader.args[1], tuple | list) else reader.args[1:]
            with graph.inserting_before(reader):
                reshaped = graph.call_function(torch.reshape, (part, shape))
            reshaped.meta = reader.meta
            reader.replace_all_uses_with(reshaped)
            graph.erase_node(reader)


def _last_size(operand: Any) -> int:
    return int(operand.meta["val"].shape[-1])
