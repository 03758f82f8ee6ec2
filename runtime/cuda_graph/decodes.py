"""DECODE, CASCADE and their greedy kinds: one graph for a step of decodes.

A graph with a decode loop prepares its own inputs and chooses its own tokens (decode_loop.py): `launch` is a whole
step. Without one attention is planned ahead of each replay, and logits are the result.

Shape legend: R requests, V vocab.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import torch

from mllm_compile.runtime.attention.capture import needed
from mllm_compile.runtime.collectives.base import current
from mllm_compile.runtime.config_sections import LEAST_ROWS
from mllm_compile.runtime.cuda_graph.capture import WeakTensor
from mllm_compile.runtime.cuda_graph.decode_loop import DecodeLoop, HostSlot
from mllm_compile.runtime.cuda_graph.dispatcher import asked_sizes, next_size
from mllm_compile.runtime.cuda_graph.kind import BatchGraphs, GraphSetting
from mllm_compile.runtime.cuda_graph.model import CapturableModel
from mllm_compile.runtime.cuda_graph.padding import PaddedBatch
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode, LogitsProcessorOutput
from mllm_compile.runtime.graph_mode import BatchDescriptor, CUDAGraphMode, GraphKind
from mllm_compile.runtime.ops.stream_linear.undivided import UndividedTiling

logger = logging.getLogger(__name__)

DECODE_KINDS = tuple(kind for kind in GraphKind if kind.is_decode)


@dataclass(slots=True)
class _DecodeGraph:
    graph: torch.cuda.CUDAGraph
    padded: PaddedBatch
    logits: torch.Tensor  # [R_padded, V], non-owning
    hidden_states: torch.Tensor | None  # [R_padded, n * hidden], non-owning, of a program that gives some
    tokens: torch.Tensor | None  # [R_padded], non-owning, of a graph with a decode loop


@dataclass(frozen=True, slots=True)
class CapturedDecode:
    """A decode that chooses its own tokens, launched.

    Attributes:
        logits: [R, V], of ranks that choose together this rank's part; tokens: [R] int64; both until another graph is
            replayed.
        rows: [R] int64 and seq_lens: [R] int32 of its requests, on the device.
        slot: has the tokens on the host, once it is over.
    """

    logits: torch.Tensor
    tokens: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    slot: HostSlot


class DecodeGraphs(BatchGraphs):
    """See the module's header.

    Attributes:
        loop: prepares the graphs' inputs and chooses their tokens; None: they do neither.
        most_requests: the requests of a rank that `launch` takes at most; 0 without a loop.
        most_sharing: those that `launch` takes where they begin with the same pages.
    """

    def __init__(self, setting: GraphSetting) -> None:
        super().__init__(setting)
        self._sizes = setting.dispatcher.sizes
        # By kind, and whether some request has an adapter.
        self._graphs: dict[tuple[GraphKind, bool], dict[int, _DecodeGraph]] = {
            (kind, has_lora): {} for kind in DECODE_KINDS for has_lora in (False, True)
        }
        most = self._sizes[GraphKind.DECODE][-1]
        self._attention = needed(self._runner.attn_backend.decodes)
        self._attention.init_cuda_graph_state(most, most)
        self._sources = self._runner.source_attention
        if self._sources is not None:
            self._sources.init_cuda_graph_state(most)
        self._cascades = self._runner.attn_backend.captured_cascades
        self.loop = self._make_loop()
        self.most_requests = 0 if self.loop is None else most
        self.most_sharing = 0 if self.loop is None else max(self._sizes[GraphKind.CASCADE], default=0)

    @staticmethod
    def sizes(runner: CapturableModel, kind: GraphKind) -> Sequence[int]:
        """The sizes of the config, or the fewest rows that a step may have; of cascades those that may pay, and of
        greedy kinds all where ranks have a kernel to choose together."""
        graphs = runner.config.cudagraph
        sizes = asked_sizes("cudagraph.decode_requests", graphs.decode_requests, graphs.mode)
        sizes = sorted({max(_least_rows(runner), size) for size in sizes})
        if kind.is_greedy_across_ranks and runner.choice is None:
            return ()
        return [size for size in sizes if _pays_as_cascade(runner, size)] if kind.shares_prefix else sizes

    def _make_loop(self) -> DecodeLoop | None:
        """The decode loop; None if it is disabled or the program's kernels cannot do all that a decode needs."""
        runner, pieces, page_table = self._runner, self._runner.model.decode_loop, self._attention.page_table
        if not runner.config.cudagraph.sample_in_graph:
            return None
        is_planned = page_table is None or (self._sources is not None and self._sources.plans_replays)
        if pieces is None or page_table is None or is_planned:
            what = "choose tokens" if pieces is None else "attend in every layer"
            logger.info("captured decodes do not choose their tokens: the program has no kernels that %s", what)
            return None
        table, inputs = runner.req_to_token_pool.req_to_token, self._padded.inputs
        return DecodeLoop(pieces, inputs, runner.row_state, table, page_table, runner.broadcast_tokens, runner.choice)

    def capture(self, descriptor: BatchDescriptor) -> None:
        size, runner, padded, loop = descriptor.num_tokens, self._runner, self._padded, self.loop
        kind, inputs, has_lora = descriptor.kind, padded.inputs, descriptor.has_lora
        whole = PaddedBatch(padded.decodes(size, has_lora), padded.tokens(size, has_lora), padded.all_rows(size))
        whole.batch.greedy_across_ranks = kind.is_greedy_across_ranks
        self._attention.init_forward_metadata_capture_cuda_graph(
            size, size, inputs.req_pool_indices[:size], inputs.seq_lens[:size], ForwardMode.DECODE
        )
        if kind.shares_prefix:
            needed(self._cascades).use_cascade()
        if self._sources is not None:
            whole.batch.of_sources = self._sources.plan_capture(whole.batch)

        def run() -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
            if loop is not None:
                loop.begin(padded.num_ranks * size)
            if self._sources is not None:
                self._sources.begin_captured(inputs.req_pool_indices[:size])
            if has_lora:
                padded.take_adapters(size)
            tokens = replace(whole.tokens, all_slots=padded.decode_slots(size))
            output = runner.program.run(whole.batch, tokens, whole.all_rows, CUDAGraphMode.FULL, descriptor)
            logits = output.next_token_logits
            if loop is None:
                return logits, output.hidden_states, None
            end = loop.end_greedy_across_ranks if output.is_partial_vocab else loop.end
            return logits, output.hidden_states, end(logits)

        if not any(of_kind for (_, is_such), of_kind in self._graphs.items() if is_such == has_lora):
            run()  # cuBLAS takes its workspace of the capture stream, and kernels are loaded
        graph, (logits, *others) = self._setting.capturer.capture(run)
        logits = WeakTensor(logits).tensor()
        self._graphs[kind, has_lora][size] = _DecodeGraph(graph, whole, logits, *map(_weak, others))

    def end_captures(self) -> None:
        if self.loop is not None:
            self.loop.captured()

    def serves(self, batch: ForwardBatch) -> bool:
        return not (batch.return_logprob and batch.logits_indices is not None)  # its graphs have the logits of all rows

    def padded_requests(self, num_requests: int) -> int:
        """Rows of the graph that holds so many requests of a rank.

        Raises:
            RuntimeError: none does.
        """
        return self._size(GraphKind.DECODE, num_requests)

    @property
    def padding_len(self) -> int:
        """Tokens that a row of padding has."""
        return self._padded.inputs.padding_len

    def launch(
        self,
        rows: np.ndarray,
        seq_lens: np.ndarray,
        slots: np.ndarray,
        deltas: np.ndarray | None = None,
        common_prefix_len: int = 0,
        greedy_across_ranks: bool = False,
        has_lora: bool = False,
    ) -> CapturedDecode:
        """Runs a step of decodes in one launch; their newest tokens are where the last step left them.

        Args:
            rows, seq_lens, slots: [R] of any integers: each request's row, its tokens with the new one, and the slot of
                that. A page that begins with it is entered in the table of slots. Ranks with requests of their own give
                all ranks' rows, a block of padded_requests each.
            deltas: [R] what their positions are beyond seq_lens - 1; None: nothing.
            common_prefix_len: first tokens that all have in the same pages, to be read once; 0: each reads its own.
            greedy_across_ranks: all take their likeliest token and nothing else is wanted. All ranks have it.
            has_lora: some have an adapter, which is known of their rows.

        Raises:
            RuntimeError: there is no decode loop, or no graph holds so many requests.
        """
        loop, num_ranks, count = self.loop, self._padded.num_ranks, rows.size
        if loop is None:
            raise RuntimeError("no decode was captured that prepares its own inputs: most_requests is 0")
        kind = GraphKind.CASCADE if common_prefix_len else GraphKind.DECODE
        size = self._size(kind, count // num_ranks)
        if num_ranks > 1:
            first = current().rank * size
            rows, seq_lens, slots = (np.roll(values, -first) for values in (rows, seq_lens, slots))
            deltas = None if deltas is None else np.roll(deltas, -first)
        if common_prefix_len:
            needed(self._cascades).share_prefix(common_prefix_len)
        if greedy_across_ranks and self._graphs[_GREEDY[kind], has_lora]:
            kind = _GREEDY[kind]
        inputs, slot = self._padded.inputs, loop.next_slot()
        slot.write(rows, seq_lens, slots, num_ranks * size, inputs.padding_len, deltas)
        inputs.clear_rope_lens()
        self._runner.forward_pass_id += 1
        entry = self._replay(kind, size, has_lora)
        assert entry.tokens is not None, "a graph with a decode loop has them"
        return CapturedDecode(
            entry.logits[:count], entry.tokens[:count], inputs.req_pool_indices[:count], inputs.seq_lens[:count], slot
        )

    def padded_batch(self, batch: ForwardBatch, descriptor: BatchDescriptor) -> PaddedBatch:
        self._prepare(batch, descriptor.num_tokens)
        return self._graphs[descriptor.kind, descriptor.has_lora][descriptor.num_tokens].padded

    def replay(self, batch: ForwardBatch, descriptor: BatchDescriptor) -> LogitsProcessorOutput:
        """Logits of a batch that came as tensors.

        With a decode loop the graph chooses tokens all the same, and overwrites RowState.last_tokens of the batch's
        rows. A caller that samples from the logits must write its own tokens there afterwards; a StepRunner does.
        """
        self._prepare(batch, descriptor.num_tokens)
        if self.loop is not None:
            self.loop.next_slot().write_in_place(descriptor.num_tokens)
        entry = self._replay(descriptor.kind, descriptor.num_tokens, descriptor.has_lora)
        count = batch.batch_size
        logits = entry.logits[:count]
        return LogitsProcessorOutput(
            logits if batch.logits_indices is None else logits.index_select(0, batch.logits_indices),
            None if entry.hidden_states is None else entry.hidden_states[:count],
        )

    def _prepare(self, batch: ForwardBatch, size: int) -> None:
        """Puts inputs in their places, padding behind them, and readies attention for them."""
        inputs = self._padded.inputs
        self._padded.take_tokens(batch, size)
        inputs.take_requests(batch, size)
        if batch.adapter_slots is not None:
            needed(self._runner.row_state.adapters).write(batch.req_pool_indices, batch.adapter_slots)
        self._attention.init_forward_metadata_replay_cuda_graph(
            size,
            inputs.req_pool_indices[:size],
            inputs.seq_lens[:size],
            ForwardMode.DECODE,
            inputs.seq_lens_cpu[:size],
        )
        if self._sources is not None:
            self._sources.plan_replay(inputs.req_pool_indices[:size], batch.source_lens_cpu)

    def _replay(self, kind: GraphKind, size: int, has_lora: bool) -> _DecodeGraph:
        """Replays a graph whose inputs are in their places, or in the next slot."""
        entry, times = self._graphs[kind, has_lora][size], self._runner.forward_times
        with nullcontext() if times is None else times.measure(size):
            entry.graph.replay()
            if self.loop is not None:
                self.loop.replayed()  # before anything can fail: the device has counted the replay
        return entry

    def _size(self, kind: GraphKind, num_requests: int) -> int:
        size = next_size(self._sizes[kind], num_requests)
        if size is None:
            most = max(self._sizes[kind], default=0)
            raise RuntimeError(f"no {kind.name} of {num_requests} requests was captured: the largest has {most}")
        return size


_GREEDY = {
    GraphKind.DECODE: GraphKind.DECODE_GREEDY_ACROSS_RANKS,
    GraphKind.CASCADE: GraphKind.CASCADE_GREEDY_ACROSS_RANKS,
}


def _least_rows(runner: CapturableModel) -> int:
    """The fewest rows of a decode: without kernels of few rows products of any number of rows are the library's."""
    if not runner.config.runtime.any_rows:
        return 1
    return 1 if any(isinstance(kernel, UndividedTiling) for kernel in runner.model.kernels) else LEAST_ROWS


def _weak(value: torch.Tensor | None) -> torch.Tensor | None:
    return None if value is None else WeakTensor(value).tensor()


def _pays_as_cascade(runner: CapturableModel, num_requests: int) -> bool:
    """True for powers of two that may pay: a cascade takes as long for all requests of a tile."""
    runtime, backend = runner.config.runtime, runner.attn_backend
    is_power = num_requests & (num_requests - 1) == 0
    if not (runtime.cascade_attention and is_power and backend.captured_cascades is not None):
        return False
    return backend.cascades is not None and backend.cascades.cascade_pays(num_requests, runtime.max_model_len, True)
