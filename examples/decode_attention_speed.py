"""Microseconds of one layer's decode attention by kernel, page size, heads, batch and length, inside a CUDA graph.

    python examples/decode_attention_speed.py [--json FILE]

The choice of kernels in runtime/attention/flashinfer_kernels.py stands on this table. Each graph runs several layers
with KV of their own, more than the L2 cache holds, over random page tables, and before each of them a kernel that does
nearly nothing, as a model has one there: without it XQA would start while the layer before it still runs. The time of
these kernels alone is taken off. XQA is timed by the number of blocks that a request's keys are split among.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import flashinfer
import torch
from flashinfer.xqa import xqa as xqa_attention

HEADS = ((16, 8), (32, 8))
BATCHES = (1, 2, 4, 8, 64, 256)
LENGTHS = (128, 512, 1024, 4096, 16384)
MAX_TOKENS = 1 << 20  # of a batch
TABLE_TOKENS = 32768  # the page table's width: what a request may grow to
SPLITS = (1, 2, 4, 8, 16)
HEAD_DIM = 128
COLD_BYTES = 256 << 20  # several times the L2 cache
MAX_LAYERS = 16
XQA_PAGE_SIZE = 64


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    num_heads: int
    num_kv_heads: int
    batch: int
    length: int  # of every request; ragged: their mean
    page_size: int
    is_ragged: bool = False

    def lengths(self) -> torch.Tensor:
        if not self.is_ragged:
            return torch.full((self.batch,), self.length, dtype=torch.int32)
        spread = torch.rand(self.batch, generator=torch.Generator().manual_seed(0)) + 0.5
        return (spread * self.length).int()

    @property
    def kv_bytes(self) -> int:
        """What one layer must read."""
        return int(self.lengths().sum()) * self.num_kv_heads * HEAD_DIM * 2 * 2


class Layers:
    """KV pages of several layers in random order, and queries."""

    def __init__(self, case: Case) -> None:
        self.case = case
        lengths = case.lengths()
        self.num_pages = (lengths + case.page_size - 1) // case.page_size
        total = int(self.num_pages.sum())
        count = min(MAX_LAYERS, max(2, COLD_BYTES // case.kv_bytes))
        shape = (total + 1, case.page_size, case.num_kv_heads, HEAD_DIM)
        kwargs = {"dtype": torch.bfloat16, "device": "cuda"}
        self.pages = [
            (torch.empty(shape, **kwargs).normal_(), torch.empty(shape, **kwargs).normal_()) for _ in range(count)
        ]
        self.order = torch.randperm(total).int() + 1
        self.queries = torch.randn(count, case.batch, case.num_heads, HEAD_DIM, **kwargs)
        self.out = torch.zeros_like(self.queries)
        self.lengths = lengths

    def page_table(self) -> torch.Tensor:
        table = torch.zeros(self.case.batch, TABLE_TOKENS // self.case.page_size, dtype=torch.int32)
        start = 0
        for row, count in enumerate(self.num_pages.tolist()):
            table[row, :count] = self.order[start : start + count]
            start += count
        return table.cuda()

    def each(self, attend: Callable[..., object]) -> Callable[[], None]:
        def run() -> None:
            for query, pages, out in zip(self.queries, self.pages, self.out, strict=True):
                query.mul_(1)
                attend(query, pages, out)

        return run


def planned(layers: Layers, workspace: torch.Tensor, use_tensor_cores: bool) -> Callable[[], None]:
    """FlashInfer's decode, planned as for a captured batch."""
    case = layers.case
    indptr = torch.zeros(case.batch + 1, dtype=torch.int32)
    indptr[1:] = layers.num_pages.cumsum(0)
    last = (layers.lengths - 1) % case.page_size + 1
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=use_tensor_cores,
        paged_kv_indptr_buffer=indptr.cuda(),
        paged_kv_indices_buffer=layers.order.cuda(),
        paged_kv_last_page_len_buffer=last.cuda(),
    )
    options = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    heads = (case.num_heads, case.num_kv_heads, HEAD_DIM, case.page_size)
    wrapper.plan(indptr, layers.order.cuda(), last, *heads, **options)
    return layers.each(lambda query, pages, out: wrapper.run(query, pages, out=out))


def xqa(layers: Layers, workspace: torch.Tensor, num_splits: int) -> Callable[[], None]:
    case = layers.case
    table, lengths = layers.page_table(), layers.lengths.cuda().view(torch.uint32)[:, None]
    semaphores = torch.zeros(1 << 16, dtype=torch.int32, device="cuda").view(torch.uint32)
    blocks = num_splits * case.batch * case.num_kv_heads  # it splits until so many SMs have one

    def attend(query: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        heads_and_page = (case.num_kv_heads, case.page_size)
        xqa_attention(
            query[:, None],
            *pages,
            table,
            lengths,
            out[:, None],
            workspace,
            semaphores,
            *heads_and_page,
            sm_count=blocks,
        )

    return layers.each(attend)


def microseconds(run: Callable[[], None], num_layers: int) -> float:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(12):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / num_layers)
    return statistics.median(times[2:])


def measure(case: Case, workspace: torch.Tensor) -> dict[str, float]:
    layers = Layers(case)
    kernels = {
        "CUDA cores": lambda: planned(layers, workspace, False),
        "tensor cores": lambda: planned(layers, workspace, True),
    }
    if case.page_size == XQA_PAGE_SIZE:
        num_sms = torch.cuda.get_device_properties(0).multi_processor_count
        for splits in SPLITS:
            if splits == 1 or splits * case.batch * case.num_kv_heads <= num_sms:
                kernels[f"XQA/{splits}"] = lambda splits=splits: xqa(layers, workspace, splits)
    times, outputs = {}, {}
    nothing = microseconds(layers.each(lambda query, pages, out: None), len(layers.pages))
    for name, make in kernels.items():
        times[name] = microseconds(make(), len(layers.pages)) - nothing
        outputs[name] = layers.out.float().clone()
        layers.out.fill_(float("nan"))
    reference = outputs["CUDA cores"]
    for name, output in outputs.items():
        error = float((output - reference).norm() / reference.norm())
        if not error < 1e-2:
            sys.exit(f"{name} differs from the CUDA-core kernel by {error:.2e} for {case}")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")
    results = []
    columns = ("CUDA cores", "tensor cores", *(f"XQA/{splits}" for splits in SPLITS))
    print("heads   batch length  page    CUDA  tensor " + " ".join(f"{name:>7}" for name in columns[2:]) + "    TB/s")
    for num_heads, num_kv_heads in HEADS:
        for is_ragged, batches in ((False, BATCHES), (True, BATCHES[-2:])):
            for batch in batches:
                for length in (length for length in LENGTHS if length * batch <= MAX_TOKENS):
                    for page_size in (16, XQA_PAGE_SIZE):
                        case = Case(num_heads, num_kv_heads, batch, length, page_size, is_ragged)
                        times = measure(case, workspace)
                        results.append(asdict(case) | {"us": times})
                        rate = case.kv_bytes / min(times.values()) / 1e6
                        heads, ragged = f"{num_heads:2}/{num_kv_heads}", "~" if is_ragged else " "
                        print(
                            f"{heads} {ragged}{batch:5} {length:6} {page_size:5}",
                            *(f"{times[name]:7.2f}" if name in times else " " * 7 for name in columns),
                            f"{rate:7.2f}",
                            flush=True,
                        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "results": results}))


if __name__ == "__main__":
    main()
