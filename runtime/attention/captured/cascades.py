"""Captured decodes that read a shared prefix once, by the program's own kernels (split/cascade.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mllm_compile.runtime.attention.capture import CapturesCascades
from mllm_compile.runtime.attention.flashinfer.kernels import PlanGroup
from mllm_compile.runtime.attention.flashinfer.planned import DecodeMetadata, Planned
from mllm_compile.runtime.attention.split.cascade import SharedPrefix
from mllm_compile.runtime.attention.split.split_decode import DecodePiece


class CapturedCascades(CapturesCascades):
    """The cascades of one backend's captured decodes."""

    def __init__(
        self,
        pieces: Mapping[int, DecodePiece],
        groups: Sequence[PlanGroup],
        prefix: SharedPrefix,
        page_table: torch.Tensor,
        planned: Planned,
    ) -> None:
        """
        Args:
            pieces: index of a plan group that has some → its kernel.
            prefix, page_table: the decodes' own.
            planned: the backend's.
        """
        self._pieces = pieces
        self._groups = groups
        self._prefix = prefix
        self._page_table = page_table
        self._planned = planned

    def use_cascade(self) -> None:
        if self._planned.decodes is None:
            raise RuntimeError("plan decodes for a capture before use_cascade")
        wrappers = list(self._planned.decodes.decode_wrappers)
        for index, piece in self._pieces.items():
            seq_lens = wrappers[index].seq_lens
            wrappers[index] = self._prefix.prepare(piece, self._groups[index], self._page_table, seq_lens)
        self._planned.decodes = DecodeMetadata(wrappers)

    def share_prefix(self, num_tokens: int) -> None:
        self._prefix.share(num_tokens)
