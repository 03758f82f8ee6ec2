"""Calls of a runner that all ranks make together; on one rank most do nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from mllm_compile.runtime.collectives.base import Communicator, using
from mllm_compile.runtime.collectives.choose import TokenChoice
from mllm_compile.runtime.collectives.sum_kernels import MOST_CHOICES
from mllm_compile.runtime.forward_batch import LogitsProcessorOutput
from mllm_compile.runtime.program.loaded import LoadedModel
from mllm_compile.runtime.program.pipeline import Pipeline
from mllm_compile.runtime.runner_config import RunnerConfig
from mllm_compile.runtime.sampling.state import RowState


class RunnerRanks:
    """The calls of a ModelRunner that all ranks make together."""

    config: RunnerConfig
    model: LoadedModel
    device: torch.device
    row_state: RowState
    communicator: Communicator | None
    pipeline: Pipeline | None

    @property
    def dp_size(self) -> int:
        """Data-parallel ranks, each with requests and a part of the experts of its own; 1 without data parallelism."""
        return self.config.runtime.expert_parallel_size

    def on_device(self) -> AbstractContextManager[Any]:
        """Makes the runner's GPU the calling thread's current one, and its rank's communicator the thread's."""
        device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        return device if self.communicator is None else _both(device, using(self.communicator))

    @property
    def choice(self) -> TokenChoice | None:
        """The kernel by which ranks choose tokens together in captured decodes.

        None: no such kernel is loaded, or the vocabulary is not divided among ranks.
        """
        communicator, graphs = self.communicator, self.config.cudagraph
        if communicator is None or self.dp_size > 1 or not graphs.sample_in_graph:
            return None
        if max(graphs.decode_requests, default=0) > MOST_CHOICES:
            return None
        return communicator.choice(self.model.vocab_size // communicator.size)

    def greedy_across_ranks(self, output: LogitsProcessorOutput) -> torch.Tensor:
        """The likeliest tokens [S] int64, on every rank, of logits that ranks have a part of each.

        Raises:
            RuntimeError: the runner is one rank's.
        """
        if self.communicator is None:
            raise RuntimeError("one rank has all logits: sample from them")
        return self.communicator.choose(output.next_token_logits)

    def least_of_ranks(self, value: int) -> int:
        """The least of a number that each rank gives; waits for them. On one rank it is the number."""
        if self.communicator is None:
            return value
        with self.on_device():
            return self.communicator.least(value)

    def broadcast_tokens(self) -> None:
        """Broadcasts rank 0's last sampled tokens to all ranks. Does nothing on one rank."""
        self.broadcast(self.row_state.last_tokens)

    def share_tokens(self, rows: np.ndarray) -> None:
        """Broadcasts the newest tokens, also of `rows`; in a pipeline stages get them with `await_tokens`."""
        if self.pipeline is None:
            self.broadcast_tokens()
        else:
            self.pipeline.sampled(rows, self.row_state.last_tokens)

    def await_tokens(self, rows: np.ndarray) -> None:
        """Has a stage of a pipeline wait for the newest tokens of `rows`, which others have."""
        if self.pipeline is not None:
            self.pipeline.await_tokens(rows, self.row_state.last_tokens)

    def broadcast(self, x: torch.Tensor) -> None:
        """Broadcasts contiguous `x` from rank 0, in place. Does nothing on one rank."""
        if self.communicator is not None:
            self.communicator.broadcast(x)


@contextmanager
def _both(first: AbstractContextManager[Any], second: AbstractContextManager[Any]) -> Iterator[None]:
    with first, second:
        yield
