"""Microseconds of the kernels of a layer of experts with few tokens on Hopper, from o to the next layer's qkv.

    python -m benchmarks.kernels.expert_layer_speed [--tokens 1,8] [--rings 6:8 6:4 3:4]

Needs an H100 or H200. The shape is Qwen3-30B-A3B's, with random weights: o, the router, gate_up and down of the chosen
experts, qkv; several layers in one CUDA graph, so that the L2 holds nothing of the last replay. `--rings` are stages of
gate_up and of down: with fewer the next kernel's blocks have room beside them. The limit is a layer's bytes at the rate
of a sum.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from benchmarks.binaries import binaries_of
from benchmarks.script import need_hopper, parser_of, positives, told_in_one_line
from mllm_compile.bench.timing.graph import read_rate, replay_us
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.kernels.cuda import KernelCompiler
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.experts.shapes import SOFTMAX_OF_ALL
from mllm_compile.runtime.ops.stream_experts.kernel import ExpertsKernel
from mllm_compile.runtime.ops.stream_experts.ops import Router, down_kernel, load_expert_kernels, up_kernel
from mllm_compile.runtime.ops.stream_linear.linear import bucket_of
from mllm_compile.runtime.ops.stream_linear.ops import STREAMED
from mllm_compile.runtime.ops.stream_linear.shapes import choose_tiling

EXPERTS, CHOSEN, HIDDEN, INNER, HEADS, QKV = 128, 8, 2048, 768, 4096, 5120
EPS = 1e-6
REPLAYS = 21


Rings = tuple[int, int]


def with_stages(kernel: ExpertsKernel, stages: int) -> ExpertsKernel:
    """The kernel with a ring of so many stages."""
    other = replace(kernel)
    vars(other)["stages"] = stages  # a property that is computed once
    return other


class Layer(NamedTuple):
    """The weights of one layer."""

    o: torch.Tensor
    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv: torch.Tensor

    @classmethod
    def random(cls) -> Layer:
        of_experts = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, HIDDEN, INNER)
        sizes = (HIDDEN, HEADS), (EXPERTS, HIDDEN), *of_experts, (QKV, HIDDEN)
        empty = (torch.empty(size, device="cuda", dtype=torch.bfloat16) for size in sizes)
        return cls(*(weight.normal_(0.0, weight.shape[-1] ** -0.5) for weight in empty))


class Chain:
    """Several layers for a number of tokens."""

    def __init__(self, layers: Sequence[Layer], tokens: int) -> None:
        self.layers = layers
        self.tokens = tokens
        self.attended = [torch.randn(tokens, HEADS, device="cuda").bfloat16() for _ in layers]
        self.x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
        self.norm = torch.rand(HIDDEN, device="cuda").bfloat16() + 0.5
        self.slots = torch.arange(1, tokens + 1, device="cuda")

    def router(self, scores: torch.Tensor) -> Router:
        return Router(scores, None, self.slots, CHOSEN, SOFTMAX_OF_ALL, True, False)

    def run(self) -> torch.Tensor:
        h = qkv = self.x
        for layer, attended in zip(self.layers, self.attended, strict=True):
            h, scaled, squares = op("stream_linear_residual_norm")(attended, layer.o, h, self.norm)
            router = self.router(op("stream_linear")(scaled, layer.router, squares, EPS, False))
            rows = op("stream_expert_up")(scaled, layer.gate_up, squares, EPS, *router)
            h, scaled, squares = op("stream_expert_down_norm")(rows, layer.down, h, self.norm, False, *router)
            qkv = op("stream_linear")(scaled, layer.qkv, squares, EPS, False)
        return qkv

    def num_active(self) -> float:
        """Experts of a layer that are read, on average, if they are chosen by chance."""
        return EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** self.tokens)


def load(chain: Chain, rings: Rings | None) -> Rings:
    """Compiles and loads the kernels; returns how many stages gate_up and down have."""
    layer = chain.layers[0]
    blocks = torch.zeros(chain.tokens, HIDDEN // 16, device="cuda")
    router = chain.router(torch.zeros(chain.tokens, EXPERTS, device="cuda", dtype=torch.bfloat16))
    bucket = bucket_of(chain.tokens)
    o = STREAMED.residual_kind((layer.o,), norm_next=True)
    plain = [STREAMED.plain_kind((one,), blocks, False, False, False) for one in (layer.router, layer.qkv)]
    linears = [choose_tiling(kind, bucket) for kind in (o, *plain)]
    kernels: list[ExpertsKernel] = [up_kernel(layer.gate_up, blocks, router), down_kernel(layer.down, True, router)]
    if rings is not None:
        kernels = [with_stages(kernel, stages) for kernel, stages in zip(kernels, rings, strict=True)]
    with KernelCompiler() as compiler:
        binaries = binaries_of(compiler, (*linears, *kernels))
    device = torch.device("cuda:0")
    STREAMED.load_kernels(linears, binaries, device)
    load_expert_kernels(kernels, binaries, device)
    up, down = kernels
    return up.stages, down.stages


def rings_of(text: str) -> Rings:
    gate_up, down = map(int, text.split(":"))
    return gate_up, down


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=positives, default="1,8")
    parser.add_argument("--rings", type=rings_of, nargs="*", default=[])
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()
    need_hopper()
    torch.manual_seed(0)
    rate = read_rate()
    print(f"{machine_line()}; a sum reads {rate:.0f} GB/s")
    print("tokens rings µs a layer       from         to      limit")
    layers = [Layer.random() for _ in range(args.layers)]
    dense = layers[0].o.nbytes + layers[0].router.nbytes + layers[0].qkv.nbytes
    of_expert = (layers[0].gate_up.nbytes + layers[0].down.nbytes) / EXPERTS
    for tokens in args.tokens:
        chain = Chain(layers, tokens)
        limit = (dense + chain.num_active() * of_expert) / rate / 1e3
        for rings in [None, *args.rings]:
            stages = load(chain, rings)
            taken = sorted(us / len(layers) for us in replay_us(chain.run, replays=REPLAYS))
            figures = (statistics.median(taken), taken[0], taken[-1], limit)
            print(f"{tokens:6} {':'.join(map(str, stages)):>5}" + "".join(f"{one:11.2f}" for one in figures))


if __name__ == "__main__":
    with told_in_one_line():
        main()
