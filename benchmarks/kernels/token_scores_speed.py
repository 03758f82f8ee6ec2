"""Microseconds of the log-probabilities of a token a row: by torch's operations, and by kernels in one pass.

    python -m benchmarks.kernels.token_scores_speed [--rows 1 8 64 256] [--vocab 151936]

Needs an NVIDIA GPU. Logits are bfloat16, each way is alone in a CUDA graph, and both take turns. `tempered` multiplies
logits by a number a row. The kernels run as they are compiled for packages (runtime/ops/tokens/score.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.script import need_gpu, parser_of, positive, told_in_one_line
from mllm_compile.bench.timing.graph import replay_us
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.bench.timing.rounds import by_turns
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.sampling.logprobs import token_logprobs

_ROUNDS = 5


class _Kernels(NamedTuple):
    """The op in place of a program's pieces."""

    dtype: torch.dtype
    score: Callable[[list[torch.Tensor]], list[torch.Tensor]]
    score_floats: Callable[[list[torch.Tensor]], list[torch.Tensor]]


def main() -> None:
    """Prints a line a number of rows."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--vocab", type=positive, default=151936)
    args = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)

    def score(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [op("score_tokens")(*inputs)]

    kernels = _Kernels(torch.bfloat16, score, score)
    print(f"{machine_line()}; {args.vocab} logits a row")
    print("rows             torch   kernels")
    for rows in args.rows:
        logits = 3 * torch.randn(rows, args.vocab, device="cuda").bfloat16()
        tokens = torch.randint(args.vocab, (rows,), device="cuda")
        for name, factors in (("", None), ("tempered", torch.full((rows,), 1.25, device="cuda"))):
            ways = {
                way: partial(replay_us, partial(token_logprobs, logits, tokens, 0, factors, pieces), 4)
                for way, pieces in (("torch", None), ("kernels", kernels))
            }
            taken = by_turns(ways, _ROUNDS)
            medians = (statistics.median(one for times in taken[way] for one in times) for way in ways)
            print(f"{rows:4} {name:8} {'  '.join(f'{us:8.1f}' for us in medians)}")


if __name__ == "__main__":
    with told_in_one_line():
        main()
