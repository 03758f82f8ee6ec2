"""How much Transformers' own logits of a small random model move with its rounding, row by row.

Such a model may have a row that any rounding shows many times over: a norm of 16 numbers that nearly cancel divides by
next to nothing. On an H200 one of eight rows of a tiny qwen3_5_text was off by 0.26 in bfloat16. Each of its kernels
was right within 0.008. The other rows were off by 0.04 at most, as were all but one row with seven other weights. Other
roundings of the embeddings moved that row by 0.13, other roundings of every module's outputs by 0.35.
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
    """The most that each row's logits move when what each of the model's modules gives is rounded otherwise, [S],
    relative as `relative_errors` are.

    Args:
        run: gives the model's logits [S, V].
        logits: what it gives without that.
        dtype: the model's; numbers are rounded to it.
    """
    generator = torch.Generator(logits.device).manual_seed(0)  # a CPU's would take long of a large model
    step = torch.finfo(dtype).eps  # at most

    def move(_module: torch.nn.Module, _given: Any, out: Any) -> Any:
        if not isinstance(out, torch.Tensor) or not out.is_floating_point():
            return out
        moved = (2 * torch.rand(out.shape, generator=generator, device=out.device) - 1) * step
        return (out.float() * (1 + moved)).to(out.dtype)

    leaves = [module for module in model.modules() if not any(True for _ in module.children())]
    handles = [module.register_forward_hook(move) for module in leaves]
    try:
        return torch.stack([relative_errors(run(), logits) for _ in range(_RUNS)]).amax(0)
    finally:
        for handle in handles:
            handle.remove()
