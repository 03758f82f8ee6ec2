"""Bit masks of the vocabulary on their way to the device, and what they do to logits there.

The host fills bits in pinned memory while the device computes the logits that they are for. They are copied on a stream
of their own beside that, so that the sampling waits for neither. Like the rules of token_rules.py a mask adds -inf, so
that what is no number stays none, and a row that may have all tokens keeps its very logits.

Shape legend: K rows with a mask, S rows of a step, V vocab, W = ceil(V / 32) words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import embedding

from mllm_compile.runtime.device.upload import upload

_BITS = 32


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that grammars allow in a step.

    Attributes:
        bits: [K, W] int32 on the device.
        rows: [K] int64, the row of the step's logits that each is for; None: K is S, in order.
        table_of: dtype → [256, 8], what a byte of bits adds to the logits of its tokens.
    """

    bits: torch.Tensor
    rows: torch.Tensor | None
    table_of: Callable[[torch.dtype], torch.Tensor]

    def forbid_others(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy of logits [S, V], of any float dtype, with -inf added to all but the allowed tokens."""
        num_rows, vocab_size = self.bits.shape[0], logits.shape[1]
        added = embedding(self.bits.view(torch.uint8).int(), self.table_of(logits.dtype))
        added = added.view(num_rows, -1)[:, :vocab_size]
        if self.rows is None:
            return logits + added
        return logits.index_copy(0, self.rows, logits.index_select(0, self.rows) + added)


class TokenMasks:
    """The memory of one step's masks, used again by each. Used by one thread.

    Args:
        max_rows: the most rows of a step that have a mask.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        shape = (max_rows, -(-vocab_size // _BITS))
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=is_cuda)
        self._bits = torch.empty(shape, dtype=torch.int32, device=device) if is_cuda else self._host
        self._stream = torch.cuda.Stream(device) if is_cuda else None
        if self._stream is not None:  # kernels that are still queued may use this memory, which was another tensor's
            self._stream.wait_stream(torch.cuda.current_stream(device))
        self._copied = torch.cuda.Event() if is_cuda else None
        self._tables: dict[torch.dtype, torch.Tensor] = {}

    def begin(self) -> np.ndarray:
        """[max_rows, W] int32 to write bits to. All steps that read the ones before must be over."""
        if self._copied is not None:
            self._copied.synchronize()  # at once when never recorded
        return self._host.numpy()

    def send(self, count: int, rows: np.ndarray | None) -> TokenMask:
        """The first `count` masks, as they will be on the device for what is queued from now on.

        Args:
            rows: [count] of any integers: as TokenMask has them.
        """
        if self._stream is not None and self._copied is not None:
            with torch.cuda.stream(self._stream):
                self._bits[:count].copy_(self._host[:count], non_blocking=True)
                self._copied.record()
            torch.cuda.current_stream().wait_event(self._copied)
        index = None if rows is None else upload(rows.astype(np.int64), self._bits.device)
        return TokenMask(self._bits[:count], index, self._table_of)

    def _table_of(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype not in self._tables:
            is_set = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
            added = np.where(is_set, 0, -np.inf).astype(np.float32)
            self._tables[dtype] = upload(added, self._bits.device).to(dtype)
        return self._tables[dtype]
