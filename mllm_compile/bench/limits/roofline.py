"""Shows where the time of a decode step goes: each kernel's bytes, time, and loss against the ceilings.

Bytes are the necessary ones, not all that a kernel moved. A GEMM reads a matrix and its rows, an attention the KV
cache. Kernels between two GEMMs read what the first wrote, and write what the second reads. Kernels between them share
that, so that splitting work over more kernels shows as time lost.

Which GEMM is which weight is known by order: a piece's matrices are used in the order of its inputs. Kernels of a
replayed CUDA graph are found, by name and count, among the kernels of a step without graphs, except kernels of captured
decodes alone. Pure Python.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from mllm_compile.bench.limits.limits import active_bytes, expert_flops
from mllm_compile.bench.measure.results import Ceilings
from mllm_compile.bench.trace.chrome_trace import BEFORE_FIRST_PIECE, COMPILED_LOOPS, TracedKernel, short_name
from mllm_compile.runtime.files.json_data import from_json
from mllm_compile.runtime.program.spec import ExpertWeight

PREPARE = "prepare the step"
SAMPLE = "logits to tokens"
BETWEEN_RANKS = "between ranks"
UNKNOWN = "?"
# GEMM kernels of cuBLAS, CUTLASS, Triton and ours; on a CPU the innermost operators. A split-K's reduction is no GEMM.
_GEMM_NAME = re.compile(
    r"^(?!aten::).*(gemm|gemv|nvjet|cutlass|matmul|triton_tem_|_mm_|mkl|_linear_kernel|_linear$"
    r"|expert_(tiles|gate_up|down|rows)$|quantised_tiles$)"
    r"|^aten::(add)?mm$",
    re.I,
)
_NO_GEMM_NAME = re.compile(r"reduce|^triton_(poi|red|per)_", re.I)
# Kernels of ours and NCCL's that sum, gather or spread over ranks, what is normed with a sum among them.
_RANKS_NAME = re.compile(r"(^|\W)(push_sum|push_norm|send_sum|send_norm|choose_token|ncclDevKernel\w*)\b")
# Kernels of a captured decode alone (runtime/ops/tokens/decode_loop.py); the second reads the logits.
_READS_LOGITS = "_block_numbers_kernel"
_CAPTURED_LABELS = {"_begin_kernel": PREPARE, _READS_LOGITS: SAMPLE, "_end_kernel": SAMPLE}


@dataclass(frozen=True, slots=True)
class MatrixFacts:
    """A weight of a GEMM, [N, K] or one of experts, which multiplies `rows` tokens.

    Attributes:
        itemsize: bytes of a number of the weight, unless it is quantised, and of the tokens.
        quantised_bytes: of the tensors that a quantised weight is.
        expert_share: of the experts, as counted; None: the expected one.
        may_be_in_fp8: a GPU may multiply with it in fp8 (step_parts.may_be_in_fp8).
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    experts: ExpertWeight | None = None
    quantised_bytes: int | None = None
    expert_share: float | None = None
    may_be_in_fp8: bool = False

    def num_bytes(self, rows: int) -> int:
        """Bytes of the weight that are read for so many rows: of experts, those that are chosen."""
        num_bytes = math.prod(self.shape) * self.itemsize if self.quantised_bytes is None else self.quantised_bytes
        if self.experts is None:
            return num_bytes
        return round(active_bytes(self.experts, rows, num_bytes, self.expert_share))

    def out_bytes(self, rows: int) -> int:
        outputs = self.shape[0] if self.experts is None else self.experts.num_chosen * self.experts.outputs
        return rows * outputs * self.itemsize

    def in_bytes(self, rows: int) -> int:
        if self.experts is None:
            return rows * self.shape[1] * self.itemsize
        return rows * (1 if self.experts.of_tokens else self.experts.num_chosen) * self.experts.inputs * self.itemsize

    def flops(self, rows: int) -> int:
        if self.experts is None:
            return 2 * rows * math.prod(self.shape)
        return expert_flops(self.experts, rows)


@dataclass(frozen=True, slots=True)
class PieceFacts:
    """One piece call: activations in and out, bytes; its matrices in order of use."""

    index: int
    in_bytes: int
    out_bytes: int
    matrices: tuple[MatrixFacts, ...]


@dataclass(frozen=True, slots=True)
class AttentionFacts:
    """One attention, after a piece call: bytes of the KV cache it reads; of query, new keys and values, and output, and
    of the up-projection that attention over latents has.

    Attributes:
        what: attention, or state for a layer with one: kv_bytes are then of states, read and written.
    """

    after_piece: int
    name: str
    kv_bytes: int
    new_bytes: int
    what: str = "attention"


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The work of a decode step with `rows` requests."""

    rows: int
    pieces: tuple[PieceFacts, ...]
    attentions: tuple[AttentionFacts, ...]
    logits_bytes: int

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> StepFacts:
        """The inverse of dataclasses.asdict."""
        return from_json(cls, data)

    def with_expert_share(self, share: float) -> StepFacts:
        """The same where so much of the experts' weights is read."""
        pieces = (
            replace(piece, matrices=tuple(replace(matrix, expert_share=share) for matrix in piece.matrices))
            for piece in self.pieces
        )
        return replace(self, pieces=tuple(pieces))


