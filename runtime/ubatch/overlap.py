"""Runs the two halves of a step beside each other: a piece of one, the same piece of the other, and so on.

On a GPU each half has a stream, and sums over ranks that the GPUs' copy engines bring across (collectives/copied.py):
while a half's numbers cross, the other half computes. Nothing that waits for another rank holds a multiprocessor then,
so halves cannot keep each other from running, on this rank or on another. All other calls to ranks are queued one after
another, in the order of the program, which is the same on all ranks. On a CPU the halves run in that order as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from mllm_compile.runtime.attention.base import AttentionBackend
from mllm_compile.runtime.collectives.base import Communicator, using
from mllm_compile.runtime.forward_context import ForwardContext, override_forward_context
from mllm_compile.runtime.program.executor import ProgramExecutor

_NUM_PARTS = 2


class BatchOverlap:
    """The streams and communicators of a step's halves, and the program that they run.

    Attributes:
        second_backend: of the second half's attention, which is planned beside the first's; set before there are steps.
    """

    second_backend: AttentionBackend

    def __init__(
        self, executor: ProgramExecutor, communicator: Communicator, most_bytes: int, device: torch.device
    ) -> None:
        """All ranks make one at the same time.

        Args:
            most_bytes: of the values of a half that are summed over ranks at once.
        """
        self._executor = executor
        self._device = device
        self._lanes = communicator.lanes(_NUM_PARTS, most_bytes)
        is_cuda = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) if is_cuda else None for _ in range(_NUM_PARTS)]

    def backends(self, first: AttentionBackend) -> tuple[AttentionBackend, AttentionBackend]:
        """A backend for each half; `first` is whole steps' backend."""
        return first, self.second_backend

    def bodies(
        self, inputs: Sequence[Mapping[str, torch.Tensor]], contexts: Sequence[ForwardContext], share_a_request: bool
    ) -> list[list[Any]]:
        """Runs the part of the program that works on tokens, for both halves; what is queued on the current stream
        afterwards comes behind them.

        Args:
            inputs: of each half, as an executor's `body` takes them.
            contexts: of each half.
            share_a_request: the second half's layers read what the first's write.
        """
        written = torch.cuda.Event() if share_a_request and self._device.type == "cuda" else None
        parts = list(zip(inputs, contexts, self._lanes, self._streams, strict=True))
        all_values = [self._executor.values(given) for given in inputs]
        with self._forked():
            for step in range(self._executor.num_body_steps):
                for part, (_, context, lane, stream) in enumerate(parts):
                    with _on(stream), using(lane), override_forward_context(context):
                        if written is not None and stream is not None and part > 0:
                            stream.wait_event(written)
                        self._executor.run_step(step, all_values[part])
                        if written is not None and stream is not None and part == 0:
                            written.record(stream)
        return all_values

    def heads(self, bodies: Sequence[list[Any]], first_of_second: int, logits_indices: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] of the step's tokens `logits_indices` [S] int64.

        Args:
            bodies: as `bodies` gives them.
            first_of_second: tokens of the first half.
        """
        first, second = bodies
        own = logits_indices < first_of_second
        of_first = self._executor.head(first, logits_indices.clamp(max=first_of_second - 1))
        of_second = self._executor.head(second, (logits_indices - first_of_second).clamp(min=0))
        return torch.where(own[:, None], of_first, of_second)

    def hidden_states(
        self, bodies: Sequence[list[Any]], inputs: Sequence[Mapping[str, torch.Tensor]]
    ) -> torch.Tensor | None:
        """Hidden states [T, n * hidden] of the whole step, where the program gives some; arguments as `bodies` has
        them."""
        parts = [
            self._executor.hidden_states(body, len(given["input_ids"]))
            for body, given in zip(bodies, inputs, strict=True)
        ]
        return None if parts[0] is None else torch.cat(parts)  # type: ignore[arg-type]  # both halves give some

    @contextmanager
    def _forked(self) -> Iterator[None]:
        """The halves' streams begin when what is queued on the current one is over, and that goes on when they are."""
        streams = [stream for stream in self._streams if stream is not None]
        main = torch.cuda.current_stream(self._device) if streams else None
        for stream in streams:
            stream.wait_stream(main)  # type: ignore[arg-type]
        try:
            yield
        finally:
            for stream in streams:
                main.wait_stream(stream)  # type: ignore[union-attr]


def _on(stream: torch.cuda.Stream | None) -> Any:
    return nullcontext() if stream is None else torch.cuda.stream(stream)
