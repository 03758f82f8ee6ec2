"""Bit masks of the vocabulary on their way to the device, and what they do to logits there.

The host fills bits in pinned memory while the device computes the logits that they are for. They are copied on a stream
of their own beside that, so that the sampling waits for neither. Like the rules of token_rules.py a mask adds -inf, so
that what is no number stays none, and a row that may have all tokens keeps its very logits.

Shape legend: K rows with a mask, S rows of a step, V vocab, W = ceil(V / 32) words.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from mllm_compile.runtime.device.upload import upload

_BITS = 32


@dataclass(frozen=True, slots=True)
class LikelierTimes:
    """The rule that one of the tokens from `first_time` on is next where they are together likelier than any other.

    Attributes:
        is_asked: [K] bool on the device, of the rows with a mask; None: all of them.
    """

    first_time: int
    is_asked: torch.Tensor | None

    def forbid_text(self, logits: torch.Tensor) -> torch.Tensor:
        """Logits [K, V] with -inf added to other tokens where the rule says so."""
        text, times = logits[:, : self.first_time], logits[:, self.first_time :]
        are_likelier = times.float().logsumexp(-1) > text.float().amax(-1)
        if self.is_asked is not None:
            are_likelier &= self.is_asked
        return torch.cat((torch.where(are_likelier[:, None], text - torch.inf, text), times), 1)


@dataclass(frozen=True, slots=True)
class TokenMask:
    """The tokens that grammars allow in a step.

    Attributes:
        bits: [K, W] int32 on the device.
        rows: [K] int64, the row of the step's logits that each is for; None: K is S, in order.
        places: [8] uint8 on the device, the value of each bit of a byte.
        draft_ids: RunPlan.draft_ids on the device, as far as grammars follow them; None: all of them.
        times: the rule of some rows, behind their masks; None: no row has it.
    """

    bits: torch.Tensor
    rows: torch.Tensor | None
    places: torch.Tensor
    draft_ids: torch.Tensor | None = None
    times: LikelierTimes | None = None

    def forbid_others(self, logits: torch.Tensor) -> torch.Tensor:
        """A copy of logits [S, V], of any float dtype, with -inf added to all but the allowed tokens."""
        is_set = self.bits.view(torch.uint8)[:, :, None].bitwise_and(self.places).ne(0)
        is_allowed = is_set.flatten(1)[:, : logits.shape[1]]
        masked = _without(logits if self.rows is None else logits.index_select(0, self.rows), is_allowed)
        if self.times is not None:
            masked = self.times.forbid_text(masked)
        return masked if self.rows is None else logits.index_copy(0, self.rows, masked)


def _without(logits: torch.Tensor, is_allowed: torch.Tensor) -> torch.Tensor:
    # Not masked_fill, which would make -inf of NaN.
    return torch.where(is_allowed, logits, logits - torch.inf)


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
        self._places = upload(np.left_shift(1, np.arange(8)).astype(np.uint8), device)

    def begin(self) -> np.ndarray:
        """[max_rows, W] int32 to write bits to. All steps that read the ones before must be over."""
        if self._copied is not None:
            self._copied.synchronize()  # at once when never recorded
        return self._host.numpy()

    def send(
        self,
        count: int,
        rows: np.ndarray | None,
        draft_ids: np.ndarray | None = None,
        times: tuple[int, np.ndarray] | None = None,
    ) -> TokenMask:
        """The first `count` masks, as they will be on the device for what is queued from now on.

        Args:
            rows: [count] of any integers: as TokenMask has them.
            draft_ids: int64, likewise.
            times: first_time and is_asked of LikelierTimes, [count] bool.
        """
        if self._stream is not None and self._copied is not None:
            with torch.cuda.stream(self._stream):
                self._bits[:count].copy_(self._host[:count], non_blocking=True)
                self._copied.record()
            torch.cuda.current_stream().wait_event(self._copied)
        index = None if rows is None else upload(rows.astype(np.int64), self._bits.device)
        followed = None if draft_ids is None else upload(draft_ids, self._bits.device)
        rule = None
        if times is not None:
            first_time, is_asked = times
            rule = LikelierTimes(first_time, None if is_asked.all() else upload(is_asked, self._bits.device))
        return TokenMask(self._bits[:count], index, self._places, followed, rule)
