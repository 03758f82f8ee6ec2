"""The interface of a kind of graphs: which sizes are captured, how a size is captured, how it is replayed.

kinds.py lists the classes. One that is replayed from tensors is a `BatchGraphs`; prompts alone are replayed from the
host's memory (prompts.py).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mllm_compile.runtime.attention.capture import needed
from mllm_compile.runtime.cuda_graph.capture import GraphCapturer, WeakTensor
from mllm_compile.runtime.cuda_graph.dispatcher import GraphDispatcher
from mllm_compile.runtime.cuda_graph.model import CapturableModel
from mllm_compile.runtime.cuda_graph.padding import PaddedBatch, PaddedInputs
from mllm_compile.runtime.forward_batch import ForwardBatch, LogitsProcessorOutput
from mllm_compile.runtime.graph_mode import BatchDescriptor, CUDAGraphMode, GraphKind
from mllm_compile.runtime.program.executor import ProgramExecutor


@dataclass(frozen=True)
class GraphSetting:
    """The objects that graphs of all kinds are captured with.

    Attributes:
        executor: of the program that graphs run; of_lora: with adapters, where there are some.
        debug: checks that inputs of captured pieces have not moved.
    """

    runner: CapturableModel
    dispatcher: GraphDispatcher
    executor: ProgramExecutor
    of_lora: ProgramExecutor | None
    capturer: GraphCapturer
    padded: PaddedInputs
    debug: bool


class KindGraphs(ABC):
    """The captured graphs of a kind, or of kinds that differ little."""

    def __init__(self, setting: GraphSetting) -> None:
        """Makes what all sizes share; a subclass calls this first."""
        self._setting = setting
        self._runner, self._padded = setting.runner, setting.padded

    @staticmethod
    @abstractmethod
    def sizes(runner: CapturableModel, kind: GraphKind) -> Sequence[int]:
        """The sizes of a kind to capture of a model; none where it does not apply.

        Raises:
            ConfigError: the config asks for sizes that cannot be captured.
        """

    @abstractmethod
    def capture(self, descriptor: BatchDescriptor) -> None:
        """Captures one size."""

    def end_captures(self) -> None:  # noqa: B027  # few kinds have something to do
        """Called once, after the last capture of any kind."""


class BatchGraphs(KindGraphs):
    """Graphs that run a ForwardBatch."""

    def serves(self, batch: ForwardBatch) -> bool:
        """True if a graph runs the batch about as fast as any other way would."""
        return True

    @abstractmethod
    def padded_batch(self, batch: ForwardBatch, descriptor: BatchDescriptor) -> PaddedBatch:
        """Puts the batch's inputs in their places and plans attention: the graph can be replayed now, or run piece by
        piece as what this returns."""

    @abstractmethod
    def replay(self, batch: ForwardBatch, descriptor: BatchDescriptor) -> LogitsProcessorOutput:
        """Runs the batch, from its inputs to its logits."""


@dataclass(slots=True)
class BodyGraph:
    """A step in one graph, up to its head.

    Attributes:
        padded: what was captured.
        body: what the head goes on from, non-owning.
    """

    graph: torch.cuda.CUDAGraph
    padded: PaddedBatch
    body: list[Any]


def capture_body(
    setting: GraphSetting, descriptor: BatchDescriptor, begin: Callable[[], None], is_first: bool
) -> BodyGraph:
    """Captures prompts of padding up to their head, behind what `begin` launches.

    Args:
        is_first: they are run once ahead: cuBLAS takes its workspace of the capture stream, and kernels are loaded.
    """
    size, has_lora, padded = descriptor.num_tokens, descriptor.has_lora, setting.padded
    whole = PaddedBatch(padded.prompts(size, has_lora), padded.tokens(size, has_lora), padded.all_rows(size))

    def run() -> list[Any]:
        begin()
        return setting.runner.program.body(whole.batch, whole.tokens, CUDAGraphMode.FULL, descriptor, whole.all_rows)

    if is_first:
        run()
    graph, body = setting.capturer.capture(run)
    executor = needed(setting.of_lora) if has_lora else setting.executor
    return BodyGraph(graph, whole, executor.map_body(body, lambda value: WeakTensor(value).tensor()))
