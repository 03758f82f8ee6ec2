"""Runs batches in captured graphs: persistent inputs, padding, capture of every size, replay.

FULL is one graph for a whole decode, which either prepares its inputs and chooses its tokens (decode_loop.py) or has
its attention planned before every replay; one for any step up to its head; or one for prompts alone, up to theirs
(prompt_turns.py). PIECEWISE replays the pieces around eager attention. Padding rows belong to the dummy row: at most
they write to page 0 and read one key of it.

Shape legend: T tokens, R requests, S rows of logits, V vocab; a trailing _padded means the captured size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from mllm_compile.runtime.attention.capture import needed
from mllm_compile.runtime.attention.metadata import StepPrompts
from mllm_compile.runtime.collectives.base import current
from mllm_compile.runtime.cuda_graph.capture import CaptureFigures, GraphCapturer, WeakTensor
from mllm_compile.runtime.cuda_graph.decode_loop import DecodeLoop, Turn
from mllm_compile.runtime.cuda_graph.dispatcher import GraphDispatcher
from mllm_compile.runtime.cuda_graph.model import CapturableModel
from mllm_compile.runtime.cuda_graph.piece_graphs import PieceGraphs
from mllm_compile.runtime.cuda_graph.prompt_turns import PromptTurns
from mllm_compile.runtime.cuda_graph.step_inputs import StepInputs, TokenPlaces
from mllm_compile.runtime.errors import ConfigError
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode, LogitsProcessorOutput, TokenInputs
from mllm_compile.runtime.forward_context import get_forward_context
from mllm_compile.runtime.graph_mode import BatchDescriptor, CUDAGraphMode, DPMetadata
from mllm_compile.runtime.program.executor import ProgramExecutor
from mllm_compile.runtime.step_fields import StepFields

logger = logging.getLogger(__name__)

# The inputs of a step come in one upload, always of all its places. A longer step has the time to copy its tokens to
# places of their own.
_MOST_UPLOADED_TOKENS = 512


@dataclass(slots=True)
class _DecodeGraph:
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor  # [R_padded, V], non-owning


@dataclass(frozen=True, slots=True)
class CapturedDecode:
    """A decode that chooses its own tokens, launched.

    Attributes:
        logits: [R, V], of decodes with tokens_alone the rank's part; tokens: [R] int64; both until another graph is
            replayed.
        rows: [R] int64 and seq_lens: [R] int32 of its requests, on the device.
        turn: has the tokens on the host, once it is over.
    """

    logits: torch.Tensor
    tokens: torch.Tensor
    rows: torch.Tensor
    seq_lens: torch.Tensor
    turn: Turn


@dataclass(slots=True)
class _MixedGraph:
    graph: torch.cuda.CUDAGraph
    body: list[Any]  # what the head goes on from, non-owning


@dataclass(slots=True)
class _PromptGraph:
    mixed: _MixedGraph
    batch: ForwardBatch  # of padding, which it was captured with


@dataclass(frozen=True, slots=True)
class LaunchedPrompts:
    """Captured prompts, launched up to their head.

    Attributes:
        fields: the step's on the device, until the next launch of such prompts or the next upload.
        head: gives the logits of tokens [S] int64.
    """

    fields: StepFields[torch.Tensor]
    head: Callable[[torch.Tensor], LogitsProcessorOutput]


class GraphRunner:
    """Captures all sizes of a dispatcher, then runs the batches that fit one.

    Attributes:
        inputs: the graphs' inputs; a step that puts its inputs there spares copying them.
        decode_loop: prepares the inputs of captured decodes and chooses their tokens; None: they do neither.
    """

    def __init__(self, runner: CapturableModel, dispatcher: GraphDispatcher, debug: bool = False) -> None:
        """
        Raises:
            ConfigError: the model is not a compiled program.
        """
        self._runner = runner
        self.dispatcher = dispatcher
        self._capturer = GraphCapturer(runner.device)
        self._max_requests = max(dispatcher.decode_requests, default=0)
        self._max_tokens = max(
            dispatcher.piecewise_tokens
            + dispatcher.mixed_tokens
            + dispatcher.fresh_tokens
            + dispatcher.extend_tokens
            + dispatcher.decode_requests,
            default=0,
        )
        # Of decodes alone: pieces are captured over attention that knows of no graphs, too.
        padding_len = 1
        if dispatcher.decode_requests:
            padding_len = needed(runner.attn_backend.decodes).get_cuda_graph_seq_len_fill_value()
        # A captured decode of ranks with requests of their own has the inputs of all, its own first.
        self._num_deals = runner.num_deals
        most_of_all = self._num_deals * self._max_requests
        num_uploaded = max(most_of_all, min(self._max_tokens, _MOST_UPLOADED_TOKENS))
        most_rows, work_bytes = max(runner.config.max_rows, most_of_all), 0
        for extends, sizes in ((False, dispatcher.fresh_tokens), (True, dispatcher.extend_tokens)):
            if sizes:
                work_bytes = max(work_bytes, needed(runner.attn_backend.prompts).prompt_work_bytes(extends))
        self.inputs = StepInputs(num_uploaded, most_rows, padding_len, runner.device, work_bytes)
        self._prompt_turns = PromptTurns(self.inputs) if work_bytes else None
        self._all_slots: torch.Tensor | None = None
        if self._num_deals > 1:
            num_slots = self._num_deals * self._max_tokens
            self._all_slots = torch.ones(num_slots, dtype=torch.int64, device=runner.device)
        self._long_inputs = TokenPlaces.zeros(self._max_tokens, runner.device)
        self._rows = torch.arange(self._max_tokens, device=runner.device)
        self._decode_graphs: dict[BatchDescriptor, _DecodeGraph] = {}
        self._chosen_tokens: dict[BatchDescriptor, torch.Tensor] = {}  # by graphs with a decode loop, non-owning
        self._mixed_graphs: dict[BatchDescriptor, _MixedGraph] = {}
        self._prompt_graphs: dict[BatchDescriptor, _PromptGraph] = {}
        self._outputs: dict[tuple[Any, ...], torch.Tensor] = {}
        executor = runner.model.executor
        if runner.always_takes_features and (media := runner.model.media) is not None:
            executor = media.with_features
            self.inputs.take_features(media.facts.feature_width, runner.config.dtype, media.facts.axes)
        if not isinstance(executor, ProgramExecutor):
            raise ConfigError(
                f"CUDA graphs need a compiled program, got {type(executor).__name__}; set cudagraph.mode: none"
            )
        self._executor = executor
        executor.set_output_buffers(self._output_buffer)
        if dispatcher.piecewise_tokens:
            executor.wrap_pieces(
                lambda piece, index, function: (
                    function if executor.is_row_piece(index) else PieceGraphs(function, self._capturer, debug)
                )
            )
        if dispatcher.decode_requests:
            needed(runner.attn_backend.decodes).init_cuda_graph_state(self._max_requests, self._max_requests)
        self.decode_loop = self._make_decode_loop()

    def _make_decode_loop(self) -> DecodeLoop | None:
        """The decode loop; None if it is disabled or the program's kernels cannot do all that a decode needs."""
        runner, pieces = self._runner, self._runner.model.decode_loop
        is_asked = runner.config.cudagraph.sample_in_graph and not runner.config.runtime.deterministic
        if not (is_asked and self.dispatcher.decode_requests):
            return None
        page_table = needed(runner.attn_backend.decodes).page_table
        if pieces is None or page_table is None:
            what = "choose tokens" if pieces is None else "attend in every layer"
            logger.info("captured decodes do not choose their tokens: the program has no kernels that %s", what)
            return None
        table = runner.req_to_token_pool.req_to_token
        return DecodeLoop(pieces, self.inputs, runner.row_state, table, page_table, runner.spread_tokens, runner.choice)

    @property
    def figures(self) -> list[CaptureFigures]:
        """Seconds and MiB of every captured size, in the order of capture."""
        return self._capturer.figures

    @torch.inference_mode()
    def capture(self) -> None:
        """Captures every size, largest first."""
        with self._capturer.session():
            for mode, descriptor in self.dispatcher.descriptors():
                with self._capturer.measured(_kind(mode, descriptor), descriptor.num_tokens):
                    if descriptor.uniform:
                        self._capture_decode(descriptor)
                    elif descriptor.fresh or descriptor.extends:
                        self._capture_prompts(descriptor)
                    elif mode is CUDAGraphMode.FULL:
                        self._capture_mixed(descriptor)
                    else:
                        self._capture_pieces(descriptor)
        if self.decode_loop is not None:
            self.decode_loop.captured()
        if self._prompt_turns is not None:
            self._prompt_turns.captured()
        seconds = sum(figure.seconds for figure in self.figures)
        mib = sum(figure.mib for figure in self.figures)
        logger.info("captured %d sizes in %.2f s, %.0f MiB", len(self.figures), seconds, mib)

    def run(self, batch: ForwardBatch) -> LogitsProcessorOutput | None:
        """Runs the batch in a captured graph; None when none fits it."""
        uniform = batch.forward_mode.is_decode()
        if batch.dp_metadata is not None:
            return self._run_dealt(batch, batch.dp_metadata)
        if batch.common_prefix_len:  # which whole graphs know nothing of
            mode, descriptor = self.dispatcher.dispatch(batch.num_tokens, batch.batch_size, False, may_mix=False)
        else:
            mode, descriptor = self.dispatcher.dispatch(batch.num_tokens, batch.batch_size, uniform)
        if mode is CUDAGraphMode.FULL and descriptor.uniform:
            return LogitsProcessorOutput(self._replay_decode(batch, descriptor))
        if mode is CUDAGraphMode.FULL:
            if needed(self._runner.attn_backend.mixed).runs_well_captured(batch):
                return self._replay_mixed(batch, descriptor)
            mode, descriptor = self.dispatcher.dispatch(batch.num_tokens, batch.batch_size, uniform, may_mix=False)
        if mode is CUDAGraphMode.PIECEWISE:
            self._places(descriptor.num_tokens).take_tokens(batch, descriptor.num_tokens)
            return self._run_pieces(batch, descriptor)
        return None

    def _run_dealt(self, batch: ForwardBatch, across: DPMetadata) -> LogitsProcessorOutput | None:
        """Runs the batch by the graphs of the rank that has most tokens, as all do; None where there are none."""
        mode, descriptor = self.dispatcher.dispatch(across.max_tokens_across_dp, 0, False, may_mix=False)
        if mode is not CUDAGraphMode.PIECEWISE or self._all_slots is None:
            return None
        across.mark_tokens(self._all_slots[: self._num_deals * descriptor.num_tokens])
        self._places(descriptor.num_tokens).take_tokens(batch, descriptor.num_tokens)
        return self._run_pieces(batch, descriptor)

    # FULL -------------------------------------------------------------------------------------------------------------

    def _capture_decode(self, descriptor: BatchDescriptor) -> None:
        size, inputs, runner = descriptor.num_tokens, self.inputs, self._runner
        batch = self._decode_batch(size)
        batch.tokens_alone = descriptor.tokens_alone
        needed(runner.attn_backend.decodes).init_forward_metadata_capture_cuda_graph(
            size, size, inputs.req_pool_indices[:size], inputs.seq_lens[:size], ForwardMode.DECODE
        )
        if descriptor.cascade:
            needed(runner.attn_backend.captured_cascades).use_cascade()
        rows, loop = self._rows[:size], self.decode_loop

        def run() -> tuple[torch.Tensor, torch.Tensor | None]:
            if loop is not None:
                loop.begin(self._num_deals * size)
            tokens = replace(self._tokens(size), all_slots=self._slots_of_all(size))
            output = runner.program.run(batch, tokens, rows, CUDAGraphMode.FULL, descriptor)
            logits = output.next_token_logits
            if loop is None:
                return logits, None
            return logits, loop.end_together(logits) if output.is_own_part else loop.end(logits)

        if not self._decode_graphs:
            run()  # cuBLAS takes its workspace of the capture stream, and kernels are loaded
        graph, (logits, tokens) = self._capturer.capture(run)
        self._decode_graphs[descriptor] = _DecodeGraph(graph, WeakTensor(logits).tensor())
        if tokens is not None:
            self._chosen_tokens[descriptor] = WeakTensor(tokens).tensor()

    def _slots_of_all(self, size: int) -> torch.Tensor | None:
        """The slots of a captured decode of `size` rows a rank, as ranks' tokens are gathered: the first rank's first,
        where a rank's inputs begin with its own."""
        if self._num_deals == 1:
            return None
        return torch.roll(self.inputs.out_cache_loc[: self._num_deals * size], current().rank * size)

    def holds_decode(self, num_requests: int) -> bool:
        """True if `decode` takes as many requests."""
        return self.decode_loop is not None and num_requests <= self._max_requests

    def decode_size(self, num_requests: int) -> tuple[int, int] | None:
        """Return what ModelRunner.decode_size does."""
        if not self.holds_decode(num_requests):
            return None
        _, descriptor = self.dispatcher.dispatch(num_requests, num_requests, True)
        return descriptor.num_tokens, self.inputs.padding_len

    def holds_cascade(self, num_requests: int) -> bool:
        """True if `decode` takes as many requests that begin with the same pages."""
        return self.decode_loop is not None and self.dispatcher.dispatch_cascade(num_requests) is not None

    def decode(
        self,
        rows: np.ndarray,
        seq_lens: np.ndarray,
        slots: np.ndarray,
        deltas: np.ndarray | None = None,
        common_prefix_len: int = 0,
        tokens_alone: bool = False,
    ) -> CapturedDecode:
        """Runs a step of decodes in one launch; their newest tokens are where the last step left them.

        Args:
            rows, seq_lens, slots: [R] of any integers: each request's row, its tokens with the new one, and the slot of
                that. A page that begins with it is entered in the table of slots. Of ranks with requests of their own
                they are those of all, a block each of decode_size.
            deltas: [R] what their positions are beyond seq_lens - 1; None: nothing.
            common_prefix_len: first tokens that all have in the same pages, to be read once; 0: each reads its own.
            tokens_alone: all take their most probable token and nothing else is wanted. Of several ranks all have it.

        Raises:
            RuntimeError: there is no decode loop; see holds_decode and holds_cascade.
        """
        if self.decode_loop is None:
            raise RuntimeError("no decode was captured that makes its own inputs ready: ask holds_decode first")
        count = rows.size
        _, descriptor = self.dispatcher.dispatch(count // self._num_deals, count // self._num_deals, True)
        if self._num_deals > 1:
            first = current().rank * descriptor.num_tokens
            rows, seq_lens, slots = (np.roll(values, -first) for values in (rows, seq_lens, slots))
            deltas = None if deltas is None else np.roll(deltas, -first)
        if common_prefix_len:
            cascade = self.dispatcher.dispatch_cascade(count)
            if cascade is None:
                raise RuntimeError(f"no cascade of {count} requests was captured: ask holds_cascade first")
            descriptor = cascade
            needed(self._runner.attn_backend.captured_cascades).share_prefix(common_prefix_len)
        if tokens_alone and self.dispatcher.tokens_alone:
            descriptor = replace(descriptor, tokens_alone=True)
        size, inputs, turn = self._num_deals * descriptor.num_tokens, self.inputs, self.decode_loop.next_turn()
        turn.write(rows, seq_lens, slots, size, inputs.padding_len, deltas)
        inputs.clear_rope_lens()
        logits, tokens = self._replay(descriptor).logits, self._chosen_tokens[descriptor]
        return CapturedDecode(
            logits[:count], tokens[:count], inputs.req_pool_indices[:count], inputs.seq_lens[:count], turn
        )

    def _replay(self, descriptor: BatchDescriptor) -> _DecodeGraph:
        """Replays a captured decode whose inputs are ready, or written down for this turn."""
        entry, times = self._decode_graphs[descriptor], self._runner.forward_times
        with nullcontext() if times is None else times.measure(descriptor.num_tokens):
            entry.graph.replay()
            if self.decode_loop is not None:
                self.decode_loop.replayed()  # before anything can fail: the device has counted the turn
        return entry

    def _replay_decode(self, batch: ForwardBatch, descriptor: BatchDescriptor) -> torch.Tensor:
        """Logits [R, V] of a batch that came as tensors.

        With a decode loop the graph chooses tokens all the same, and overwrites RowState.last_tokens of the batch's
        rows: a caller that samples from the logits must write its own tokens there afterwards, as StepRunner does.
        """
        self._prepare_decode(batch, descriptor.num_tokens)
        if self.decode_loop is not None:
            self.decode_loop.next_turn().write_in_place(descriptor.num_tokens)
        logits = self._replay(descriptor).logits[: batch.batch_size]
        return logits if batch.logits_indices is None else logits.index_select(0, batch.logits_indices)

    def _prepare_decode(self, batch: ForwardBatch, size: int) -> None:
        """Puts inputs in their places, padding behind them, and readies attention for them."""
        inputs = self.inputs
        inputs.take_tokens(batch, size)
        inputs.take_requests(batch, size)
        needed(self._runner.attn_backend.decodes).init_forward_metadata_replay_cuda_graph(
            size,
            inputs.req_pool_indices[:size],
            inputs.seq_lens[:size],
            batch.seq_lens_sum + (size - batch.batch_size) * inputs.padding_len,
            ForwardMode.DECODE,
            inputs.seq_lens_cpu[:size],
        )

    def _decode_batch(self, size: int) -> ForwardBatch:
        """A batch of `size` padding rows over the persistent inputs."""
        inputs = self.inputs
        batch = self._runner.prepare_forward_batch_decode(
            inputs.input_ids[:size],
            inputs.req_pool_indices[:size],
            inputs.seq_lens[:size],
            inputs.out_cache_loc[:size],
            seq_lens_cpu=torch.full((size,), inputs.padding_len, dtype=torch.int32),
            positions=inputs.positions[:size],
        )
        batch.media, batch.mrope_positions = inputs.media, inputs.mrope_positions
        return batch

    def _places(self, size: int) -> TokenPlaces:
        return self.inputs if size <= self.inputs.max_tokens else self._long_inputs

    def _tokens(self, size: int) -> TokenInputs:
        inputs = self._places(size)
        given = inputs.input_ids[:size], inputs.positions[:size], inputs.out_cache_loc[:size]
        all_slots = None if self._all_slots is None else self._all_slots[: self._num_deals * size]
        return TokenInputs(*given, inputs.media, inputs.mrope_positions, inputs.rope_lens[:size], all_slots)

    # FULL, of any step ------------------------------------------------------------------------------------------------

    def _capture_mixed(self, descriptor: BatchDescriptor) -> None:
        size, attention = descriptor.num_tokens, needed(self._runner.attn_backend.mixed)
        attention.init_forward_metadata_capture_mixed(size)
        batch = self._padding_prompts(size)

        def begin() -> None:
            attention.begin_captured_mixed(size, self.inputs.req_pool_indices)

        self._mixed_graphs[descriptor] = self._capture_body(batch, descriptor, begin, is_first=not self._mixed_graphs)

    def _capture_body(
        self, batch: ForwardBatch, descriptor: BatchDescriptor, begin: Callable[[], None], is_first: bool
    ) -> _MixedGraph:
        """Captures a step up to its head, behind what `begin` launches. The first of its kind is run ahead."""
        size, runner = descriptor.num_tokens, self._runner

        def run() -> list[Any]:
            begin()
            return runner.program.body(batch, self._tokens(size), CUDAGraphMode.FULL, descriptor, self._rows[:size])

        if is_first:
            run()  # as in _capture_decode
        graph, body = self._capturer.capture(run)
        return _MixedGraph(graph, self._executor.map_body(body, lambda value: WeakTensor(value).tensor()))

    def _replay_mixed(self, batch: ForwardBatch, descriptor: BatchDescriptor) -> LogitsProcessorOutput:
        size = descriptor.num_tokens
        self._places(size).take_tokens(batch, size)
        self.inputs.take_requests(batch, min(size, self.inputs.max_requests))
        needed(self._runner.attn_backend.mixed).init_forward_metadata_replay_mixed(size, batch)
        entry = self._mixed_graphs[descriptor]
        times = self._runner.forward_times
        with nullcontext() if times is None else times.measure(size):
            entry.graph.replay()
            return self._runner.program.head(batch, entry.body, self._logits_rows(batch))

    def _logits_rows(self, batch: ForwardBatch) -> torch.Tensor:
        return self._rows[: batch.batch_size] if batch.logits_indices is None else batch.logits_indices

    # FULL, of prompts alone -------------------------------------------------------------------------------------------

    def _capture_prompts(self, descriptor: BatchDescriptor) -> None:
        size, turns = descriptor.num_tokens, self._prompt_turns
        if turns is None:
            raise RuntimeError("prompts are captured with attention that takes its work from the host's memory alone")
        attention = needed(self._runner.attn_backend.prompts)
        attention.init_forward_metadata_capture_prompts(size, self.inputs.work, descriptor.extends)
        batch = self._padding_prompts(size)
        graph = self._capture_body(batch, descriptor, turns.begin, is_first=not self._prompt_graphs)
        self._prompt_graphs[descriptor] = _PromptGraph(graph, batch)

    def launch_prompts(self, fields: StepFields[np.ndarray], prompts: StepPrompts) -> LaunchedPrompts | None:
        """Runs prompts alone, up to their head, in one launch.

        Args:
            fields: of the step, logits_indices among them.

        Returns:
            None: they are not captured so, or more than the captured kernels serve.
        """
        turns = self._prompt_turns
        descriptor = self.dispatcher.dispatch_prompts(fields.positions.size, prompts.extends)
        if turns is None or descriptor is None:
            return None
        size, attention = descriptor.num_tokens, needed(self._runner.attn_backend.prompts)
        placed = turns.write(fields, lambda work: attention.write_prompt_work(size, work, prompts))
        if placed is None:
            return None
        self.inputs.clear_rope_lens()
        entry, times = self._prompt_graphs[descriptor], self._runner.forward_times
        with nullcontext() if times is None else times.measure(descriptor.num_tokens):
            entry.mixed.graph.replay()
            turns.replayed()  # before anything can fail: the device has taken the turn
        return LaunchedPrompts(placed, partial(self._runner.program.head, entry.batch, entry.mixed.body))

    # PIECEWISE --------------------------------------------------------------------------------------------------------

    def _capture_pieces(self, descriptor: BatchDescriptor) -> None:
        """Runs prompts of padding tokens through the program; its pieces capture themselves on the way."""
        batch = self._padding_prompts(descriptor.num_tokens)
        batch.logits_indices = torch.zeros(1, dtype=torch.int64, device=self._runner.device)
        if not any(figure.mode == CUDAGraphMode.PIECEWISE.name for figure in self.figures):
            self._runner.run_eager(batch)
        self._run_pieces(batch, descriptor)

    def _padding_prompts(self, size: int) -> ForwardBatch:
        """Prompts of `size` padding tokens over the persistent inputs."""
        runner, tokens = self._runner, self._tokens(size)
        lengths = torch.tensor(_lengths(size, runner.config.runtime.max_model_len), dtype=torch.int32)
        new, none = lengths.to(runner.device), torch.zeros_like(lengths)
        batch = runner.prepare_forward_batch_extend(
            tokens.input_ids,
            torch.zeros(len(lengths), dtype=torch.int64, device=runner.device),
            new,
            new,
            none.to(runner.device),
            tokens.out_cache_loc,
            extend_seq_lens_cpu=lengths,
            extend_prefix_lens_cpu=none,
            positions=tokens.positions,
        )
        batch.media, batch.mrope_positions = tokens.media, tokens.mrope_positions
        return batch

    def _run_pieces(self, batch: ForwardBatch, descriptor: BatchDescriptor) -> LogitsProcessorOutput:
        runner, rows = self._runner, self._logits_rows(batch)
        runner.attn_backend.init_forward_metadata(batch)
        tokens, all_rows = self._tokens(descriptor.num_tokens), self._rows[: descriptor.num_tokens]
        return runner.program.run(batch, tokens, rows, CUDAGraphMode.PIECEWISE, descriptor, all_rows)

    def _output_buffer(
        self, index: int, like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """Outputs of layers between pieces. Eager steps and captured decodes get fresh memory, in a capture of the
        graph's pool; graphs that serve any step get buffers that begin as zeros: no layer writes rows of padding, and
        what is there goes on into keys and values, so it must be finite."""
        descriptor = get_forward_context().batch_descriptor
        if descriptor is None or descriptor.uniform:
            make = like.new_empty if self._num_deals == 1 else like.new_zeros
            return make((like.shape[0], *shape), dtype=dtype)
        key = (index, *shape, dtype)
        if key not in self._outputs:
            self._outputs[key] = like.new_zeros((self._max_tokens, *shape), dtype=dtype)
        return self._outputs[key][: like.shape[0]]


def _kind(mode: CUDAGraphMode, descriptor: BatchDescriptor) -> str:
    """The mode's name in figures."""
    if descriptor.tokens_alone:
        return "TOGETHER"
    if mode is CUDAGraphMode.FULL and not descriptor.uniform:
        return "FRESH" if descriptor.fresh else "EXTEND" if descriptor.extends else "MIXED"
    return mode.name


def _lengths(num_tokens: int, longest: int) -> list[int]:
    """Lengths of as few requests as can have so many tokens."""
    return [min(longest, num_tokens - start) for start in range(0, num_tokens, longest)]


def estimate_graph_bytes(runner: CapturableModel, dispatcher: GraphDispatcher) -> int:
    """Device memory that capturing every size of `dispatcher` will take.

    The two largest sizes of each kind are captured and thrown away: the largest pays for the pool, the second shows
    what one more size adds.
    """
    sizes_of = {
        "FULL": dispatcher.decode_requests,
        "PIECEWISE": dispatcher.piecewise_tokens,
        "MIXED": dispatcher.mixed_tokens,
        "FRESH": dispatcher.fresh_tokens,
        "EXTEND": dispatcher.extend_tokens,
    }
    decodes, pieces, mixed, fresh, extends = (sizes[-2:] for sizes in sizes_of.values())
    trial = GraphDispatcher(dispatcher.mode, pieces, decodes, mixed, fresh_tokens=fresh, extend_tokens=extends)
    graphs = GraphRunner(runner, trial)
    graphs.capture()
    total = 0.0
    for kind, sizes in sizes_of.items():
        mib = [figure.mib for figure in graphs.figures if figure.mode == kind]
        count = len(sizes) + (len(dispatcher.cascade_requests) if kind == "FULL" else 0)
        if kind == "FULL" and dispatcher.tokens_alone:
            count *= 2
        total += sum(mib) + max(0, count - 2) * (mib[-1] if mib else 0.0)
    return int(total * 2**20)