@dataclass(frozen=True, slots=True)
class KernelWork:
    """The purpose of a kernel, and what it has to move and compute.

    Attributes:
        flops, fp8_flops: operations of products in the model's type, and of those that may be in fp8.
    """

    label: str
    num_bytes: int = 0
    flops: int = 0
    fp8_flops: int = 0


@dataclass(frozen=True, slots=True)
class RooflineRow:
    """Kernels of one name with one job, over a step.

    Attributes:
        label: the job, the layer's number left out.
        kernel: short name.
        count: kernels a step.
        us: their time, all together.
        num_bytes, flops: likewise.
        limit_us: the least time by the ceilings.
    """

    label: str
    kernel: str
    count: int
    us: float
    num_bytes: int
    flops: int
    limit_us: float

    @property
    def lost_us(self) -> float:
        return self.us - self.limit_us

    @property
    def share(self) -> float:
        """The share of the binding ceiling that is reached, 0 to 1."""
        return self.limit_us / self.us if self.us else 0.0


def assign_jobs(kernels: Sequence[TracedKernel], facts: StepFacts) -> list[KernelWork]:
    """Each kernel's job, from a step whose kernels know their piece."""
    jobs = [KernelWork(UNKNOWN)] * len(kernels)
    groups: dict[tuple[int, bool], list[int]] = defaultdict(list)
    for position, kernel in enumerate(kernels):
        groups[kernel.piece, kernel.inside].append(position)
    pieces = {piece.index: piece for piece in facts.pieces}
    attentions = {attention.after_piece: attention for attention in facts.attentions}
    last = max(pieces)
    for (piece, inside), positions in groups.items():
        mine = [kernels[position] for position in positions]
        if inside:
            found = _piece_jobs(mine, pieces[piece], facts.rows)
        elif piece == BEFORE_FIRST_PIECE:
            found = [KernelWork(PREPARE)] * len(mine)
        elif piece in attentions:
            found = _attention_jobs(mine, attentions[piece])
        else:
            label = SAMPLE if piece == last else UNKNOWN
            found = _longest_gets(mine, KernelWork(label, facts.logits_bytes), KernelWork(label))
        for position, job in zip(positions, found, strict=True):
            jobs[position] = job
    return jobs


def jobs_by_name(
    kernels: Sequence[TracedKernel], known: Sequence[TracedKernel], known_jobs: Sequence[KernelWork], logits_bytes: int
) -> list[KernelWork]:
    """Jobs for a captured step's kernels from another step's: the n-th of a name has the job of the n-th there.

    Args:
        logits_bytes: bytes that choosing tokens reads.
    """
    return [
        known_jobs[same] if same is not None else _captured_job(kernel.name, logits_bytes)
        for kernel, same in zip(kernels, _same_in(known, kernels), strict=True)
    ]


def part_times(
    kernels: Sequence[TracedKernel], known: Sequence[TracedKernel], facts: StepFacts
) -> tuple[dict[int, float], float]:
    """The time of each step of the program; kernels are matched as jobs_by_name does.

    Returns:
        (index in program.steps → µs of its kernels, µs of the kernels of no step: inputs made ready, tokens chosen).
    """
    attentions = {attention.after_piece for attention in facts.attentions}
    times: dict[int, float] = defaultdict(float)
    others = 0.0
    for kernel, same in zip(kernels, _same_in(known, kernels), strict=True):
        piece, inside = (BEFORE_FIRST_PIECE, False) if same is None else (known[same].piece, known[same].inside)
        if inside:
            times[piece] += kernel.us
        elif piece in attentions:
            times[piece + 1] += kernel.us
        else:
            others += kernel.us
    return dict(times), others


def _same_in(known: Sequence[TracedKernel], kernels: Sequence[TracedKernel]) -> list[int | None]:
    """Each kernel's position in the known step: the n-th of a name is the n-th there; or None."""
    by_name: dict[str, list[int]] = defaultdict(list)
    for position, kernel in enumerate(known):
        by_name[kernel.name].append(position)
    counts: dict[str, int] = defaultdict(int)
    found = []
    for kernel in kernels:
        same, count = by_name[kernel.name], counts[kernel.name]
        found.append(same[count] if count < len(same) else None)
        counts[kernel.name] += 1
    return found


def _captured_job(name: str, logits_bytes: int) -> KernelWork:
    return KernelWork(_CAPTURED_LABELS.get(name, UNKNOWN), logits_bytes if name == _READS_LOGITS else 0)


