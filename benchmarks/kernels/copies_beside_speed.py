"""Milliseconds of a memory-bound step beside copies from the host's memory, by copies a call of the driver.

    python -m benchmarks.kernels.copies_beside_speed [--ways 1152:0,256:0,64:0,64:50] [--steps 300]
        [--launches 1]

Needs an NVIDIA GPU. A step is one CUDA graph that reads 4.3 GB of weights, or several that read as much together, as a
step with prompts is; one is launched while the one before runs, as in an engine. Pages are of the 8B shape (72 parts of
128 KiB). A way is COPIES:PAUSE: so many copies a call, and a pause of so many microseconds behind each call. `launch`
is how long the host's calls of a step take.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.script import need_gpu, parser_of, positive
from benchmarks.tiers.behind import link_rates
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.process.console import print_table
from mllm_compile.runtime.cuda.batched_copies import copy_batch
from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.schedule.tiers.ticket import Ticket
from mllm_compile.runtime.tiers import rows
from mllm_compile.runtime.tiers.copies import SlotCopies
from mllm_compile.runtime.tiers.layout import SlotLayout

_LAYERS, _PAGE, _PAGES, _PIECE = 36, (64, 8, 128), 448, 14
_WIDTH, _WEIGHTS = 4096, 128  # a step's matrices of 4096 x 4096 in bf16
_AT_ONCE = 2

Way = tuple[int, float]


def ways(text: str) -> list[Way]:
    """COPIES:PAUSE with commas between them, for argparse; copies a call, and seconds."""
    try:
        found = [(int(copies), 1e-6 * float(pause)) for copies, pause in (one.split(":") for one in text.split(","))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; expected COPIES:PAUSE,…") from None
    if any(copies < 1 or pause < 0 for copies, pause in found):
        raise argparse.ArgumentTypeError(f"{text!r}; expected at least a copy a call")
    return found


def use_way(way: Way | None) -> None:
    """Has copies go a way from now on; None: the product's."""

    def copy(targets: np.ndarray, sources: np.ndarray, sizes: np.ndarray, *, stream: int, device: int) -> None:
        assert way is not None
        copies, pause_s = way
        for start in range(0, sizes.size, copies):
            part = slice(start, start + copies)
            copy_batch(targets[part], sources[part], sizes[part], stream=stream, device=device, at_once=copies)
            if pause_s:
                time.sleep(pause_s)

    rows.copy_batch = copy_batch if way is None else copy  # type: ignore[attr-defined]


class Steps:
    """A step of products of one row, as so many graphs."""

    def __init__(self, launches: int) -> None:
        weights = [torch.randn(_WIDTH, _WIDTH, device="cuda", dtype=torch.bfloat16) / 64 for _ in range(_WEIGHTS)]
        x = torch.randn(1, _WIDTH, device="cuda", dtype=torch.bfloat16)
        self._graphs = [torch.cuda.CUDAGraph() for _ in range(launches)]
        for _ in range(2):
            self._forward(x, weights)
        torch.cuda.synchronize()
        self._kept = weights, [x]
        for number, graph in enumerate(self._graphs):
            with torch.cuda.graph(graph):
                x = self._forward(x, weights[number * _WEIGHTS // launches : (number + 1) * _WEIGHTS // launches])
            self._kept[1].append(x)

    def _forward(self, x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
        for weight in weights:
            x = x @ weight
        return x

    def run(self, count: int) -> Iterator[float]:
        """Launches so many; the host's seconds of each launch."""
        ends = [torch.cuda.Event(blocking=True) for _ in range(2)]
        for number in range(count):
            if number > 1:
                ends[number % 2].synchronize()
            began = time.perf_counter()
            for graph in self._graphs:
                graph.replay()
            taken = time.perf_counter() - began
            ends[number % 2].record()
            yield taken
        torch.cuda.synchronize()


class Pages:
    """Pages of the 8B shape, with the memory behind them."""

    def __init__(self) -> None:
        pool = [torch.zeros(_PAGES, *_PAGE, device="cuda", dtype=torch.bfloat16) for _ in range(2 * _LAYERS)]
        self.copies = SlotCopies(SlotLayout(pool), SlotLayout([]), _PAGES, 0, torch.device("cuda"))
        self._order = np.random.default_rng(0).permutation(_PAGES)
        self._at = self._flying = self.num_pages = 0
        self.is_ending = False

    def advance(self, kind: str) -> None:
        """Takes copies in that are over, and begins others."""
        over = self.copies.finished()
        self._flying -= len(over)
        self.num_pages += sum(len(ticket.entries) for ticket in over)
        while self._flying < _AT_ONCE and not self.is_ending:
            slots = self._order[self._at : self._at + _PIECE]
            self._at = (self._at + _PIECE) % _PAGES
            entries = [Entry(b"", b"", b"", 0, int(slot)) for slot in slots]
            ticket = Ticket("load" if kind == "load" else "store", entries, slots.astype(np.int32))
            ticket.from_below = np.zeros(len(entries), dtype=bool)
            self.copies.begin(ticket)
            self._flying += 1

    def settle(self) -> None:
        self.is_ending = True
        self.copies.wait()
        self.advance("load")
        self.is_ending = False


def timed(steps: Steps, count: int, pages: Pages | None = None, kind: str = "load") -> tuple[float, float, list[float]]:
    """Seconds a step, bytes copied a second, and seconds of each launch."""
    before = 0
    if pages is not None:
        pages.advance(kind)
        before = pages.num_pages
    began, launches = time.perf_counter(), []
    for launch in steps.run(count):
        launches.append(launch)
        if pages is not None:
            pages.advance(kind)
    taken = time.perf_counter() - began
    if pages is None:
        return taken / count, 0.0, launches
    copied = pages.num_pages - before
    pages.settle()
    return taken / count, copied * pages.copies.page_bytes / taken, launches


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ways", type=ways, default="1152:0,256:0,64:0,16:0,128:50,64:50,32:20")
    parser.add_argument("--steps", type=positive, default=300)
    parser.add_argument("--launches", type=positive, default=1, help="graphs of a step, up to 128 (default: 1)")
    args = parser.parse_args()
    if args.launches > _WEIGHTS:
        parser.error(f"--launches {args.launches}: a step has {_WEIGHTS} products")
    need_gpu()
    link = link_rates()
    print(f"{machine_line()}; link {link[0] / 1e9:.1f} GB/s in, {link[1] / 1e9:.1f} out")
    steps, pages = Steps(args.launches), Pages()
    timed(steps, 50)
    table = []
    for kind in ("load", "store"):
        for way in (None, *args.ways):
            use_way(way)
            timed(steps, 20, pages, kind)
            alone, _, quiet = timed(steps, args.steps)
            beside, rate, busy = timed(steps, args.steps, pages, kind)
            name = "as it is" if way is None else f"{way[0]}:{1e6 * way[1]:.0f}"
            calls = [f"{1e6 * np.quantile(found, at):.0f}" for found in (quiet, busy) for at in (0.5, 0.99)]
            table.append((kind, name, f"{rate / 1e9:.1f}", f"{1e3 * alone:.3f}", f"{1e3 * beside:.3f}",
                          f"{beside / alone:.3f}", "/".join(calls[:2]), "/".join(calls[2:])))  # fmt: skip
    heads = ("copies", "way", "GB/s", "step", "beside", "x", "launch µs p50/p99", "beside")

    print_table(sys.stdout, "ms a step", heads, table)
    pages.copies.close()


if __name__ == "__main__":
    main()
