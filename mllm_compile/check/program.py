"""Runs the compiled program on small inputs before it is published: against Transformers' own forward.

Two requests are packed into one flat batch, at far-apart positions. Where pieces have variants for few tokens, one
token alone is run too. The two requests are repeated until every kernel of the linears and the variants for any number
have run. Logits differ from Transformers', for each request alone, in three cases: the model carries state from token
to token, reads neighbours by place instead of by attention, or was broken by a pass or Inductor. The weights are
random_weights.py's, so an 8B model needs one layer's memory. check/kernels.py checks what such batches do not reach.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mllm_compile.check.adapters import AdapterCase
from mllm_compile.check.kernels import check_written_pieces, relative_errors
from mllm_compile.check.media import (
    AddedToPrompts,
    MediaCase,
    compare_media,
    features_of,
    inputs_with_features,
    special_ids,
)
from mllm_compile.check.spread import spread_of_rows
from mllm_compile.check.states import StateCheck
from mllm_compile.errors import CompileError, UnsupportedModelError
from mllm_compile.model.attention_hook import attention_implementation
from mllm_compile.model.positions_hook import reading_positions
from mllm_compile.model.random_weights import materialise
from mllm_compile.model.refusals import first_line, refusing
from mllm_compile.passes.base import VARIANTS, QuantisedTensor, part_of_rank
from mllm_compile.passes.match.nodes import called_pieces, is_op
from mllm_compile.runtime.attention.base import AttentionInputs
from mllm_compile.runtime.attention.layer import AttentionLayer
from mllm_compile.runtime.attention.layer_kernels import of_kind
from mllm_compile.runtime.collectives.base import current
from mllm_compile.runtime.collectives.lockstep import run_lockstep
from mllm_compile.runtime.forward_context import set_forward_context
from mllm_compile.runtime.lora.pool import LoraPool
from mllm_compile.runtime.memory_pool import KVPool
from mllm_compile.runtime.ops import family
from mllm_compile.runtime.ops.panels.layout import put_in_panels
from mllm_compile.runtime.ops.trace import attention_reference
from mllm_compile.runtime.program.executor import ProgramExecutor
from mllm_compile.runtime.program.link import LinkedProgram, current_device, link
from mllm_compile.runtime.program.pieces import load_piece
from mllm_compile.runtime.program.spec import ModelSizes, Program
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import WeightScheme
from mllm_compile.runtime.schedule.rope_lengths import RopeLengths
from mllm_compile.runtime.state.base import StateBackend, StateInputs
from mllm_compile.runtime.state.metadata import Segment, StateMetadata
from mllm_compile.store.artifact import BINARIES, PIECES

if TYPE_CHECKING:
    from mllm_compile.compiler.lowered import Lowered
    from mllm_compile.model.hf_model import HFModel

_Bound = tuple[ProgramExecutor, tuple[AttentionLayer, ...]]
_Requests = list[torch.Tensor]  # of each request one tensor, [its tokens]

REQUEST_LENGTHS = (5, 3)
SECOND_REQUEST_POSITION = 100
# ‖ours − theirs‖ / ‖theirs‖ of the worst token. Measured with these weights (4 to 36 layers, dense and experts, as
# traced and through Inductor): right models are off by up to 7e-7 in float32 and 0.017 in bfloat16. Wrong models are
# off by more: learned positions that were not ours by 0.16, convolutions by 0.35 and more, a state carried over by over
# 1.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 8e-2}
# In 16 bits, or of inputs in eight, rounding sends a token with nearly equal scores to another expert, in a right model
# too. One of three experts in two layers made logits differ by 0.19. So there the token in the middle counts, and of
# each no more than this.
MOST_REROUTED = 0.5
# In 16 bits features carry the tower's rounding into the text: gemma3's logits were off by 0.084 on an H100.
ROUNDED_TWICE = 2
# Where linears read fp8 (quantise_activations): right models of 4 to 36 layers are off by 0.05 to 0.10. All else is
# held to the bound above, by the batches of few tokens, whose variants read bfloat16.
FP8_TOLERANCE = 0.2
# Where a CPU's linears round what they read to eight bits (pack_linears), each is off by 0.005 to 0.014. In bfloat16,
# whose bound this is, one is off by 0.003.
INT8_TOLERANCE = 8e-2


def self_check(
    lowered: Lowered,
    folder: Path,
    piece_suffix: str,
    device: str,
    page_size: int,
    state_dtype: str = "float32",
    kv_cache_dtype: str | None = None,
) -> str | None:
    """The reason why images would not be served right, where the model takes some; None: they would.

    Args:
        lowered: the lowered model; small real parameters replace its fake ones here.
        folder: the runtime's, with its pieces and its CUDA kernels.
        piece_suffix: which of a piece's files to run.
        device: where to run.
        page_size: tokens of a KV page.
        state_dtype: the type of sums of layers with a state.
        kv_cache_dtype: the type of keys and values; None: the model's.

    Raises:
        UnsupportedModelError: the program's logits are not Transformers'.
        CompileError: the program does not run, or a piece beside the model's computes something wrong.
    """
    hf_model, program = lowered.hf_model, lowered.program
    with current_device(torch.device(device)):
        by_name = _quantise(hf_model.model, materialise(hf_model, device), lowered.quantised)
        binaries = {path.stem: path.read_bytes() for path in (folder / BINARIES).glob("*")}
        files = {piece: folder / PIECES / (piece + piece_suffix) for piece in program.every_piece_id()}
        pieces = {piece: load_piece(path.name, path.read_bytes()) for piece, path in files.items()}
        linked = link(program, pieces, binaries, torch.device(device))
        ranks = [
            linked.bind(program_weights(by_name, program, lowered, rank), rank) for rank in range(lowered.num_ranks)
        ]
        states = StateCheck(of_kind(linked.layer_kernels, "state"), state_dtype)
        cache_dtype = None if kv_cache_dtype is None else getattr(torch, kv_cache_dtype)
        logits = _check_program(lowered, ranks, device, states)
        check_written_pieces(linked, page_size, hf_model.model.dtype, logits, cache_dtype)
        _check_adapters(lowered, linked, by_name, device, states)
        return _check_media(lowered, linked, by_name, device, states)


def _check_program(lowered: Lowered, ranks: Sequence[_Bound], device: str, states: StateCheck) -> torch.Tensor:
    """Runs every batch, on all ranks at once; returns the program's logits of the largest."""
    hf_model, program = lowered.hf_model, lowered.program
    model_type = hf_model.model.config.model_type
    batches = _batches(program, *_requests(hf_model.sizes(program.layers), device, program.rope))
    known: dict[int, torch.Tensor] = {}
    spreads: dict[int, torch.Tensor] = {}
    for batch_ids, batch_positions in batches:
        wants_rows = len(batch_ids) in (len(REQUEST_LENGTHS), len(batches[-1][0]))  # the rest would take a second more
        with refusing(f"{model_type!r} does not run"):
            theirs = _logits_of_transformers(hf_model, batch_ids, batch_positions, known)
        rows = _some_rows(len(theirs), device) if wants_rows else None
        try:
            ours, *of_rows = _run_ranks(ranks, batch_ids, batch_positions, rows, device, hf_model.model.dtype, states)
        except CompileError:
            raise
        except Exception as failure:
            raise CompileError(
                f"what was compiled of {model_type!r} does not run: {first_line(failure)}.{hint(lowered)}"
            ) from failure
        limit = _limit(lowered, sum(map(len, batch_ids)))
        errors = relative_errors(torch.cat([ours, *of_rows]), torch.cat([theirs, *(theirs[rows] for _ in of_rows)]))
        may_be_rerouted = bool(program.expert_weights) and limit > TOLERANCE[torch.float32]
        error = _counted(errors, may_be_rerouted)
        is_right, is_elsewhere = error <= limit, may_be_rerouted and error > MOST_REROUTED
        if not is_right and not is_elsewhere and hf_model.model.dtype != torch.float32:
            # A row may be off by as much more as rounding alone moves it.
            spread = _spread_of_transformers(hf_model, batch_ids, batch_positions, known, spreads)
            spread = torch.cat([spread, *(spread[rows] for _ in of_rows)])
            is_right = _counted((errors - spread).clamp(min=0), may_be_rerouted) <= limit
        if not is_right:
            raise UnsupportedModelError(
                f"{model_type!r} would not be served right: with {_crowd(len(batch_ids))} its logits are off by "
                f"{error:.2g} from Transformers' (limit {limit:g}). Usual causes: layers that carry state from token "
                f"to token, or that read positions other than position_ids.{hint(lowered, ' Or a pass')}"
            )
    return ours


