"""Microseconds of experts' linears of 9 to 256 tokens, each alone in a CUDA graph, in several tilings.

    python -m benchmarks.kernels.grouped_experts_speed [--tokens 64 256] [--down 64:256:4:3 128:128:4:3] [--gate-up …]

Needs a GPU with Triton. The shape is Qwen3-30B-A3B's; each token chooses 8 of 128 experts at random. A tiling is
COLUMNS:DEPTH:WARPS:STAGES (runtime/ops/experts/grouped.py), of a gated linear columns of gate and up together; the one
that a runtime takes comes first. The rate counts each chosen expert's weight once; a sum's is beside it.
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.script import need_gpu, parser_of, positive, told_in_one_line
from mllm_compile.bench.timing.graph import graph_us, read_rate
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.experts.shapes import SOFTMAX_OF_ALL, rows_at_once, rows_of_block

EXPERTS, CHOSEN, HIDDEN, INNER = 128, 8, 2048, 768
Tiling = tuple[int, int, int, int]


def tiling_of(text: str) -> Tiling:
    columns, depth, warps, stages = map(int, text.split(":"))
    return columns, depth, warps, stages


def measure(tokens: int, weights: dict[str, torch.Tensor], forms: dict[str, list[Tiling]]) -> None:
    """Prints a line a tiling."""
    import triton  # where there is a GPU, which main asks for

    from mllm_compile.runtime.ops.experts import grouped

    block = rows_of_block(tokens, CHOSEN, EXPERTS)
    x = torch.randn(tokens, HIDDEN, device="cuda").bfloat16()
    slots = torch.arange(1, tokens + 1, device="cuda")
    scores = torch.randn(tokens, EXPERTS, device="cuda").bfloat16()
    _, ids = op("choose_experts")(scores, CHOSEN, SOFTMAX_OF_ALL, True)
    order, blocks = op("order_experts")(ids, slots, EXPERTS, block, rows_at_once(tokens, CHOSEN))
    share = ids.unique().numel() / EXPERTS
    rows = None
    chosen = grouped._tiling
    for name, weight in weights.items():
        is_gated = name == "gate_up"
        inputs, given = (x, True) if is_gated else (rows, False)
        operands = (inputs, order, blocks, weight, None, CHOSEN, False, given, is_gated, block)
        for form in (None, *forms[name]):
            if form is not None:
                columns, depth, warps, stages = form
                columns = columns // 2 if is_gated else columns
                sizes = {"COLUMNS": columns, "DEPTH": depth, "num_warps": warps, "num_stages": stages}
                grouped._tiling = lambda *_, sizes=sizes: sizes
            label = "as it is" if form is None else ":".join(map(str, form))
            try:
                rows = op("grouped_linear")(*operands) if is_gated else rows
                us = graph_us(partial(op("grouped_linear"), *operands))
                rate = f"{us:8.1f} {share * weight.nbytes / us / 1e6:6.2f}"
            except triton.runtime.errors.OutOfResources:  # type: ignore[attr-defined]  # the stub has our kernels' names
                rate = "does not fit"
            grouped._tiling = chosen
            print(f"{tokens:6}  {name:8} {label:14} {rate}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=positive, nargs="+", default=[64, 256])
    parser.add_argument("--gate-up", type=tiling_of, nargs="*", default=[])
    parser.add_argument("--down", type=tiling_of, nargs="*", default=[])
    args = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    sizes = {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
    weights = {
        name: torch.empty(EXPERTS, *size, device="cuda", dtype=torch.bfloat16).normal_(0.0, size[1] ** -0.5)
        for name, size in sizes.items()
    }
    print(f"{machine_line()}; a sum reads {read_rate() / 1e3:.2f} TB/s")
    print("tokens  linear   tiling               µs   TB/s")
    for tokens in args.tokens:
        measure(tokens, weights, {"gate_up": args.gate_up, "down": args.down})


if __name__ == "__main__":
    with told_in_one_line():
        main()
