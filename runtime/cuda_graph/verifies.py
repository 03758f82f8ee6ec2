"""VERIFY: one graph for a step of decodes with drafts, whole (verify_loop.py). Where layers have a state, a second one
takes the states on by what was accepted.

A request has as many tokens as any other; what its draft does not fill is padding. Attention takes a request's tokens
together, or each as a decode of its own. Then the keys of all are written before it reads any. Ranks with requests of
their own each run a graph of the same size. They choose and accept for the requests of all.

Shape legend: R requests of a rank, C tokens of each, N ranks with requests of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from mllm_compile.runtime.attention.capture import needed
from mllm_compile.runtime.collectives.base import current
from mllm_compile.runtime.cuda_graph.capture import WeakTensor
from mllm_compile.runtime.cuda_graph.dispatcher import asked_sizes, next_size
from mllm_compile.runtime.cuda_graph.kind import GraphSetting, KindGraphs
from mllm_compile.runtime.cuda_graph.model import CapturableModel
from mllm_compile.runtime.cuda_graph.verify_loop import VerifyLoop
from mllm_compile.runtime.graph_mode import BatchDescriptor, CUDAGraphMode, GraphKind
from mllm_compile.runtime.ops.tokens.verify_fields import MOST_DRAFTED

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _VerifyGraph:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor  # [N * R * C, V], non-owning
    tokens: torch.Tensor  # [N * R * C], non-owning
    hidden_states: torch.Tensor | None  # [≥ R * C, …], non-owning, of a program that gives some
    behind: torch.cuda.CUDAGraph | None  # takes states on by what was accepted, and drafts behind it


@dataclass(frozen=True, slots=True)
class CapturedVerify:
    """A verify step, launched. All is on the device, and there until another graph is replayed.

    Attributes:
        logits: [N * R * C, V]; tokens: [N * R * C] int64, the choice behind each token, both in the order of ranks.
        rows: [N * R * C] int64 and seq_lens: [N * R * C] int32 of its tokens, the rank's own first; 0 of padding.
        hidden_states: [≥ R * C, …] of a program that gives some.
        behind: to be replayed once it is known which tokens are accepted; None: no layer has a state, and no head
            drafts.
    """

    logits: torch.Tensor
    tokens: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    hidden_states: torch.Tensor | None
    behind: torch.cuda.CUDAGraph | None


class VerifyGraphs(KindGraphs):
    """See the module's header.

    Attributes:
        loop: drafts, makes inputs and accepts.
        chain: makes the next step's drafts behind each; None: nothing does.
        request_sizes: C → R of each captured step, ascending; C ascends as well.
    """

    def __init__(self, setting: GraphSetting) -> None:
        super().__init__(setting)
        runner = self._runner
        backend, model = runner.attn_backend, runner.model
        self._attention, page_table = needed(backend.verifies), needed(backend.decodes).page_table
        if model.verify is None or model.decode_loop is None or page_table is None:
            raise RuntimeError("the program has no kernels of captured verify steps: sizes says so")
        sizes = setting.dispatcher.sizes[GraphKind.VERIFY]
        self.request_sizes: dict[int, list[int]] = {}
        self.chain = runner.draft_chain
        for count, width in _shapes(runner):
            if count * width in sizes:
                self.request_sizes.setdefault(width, []).append(count)
        self._num_ranks = num_ranks = self._padded.num_ranks
        self._rank = current().rank if num_ranks > 1 else 0
        self.loop = VerifyLoop(
            model.verify,
            model.decode_loop,
            runner.config.speculative,
            self._padded.inputs,
            runner.row_state,
            runner.req_to_token_pool.req_to_token,
            page_table,
            runner.broadcast,
            most_requests=num_ranks * max(counts[-1] for counts in self.request_sizes.values()),
            most_tokens=num_ranks * sizes[-1],
            first_block=(self._rank, num_ranks),
        )
        self._graphs: dict[tuple[int, int, bool], _VerifyGraph] = {}  # by R and C, and whether there are adapters

    @property
    def most_requests(self) -> Mapping[int, int]:
        """Tokens of a draft, C - 1 → R of the largest step."""
        return {width - 1: counts[-1] for width, counts in self.request_sizes.items()}

    def padded_requests(self, num_requests: int, width: int) -> int:
        """R of the step of C tokens each that holds so many requests of a rank.

        Raises:
            RuntimeError: no graph does.
        """
        size = next_size(self.request_sizes.get(width, ()), num_requests)
        if size is None:
            raise RuntimeError(
                f"no VERIFY of {num_requests} requests with {width} tokens each was captured: {self.request_sizes}"
            )
        return size

    def width(self, num_requests: int, num_tokens: int) -> int | None:
        """The least C of a step that holds so many requests with up to so many tokens each; None: none does."""
        fitting = (width for width, counts in self.request_sizes.items() if counts[-1] >= num_requests)
        return next((width for width in fitting if width >= num_tokens), None)

    @staticmethod
    def sizes(runner: CapturableModel, kind: GraphKind) -> Sequence[int]:
        """Tokens: of decodes' sizes those that fit."""
        if not runner.config.max_verified:
            return ()
        obstacle = _obstacle(runner)
        if obstacle is not None:
            logger.info("verify steps are not captured whole: %s", obstacle)
            return ()
        return [count * width for count, width in _shapes(runner)]

    def capture(self, descriptor: BatchDescriptor) -> None:
        """Captures the steps of every C that have so many tokens."""
        for width, counts in self.request_sizes.items():
            if descriptor.num_tokens % width == 0 and descriptor.num_tokens // width in counts:
                self._capture(descriptor, descriptor.num_tokens // width, width)

    def _capture(self, descriptor: BatchDescriptor, num_requests: int, width: int) -> None:
        size, padded, loop, has_lora = descriptor.num_tokens, self._padded, self.loop, descriptor.has_lora
        batch, tokens = padded.decodes(size, has_lora), padded.tokens(size, has_lora)
        all_rows, num_of_all = padded.all_rows(size), self._num_ranks * num_requests
        self._attention.init_forward_metadata_capture_verify(size, width, batch.seq_lens)
        batch.num_verify_tokens = size
        shape, chain = (num_requests, width), self.chain

        def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            if chain is not None:
                chain.give(loop.tensors(num_requests))
            loop.begin(num_of_all, width)
            self._attention.begin_captured_verify(batch.req_pool_indices.view(shape), batch.seq_lens.view(shape))
            if has_lora:
                padded.take_adapters(size)
            of_all = replace(tokens, all_slots=padded.decode_slots(size))
            output = self._runner.program.run(batch, of_all, all_rows, CUDAGraphMode.FULL, descriptor)
            chosen = loop.end(output.next_token_logits, num_of_all)
            if chain is not None and output.hidden_states is not None:
                chain.read(output.hidden_states, num_requests, width)
            return output.next_token_logits, chosen, output.hidden_states

        def keep() -> None:
            self._runner.keep_states(loop.counts(num_requests))
            if chain is not None:
                chain.run(loop.tensors(num_requests), width)

        if not any(is_such == has_lora for *_, is_such in self._graphs):
            run()  # cuBLAS takes its workspace of the capture stream, and kernels are loaded
            keep()
        graph, (logits, chosen, hidden_states) = self._setting.capturer.capture(run)
        of_graph = None if hidden_states is None else WeakTensor(hidden_states).tensor()
        results = WeakTensor(logits).tensor(), WeakTensor(chosen).tensor()
        behind = None
        if self._runner.model.state_layers or chain is not None:
            behind, _ = self._setting.capturer.capture(keep)
        self._graphs[num_requests, width, has_lora] = _VerifyGraph(graph, *results, of_graph, behind)

    def launch(self, fields: np.ndarray, width: int, has_lora: bool = False) -> CapturedVerify:
        """Runs a step in one launch.

        Args:
            width: C of a step that is captured.
            fields: [R, VERIFY_FIELDS] int32. Slots of all tokens that a request may get are in the device's table, and
                sampling parameters are flushed. Ranks with requests of their own give a block of padded_requests each.
            has_lora: some request has an adapter, which is known of its row.

        Raises:
            RuntimeError: no graph holds so many requests.
        """
        size = self.padded_requests(len(fields) // self._num_ranks, width)
        own_first = np.roll(fields, -self._rank * size, axis=0) if self._rank else fields
        self.loop.write_fields(own_first, self._num_ranks * size)
        inputs, count = self._padded.inputs, len(fields) * width
        inputs.clear_rope_lens()
        self._runner.forward_pass_id += 1
        times = self._runner.forward_times
        entry = self._graphs[size, width, has_lora]
        with nullcontext() if times is None else times.measure(size * width):
            entry.graph.replay()
        rows, seq_lens = inputs.req_pool_indices[:count], inputs.seq_lens[:count]
        chosen = entry.logits[:count], entry.tokens[:count]
        return CapturedVerify(*chosen, rows, seq_lens, entry.hidden_states, entry.behind)


def _shapes(runner: CapturableModel) -> list[tuple[int, int]]:
    """R and C of each step to capture."""
    config, chain = runner.config, runner.draft_chain
    graphs, depths = config.cudagraph, config.speculative.captured_depths
    counts = list(asked_sizes("cudagraph.decode_requests", graphs.decode_requests, graphs.mode))
    if len(depths) > 1:  # then the largest steps are few, and each size is captured for several C
        counts = _doubling(counts)
    shapes = ((count, 1 + depth) for depth in depths for count in counts)
    shapes = ((count, width) for count, width in shapes if count * width <= config.max_verified)
    return [shape for shape in shapes if chain is None or chain.holds(*shape)]


def _doubling(sizes: Sequence[int]) -> list[int]:
    """The ascending sizes without those that are less than twice the one before."""
    kept = [sizes[0]]
    for size in sizes[1:]:
        if size >= 2 * kept[-1]:
            kept.append(size)
    return kept


def _obstacle(runner: CapturableModel) -> str | None:
    """Why a model's verify steps are not captured."""
    section, model = runner.config.speculative, runner.model
    if runner.communicator is not None and section.synthetic_acceptance_length is not None:
        return "a synthetic acceptance goes by seeds, which one rank has"
    if model.verify is None:
        return "the program has no kernels that draft and accept"
    if runner.attn_backend.verifies is None:
        return "the program has no kernels that attend in every layer, or compute its states"
    longest = section.most_drafted
    return None if longest <= MOST_DRAFTED else f"kernels take drafts of {MOST_DRAFTED} tokens, not {longest}"
