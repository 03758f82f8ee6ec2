"""The device's state of each request's row from one step to the next."""

from __future__ import annotations

import torch

from mllm_compile.runtime.sampling.state import SamplingState


class RowState:
    """The tensors of the table's rows, always the same: captured graphs read and write them.

    Attributes:
        last_tokens: [rows] int64, the newest token of each.
        sampling: their sampling parameters.
    """

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.sampling = SamplingState(num_rows, vocab_size, device)
