"""Microseconds of a layer's kernels of a decode of few requests, with attention and without, in chains on Hopper.

    python -m benchmarks.kernels.decode_layer_speed [--shapes 0.6b,8b] [--requests 1,8] [--keys 512,576]

Needs a Hopper GPU. A CUDA graph runs qkv, attention, o, gate_up and down of many layers, each with its own weights and
keys, so that both come from the GPU's memory. Linears are in bfloat16, by the kernels that a step has. Attention is
clusters.cu, which norms and rotates the new token and writes it into the cache. What it adds to the chain is less than
what a profile shows of it: the next linear's weights arrive meanwhile. The last columns have qkv and o alone around it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.binaries import binaries_of
from benchmarks.kernels.quantised_linears_speed import LEAST_BYTES, SHAPES, Chain, load
from benchmarks.script import names_of, need_hopper, parser_of, positives
from mllm_compile.bench.timing.graph import graph_us
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.kernels.cuda import KernelCompiler
from mllm_compile.runtime.attention.capture import RopeInputs
from mllm_compile.runtime.attention.hopper.clusters import MOST_SEQUENCES, cluster_kernels
from mllm_compile.runtime.attention.hopper.decoder import ClusterDecode
from mllm_compile.runtime.attention.hopper.kernel import HEAD_DIM
from mllm_compile.runtime.ops.stream_linear.lanes import MAX_TOKENS
from mllm_compile.runtime.ops.stream_linear.linear import bucket_of
from mllm_compile.runtime.ops.stream_linear.ops import STREAMED
from mllm_compile.runtime.ops.stream_linear.shapes import choose_tiling

PAGE_SIZE = 64
EPS = 1e-6


@dataclass(frozen=True)
class Heads:
    """Query and KV heads of a shape."""

    query: int
    kv: int

    @classmethod
    def of(cls, shape: str) -> Heads:
        _, query_columns, _, all_columns = SHAPES[shape]
        return cls(query_columns // HEAD_DIM, (all_columns - query_columns) // 2 // HEAD_DIM)


class Layers:
    """Some layers at one batch: their linears, their caches in random pages, and what attention takes of a step."""

    def __init__(self, chain: Chain, heads: Heads, decode: ClusterDecode, requests: int, keys: int) -> None:
        self.chain, self.heads, self.decode = chain, heads, decode
        chain.set_tokens(requests)
        pages = -(-keys // PAGE_SIZE)
        shape = (requests * pages * PAGE_SIZE, heads.kv, HEAD_DIM)
        self.caches = [tuple(torch.randn(shape, device="cuda").bfloat16() for _ in range(2)) for _ in chain.layers]
        self.table = torch.randperm(requests * pages, device="cuda").int().view(requests, pages)
        self.lengths = torch.full((requests,), keys, dtype=torch.int32, device="cuda")
        turns = 6 * torch.rand(1, requests, HEAD_DIM, device="cuda")
        self.angles = turns.cos().bfloat16(), turns.sin().bfloat16()
        self.norms = [(0.5 + torch.rand(HEAD_DIM, device="cuda")).bfloat16() for _ in range(2)]
        self.out = torch.zeros(requests, heads.query, HEAD_DIM, device="cuda", dtype=torch.bfloat16)

    def run(self, attends: bool, has_mlp: bool) -> None:
        chain = self.chain
        h, scaled, squares = chain.residual, chain.x["qkv"], chain.squares["qkv"]
        for weights, cache in zip(chain.layers, self.caches, strict=True):
            packed = chain.run_one("qkv", weights["qkv"], scaled, squares, h)
            if attends:
                self._attend(packed, cache)
            h, scaled, squares = chain.run_one("o", weights["o"], self.out.flatten(1), squares, h)
            if has_mlp:
                active = chain.run_one("gate_up", weights["gate_up"], scaled, squares, h)
                h, scaled, squares = chain.run_one("down", weights["down"], active, squares, h)

    def _attend(self, packed: torch.Tensor, cache: tuple[torch.Tensor, ...]) -> None:
        sizes = [count * HEAD_DIM for count in (self.heads.query, self.heads.kv, self.heads.kv)]
        q, k, v = (part.unflatten(-1, (-1, HEAD_DIM)) for part in packed[None].split(sizes, -1))
        rope_inputs = RopeInputs.of([q, k, *self.angles, *self.norms], v[0], EPS)
        self.decode([q[0], *cache, self.table, self.lengths, self.out], rope_inputs)

    def layer_us(self, attends: bool, has_mlp: bool) -> float:
        return graph_us(lambda: self.run(attends, has_mlp)) / len(self.chain.layers)


def main(arguments: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shapes", type=names_of(SHAPES), default="0.6b,8b")
    parser.add_argument("--requests", type=positives, default="1,8")
    parser.add_argument("--keys", type=positives, default="512,576")
    options = parser.parse_args(arguments)
    for shape in options.shapes:
        most = min(MAX_TOKENS, MOST_SEQUENCES // Heads.of(shape).kv)
        if max(options.requests) > most:
            parser.error(f"--requests {max(options.requests)}: {shape} takes up to {most} here; name fewer")
    need_hopper()
    torch.manual_seed(0)
    print(f"{machine_line()}, microseconds a layer")
    print(f"{'shape':6}{'requests':>9}{'keys':>6}{'layer':>8}{'without':>9}{'adds':>7}{'qkv to o':>10}{'adds':>7}")
    with KernelCompiler() as compiler:
        for shape in options.shapes:
            _measure(compiler, shape, options.requests, options.keys)
    return 0


def _measure(compiler: KernelCompiler, shape: str, requests: Sequence[int], keys: Sequence[int]) -> None:
    heads = Heads.of(shape)
    kernels = cluster_kernels(heads.query, heads.kv, PAGE_SIZE)
    decode = ClusterDecode(kernels, binaries_of(compiler, kernels), HEAD_DIM**-0.5, torch.device("cuda:0"))
    hidden, query_columns, ffn, qkv = SHAPES[shape]
    num_layers = max(10, LEAST_BYTES // (2 * hidden * (query_columns + 3 * ffn + qkv)))
    chain = Chain(shape, "bf16", 1, num_layers)
    load(compiler, [choose_tiling(kind, bucket_of(1)) for kind in chain.kinds().values()], STREAMED.load_kernels)
    for count in requests:
        for length in keys:
            layers = Layers(chain, heads, decode, count, length)
            layer, without, some, linears = (
                layers.layer_us(attends, has_mlp) for has_mlp in (True, False) for attends in (True, False)
            )
            of_layer = f"{layer:8.2f}{without:9.2f}{layer - without:7.2f}"
            print(f"{shape:6}{count:9}{length:6}{of_layer}{some:10.2f}{some - linears:7.2f}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
