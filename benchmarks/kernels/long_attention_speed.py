"""Attention of a long prompt's chunk, by the ways in which it may be computed: µs of one layer, inside a CUDA graph.

    python -m benchmarks.kernels.long_attention_speed [--heads 32/8] [--shapes 1x8192 1x512+16000]

Needs an NVIDIA Hopper GPU and the `cuda` extra. Shapes are REQUESTSxNEW+BEFORE, in tokens. The ways:

- pages: FlashInfer's fa3 over the pages of the KV cache;
- in a row: its fa3 over keys and values that are one after another, and the time of copying them out of their pages;
- parts: the keys before the chunk in so many parts, each seen whole by all queries, and the chunk's own keys; results
    are merged. With few queries more multiprocessors have work then;
- cuDNN: torch's, of the same heads and with nothing before, to compare with.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.kernels.prefill_attention_speed import heads_of, offsets, shape_of
from benchmarks.script import need_hopper, parser_of, told_in_one_line
from mllm_compile.bench.timing.graph import graph_us
from mllm_compile.process.console import print_table
from mllm_compile.runtime.attention.flashinfer.copied import CopySpace

SHAPES = (
    *((1, 8192, 0), (1, 8192, 8192), (1, 8192, 24_576), (8, 4096, 0), (8, 2048, 2048)),
    *((1, new, before) for before in (8000, 16_000, 31_000) for new in (128, 256, 384, 512, 640, 768, 1024)),
)
HEAD_DIM, PAGE_SIZE = 128, 64
PARTS = (2, 4)
LAUNCHES = 4


class Chunk:
    """One layer's inputs."""

    def __init__(self, num_heads: int, num_kv_heads: int, shape: tuple[int, int, int], workspace: torch.Tensor) -> None:
        self.count, self.new, self.before = shape
        self.heads = (num_heads, num_kv_heads, HEAD_DIM)
        self.workspace = workspace
        self.lengths = np.full(self.count, self.new + self.before, np.int32)
        pages = -(-self.lengths // PAGE_SIZE)
        self.page_starts = offsets(pages)
        options = {"device": workspace.device, "dtype": torch.bfloat16}
        self.q = torch.randn(self.count * self.new, num_heads, HEAD_DIM, **options)
        self.out = torch.empty_like(self.q)
        self.pages = torch.randn(2, int(pages.sum()), PAGE_SIZE, num_kv_heads, HEAD_DIM, **options)
        self.order = torch.randperm(self.pages.shape[1], device=workspace.device).int()
        self.starts = offsets(np.full(self.count, self.new))
        self.plan_options = {"sm_scale": HEAD_DIM**-0.5, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}

    def paged(self) -> Callable[[], object]:
        import flashinfer

        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", backend="fa3")
        last = torch.from_numpy((self.lengths - 1) % PAGE_SIZE + 1)
        wrapper.plan(
            self.starts, self.page_starts, self.order, last, *self.heads, PAGE_SIZE, causal=True, **self.plan_options
        )
        return lambda: wrapper.run(self.q, tuple(self.pages), out=self.out)

    def in_a_row(self) -> Callable[[], object]:
        import flashinfer

        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(self.workspace, "NHD", backend="fa3")
        wrapper.plan(self.starts, offsets(self.lengths), *self.heads, causal=True, **self.plan_options)
        k, v = (pages.flatten(0, 1)[: int(self.lengths.sum())] for pages in self.pages)
        return lambda: wrapper.run(self.q, k, v, out=self.out)

    def copied(self) -> Callable[[], object]:
        """Copies keys and values out of their pages."""
        offsets_of_page = torch.arange(PAGE_SIZE, device=self.order.device, dtype=torch.int32)
        slots = (self.order[:, None] * PAGE_SIZE + offsets_of_page).flatten()
        space = CopySpace(torch.empty(self.pages.nbytes, dtype=torch.uint8, device=self.order.device))
        return lambda: space.copy(tuple(self.pages), slots)

    def in_parts(self, parts: int) -> Callable[[], object]:
        """One request's; `before` in whole pages."""
        import flashinfer

        workspace = torch.zeros(1 << 20, dtype=torch.uint8, device=self.workspace.device)
        pages = self.before // PAGE_SIZE
        before = flashinfer.BatchPrefillWithPagedKVCacheWrapper(self.workspace, "NHD", backend="fa3")
        bounds = torch.tensor([pages * part // parts for part in range(parts + 1)], dtype=torch.int32)
        starts = offsets(np.full(parts, self.new))
        last = torch.full((parts,), PAGE_SIZE, dtype=torch.int32)
        options = self.plan_options
        before.plan(starts, bounds, self.order[:pages], last, *self.heads, PAGE_SIZE, causal=False, **options)
        own = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
        own.plan(self.starts, self.starts, *self.heads, causal=True, **options)
        k, v = (of_pages.flatten(0, 1)[: self.new] for of_pages in self.pages)
        queries = self.q.new_empty(parts * self.new, *self.q.shape[1:])
        outs, sums = torch.empty_like(queries), torch.empty(queries.shape[:2], device=self.q.device)
        own_sums = sums.new_empty(self.q.shape[:2])

        def run() -> None:
            queries.view(parts, *self.q.shape).copy_(self.q)
            before.run(queries, tuple(self.pages), out=outs, lse=sums, return_lse=True)
            own.run(self.q, k, v, out=self.out, lse=own_sums, return_lse=True)
            for out, log_sum in zip(outs.chunk(parts), sums.chunk(parts), strict=True):
                flashinfer.merge_state_in_place(self.out, own_sums, out, log_sum)

        return run

    def by_cudnn(self) -> Callable[[], object]:
        shape = (self.count, self.heads[0], self.new, HEAD_DIM)
        q, k, v = (torch.randn(shape, device=self.q.device, dtype=self.q.dtype) for _ in range(3))

        def run() -> None:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        return run

    @property
    def flop(self) -> float:
        return 4 * self.heads[0] * HEAD_DIM * self.count * self.new * (self.before + self.new / 2)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--heads", type=heads_of, nargs="+", default=[(32, 8)], help="query heads/KV heads")
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=SHAPES)
    args = parser.parse_args()
    need_hopper()
    device = torch.device("cuda", torch.cuda.current_device())
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device=device)
    rows = []
    for (num_heads, num_kv_heads), shape in itertools.product(args.heads, args.shapes):
        chunk = Chunk(num_heads, num_kv_heads, shape, workspace)
        ways: list[Callable[[], object] | None] = [chunk.paged(), chunk.in_a_row(), chunk.copied()]
        is_split = chunk.count == 1 and chunk.before >= 16 * PAGE_SIZE
        ways += [chunk.in_parts(parts) if is_split else None for parts in PARTS]
        ways.append(None if chunk.before else chunk.by_cudnn())
        times = [None if way is None else graph_us(way, LAUNCHES) for way in ways]
        cells = ["" if time is None else f"{time:.0f}" for time in times]
        rates = ["" if time is None else f"{chunk.flop / time / 1e6:.0f}" for time in (times[0], times[1], times[-1])]
        rows.append((f"{num_heads}/{num_kv_heads}", f"{chunk.count} x {chunk.new}", str(chunk.before), *cells, *rates))
        print("; ".join(rows[-1]))
    parts = [f"{count} parts" for count in PARTS]
    columns = ("heads", "new", "before", "pages", "in a row", "copy", *parts, "cuDNN", "TFLOP/s", "in a row", "cuDNN")
    print_table(sys.stdout, "µs of a layer", columns, rows)


if __name__ == "__main__":
    with told_in_one_line():
        main()
