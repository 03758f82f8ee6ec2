"""Attention of captured prompts with no tokens in the cache: each from its first token on, without decodes.

Unlike a mixed step (mixed.py) such a one has no kernels of decodes, which take 2 µs a layer though they have nothing to
do, and needs no page table: FlashInfer's fa3 reads keys and values as they come, in a row. All else that it reads of a
batch is the list of work. That is written where the host keeps a step's inputs, and comes to the device with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mllm_compile.runtime.attention.flashinfer.prefill import GroupPrefill
from mllm_compile.runtime.attention.flashinfer.work_list import WorkList


class NewPrefillSteps:
    """The captured steps of one backend.

    Attributes:
        work_bytes: of the lists of all plan groups.
    """

    def __init__(self, groups: Sequence[GroupPrefill], works: Sequence[WorkList]) -> None:
        """
        Args:
            groups: one a plan group.
            works: the list of each, in the same order.
        """
        self._groups = groups
        self._works = works
        ends = np.cumsum([one.num_bytes for one in works]).tolist()
        self._places = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        self.work_bytes: int = ends[-1]
        self._captured: dict[int, list[Any]] = {}  # what graphs launched is kept

    def capture(self, num_tokens: int, work: torch.Tensor) -> list[Any]:
        """The wrappers of a step of `num_tokens`, one a plan group.

        Args:
            work: [work_bytes] uint8 on the device: the lists at each replay.
        """
        parts = zip(self._groups, self._works, self._places, strict=True)
        wrappers = [group.capture_in_a_row(num_tokens, works, work[place]) for group, works, place in parts]
        self._captured[num_tokens] = wrappers
        return wrappers

    def write(self, memory: np.ndarray, starts: np.ndarray) -> bool:
        """Writes the lists of prompts; False: there are more pieces than blocks.

        Args:
            memory: [work_bytes] uint8.
            starts: [R + 1] int32: the first token of each prompt, and the end of the last one.
        """
        lengths = starts[1:] - starts[:-1]
        return all(
            works.write(memory[place].view(np.int32), starts, starts, lengths)
            for works, place in zip(self._works, self._places, strict=True)
        )