def _counted(errors: torch.Tensor, may_be_rerouted: bool) -> float:
    """The error by which a program is judged, from its rows' errors [S]."""
    worst = errors.max().item()
    if not may_be_rerouted or not worst <= MOST_REROUTED:
        return worst
    return errors.median().item() if len(errors) > 1 else 0.0  # of one token alone nothing can be told


def _limit(lowered: Lowered, tokens: int) -> float:
    """The bound of the error of a step of so many tokens: linears may round what they read."""
    if _calls(lowered, tokens, "scaled_linear"):
        return FP8_TOLERANCE
    exact = TOLERANCE[lowered.hf_model.model.dtype]
    rounds = _calls(lowered, tokens, "rounded_panel_linear", "rounded_panel_expert_linear")
    return max(exact, INT8_TOLERANCE) if rounds else exact


def _calls(lowered: Lowered, tokens: int, *names_of_ops: str) -> bool:
    """True if pieces of a step of so many tokens call one of the ops."""
    variants: dict[str, dict[int, str]] = lowered.graph.meta.get(VARIANTS, {})
    names = []
    for name in called_pieces(lowered.graph):
        of_more = {most: variant for most, variant in variants.get(name, {}).items() if most >= tokens}
        names.append(of_more[min(of_more)] if of_more else name)
    pieces: list[Any] = [lowered.graph.get_submodule(name) for name in names]
    return any(is_op(node, *names_of_ops) for piece in pieces for node in piece.graph.nodes)


