"""Microseconds of the kernels of one layer of experts with many tokens on Hopper, each alone in a CUDA graph.

    python -m benchmarks.kernels.experts_speed [--tokens 512 2048 8192] [--gate-up 192:2 192:4] [--down 128:2 192:2]

Needs an H100 or H200. The shape is Qwen3-30B-A3B's; each token chooses 8 of 128 experts at random. Linears come with
TFLOP/s, what only moves rows with TB/s. A form of the tiles' kernels is ROWS:SHARE, rows of
the weight in a tile and blocks of a cluster (runtime/ops/expert_tiles/kernel.py). By default the one that a runtime
takes is timed. Beside them: Triton's grouped products, which take their place without tile_experts, and the other
products of such a layer by cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.binaries import binaries_of
from benchmarks.script import need_hopper, parser_of, positive, told_in_one_line
from mllm_compile.bench.timing.graph import graph_us
from mllm_compile.kernels.cuda import KernelCompiler
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.expert_tiles.kernel import BLOCK, ExpertTilesKernel
from mllm_compile.runtime.ops.experts.shapes import SOFTMAX_OF_ALL, rows_of_block

EXPERTS, CHOSEN, HIDDEN, INNER = 128, 8, 2048, 768
GATE_UP, DOWN = (2 * INNER, HIDDEN), (HIDDEN, INNER)
OTHERS = {"qkv": (5120, 2048), "o": (2048, 4096), "router": (EXPERTS, HIDDEN)}
LAUNCHES = 5
Form = tuple[int, int]  # rows of a tile, blocks of a cluster


class FormedKernel(ExpertTilesKernel):
    """A kernel of a given form."""

    form: Form

    @property
    def tile_rows(self) -> int:
        return self.form[0]

    @property
    def share(self) -> int:
        return self.form[1]


def form_of(text: str) -> Form:
    rows, share = map(int, text.split(":"))
    return rows, share


def kernel_of(size: tuple[int, int], is_gated: bool, form: Form) -> ExpertTilesKernel:
    kernel = FormedKernel(*size, is_gated)
    object.__setattr__(kernel, "form", form)  # a frozen dataclass, whose fields are what a runtime stores
    return kernel


def default_form(size: tuple[int, int], is_gated: bool) -> Form:
    kernel = ExpertTilesKernel(*size, is_gated)
    return kernel.tile_rows, kernel.share


def load(kernels: list[ExpertTilesKernel]) -> None:
    from mllm_compile.runtime.ops.expert_tiles.ops import load_expert_tiles

    with KernelCompiler() as compiler:
        binaries = binaries_of(compiler, kernels)
    load_expert_tiles(kernels, binaries, torch.device("cuda:0"))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[512, 2048, 8192])
    parser.add_argument("--gate-up", type=form_of, nargs="+", default=[default_form(GATE_UP, True)])
    parser.add_argument("--down", type=form_of, nargs="+", default=[default_form(DOWN, False)])
    args = parser.parse_args()
    need_hopper()
    torch.manual_seed(0)
    weights = {
        size: torch.randn(EXPERTS, *size, device="cuda", dtype=torch.bfloat16) * size[1] ** -0.5
        for size in (GATE_UP, DOWN)
    }
    dense = {
        name: torch.randn(size, device="cuda", dtype=torch.bfloat16) * size[1] ** -0.5 for name, size in OTHERS.items()
    }
    print("tokens  what              µs  TFLOP/s   TB/s")
    for tokens in args.tokens:
        measure(tokens, weights, dense, args.gate_up, args.down)


def measure(
    tokens: int,
    weights: dict[tuple[int, int], torch.Tensor],
    dense: dict[str, torch.Tensor],
    of_gate_up: list[Form],
    of_down: list[Form],
) -> None:
    """Prints a line a kernel."""
    num_rows = tokens * CHOSEN

    def add(name: str, run: Callable[[], object], flop: float = 0, moved: float = 0) -> None:
        us = graph_us(run, LAUNCHES)
        rates = f"{flop / us / 1e6:8.0f}" if flop else f"{moved / us / 1e6:15.2f}" if moved else ""
        print(f"{tokens:6}  {name:14} {us:8.1f} {rates}")

    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16)
    slots = torch.arange(1, tokens + 1, device="cuda")
    scores = torch.randn(tokens, EXPERTS, device="cuda", dtype=torch.bfloat16)
    choose, order_experts = op("choose_experts"), op("order_experts")
    shares, ids = choose(scores, CHOSEN, SOFTMAX_OF_ALL, True)
    order, blocks = order_experts(ids, slots, EXPERTS, BLOCK, 0)
    row_bytes = 2 * HIDDEN
    add("choice", lambda: choose(scores, CHOSEN, SOFTMAX_OF_ALL, True))
    add("order", lambda: order_experts(ids, slots, EXPERTS, BLOCK, 0))
    inner = torch.zeros(len(order), INNER, device="cuda", dtype=torch.bfloat16)
    rows_of = torch.randint(tokens, (num_rows,), device="cuda")
    add("rows by torch", lambda: x[rows_of], moved=(num_rows + tokens) * row_bytes)
    for size, is_gated, forms in ((GATE_UP, True, of_gate_up), (DOWN, False, of_down)):
        weight = weights[size]
        for form in forms:
            load([kernel_of(size, is_gated, form)])
            name = f"{'gate_up' if is_gated else 'down'} {':'.join(map(str, form))}"
            flop = 2 * num_rows * size[0] * size[1]
            if is_gated:
                inner = op("gated_expert_tiles")(x, order, blocks, weight, CHOSEN)
                add(name, lambda: op("gated_expert_tiles")(x, order, blocks, weight, CHOSEN), flop)  # noqa: B023
            else:
                add(name, lambda: op("expert_tiles")(inner, order, blocks, weight, ids), flop)  # noqa: B023
    block = rows_of_block(None, CHOSEN, EXPERTS)
    grouped, by_block = op("grouped_linear"), order_experts(ids, slots, EXPERTS, block, 0)
    activated = grouped(x, *by_block, weights[GATE_UP], None, CHOSEN, False, True, True, block)
    for name, rows, size in (("gate_up Triton", x, GATE_UP), ("down Triton", activated, DOWN)):
        how = CHOSEN, False, rows is x, rows is x, block
        add(name, lambda: grouped(rows, *by_block, weights[size], None, *how), 2 * num_rows * size[0] * size[1])  # noqa: B023
    outputs = op("expert_tiles")(inner, order, blocks, weights[DOWN], ids)
    add("sum", lambda: op("sum_experts")(outputs, shares), moved=(num_rows + tokens) * row_bytes)
    for name, weight in dense.items():
        inputs = torch.randn(tokens, weight.shape[1], device="cuda", dtype=torch.bfloat16)
        linear = torch.nn.functional.linear
        add(name, lambda: linear(inputs, weight), 2 * tokens * weight.numel())  # noqa: B023


if __name__ == "__main__":
    with told_in_one_line():
        main()
