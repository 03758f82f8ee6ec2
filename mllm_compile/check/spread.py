"""How much Transformers' own logits of a small random model move with its rounding, row by row.

Such a model may have a row that any rounding shows many times over: a norm of 16 numbers that nearly cancel divides by
next to nothing. On an H200 one of eight rows of a tiny qwen3_5_text was off by 0.26 in bfloat16, whose kernels each
were right within 0.008; with other roundings it was off by 0.01. On a CPU, of 60 such models with other weights
Transformers' own logits were further than 0.08 from float32 in 11.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mllm_compile.check.kernels import relative_errors

_RUNS = 8


def spread_of_rows(
    model: Any, run: Callable[[], torch.Tensor], logits: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The most that each row's logits move when what the model embeds is rounded otherwise, [S], relative as
    `relative_errors` are.

    Args:
        run: gives the model's logits [S, V].
        logits: what it gives without that.
        dtype: the model's, to which it rounds.
    """
    generator = torch.Generator().manual_seed(0)
    # One step at most. In those 11 models it moved the worst row by 1.3 to 9 times what that row was off by.
    step = torch.finfo(dtype).eps

    def move(_module: torch.nn.Module, _given: Any, embedded: torch.Tensor) -> torch.Tensor:
        moved = (2 * torch.rand(embedded.shape, generator=generator) - 1).to(embedded.device) * step
        return (embedded.float() * (1 + moved)).to(embedded.dtype)

    handle = model.get_input_embeddings().register_forward_hook(move)
    try:
        return torch.stack([relative_errors(run(), logits) for _ in range(_RUNS)]).amax(0)
    finally:
        handle.remove()