def _bound_for_adapters(
    linked: LinkedProgram, one: Lowered, by_name: Mapping[str, torch.Tensor], case: AdapterCase, device: str, rank: int
) -> _Bound:
    """A program for adapters over the weights, with those of the case in its memory."""
    layout, program = case.layout, one.program
    pool = LoraPool(layout, torch.device(device), rank)
    case.write(pool)
    own = replace(program, weights=tuple(name for name in program.weights if name not in layout.shapes()))
    executor = ProgramExecutor(program, linked.pieces, {**program_weights(by_name, own, one, rank), **pool.buffers})
    return executor, tuple(AttentionLayer.of(layer, executor.weights, rank) for layer in program.layers)


def _check_adapters(
    lowered: Lowered, linked: LinkedProgram, by_name: Mapping[str, torch.Tensor], device: str, states: StateCheck
) -> None:
    """Runs every batch with adapters, where the program takes some, against Transformers' linears with the same."""
    lora, hf_model = lowered.program.lora, lowered.hf_model
    if lora is None:
        return
    of_lora, program, dtype = lowered.of_lora[0], lora.program, hf_model.model.dtype
    case = AdapterCase(lora.layout, dtype, device)

    @functools.cache
    def theirs_of(index: int, is_alone: bool, slot: int) -> torch.Tensor:
        ids, positions = batches[0 if is_alone else -1]
        with case.added(hf_model.model, slot):
            return _run_transformers(hf_model, ids[index : index + 1], positions[index : index + 1])

    ranks = [_bound_for_adapters(linked, of_lora, by_name, case, device, rank) for rank in range(lowered.num_ranks)]
    batches = _batches(program, *_requests(hf_model.sizes(program.layers), device, program.rope))
    for batch_ids, batch_positions in batches:
        count = _num_different(batch_ids)
        for slots in case.steps:
            of_each = [theirs_of(index, count == 1, slot) for index, slot in enumerate(slots[:count])]
            theirs = torch.cat(of_each).repeat(len(batch_ids) // count, 1)
            given = batch_ids, batch_positions, None, device, dtype, states, slots[:count]
            error = _counted(relative_errors(_run_ranks(ranks, *given)[0], theirs), bool(program.expert_weights))
            limit = _limit(of_lora, sum(map(len, batch_ids))) * (1 if dtype == torch.float32 else ROUNDED_TWICE)
            if not error <= limit:
                raise UnsupportedModelError(
                    f"adapters of {hf_model.model.config.model_type!r} would not be served right: with "
                    f"{_crowd(len(batch_ids))} logits are off by {error:.2g} from Transformers' with what they add "
                    f"(limit {limit:g}). Leave out the section lora, or set lora.targets to other modules."
                    f"{hint(of_lora)}"
                )


def _check_media(
    lowered: Lowered, linked: LinkedProgram, by_name: Mapping[str, torch.Tensor], device: str, states: StateCheck
) -> str | None:
    """Runs a batch with images, where the model takes some, and again with adapters, where it takes those; returns why
    images would not be served right."""
    programs, hf_model, adapter = lowered.program.media, lowered.hf_model, lowered.adapter
    if programs is None or adapter is None:
        return None
    vocab_size = hf_model.sizes(programs.with_features.layers).vocab_size
    case = MediaCase(programs.facts, vocab_size, special_ids(hf_model), device)
    text, tower = lowered.of_media
    dtype, lengths = hf_model.model.dtype, tuple(len(ids) for ids, _ in case.prompts)

    def executor(one: Lowered, rank: int) -> ProgramExecutor:
        return ProgramExecutor(one.program, linked.pieces, program_weights(by_name, one.program, one, rank))

    def plain(rank: int) -> _Bound:
        own = executor(text, rank)
        return own, tuple(AttentionLayer.of(layer, own.weights, rank) for layer in own.program.layers)

    def run(bound: Callable[[int], _Bound], slots: Sequence[int]) -> torch.Tensor:
        features = features_of(executor(tower, 0), case, dtype, device)
        inputs = dict(inputs_with_features(case, features))
        if slots:
            inputs["adapter_slots"] = torch.from_numpy(np.repeat(slots, lengths).astype(np.int32)).to(device)
        blocks = case.blocks if programs.facts.sees_ahead else ()

        def of_rank(rank: int) -> torch.Tensor:
            with current_device(torch.device(device)):
                ahead = blocks, programs.facts.sees_ahead_in_windows
                return _run_packed(*bound(rank), lengths, 1, inputs, None, device, dtype, states, *ahead)[0]

        return of_rank(0) if lowered.num_ranks == 1 else run_lockstep(lowered.num_ranks, of_rank)[0]

    def fault_of(one: Lowered, bound: Callable[[int], _Bound], added: AddedToPrompts, *slots: int) -> str | None:
        ours: torch.Tensor | Exception
        try:
            ours = run(bound, slots)
        except Exception as failure:
            ours = failure
        limit = _limit(one, sum(lengths)) * (1 if dtype == torch.float32 else ROUNDED_TWICE)
        return compare_media(hf_model, adapter, case, ours, limit, hint(one), added)

    fault = fault_of(text, plain, lambda model, prompt: nullcontext())
    lora = lowered.program.lora
    if fault is not None or lora is None:
        return fault
    adapters, of_lora = AdapterCase(lora.layout, dtype, device), lowered.of_lora[1]
    slots = adapters.steps[0]
    return fault_of(
        of_lora,
        lambda rank: _bound_for_adapters(linked, of_lora, by_name, adapters, device, rank),
        lambda model, prompt: adapters.added(model, slots[prompt]),
        *slots,
    )


def _crowd(num_requests: int) -> str:
    return {1: "one token alone", 2: "two requests in one batch"}.get(
        num_requests, f"{num_requests} requests in one batch"
    )


def hint(lowered: Lowered, suspicion: str = " It may be a pass") -> str:
    """The passes that changed this model and that it can do without."""
    from mllm_compile.passes.pipeline import optional_pass_names

    optional = optional_pass_names()
    names = [report.name for report in lowered.reports if report.matches and report.name in optional]
    return f"{suspicion}: try compile.disable_passes: [{', '.join(names)}]." if names else ""


def _requests(sizes: ModelSizes, device: str, rope: RopeLengths | None = None) -> tuple[_Requests, _Requests]:
    """Token ids and positions of each request; the second is a long text's where RoPE follows its length."""
    second, context_len = SECOND_REQUEST_POSITION, sizes.context_len
    if rope is not None:
        second = rope.boundary + 1
        context_len = second + REQUEST_LENGTHS[1] if rope.of_each_length else context_len
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, sizes.vocab_size, (length,), generator=generator).to(device) for length in REQUEST_LENGTHS]
    starts = (0, max(0, min(second, context_len - REQUEST_LENGTHS[1])))
    return ids, [
        torch.arange(start, start + length, device=device)
        for start, length in zip(starts, REQUEST_LENGTHS, strict=True)
    ]


