"""Microseconds of one layer's decode attention over a cache of bfloat16 and of e4m3, by batch and length.

    python -m benchmarks.kernels.fp8_decode_speed [--heads 32 --kv-heads 8]

Needs a Hopper GPU. As decode_attention_speed.py, whose layers it runs: each graph runs several layers with KV of their
own, more than the L2 cache holds. GB/s are of keys and values.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from benchmarks.binaries import binaries_of
from benchmarks.kernels.decode_attention_speed import PAGE_SIZE, Case, Layers, hopper_decode
from benchmarks.script import need_hopper, parser_of
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.kernels.cuda import KernelCompiler
from mllm_compile.runtime.attention.hopper.clusters import cluster_kernels
from mllm_compile.runtime.attention.hopper.decoder import ClusterDecode, ShareDecode
from mllm_compile.runtime.attention.hopper.shapes import most_in_clusters
from mllm_compile.runtime.attention.hopper.shares import ShareKernel

CASES = ((1, 577), (8, 577), (64, 577), (256, 577), (1, 8192), (16, 4096), (64, 4096))


def kernels(num_heads: int, num_kv_heads: int, fp8: bool) -> dict[str, Callable[..., object]]:
    clusters = cluster_kernels(num_heads, num_kv_heads, PAGE_SIZE, fp8=fp8)
    shares = ShareKernel(num_kv_heads, num_heads // num_kv_heads, PAGE_SIZE, fp8=fp8)
    device = torch.device("cuda:0")
    with KernelCompiler() as compiler:
        binaries = binaries_of(compiler, (*clusters, shares))
    return {
        "clusters": ClusterDecode(clusters, binaries, 128**-0.5, device),
        "shares": ShareDecode(shares, binaries, 128**-0.5, device),
    }


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    options = parser.parse_args()
    need_hopper()
    print(f"{machine_line()}, {options.heads}/{options.kv_heads} heads")
    print(f"{'requests':>9}{'tokens':>8}{'kernel':>10}{'bf16':>9}{'GB/s':>7}{'fp8':>9}{'GB/s':>7}")
    by_type = {fp8: kernels(options.heads, options.kv_heads, fp8) for fp8 in (False, True)}
    shares = ShareKernel(options.kv_heads, options.heads // options.kv_heads, PAGE_SIZE)
    for batch, length in CASES:
        name = "clusters" if batch * options.kv_heads <= most_in_clusters(shares, length) else "shares"
        line = f"{batch:9}{length:8}{name:>10}"
        for fp8 in (False, True):
            layers = Layers(Case(options.heads, options.kv_heads, batch, length))
            if fp8:
                layers.pages = [tuple(one.to(torch.float8_e4m3fn) for one in pages) for pages in layers.pages]
            time = layers.layer_us(hopper_decode(layers, by_type[fp8][name]))
            num_bytes = 2 * batch * length * options.kv_heads * 128 * (1 if fp8 else 2)
            line += f"{time:9.1f}{num_bytes / time / 1e3:7.0f}"
            del layers
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
