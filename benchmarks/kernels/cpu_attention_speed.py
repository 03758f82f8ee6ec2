"""Attention of a layer on a CPU: the C++ library over the pages beside plain torch, by turns.

    python -m benchmarks.kernels.cpu_attention_speed [--heads 9,3,64] [--threads 1] [--dtype float32] [--repeats 7]

Batches are decodes of 64, 512 and 4,096 tokens, one and eight of them, and prompts of 512 with and without 2,048 tokens
before them. Pages lie in no order. Times are CPU time of the process, so other load matters less; with several threads
they are added up.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch

from benchmarks.script import names_of, parser_of, positive, positives, told_in_one_line
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.bench.timing.rounds import by_turns
from mllm_compile.kernels.cpu import compiled
from mllm_compile.process.console import print_table
from mllm_compile.runtime.attention.base import AttentionInputs
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.paged.attend import PagedAttention
from mllm_compile.runtime.attention.paged.library import PAGED_ATTENTION
from mllm_compile.runtime.attention.torch_backend import TorchAttnBackend
from mllm_compile.runtime.cpu.load import load_library
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode
from mllm_compile.runtime.memory_pool import KVPool, ReqToTokenPool

PAGE = 16
# Requests, tokens of each in the cache, new ones.
BATCHES = ((1, 63, 1), (1, 511, 1), (1, 4095, 1), (8, 63, 1), (8, 511, 1), (1, 0, 512), (1, 2048, 512))
_PRODUCTS_OF_A_TIME = 20_000_000  # of queries and keys: small batches are repeated


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--heads", type=positives, default=[9, 3, 64], help="query heads, KV heads, head dim")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--dtype", type=names_of(("float32", "bfloat16")), default=["float32"])
    parser.add_argument("--repeats", type=positive, default=7)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(machine_line("cpu"))
    heads, kv_heads, dim = args.heads
    layer = AttentionLayer("layer", 0, heads, kv_heads, dim, dim, dim**-0.5, 0.0, -1, None)
    rows = []
    for name in args.dtype:
        dtype = getattr(torch, name)
        backends = {"library": TorchAttnBackend(paged={layer.name: library().of(layer, dtype)})}
        backends["torch"] = TorchAttnBackend()
        for batch in BATCHES:
            takes = {way: partial(microseconds, *step(layer, batch, dtype, one)) for way, one in backends.items()}
            times = by_turns(takes, args.repeats)
            ours, theirs = (median(times[way]) for way in backends)
            ratio = median(b / a for a, b in zip(*times.values(), strict=True))
            shape = f"{batch[0]} x ({batch[1]} + {batch[2]})"
            rows.append((name, shape, f"{ours:.0f}", f"{theirs:.0f}", f"{ratio:.1f}"))
    print_table(
        sys.stdout, "a layer", ("dtype", "requests x (cached + new)", "library, µs", "torch, µs", "torch/library"), rows
    )


def library() -> PagedAttention:
    with TemporaryDirectory() as folder:
        binary = compiled(PAGED_ATTENTION, Path(folder) / "cpu")
    return PagedAttention(load_library(PAGED_ATTENTION, {PAGED_ATTENTION.name: binary}))


def step(
    layer: AttentionLayer, shape: tuple[int, int, int], dtype: torch.dtype, backend: TorchAttnBackend
) -> tuple[TorchAttnBackend, AttentionInputs, int]:
    """A layer's inputs in a step, and how often it is run for a time."""
    num_requests, cached, new = shape
    length = cached + new
    width = -(-length // PAGE)
    num_pages, generator = num_requests * width, torch.Generator().manual_seed(0)
    table = ReqToTokenPool(num_requests, width * PAGE, "cpu")
    rows = torch.arange(1, num_requests + 1)
    pages = torch.randperm(num_pages, generator=generator) + 1
    table.write_pages(rows.repeat_interleave(width), torch.arange(width).repeat(num_requests), pages, PAGE)
    pool = KVPool(num_pages + 1, PAGE, [layer.cache_shape], dtype, "cpu")
    for buffer in pool.get_pages(0):
        buffer.normal_(generator=generator)
    seq_lens, new_lens = (torch.full((num_requests,), count, dtype=torch.int32) for count in (length, new))
    slots = table.req_to_token[rows, cached:length].flatten().long()
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE if new == 1 else ForwardMode.EXTEND,
        batch_size=num_requests,
        input_ids=slots,
        req_pool_indices=rows,
        seq_lens=seq_lens,
        out_cache_loc=slots,
        positions=slots,
        seq_lens_cpu=seq_lens,
        req_to_token_pool=table,
        token_to_kv_pool=pool,
        attn_backend=backend,
        extend_seq_lens_cpu=new_lens,
    )
    q, k, v = (
        torch.randn(num_requests * new, heads, layer.head_dim, generator=generator).to(dtype)
        for heads in (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
    )
    inputs = AttentionInputs(q, k, v, torch.empty_like(q), layer, batch, slots)
    products = num_requests * new * length * layer.num_heads
    return backend, inputs, max(1, min(100, _PRODUCTS_OF_A_TIME // products))


def microseconds(backend: TorchAttnBackend, inputs: AttentionInputs, runs: int) -> float:
    """CPU time of a layer, the writing of new keys and values with it."""
    backend.init_forward_metadata(inputs.batch)
    writes = backend.writes_kv(inputs.layer)
    begin = time.process_time()
    for _ in range(runs):
        if not writes:
            inputs.batch.token_to_kv_pool.set_kv_buffer(0, inputs.batch.out_cache_loc, inputs.k, inputs.v)
        backend.forward(inputs)
    return (time.process_time() - begin) / runs * 1e6


if __name__ == "__main__":
    with told_in_one_line():
        main()