def roofline_rows(kernels: Sequence[TracedKernel], jobs: Sequence[KernelWork], ceilings: Ceilings) -> list[RooflineRow]:
    """Kernels of one name and job together, the most time lost first."""
    groups: dict[tuple[str, str], list[tuple[TracedKernel, KernelWork]]] = defaultdict(list)
    for kernel, job in zip(kernels, jobs, strict=True):
        groups[_without_numbers(job.label), short_name(kernel.name)].append((kernel, job))
    rows = [
        RooflineRow(
            label=label,
            kernel=name,
            count=len(group),
            us=sum(kernel.us for kernel, _ in group),
            num_bytes=sum(job.num_bytes for _, job in group),
            flops=sum(job.flops + job.fp8_flops for _, job in group),
            limit_us=sum(_limit_us(job, ceilings) for _, job in group),
        )
        for (label, name), group in groups.items()
    ]
    return sorted(rows, key=lambda row: row.lost_us, reverse=True)


def _limit_us(job: KernelWork, ceilings: Ceilings) -> float:
    return max(job.num_bytes / ceilings.read_bytes_s, ceilings.products_s(job.flops, job.fp8_flops)) * 1e6


def _piece_jobs(kernels: Sequence[TracedKernel], piece: PieceFacts, rows: int) -> list[KernelWork]:
    """Jobs of a piece: GEMMs get their matrices; kernels between two share what one wrote and the other reads."""
    matrices = piece.matrices
    gemms = _gemm_positions(kernels, len(matrices))
    if gemms is None:
        return _fused_piece_jobs(kernels, piece, rows)
    jobs = [KernelWork("")] * len(kernels)
    for position, matrix in zip(gemms, matrices, strict=True):
        moved = matrix.num_bytes(rows) + matrix.in_bytes(rows) + matrix.out_bytes(rows)
        jobs[position] = KernelWork(matrix.name, moved, *_flops((matrix,), rows))
    edges = [-1, *gemms, len(kernels)]
    for gap, (begin, end) in enumerate(pairwise(edges)):
        between = range(begin + 1, end)
        before = matrices[gap - 1].out_bytes(rows) if gap else piece.in_bytes
        after = matrices[gap].in_bytes(rows) if gap < len(matrices) else piece.out_bytes
        label = f"before {matrices[gap].name}" if gap < len(matrices) else "end of the piece"
        for position in between:
            is_of_ranks = _RANKS_NAME.search(kernels[position].name)
            jobs[position] = KernelWork(BETWEEN_RANKS if is_of_ranks else label, (before + after) // len(between))
    return jobs


def _gemm_positions(kernels: Sequence[TracedKernel], count: int) -> list[int] | None:
    """The positions of GEMMs: by name where that gives the right number, else the longest kernels.

    None: there are fewer kernels than GEMMs, as in a piece whose GEMMs are inside compiled loops (on a CPU).
    """
    by_name = [
        position
        for position, kernel in enumerate(kernels)
        if _GEMM_NAME.search(kernel.name) and not _NO_GEMM_NAME.search(kernel.name)
    ]
    if len(by_name) == count:
        return by_name
    if len(kernels) < count or any(kernel.name == COMPILED_LOOPS for kernel in kernels):
        return None
    longest = sorted(range(len(kernels)), key=lambda position: kernels[position].us, reverse=True)[:count]
    return sorted(longest)


def _fused_piece_jobs(kernels: Sequence[TracedKernel], piece: PieceFacts, rows: int) -> list[KernelWork]:
    """Jobs of a fused piece: the longest kernel does all that the piece does."""
    first, last = piece.matrices[0].name, piece.matrices[-1].name
    label = first if first == last else f"{first} … {last}"
    moved = piece.in_bytes + piece.out_bytes + sum(matrix.num_bytes(rows) for matrix in piece.matrices)
    return _longest_gets(
        kernels, KernelWork(label, moved, *_flops(piece.matrices, rows)), KernelWork(f"around {label}")
    )


def _flops(matrices: Sequence[MatrixFacts], rows: int) -> tuple[int, int]:
    """(operations of products in the model's type, of those that may be in fp8)"""
    plain, in_fp8 = (
        sum(matrix.flops(rows) for matrix in matrices if matrix.may_be_in_fp8 == kind) for kind in (False, True)
    )
    return plain, in_fp8


def _attention_jobs(kernels: Sequence[TracedKernel], attention: AttentionFacts) -> list[KernelWork]:
    """Jobs of an attention: the longest kernel reads the cache; others (writing, merging) move the new part."""
    name = f"{attention.what} {attention.name}"
    if len(kernels) == 1:
        return [KernelWork(name, attention.kv_bytes + attention.new_bytes)]
    others = attention.new_bytes // (len(kernels) - 1)
    return _longest_gets(kernels, KernelWork(name, attention.kv_bytes), KernelWork(f"{name}: around it", others))


def _longest_gets(kernels: Sequence[TracedKernel], main: KernelWork, rest: KernelWork) -> list[KernelWork]:
    longest = max(range(len(kernels)), key=lambda position: kernels[position].us, default=0)
    return [main if position == longest else rest for position in range(len(kernels))]


def _without_numbers(label: str) -> str:
    """The same place of every layer under one name: model.layers.3.mlp.up_proj.weight is mlp.up_proj."""
    label = re.sub(r"(?<=[._])\d+(?=[._:]|\W|$)", "*", label)
    return re.sub(r"\bmodel\.(layers\.\*\.)?|\.weight\b", "", label)
