"""passes/fuse_single_token.py: which linears are fused, and that the fused piece computes what the piece did.

The kernels need CUDA and Triton; here their ops are stand-ins in plain torch, with the same roundings.
"""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from mllm_compile.passes import fuse_single_token
from mllm_compile.passes.base import SINGLE_TOKEN_PIECES
from mllm_compile.passes.fuse_single_token import FuseSingleToken, single_token_form
from mllm_compile.passes.fx_match import LINEAR

HIDDEN, FFN, EPS = 256, 512, 1e-6


def _rms(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


@pytest.fixture(scope="module")
def stand_ins():
    if torch.cuda.is_available():
        pytest.skip("the real ops are defined where there is a GPU")
    library = torch.library.Library("mllm", "FRAGMENT")
    library.define("norm_linear(Tensor x, Tensor norm_weight, Tensor weight, float eps) -> Tensor")
    library.define("norm_gated_linear(Tensor x, Tensor norm_weight, Tensor weight, float eps) -> Tensor")
    library.define("linear_residual(Tensor x, Tensor weight, Tensor residual) -> Tensor")

    def gated(x, norm_weight, weight, eps):
        gate, up = torch.nn.functional.linear(_rms(x, norm_weight, eps), weight).chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    library.impl("norm_linear", lambda x, n, w, eps: torch.nn.functional.linear(_rms(x, n, eps), w), "CPU")
    library.impl("norm_gated_linear", gated, "CPU")
    library.impl("linear_residual", lambda x, w, r: r + torch.nn.functional.linear(x, w), "CPU")
    yield
    del library


@pytest.fixture(autouse=True)
def on_cpu(stand_ins, monkeypatch):
    monkeypatch.setattr(fuse_single_token, "DEVICE_TYPE", "cpu")


class Block:
    """Builds a piece node by node, values along with it."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.inputs: list[torch.Tensor] = []

    def input(self, name: str, *shape: int) -> fx.Node:
        node = self.graph.placeholder(name)
        generator = torch.Generator().manual_seed(len(self.inputs))
        node.meta["val"] = torch.randn(shape, generator=generator).mul(0.05).to(torch.bfloat16)
        self.inputs.append(node.meta["val"])
        return node

    def call(self, target, *args, **kwargs) -> fx.Node:
        make = self.graph.call_method if isinstance(target, str) else self.graph.call_function
        node = make(target, args, kwargs)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = (
            getattr(values[0], target)(*values[1:], **kwargs) if isinstance(target, str) else target(*values, **kwargs)
        )
        return node

    def norm(self, x: fx.Node, weight: fx.Node) -> fx.Node:
        wide = self.call("to", x, torch.float32)
        mean = self.call("mean", self.call("pow", wide, 2), -1, keepdim=True)
        scaled = self.call(operator.mul, wide, self.call(torch.rsqrt, self.call(operator.add, mean, EPS)))
        return self.call(operator.mul, weight, self.call("to", scaled, torch.bfloat16))

    def module(self, *outputs: fx.Node) -> fx.GraphModule:
        self.graph.output(tuple(outputs))
        return fx.GraphModule(torch.nn.Module(), self.graph)


def decoder_piece() -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """o_proj and residual, norm and gated linear, down and residual, norm and the next layer's qkv."""
    block = Block()
    attended, residual = block.input("attended", 1, 1, HIDDEN), block.input("residual", 1, 1, HIDDEN)
    after = block.call(operator.add, residual, block.call(LINEAR, attended, block.input("o", HIDDEN, HIDDEN), None))
    hidden = block.norm(after, block.input("norm", HIDDEN))
    gate_up = block.call(LINEAR, hidden, block.input("gate_up", 2 * FFN, HIDDEN), None)
    gates = block.call(torch.split, gate_up, [FFN, FFN], dim=-1)
    gate, up = block.call(operator.getitem, gates, 0), block.call(operator.getitem, gates, 1)
    product = block.call(operator.mul, block.call(torch.nn.functional.silu, gate), up)
    out = block.call(operator.add, after, block.call(LINEAR, product, block.input("down", HIDDEN, FFN), None))
    next_hidden = block.norm(out, block.input("next_norm", HIDDEN))
    qkv = block.call(LINEAR, next_hidden, block.input("qkv", 2 * HIDDEN, HIDDEN), None)
    return block.module(out, qkv), block.inputs


def fused_ops(gm: fx.GraphModule) -> list[str]:
    names = [str(node.target) for node in gm.graph.nodes if str(node.target).startswith("mllm.")]
    return [name.split(".")[1] for name in names]


def test_a_decoder_piece_becomes_four_kernels():
    piece, _ = decoder_piece()
    form = single_token_form(piece)
    assert form is not None
    assert fused_ops(form) == ["linear_residual", "norm_gated_linear", "linear_residual", "norm_linear"]
    assert not any(node.op == "call_function" and node.target is LINEAR for node in form.graph.nodes)


def test_the_form_computes_what_the_piece_does_and_the_piece_stays():
    piece, inputs = decoder_piece()
    before, text = piece(*inputs), str(piece.graph)
    form = single_token_form(piece)
    assert form is not None
    assert str(piece.graph) == text
    for ours, theirs in zip(form(*inputs), before, strict=True):
        assert torch.equal(ours, theirs)


def test_a_linear_with_a_bias_another_activation_or_odd_sizes_is_left_alone():
    block = Block()
    x, residual = block.input("x", 1, 1, HIDDEN), block.input("residual", 1, 1, HIDDEN)
    biased = block.call(LINEAR, x, block.input("w", HIDDEN, HIDDEN), block.input("b", HIDDEN))
    odd = block.call(LINEAR, x, block.input("w_odd", HIDDEN + 1, HIDDEN), None)
    out = block.call(operator.add, residual, biased)
    assert single_token_form(block.module(out, odd)) is None


def test_a_product_that_others_read_keeps_its_linear():
    block = Block()
    x, residual = block.input("x", 1, 1, HIDDEN), block.input("residual", 1, 1, HIDDEN)
    product = block.call(LINEAR, x, block.input("w", HIDDEN, HIDDEN), None)
    assert single_token_form(block.module(block.call(operator.add, residual, product), product)) is None


def test_a_norm_that_others_read_stays_and_its_linear_is_fused():
    block = Block()
    hidden = block.norm(block.input("x", 1, 1, HIDDEN), block.input("norm", HIDDEN))
    product = block.call(LINEAR, hidden, block.input("w", HIDDEN, HIDDEN), None)
    piece = block.module(hidden, product)
    form = single_token_form(piece)
    assert form is not None
    assert fused_ops(form) == ["norm_linear"]
    assert all(torch.equal(a, b) for a, b in zip(form(*block.inputs), piece(*block.inputs), strict=True))


def test_the_pass_adds_one_form_a_distinct_piece_and_a_second_run_changes_nothing():
    piece, _ = decoder_piece()
    graph = fx.Graph()
    inputs = [graph.placeholder(node.name) for node in piece.graph.nodes if node.op == "placeholder"]
    first = graph.call_module("piece_a", tuple(inputs))
    graph.call_module("piece_a", tuple(inputs))
    graph.output((first,))
    root = torch.nn.Module()
    root.add_module("piece_a", piece)
    gm = fx.GraphModule(root, graph)
    assert FuseSingleToken()(gm).matches == 1
    assert gm.meta[SINGLE_TOKEN_PIECES] == {"piece_a": "piece_a_one_token"}
    assert FuseSingleToken()(gm).matches == 0
