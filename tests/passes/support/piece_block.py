"""Builds pieces node by node, with values of their own: what the passes that fuse linears are tested on."""

from __future__ import annotations

import operator
from typing import Literal, get_args

import torch
from torch import fx

from mllm_compile.passes.match.nodes import LINEAR
from mllm_compile.passes.match.spelling import spell
from mllm_compile.runtime.ops import op

HIDDEN, FFN, EPS = 256, 512, 1e-6
NormForm = Literal["rounded first", "rounded last", "plus one"]  # as Llama, Nemotron-H and Gemma write an RMS norm
NORM_FORMS: tuple[NormForm, ...] = get_args(NormForm)


def rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


class Block:
    """Builds a piece node by node, values along with it."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.inputs: list[torch.Tensor] = []

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> fx.Node:
        generator = torch.Generator().manual_seed(len(self.inputs))
        return self.holding(name, torch.randn(shape, generator=generator).mul(0.05).to(dtype))

    def holding(self, name: str, value: torch.Tensor) -> fx.Node:
        with self.graph.inserting_before(self._first_call()):
            node = self.graph.placeholder(name)
        node.meta["val"] = value
        self.inputs.append(value)
        return node

    def _first_call(self) -> fx.Node:
        """Inputs are before it; the end of the graph in an empty one."""
        return next((node for node in self.graph.nodes if node.op != "placeholder"), self.graph._root)

    def call(self, target, *args, **kwargs) -> fx.Node:
        make = self.graph.call_method if isinstance(target, str) else self.graph.call_function
        node = make(target, args, kwargs)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = (
            getattr(values[0], target)(*values[1:], **kwargs) if isinstance(target, str) else target(*values, **kwargs)
        )
        return node

    def norm(self, x: fx.Node, weight: fx.Node, form: NormForm = "rounded first") -> fx.Node:
        wide = self.call("to", x, torch.float32)
        mean = self.call("mean", self.call("pow", wide, 2), -1, keepdim=True)
        scaled = self.call(operator.mul, wide, self.call(torch.rsqrt, self.call(operator.add, mean, EPS)))
        if form == "rounded first":
            return self.call(operator.mul, weight, self.call("to", scaled, x.meta["val"].dtype))
        wide_weight = self.call("float", weight)
        if form == "plus one":
            wide_weight = self.call(operator.add, 1.0, wide_weight)
        return self.call("type_as", self.call(operator.mul, scaled, wide_weight), x)

    def silu_mul(self, x: fx.Node) -> fx.Node:
        half = x.meta["val"].shape[-1] // 2
        halves = self.call(torch.split, x, [half, half], dim=-1)
        gate, up = self.call(operator.getitem, halves, 0), self.call(operator.getitem, halves, 1)
        return self.call(operator.mul, self.call(torch.nn.functional.silu, gate), up)

    def module(self, *outputs: fx.Node) -> fx.GraphModule:
        """The piece, spelled as canonicalise leaves it."""
        self.graph.output(tuple(outputs))
        gm = fx.GraphModule(torch.nn.Module(), self.graph)
        spell(gm)
        gm.recompile()
        return gm


def decoder_piece(
    num_tokens: int = 1, dtype: torch.dtype = torch.bfloat16, norm: NormForm = "rounded first", rank: int = 0
) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """o_proj and residual, norm and gated linear, down and residual, norm and the next layer's qkv; with adapters of
    that rank, if any."""
    block = Block()
    slots = block.holding("adapter_slots", torch.arange(num_tokens).int() % 3 - 1) if rank else None

    def weight(name: str, *shape: int) -> fx.Node:
        return block.input(name, *shape, dtype=dtype)

    def linear(x: fx.Node, name: str, outputs: int, inputs: int, *parts: int) -> fx.Node:
        y = block.call(LINEAR, x, weight(name, outputs, inputs), None)
        if slots is None:
            return y
        parts = parts or (outputs,)
        a, b = weight(f"{name}_a", 2, rank * len(parts), inputs), weight(f"{name}_b", 2, outputs, rank)
        starts = [sum(parts[:index]) for index in range(len(parts))]
        return block.call(op("add_lora"), y, x, a, b, slots, starts, list(parts))

    attended = block.input("attended", 1, num_tokens, HIDDEN, dtype=dtype)
    residual = block.input("residual", 1, num_tokens, HIDDEN, dtype=dtype)
    after = block.call(operator.add, residual, linear(attended, "o", HIDDEN, HIDDEN))
    hidden = block.norm(after, weight("norm", HIDDEN), norm)
    product = block.silu_mul(linear(hidden, "gate_up", 2 * FFN, HIDDEN, FFN, FFN))
    out = block.call(operator.add, after, linear(product, "down", HIDDEN, FFN))
    next_hidden = block.norm(out, weight("next_norm", HIDDEN), norm)
    qkv = linear(next_hidden, "qkv", 2 * HIDDEN, HIDDEN, HIDDEN, 128, 128)
    return block.module(out, qkv), block.inputs


def graph_of_one_piece(piece: fx.GraphModule) -> fx.GraphModule:
    """A parent graph that calls the piece twice."""
    graph = fx.Graph()
    inputs = [graph.placeholder(node.name) for node in piece.graph.nodes if node.op == "placeholder"]
    first = graph.call_module("piece_a", tuple(inputs))
    graph.call_module("piece_a", tuple(inputs))
    graph.output((first,))
    root = torch.nn.Module()
    root.add_module("piece_a", piece)
    return fx.GraphModule(root, graph)


def fused_ops(gm: fx.GraphModule) -> list[str]:
    """The ops of ours in a piece, in order."""
    names = [str(node.target) for node in gm.graph.nodes if str(node.target).startswith("mllm.")]
    return [name.split(".")[1] for name in names]
