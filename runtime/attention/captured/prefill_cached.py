"""Attention of captured prompts, some with tokens in the cache, without decodes.

As new ones (prefill_new.py) they have no kernels of decodes. All that they read of a batch is in the host's memory of a
step's inputs: lists of work, and the ids of keys' and values' pages. FlashInfer's fa2 serves few tokens, whose keys it
divides among blocks; fa3 serves more.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mllm_compile.runtime.attention.flashinfer.prefill import GroupPrefill
from mllm_compile.runtime.attention.flashinfer.work_list import SplitList, WorkList
from mllm_compile.runtime.attention.metadata import StepPrompts

# Most tokens for dividing a query's keys among blocks. On an H200 64 and 128 tokens behind 2,000 of Qwen3-8B take some
# 20 and 33 µs a layer so, 34 and 35 by fa3; behind 8,000 fa3 takes 118.
_MOST_SPLIT_TOKENS = 128
_MOST_PROMPTS = 32
_MOST_PAGES = 2048  # whose ids come with a step's inputs


class CachedPrefillSteps:
    """The captured steps of one backend.

    Attributes:
        work_bytes: of page ids, and of the lists of all plan groups.
    """

    def __init__(self, groups: Sequence[GroupPrefill], works: Sequence[WorkList], page_size: int) -> None:
        """
        Args:
            groups: one a plan group.
            works: fa3's list of each, in the same order.
        """
        self._groups = groups
        self._works = works
        self._page_size = page_size
        split = [group.split_list(_MOST_SPLIT_TOKENS, _MOST_PROMPTS) for group in groups]
        sizes = [max(one.num_bytes, two.num_bytes) for one, two in zip(works, split, strict=True)]
        ends = np.cumsum([_MOST_PAGES * 4, *sizes]).tolist()
        self._places = [slice(*bounds) for bounds in itertools.pairwise(ends)]
        self.work_bytes: int = ends[-1]
        self._lists: dict[int, Sequence[SplitList | WorkList]] = {}
        self._captured: dict[int, list[Any]] = {}  # what graphs launched is kept

    def capture(self, num_tokens: int, work: torch.Tensor) -> list[Any]:
        """The wrappers of a step of `num_tokens`, one a plan group.

        Args:
            work: [≥ work_bytes] uint8 on the device: page ids and lists at each replay.
        """
        lists: Sequence[SplitList | WorkList] = self._works
        if num_tokens <= _MOST_SPLIT_TOKENS:
            lists = [group.split_list(num_tokens, _MOST_PROMPTS) for group in self._groups]
        self._lists[num_tokens] = lists
        page_ids = work[: _MOST_PAGES * 4].view(torch.int32)
        parts = zip(self._groups, lists, self._places, strict=True)
        wrappers = [group.capture_pages(num_tokens, works, work[place], page_ids) for group, works, place in parts]
        self._captured[num_tokens] = wrappers
        return wrappers

    def write(self, num_tokens: int, memory: np.ndarray, prompts: StepPrompts) -> bool:
        """Writes page ids and lists of prompts; False: there are more than there is room for, or the kernels would take
        longer than others by more than a graph spares.

        Args:
            memory: [≥ work_bytes] uint8.
        """
        num_keys = prompts.num_keys
        bounds = list(itertools.accumulate((-(-n // self._page_size) for n in num_keys.tolist()), initial=0))
        first_pages, total = np.array(bounds, dtype=np.int32), bounds[-1]
        if total > _MOST_PAGES or not self._serves(num_tokens, prompts):
            return False
        for works, place in zip(self._lists[num_tokens], self._places, strict=True):
            if not works.write(memory[place].view(np.int32), prompts.starts, first_pages, num_keys):
                return False
        memory[: total * 4].view(np.int32)[:] = prompts.list_pages()
        return True

    def _serves(self, num_tokens: int, prompts: StepPrompts) -> bool:
        lengths = prompts.query_lens, prompts.prefix_lens
        return num_tokens <= _MOST_SPLIT_TOKENS or all(group.runs_well_captured(*lengths) for group in self._groups)