def _batches(program: Program, ids: _Requests, positions: _Requests) -> list[tuple[_Requests, _Requests]]:
    """Ids and positions of each batch, the smallest first: every variant of a piece runs, the one for any number
    last."""
    sizes = {variant.max_size for variant in program.all_variants()}
    batches = [([ids[0][:1]], [positions[0][:1]])] if 1 in sizes else []
    tokens = sum(REQUEST_LENGTHS)
    most = max(sizes, default=1)
    ranges = sorted({size for name, members in program.kernels.items() for size in family(name).step_sizes(members)})
    buckets = [size // tokens for size in ranges if tokens < size <= most]
    kernels = [count - 1 if count > 2 else count for count in buckets]  # also with fewer tokens than a kernel is for
    beyond = [most // tokens + 1] if most > 1 else []
    batches += [(ids * count, positions * count) for count in (1, *kernels, *beyond)]
    return batches


def _num_different(requests: _Requests) -> int:
    """Number of distinct requests in a batch of `_batches`, which repeats them."""
    return min(len(requests), len(REQUEST_LENGTHS))


def _logits_of_transformers(
    hf_model: HFModel, ids: _Requests, positions: _Requests, known: dict[int, torch.Tensor]
) -> torch.Tensor:
    """Runs each request once, and takes `known` from then on, by how many there are."""
    count = _num_different(ids)
    if count not in known:
        known[count] = _run_transformers(hf_model, ids[:count], positions[:count])
    return known[count].repeat(len(ids) // count, 1)


def _spread_of_transformers(
    hf_model: HFModel,
    ids: _Requests,
    positions: _Requests,
    known: Mapping[int, torch.Tensor],
    spreads: dict[int, torch.Tensor],
) -> torch.Tensor:
    """How much rounding moves each row of `_logits_of_transformers`, [S]; found once, and in `spreads` from then on."""
    count = _num_different(ids)
    if count not in spreads:
        run = functools.partial(_run_transformers, hf_model, ids[:count], positions[:count])
        spreads[count] = spread_of_rows(hf_model.model, run, known[count], hf_model.model.dtype)
    return spreads[count].repeat(len(ids) // count)


def _run_transformers(hf_model: HFModel, ids: list[torch.Tensor], positions: list[torch.Tensor]) -> torch.Tensor:
    """Runs each request alone, with the model's own attention and masks.

    Eager attention where there is one: it has all that the model says, while sdpa drops soft caps in silence up to
    Transformers 5.17. A request that begins at 0 is not told its positions: some models count them from elsewhere.
    """
    model: Any = hf_model.model

    def run_alone(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor
        if positions[0] == 0:
            logits = model(input_ids=ids[None], use_cache=False).logits[0]
            return logits
        told = positions + hf_model.position_offset
        with reading_positions(model, lambda counted: told.view(counted.shape)):
            logits = model(input_ids=ids[None], position_ids=told[None], use_cache=False).logits[0]
            return logits

    def run(implementation: str) -> torch.Tensor:
        with torch.no_grad(), attention_implementation(model, implementation), _without_advice():
            return torch.cat([run_alone(*request) for request in zip(ids, positions, strict=True)])

    try:
        return run("eager")
    except Exception:  # not every model has it
        return run("sdpa")


@contextmanager
def _without_advice() -> Iterator[None]:
    """Transformers does not say within the context which packages would make its recurrences faster: none is served."""

    def is_other(record: logging.LogRecord) -> bool:
        return "is falling back to its reference" not in record.getMessage()

    logger = logging.getLogger("transformers.integrations.hub_kernels")
    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


def _quantise(
    model: Any, by_name: dict[str, torch.Tensor], tensors: Mapping[str, QuantisedTensor]
) -> dict[str, torch.Tensor]:
    """Adds the tensors of quantised weights to the model's, and gives the model the numbers that they encode. Layers
    share them, as they share what was quantised."""
    done: dict[tuple[int, WeightScheme], tuple[dict[str, torch.Tensor], torch.nn.Parameter]] = {}
    found = dict(by_name)
    for name, tensor in tensors.items():
        weight, scheme = by_name[tensor.weight_name], tensor.scheme
        key = weight.data_ptr(), scheme
        if key not in done:
            rows = weight.transpose(-1, -2) if tensor.is_transposed else weight
            parts = quantised(rows, scheme)
            stands_for = dequantised(parts, scheme.kind, scheme.group, rows.shape[-1], weight.dtype)
            stands_for = stands_for.transpose(-1, -2).contiguous() if tensor.is_transposed else stands_for
            done[key] = parts, torch.nn.Parameter(stands_for, requires_grad=False)
        parts, parameter = done[key]
        found[name] = parts[tensor.role]
        # Of a tied head the input is called after the head, and the embedding keeps its numbers.
        owner, _, leaf_name = name.removesuffix(f"_{tensor.role}").rpartition(".")
        setattr(model.get_submodule(owner), leaf_name, parameter)
    return found


def program_weights(
    by_name: Mapping[str, torch.Tensor], program: Program, lowered: Lowered, rank: int
) -> dict[str, torch.Tensor]:
    """The model's weights as a rank's program wants them: its parts of them, and packed ones concatenated; once for
    those that layers share."""
    made: dict[Any, torch.Tensor] = {}
    bound = {}

    def as_it_lies(name: str, weight: torch.Tensor) -> torch.Tensor:
        if (unit := program.panels.get(name)) is None:
            return weight
        key = weight.data_ptr(), "panels"
        if key not in made:
            made[key] = weight.clone(memory_format=torch.contiguous_format)
            put_in_panels(made[key], unit)
        return made[key]

    def part(name: str) -> torch.Tensor:
        cuts = lowered.cuts_of(name)
        key = by_name[name].data_ptr(), cuts
        if key not in made:
            made[key] = part_of_rank(by_name[name], cuts, rank).contiguous() if cuts else by_name[name]
        return made[key]

    for name in program.weights:
        if name not in lowered.packed:
            bound[name] = as_it_lies(name, part(name))
            continue
        members = [part(member.weight_name) for member in lowered.packed[name]]
        key = tuple(member.data_ptr() for member in members)
        if key not in made:
            made[key] = torch.cat(members)
        bound[name] = as_it_lies(name, made[key])
    return bound


@dataclass(frozen=True)
class _PackedRequests:
    """Stands for batch and backend: attends within each request; what is written to the cache is not read.

    Attributes:
        lengths: the lengths of the different requests, one after another.
        copies: how often those follow.
        blocks: tokens of the first that see each other in both directions, first and end.
        blocks_in_windows: they do in layers with windows alone.
    """

    lengths: tuple[int, ...]
    copies: int
    token_to_kv_pool: KVPool
    states: StateBackend
    device: str
    blocks: Sequence[tuple[int, int]] = ()
    blocks_in_windows: bool = False

    rope = None  # as a backend's: q and k come rotated

    @property
    def batch(self) -> _PackedRequests:
        return self

    @property
    def attn_backend(self) -> _PackedRequests:
        return self

    @property
    def num_actual_tokens(self) -> int:
        return sum(self.lengths) * self.copies

    @property
    def extend_seq_lens(self) -> torch.Tensor:
        return torch.tensor(self.lengths * self.copies, dtype=torch.int32, device=self.device)

    @property
    def extend_prefix_lens(self) -> torch.Tensor:
        return torch.zeros_like(self.extend_seq_lens)

    def of_states(self) -> StateMetadata:
        """The metadata of layers with a state; each copy is a request."""
        ends = itertools.accumulate(self.lengths * self.copies)
        starts = [0, *ends]
        segments = [Segment(index, *span, has_state=False) for index, span in enumerate(itertools.pairwise(starts))]
        return StateMetadata(
            batch=self,  # type: ignore[arg-type]
            rows=torch.arange(1, len(starts), device=self.device),
            num_decodes=0,
            segments=segments,
            num_actual_tokens=starts[-1],
        )

    def writes_kv(self, layer: AttentionLayer) -> bool:
        return False

    def forward_state(self, inputs: StateInputs) -> None:
        self.states.forward(inputs)

    def forward(self, inputs: AttentionInputs) -> None:
        layer, params = inputs.layer, inputs.layer.params
        sinks = None if layer.sink_logits is None else layer.sink_logits.repeat(self.copies)
        start = 0
        for length in self.lengths:
            # Copies of a request are further heads of one: a call for each took most of a check's time.
            queries, keys, values = (
                self._of_request(x, start, length).transpose(0, 1).flatten(1, 2) for x in (inputs.q, inputs.k, inputs.v)
            )
            attended = attention_reference(
                *(queries, keys, values, sinks, params.sm_scale, params.logits_soft_cap, params.window_left),
                alibi_slopes=layer.alibi_slopes * self.copies,
                chunk=layer.chunk,
                latent=layer.v_head_dim if layer.is_latent else 0,
                up=layer.up_weight,
                blocks=() if start or (self.blocks_in_windows and params.window_left < 0) else self.blocks,
            ).unflatten(1, (self.copies, -1))
            self._of_request(inputs.out, start, length).copy_(attended.transpose(0, 1))
            start += length

    def _of_request(self, x: torch.Tensor, start: int, length: int) -> torch.Tensor:
        """[copies, length, H, D] of [T, H, D]."""
        part: torch.Tensor = x.unflatten(0, (self.copies, -1))[:, start : start + length]
        return part


def _some_rows(tokens: int, device: str) -> torch.Tensor:
    """Picks every second row, the last one first: a pass may have moved their gather to where it does not belong."""
    return torch.arange(tokens - 1, -1, -2, device=device)


def _run_ranks(
    ranks: Sequence[_Bound],
    ids: list[torch.Tensor],
    positions: list[torch.Tensor],
    rows: torch.Tensor | None,
    device: str,
    dtype: torch.dtype,
    states: StateCheck,
    adapters: Sequence[int] = (),
) -> tuple[torch.Tensor, ...]:
    """Runs _run_program on all ranks beside each other; returns the first one's logits."""
    if len(ranks) == 1:
        return _run_program(*ranks[0], ids, positions, rows, device, dtype, states, adapters)

    def run(rank: int) -> tuple[torch.Tensor, ...]:
        with current_device(torch.device(device)):
            return _run_program(*ranks[rank], ids, positions, rows, device, dtype, states, adapters)

    return run_lockstep(len(ranks), run)[0]


def _run_program(
    executor: ProgramExecutor,
    layers: tuple[AttentionLayer, ...],
    ids: list[torch.Tensor],
    positions: list[torch.Tensor],
    rows: torch.Tensor | None,
    device: str,
    dtype: torch.dtype,
    states: StateCheck,
    adapters: Sequence[int] = (),
) -> tuple[torch.Tensor, ...]:
    """Logits of all tokens, and of `rows`, where some are wanted, by the two ways to ask for them.

    Args:
        adapters: the slot of each different request, of a program for adapters.
    """
    different = _num_different(ids)
    lengths, copies = tuple(len(request) for request in ids[:different]), len(ids) // different
    inputs = {"input_ids": torch.cat(ids), "positions": torch.cat(positions)}
    if "hidden_states" in executor.program.inputs:
        inputs["hidden_states"] = executor.weights["embed_tokens.weight"][inputs["input_ids"]]
    if adapters:
        by_token = np.repeat(adapters, lengths).astype(np.int32)
        inputs["adapter_slots"] = torch.from_numpy(np.tile(by_token, copies)).to(device)
    inputs["rope_lens"] = torch.cat([(request[-1:] + 1).expand(len(request)) for request in positions])
    return _run_packed(executor, layers, lengths, copies, inputs, rows, device, dtype, states)


def _run_packed(
    executor: ProgramExecutor,
    layers: tuple[AttentionLayer, ...],
    lengths: tuple[int, ...],
    copies: int,
    inputs: Mapping[str, torch.Tensor],
    rows: torch.Tensor | None,
    device: str,
    dtype: torch.dtype,
    states: StateCheck,
    blocks: Sequence[tuple[int, int]] = (),
    blocks_in_windows: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Logits as _run_program's, of requests of `lengths`, `copies` times; inputs are shared by all copies, except
    slots. Tokens of the first one's `blocks` see each other in both directions, in layers with windows or in all."""
    tokens = sum(lengths) * copies
    by_name = {layer.name: layer for layer in layers}
    shapes = [layer.cache_shape for layer in layers]
    state_layers = executor.program.state_layers
    backend = states.backend(state_layers, len(lengths) * copies, device)
    pool = KVPool(tokens + 1, 1, shapes, dtype, device)
    packed = _PackedRequests(lengths, copies, pool, backend, device, blocks, blocks_in_windows)
    metadata: dict[str, Any] = dict.fromkeys(by_name, packed)
    metadata |= dict.fromkeys((layer.name for layer in state_layers), packed.of_states())
    every = torch.arange(tokens, device=device)
    slots = every + 1  # 0 is padding's
    with (
        torch.no_grad(),
        set_forward_context(
            metadata,
            no_compile_layers={**by_name, **{layer.name: layer for layer in state_layers}},
            slot_mapping=dict.fromkeys(by_name, slots),
            num_tokens=tokens,
        ),
    ):
        inputs = {**inputs, "slots": slots}
        if "all_slots" in executor.program.inputs:
            inputs["all_slots"] = slots.repeat(current().size)
        body = executor.body(inputs)
        logits = executor.head(body, every)
        if rows is None:
            return (logits,)
        return logits, executor.head(body, rows), executor.head(executor.body(inputs, every), rows)
