"""VERIFY: one graph for a step of decodes with drafts, whole (verify_loop.py).

A request has as many tokens as any other; what its draft does not fill is padding. Attention sees each token as a
decode of its own. The keys of all are written before it reads any.

Shape legend: R requests, C tokens of each.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from mllm_compile.runtime.attention.capture import needed
from mllm_compile.runtime.cuda_graph.capture import WeakTensor
from mllm_compile.runtime.cuda_graph.dispatcher import asked_sizes, next_size
from mllm_compile.runtime.cuda_graph.kind import GraphSetting, KindGraphs
from mllm_compile.runtime.cuda_graph.model import CapturableModel
from mllm_compile.runtime.cuda_graph.verify_loop import VerifyLoop
from mllm_compile.runtime.device.staging import StagingBuffer
from mllm_compile.runtime.graph_mode import BatchDescriptor, CUDAGraphMode, GraphKind
from mllm_compile.runtime.ops.tokens.verify_fields import MOST_DRAFTED

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _VerifyGraph:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor  # [R * C, V], non-owning
    hidden_states: torch.Tensor | None  # [≥ R * C, …], non-owning, of a program that gives some


@dataclass(frozen=True, slots=True)
class CapturedVerify:
    """A verify step, launched.

    Attributes:
        buffer: the host's memory of its results, which its caller records and waits for.
        results: [R, RESULT_FIELDS] int64 there.
        hidden_states: [≥ R * C, …] of a program that gives some, until another graph is replayed.
    """

    buffer: StagingBuffer
    results: np.ndarray
    hidden_states: torch.Tensor | None


class VerifyGraphs(KindGraphs):
    """See the module's header.

    Attributes:
        loop: drafts, makes inputs and accepts.
        request_sizes: R of each captured step, ascending.
    """

    def __init__(self, setting: GraphSetting) -> None:
        super().__init__(setting)
        runner = self._runner
        backend, model = runner.attn_backend, runner.model
        self._attention, page_table = needed(backend.verifies), needed(backend.decodes).page_table
        if model.verify is None or model.decode_loop is None or page_table is None:
            raise RuntimeError("the program has no kernels of captured verify steps: sizes says so")
        sizes = setting.dispatcher.sizes[GraphKind.VERIFY]
        num_tokens = 1 + runner.config.speculative.most_captured
        self.request_sizes = [size // num_tokens for size in sizes]
        self.loop = VerifyLoop(
            model.verify,
            model.decode_loop,
            runner.config.speculative,
            self._padded.inputs,
            runner.row_state,
            runner.req_to_token_pool.req_to_token,
            page_table,
            self.most_requests,
        )
        self._graphs: dict[int, _VerifyGraph] = {}  # by R

    @property
    def most_requests(self) -> int:
        """R of the largest step."""
        return self.request_sizes[-1]

    @staticmethod
    def sizes(runner: CapturableModel, kind: GraphKind) -> Sequence[int]:
        """Tokens: of decodes' sizes those that fit."""
        config, most = runner.config, runner.config.max_verified
        if not most:
            return ()
        obstacle = _obstacle(runner)
        if obstacle is not None:
            logger.info("verify steps are not captured whole: %s", obstacle)
            return ()
        num_tokens = 1 + config.speculative.most_captured
        graphs = config.cudagraph
        sizes = asked_sizes("cudagraph.decode_requests", graphs.decode_requests, graphs.mode)
        return [size * num_tokens for size in sizes if size * num_tokens <= most]

    def capture(self, descriptor: BatchDescriptor) -> None:
        size, padded, loop = descriptor.num_tokens, self._padded, self.loop
        num_requests = size // loop.num_tokens
        batch, tokens, all_rows = padded.decodes(size), padded.tokens(size), padded.all_rows(size)
        self._attention.init_forward_metadata_capture_verify(size, batch.seq_lens)

        def run() -> tuple[torch.Tensor, torch.Tensor | None]:
            loop.begin(num_requests)
            output = self._runner.program.run(batch, tokens, all_rows, CUDAGraphMode.FULL, descriptor)
            loop.end(output.next_token_logits)
            return output.next_token_logits, output.hidden_states

        if not self._graphs:
            run()  # cuBLAS takes its workspace of the capture stream, and kernels are loaded
        graph, (logits, hidden_states) = self._setting.capturer.capture(run)
        of_graph = None if hidden_states is None else WeakTensor(hidden_states).tensor()
        self._graphs[num_requests] = _VerifyGraph(graph, WeakTensor(logits).tensor(), of_graph)

    def launch(self, fields: np.ndarray) -> CapturedVerify:
        """Runs a step in one launch.

        Args:
            fields: [R, VERIFY_FIELDS] int32. Slots of all tokens that a request may get are in the device's table, and
                sampling parameters are flushed.

        Raises:
            RuntimeError: no graph holds so many requests.
        """
        size = next_size(self.request_sizes, len(fields))
        if size is None:
            raise RuntimeError(
                f"no VERIFY of {len(fields)} requests was captured: the largest has {self.most_requests}"
            )
        self.loop.write_fields(fields, size)
        self._padded.inputs.clear_rope_lens()
        self._runner.forward_pass_id += 1
        times = self._runner.forward_times
        entry = self._graphs[size]
        with nullcontext() if times is None else times.measure(size * self.loop.num_tokens):
            entry.graph.replay()
        return CapturedVerify(*self.loop.results(len(fields)), entry.hidden_states)

    def logits_of(self, num_requests: int) -> torch.Tensor:
        """The logits [R * C, V] of the last replay of that size, until another graph is replayed."""
        return self._graphs[num_requests].logits


def _obstacle(runner: CapturableModel) -> str | None:
    """Why a model's verify steps are not captured."""
    section, model = runner.config.speculative, runner.model
    if runner.communicator is not None:
        return "ranks choose tokens together"
    if model.verify is None:
        return "the program has no kernels that draft and accept"
    if runner.attn_backend.verifies is None:
        return "the program has no kernels that attend in every layer, or layers with a state"
    longest = section.most_captured
    return None if longest <= MOST_DRAFTED else f"kernels take drafts of {MOST_DRAFTED} tokens, not {longest}"
