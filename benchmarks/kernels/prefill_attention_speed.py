"""Microseconds of one layer's prefill attention by FlashInfer's kernels, measured and estimated, inside a CUDA graph.

    python -m benchmarks.kernels.prefill_attention_speed [--heads 32/8] [--shapes 1x8192 1x480+16000]

Needs an NVIDIA GPU and the `cuda` extra. The estimates (runtime/attention/flashinfer/prefill_cost.py) choose a batch's
kernel; the last column is how much longer the chosen one took than the fastest. Run it on a GPU that is no H200: where
it finds more than a few per cent, the constants are worth fitting anew. Shapes are REQUESTSxNEW+BEFORE, in tokens.
"""

from __future__ import annotations

import itertools
import statistics
import sys

import numpy as np
import torch

from benchmarks.script import need_gpu, parser_of, positive
from mllm_compile.bench.timing.graph import graph_us
from mllm_compile.process.console import print_table
from mllm_compile.runtime.attention.flashinfer.kernels import PlanGroup, PrefillKernel, choose_prefill_kernel
from mllm_compile.runtime.attention.layer import PerLayerParameters

HEADS = ((16, 8), (32, 8), (32, 32), (14, 2))
SHAPES = (  # requests, new tokens of each, tokens before them
    *((1, tokens, 0) for tokens in (16, 64, 128, 192, 256, 512, 1024, 2048)),
    *((4, 128, 0), (8, 128, 0), (4, 256, 0), (4, 512, 0), (16, 32, 0)),
    *((1, 16, 1000), (1, 64, 512), (1, 64, 3500), (1, 128, 512), (1, 128, 2048), (1, 256, 1024)),
    *((1, 512, 512), (1, 512, 3500), (1, 1024, 2048), (4, 128, 1024), (8, 64, 512), (16, 16, 512)),
)
HEAD_DIM, PAGE_SIZE = 128, 64
LAUNCHES = 20
PLAIN = PerLayerParameters(-1, 0.0, HEAD_DIM**-0.5)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--heads", type=heads_of, nargs="+", default=HEADS, help="query heads/KV heads")
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=SHAPES)
    args = parser.parse_args()
    need_gpu()
    device = torch.device("cuda", torch.cuda.current_device())
    is_hopper = torch.cuda.get_device_properties(device).major == 9
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device=device)
    kernels = [PrefillKernel("fa2", True), PrefillKernel("fa2", False)]
    kernels += [PrefillKernel("fa3", False)] if is_hopper else []
    rows, excess = [], []
    for (num_heads, num_kv_heads), (count, new, prefix) in itertools.product(args.heads, args.shapes):
        group = PlanGroup(num_heads, num_kv_heads, HEAD_DIM, PLAIN)
        lengths = np.full(count, new, np.int32), np.full(count, prefix, np.int32)
        times = {kernel: measure(group, kernel, *lengths, workspace) for kernel in kernels}
        chosen = choose_prefill_kernel(group, torch.bfloat16, *lengths, num_sms, is_hopper)
        excess.append(times[chosen] / min(times.values()) - 1)
        cells = [f"{time:.1f}{' *' if kernel == chosen else ''}" for kernel, time in times.items()]
        flop = 4 * num_heads * HEAD_DIM * count * new * (prefix + new / 2)
        cells += [f"{excess[-1]:.0%}", f"{flop / times[chosen] / 1e6:.0f}"]
        rows.append((f"{num_heads}/{num_kv_heads}", f"{count} x {new}", str(prefix), *cells))
    names = [f"{kernel.name}{', split' if kernel.splits else ''}" for kernel in kernels]
    print_table(sys.stdout, "µs, * chosen", ("heads", "new", "before", *names, "longer", "TFLOP/s"), rows)
    print(f"chosen ones took {statistics.mean(excess):.1%} longer than the fastest, {max(excess):.1%} at most")


def heads_of(text: str) -> tuple[int, int]:
    num_heads, num_kv_heads = map(positive, text.split("/"))
    return num_heads, num_kv_heads


def shape_of(text: str) -> tuple[int, int, int]:
    new, _, before = text.partition("+")
    count, new = map(positive, new.split("x"))
    return count, new, positive(before) if before else 0


def measure(
    group: PlanGroup, kernel: PrefillKernel, new: np.ndarray, prefix: np.ndarray, workspace: torch.Tensor
) -> float:
    """µs of one launch."""
    import flashinfer

    device, dtype = workspace.device, torch.bfloat16
    options = {"sm_scale": group.params.sm_scale, "q_data_type": dtype, "kv_data_type": dtype}
    options |= {"causal": True, "disable_split_kv": not kernel.splits}
    heads = (group.num_heads, group.num_kv_heads, HEAD_DIM)
    starts = offsets(new)
    q = torch.randn(int(new.sum()), group.num_heads, HEAD_DIM, device=device, dtype=dtype)
    out = torch.empty_like(q)
    if not prefix.any():
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend=kernel.name)
        wrapper.plan(starts, starts, *heads, **options)
        k, v = torch.randn(2, len(q), group.num_kv_heads, HEAD_DIM, device=device, dtype=dtype)
        return graph_us(lambda: wrapper.run(q, k, v, out=out), LAUNCHES)
    pages = -(-(new + prefix) // PAGE_SIZE)
    order = torch.randperm(int(pages.sum()), device=device).int()
    last = torch.from_numpy((new + prefix - 1) % PAGE_SIZE + 1)
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=kernel.name)
    wrapper.plan(starts, offsets(pages), order, last, *heads, PAGE_SIZE, **options)
    kv = torch.randn(2, len(order), PAGE_SIZE, group.num_kv_heads, HEAD_DIM, device=device, dtype=dtype)
    return graph_us(lambda: wrapper.run(q, tuple(kv), out=out), LAUNCHES)


def offsets(lengths: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))


if __name__ == "__main__":
    main()
