"""Times sums over ranks with the residual and the norm behind them, by kernels of ours and by NCCL, and checks them.

    python -m benchmarks.kernels.rank_sums_speed [COLUMNS [RANKS]]          # 4096 and 2

Needs a Hopper GPU for each rank. A line a way has µs of a call, captured 40 times in a CUDA graph; then the time that
it adds behind two linears of a rank of Qwen3-8B; then the time that it adds if the tokens are two halves. There a
half's sum is on its own stream beside the other half's linears. Or ("copied") each half has a stream and its sums are
copied, as in steps in halves (runtime.enable_dbo). Every way is compared with float32 first, and between ranks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.script import need_hopper, parser_of, positive
from mllm_compile.bench.timing.clock import gpu_seconds
from mllm_compile.bench.timing.graph import replay_us
from mllm_compile.bench.timing.rounds import repeated
from mllm_compile.kernels.nvrtc import compile_cuda
from mllm_compile.runtime.collectives.base import Communicator
from mllm_compile.runtime.collectives.nccl import NcclCommunicator, new_group_id
from mllm_compile.runtime.collectives.push import add_and_norm, load_ranks_kernel
from mllm_compile.runtime.collectives.sum_kernels import (
    AddNormKernel,
    PushKernel,
    PushNormKernel,
    SendKernel,
    SendNormKernel,
)
from mllm_compile.runtime.cuda.kernel import kernel_source

TOKENS = (1, 8, 64, 256, 512, 1024, 2048, 4096, 8192)
CALLS, REPLAYS = 40, 5
LAYERS, LEAST_IN_HALVES = 8, 1024
INNER = 6144  # features of a rank between the two linears
EPS = 1e-6

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def ways(group: NcclCommunicator) -> dict[str, Way]:
    pushed: Any = group._pushed
    sent: Any = group._sent
    group._pushed = group._sent = None  # sums are NCCL's from here on

    def if_taken(sums: Any, call: Way) -> Way:
        def way(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if sums is None or not sums.takes(x):
                raise ValueError("too large")
            return call(x, residual, weight)

        return way

    return {
        "none": lambda x, residual, weight: add_and_norm(x, residual, weight, EPS),
        "nccl": lambda x, residual, weight: add_and_norm(group.all_reduce(x), residual, weight, EPS),
        "push, then norm": if_taken(
            pushed, lambda x, residual, weight: add_and_norm(pushed.sum(x), residual, weight, EPS)
        ),
        "push with norm": if_taken(pushed, lambda *given: pushed.sum_and_norm(*given, EPS)),
        "send, then norm": if_taken(sent, lambda x, residual, weight: add_and_norm(sent.sum(x), residual, weight, EPS)),
        "send with norm": if_taken(sent, lambda *given: sent.sum_and_norm(*given, EPS)),
    }


def timed(run: Callable[[], Any], group: NcclCommunicator, calls: int = CALLS) -> float:
    """µs of a call, the fastest of some replays."""
    return min(replay_us(run, calls, REPLAYS, lambda: group.least(0)))


def check(name: str, way: Way, given: tuple[torch.Tensor, ...], group: NcclCommunicator) -> str:
    x, residual, weight = given
    _, normed = way(x, residual, weight)
    every = group.all_gather(x).float().sum(0) + residual.float()
    wanted = weight.float() * every * torch.rsqrt(every.pow(2).mean(-1, keepdim=True) + EPS)
    error = float((normed.float() - wanted).norm() / wanted.norm())
    bits = group.all_gather(normed.view(torch.int16))
    are_equal = bool((bits == bits[0]).all())
    return "" if error < 1e-2 and are_equal else f"{name}: WRONG, error {error:.3g}, equal bits {are_equal}"


def measure(rank: int, size: int, group_id: bytes, columns: int) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    of_rows = (PushNormKernel(columns), SendNormKernel(columns), AddNormKernel(columns))
    kernels = (PushKernel(), SendKernel(), *of_rows)
    for kernel in kernels:
        binary = compile_cuda(kernel_source(kernel), kernel.name, "sm_90a")
        load_ranks_kernel(kernel, {kernel.name: binary}, device)
    group = NcclCommunicator(rank, size, group_id, device)
    group.use_kernels(kernels)
    lanes = group.lanes(2, TOKENS[-1] // 2 * columns * 2)
    streams = [torch.cuda.Stream() for _ in lanes]
    own, shared = (torch.Generator(device).manual_seed(seed) for seed in (rank, 99))

    def random(*shape: int, of: torch.Generator = shared) -> torch.Tensor:
        return torch.randn(shape, generator=of, device=device).bfloat16()

    up, down, weight = random(2 * INNER, columns), random(columns, INNER), random(columns)
    known = ways(group)
    alone: dict[int, float] = {}  # of two linears and the rest, without a sum
    for title in ("a call", "behind two linears, less 'none'"):
        rows = {}
        for name, way in known.items():
            for tokens in TOKENS:
                given = random(tokens, columns, of=own), random(tokens, columns), weight
                try:
                    way(*given)
                except ValueError:
                    continue
                if title == "a call":
                    wrong = "" if name == "none" else check(name, way, given, group)
                    if wrong and rank == 0:
                        print(f"{wrong} at {tokens} tokens")
                    rows[name, tokens] = timed(lambda: way(*given), group)  # noqa: B023
                else:

                    def chain() -> None:
                        hidden = torch.nn.functional.linear(given[0], up)[:, :INNER]  # noqa: B023
                        way(torch.nn.functional.linear(hidden, down), *given[1:])  # noqa: B023

                    rows[name, tokens] = timed(chain, group)
                    if name == "none":
                        alone[tokens] = rows[name, tokens]
        if rank == 0:
            show(title, rows)
    rows = {}
    for tokens in (count for count in TOKENS if count >= LEAST_IN_HALVES):
        halves = [(random(tokens // 2, columns, of=own), random(tokens // 2, columns), weight) for _ in range(2)]
        for name in ("nccl", "send with norm"):
            run = partial(in_halves, halves, up, down, known[name], torch.cuda.Stream())
            rows[name, tokens] = timed(run, group, CALLS // LAYERS) / LAYERS - alone[tokens]
        run = partial(on_two_streams, halves, up, down, lanes, streams)
        rows["copied", tokens] = launched(run, group) - alone[tokens]
        wrong = check(
            "copied",
            lambda x, residual, weight: lanes[0].all_reduce_residual_norm(x, residual, weight, EPS),
            halves[0],
            group,
        )
        if wrong and rank == 0:
            print(f"{wrong} at {tokens // 2} tokens")
    if rank == 0:
        show("in two halves, less 'none' whole", rows)
    group.close()


def in_halves(
    halves: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    up: torch.Tensor,
    down: torch.Tensor,
    way: Way,
    side: torch.cuda.Stream,
) -> None:
    """LAYERS times two linears and a sum for each half of the tokens: one's sum is beside the other's linears."""
    main = torch.cuda.current_stream()
    summed: list[torch.cuda.Event | None] = [None, None]
    for _ in range(LAYERS):
        for index, (x, residual, weight) in enumerate(halves):
            if (last := summed[index]) is not None:
                main.wait_event(last)  # the half's linears read what its sum gave
            hidden = torch.nn.functional.linear(x, up)[:, :INNER]
            part = torch.nn.functional.linear(hidden, down)
            side.wait_stream(main)
            with torch.cuda.stream(side):
                way(part, residual, weight)
                summed[index] = side.record_event()
    main.wait_stream(side)


def on_two_streams(
    halves: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    up: torch.Tensor,
    down: torch.Tensor,
    lanes: Sequence[Communicator],
    streams: Sequence[torch.cuda.Stream],
) -> None:
    """CALLS times two linears and a sum for each half of the tokens, each half on a stream."""
    main = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(main)
    for _ in range(CALLS):
        for (x, residual, weight), lane, stream in zip(halves, lanes, streams, strict=True):
            with torch.cuda.stream(stream):
                hidden = torch.nn.functional.linear(x, up)[:, :INNER]
                lane.all_reduce_residual_norm(torch.nn.functional.linear(hidden, down), residual, weight, EPS)
    for stream in streams:
        main.wait_stream(stream)


def launched(run: Callable[[], Any], group: NcclCommunicator) -> float:
    """µs of a call, the fastest of some; launched one by one, as what counts calls on the host cannot be captured."""

    def take() -> float:
        torch.cuda.synchronize()
        group.least(0)  # the ranks meet
        return gpu_seconds(run) * 1e6 / CALLS

    return min(repeated(take, REPLAYS, warm_ups=0))


def show(title: str, rows: dict[tuple[str, int], float]) -> None:
    print(f"{title:34}" + "".join(f"{tokens:>10}" for tokens in TOKENS))
    for name in dict.fromkeys(name for name, _ in rows):
        line = f"{name:34}"
        for tokens in TOKENS:
            us = rows.get((name, tokens))
            if us is not None and title.startswith("behind") and name != "none":
                us -= rows["none", tokens]
            line += " " * 10 if us is None else f"{us:10.2f}"
        print(line)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("columns", type=positive, nargs="?", default=4096)
    parser.add_argument("ranks", type=positive, nargs="?", default=2)
    asked = parser.parse_args()
    columns, size = asked.columns, asked.ranks
    rank = int(os.environ.get("RANK", "0"))
    need_hopper(size)
    if rank:
        measure(rank, size, bytes.fromhex(os.environ["GROUP"]), columns)
        return
    group_id = new_group_id()
    others = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.kernels.rank_sums_speed", str(columns), str(size)],
            env=os.environ | {"RANK": str(other), "GROUP": group_id.hex()},
        )
        for other in range(1, size)
    ]
    try:
        measure(0, size, group_id, columns)
    finally:
        for other in others:
            other.wait(10)


if __name__ == "__main__":
    main()
