"""Attention of captured decodes, one token a request: a capture for each number of rows.

A captured kernel's inputs stay in place; only their contents change with each replay.

Shape legend: R rows of a captured batch, P page entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mllm_compile.runtime.attention.flashinfer.decode import DecodeBatch, GraphBuffers, GroupDecode
from mllm_compile.runtime.attention.split.split_decode import SplitDecodeSpace
from mllm_compile.runtime.errors import ConfigError
from mllm_compile.runtime.forward_batch import ForwardMode


class DecodeSteps:
    """The captured decodes of one backend."""

    def __init__(
        self, groups: Sequence[GroupDecode], space: SplitDecodeSpace | None, buffers: Sequence[GraphBuffers]
    ) -> None:
        """
        Args:
            groups: one a plan group.
            space: the space of the program's own kernels, if there are any.
            buffers: the buffers that each group's captured kernels read.
        """
        self._groups = groups
        self._space = space
        self._buffers = buffers
        self._sizes: set[int] = set()

    def capture(self, num_rows: int, rows: torch.Tensor, seq_lens: torch.Tensor) -> list[Any]:
        """Capture decodes of `num_rows` rows of one token on the dummy page, a wrapper for each plan group.

        Args:
            rows: [R] int64, of the table of slots.
            seq_lens: [R] int32, which captured kernels read.
        """
        self._list_pages(rows)
        wrappers = [
            group.plan_capture(num_rows, seq_lens, buffers)
            for group, buffers in zip(self._groups, self._buffers, strict=True)
        ]
        self._sizes.add(num_rows)
        return wrappers

    def replay(self, num_rows: int, rows: torch.Tensor, decodes: DecodeBatch) -> list[Any]:
        """The wrappers captured for `num_rows` rows, made ready for these requests.

        Raises:
            RuntimeError: nothing was.
        """
        if num_rows not in self._sizes:
            raise RuntimeError(f"no batch of {num_rows} was captured; captured: {sorted(self._sizes)}")
        self._list_pages(rows)
        return [group.plan_replay(num_rows, decodes) for group in self._groups]

    def _list_pages(self, rows: torch.Tensor) -> None:
        if self._space is not None:
            self._space.list_pages(rows)


def make_graph_buffers(num_groups: int, max_rows: int, max_pages: int, device: torch.device) -> list[GraphBuffers]:
    """Buffers of zeros for each group. Page lists and their offsets differ between windows; how full a request's last
    page is does not, and is one buffer of all groups.

    Args:
        max_rows: R of the largest capture.
        max_pages: most pages of one request.
    """

    def zeros(size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=device)

    last_page_len = zeros(max_rows)
    return [GraphBuffers(zeros(max_rows * max_pages), zeros(max_rows + 1), last_page_len) for _ in range(num_groups)]


def check_capturable(forward_mode: ForwardMode, bs: int, num_tokens: int) -> None:
    """
    Raises:
        ConfigError: a batch is not a decode of one token a request.
    """
    if not forward_mode.is_decode() or bs != num_tokens:
        raise ConfigError(
            f"only DECODE with one token a request is captured, got {forward_mode.name} with {num_tokens} tokens "
            f"of {bs} requests"
        )
