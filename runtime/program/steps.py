"""The kinds of steps of a program, as they are stored; free of torch. spec.py holds a program, executor.py runs it.

A step is a piece (a compiled function of tensors) or a layer between pieces, whose op reads the forward context: an
attention, or a layer with a state.

Shape legend: T tokens, N rows of a tower, H query heads, Hk KV heads, D head dim, Dv value head dim, R reach of a bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from mllm_compile.runtime.errors import ArtifactError
from mllm_compile.runtime.files.json_data import from_json


@dataclass(frozen=True)
class PieceStep:
    """outputs = piece(inputs); inputs name values or weights. With `writes_kv_of` the piece writes that layer's keys
    and values, and is given slots and cache behind its inputs; or no slots, and leaves it to attention
    (ops.cache_inputs)."""

    piece: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    writes_kv_of: str | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return self.inputs

    @property
    def writes(self) -> tuple[str, ...]:
        return self.outputs


@dataclass(frozen=True)
class RopeInputNames:
    """The inputs of the q and k that the piece before leaves to attention to rotate (attention.capture.RopeInputs).

    Attributes:
        values: names of q and k; of cos and sin where heads rotate, then of the norms' weights where there are some.
        eps: these norms' eps.
    """

    values: tuple[str, ...]
    eps: float


@dataclass(frozen=True)
class AttentionStep:
    """out [T, H, Dv] = attention of `layer` over q [T, H, D], k [T, Hk, D], v [T, Hk, Dv] and the KV cache. Writes k
    and v to the cache unless the previous piece has done so. With `rope_inputs` the piece may have left both to
    attention: then it has not made q and k either."""

    layer: str
    q: str
    k: str
    v: str
    out: str
    saves_kv: bool = True
    rope_inputs: RopeInputNames | None = None
    bias: str | None = None  # a value [H, 2R + 1] (LayerSpec.has_distance_bias)
    index: tuple[str, ...] = ()  # an indexer's queries, and weights if it has some (LayerSpec.top_k)

    @property
    def reads(self) -> tuple[str, ...]:
        of_rope = () if self.rope_inputs is None else self.rope_inputs.values
        return (self.q, self.k, self.v, *of_rope, *(() if self.bias is None else (self.bias,)), *self.index)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)


@dataclass(frozen=True)
class CrossAttentionStep:
    """out [T, H, Dv] = attention of `layer` over q [T, H, D] and the pages of each token's source."""

    layer: str
    q: str
    out: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.q,)

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)


@dataclass(frozen=True)
class StateStep:
    """out [T, …] = `layer` over its operands (StateLayer.operands), [T, …] each if of tokens, and the states of the
    batch's requests, which it advances."""

    layer: str
    operands: tuple[str, ...]
    out: str

    @property
    def reads(self) -> tuple[str, ...]:
        return self.operands

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)


@dataclass(frozen=True)
class TextPiece:
    """A piece that attends for packed texts (ops/segments/texts.py).

    Attributes:
        piece: its id.
        strides: of q, k and v: from row to row, and from head to head.
    """

    piece: str
    strides: tuple[tuple[int, int], ...]


# The op's arguments over packed rows that scores get beside queries and keys, in its order.
OF_SCORES = ("bias", "distance_keys", "distance_queries", "distance_columns", "sinks")


@dataclass(frozen=True)
class PackedAttentionStep:
    """out [N, H, Dv] = attention over q [N, H, D], k [N, Hk, D], v [N, Hk, Dv], within segments.

    Attributes:
        layer: its name, for people.
        segments: the input that bounds them (linked_steps.Segments).
        by_kernel: a kernel of the program attends (passes/attend_segments.py). It has neither windows nor a soft cap,
            nor what scores get beside: `bias` [H, 2R + 1], or `distance_keys` and `distance_queries` [W, H, D] with
            `distance_columns` [2R + 1] (ops/segments/distance_scores.py), and `sinks` [H].
        of_texts: a piece that has them, where the program has one.
    """

    layer: str
    q: str
    k: str
    v: str
    segments: str
    out: str
    out_shape: tuple[int, int]
    sm_scale: float
    by_kernel: bool = False
    window_left: int = -1
    window_right: int = -1
    bias: str | None = None
    distance_keys: str | None = None
    distance_queries: str | None = None
    distance_columns: str | None = None
    sinks: str | None = None
    soft_cap: float = 0.0
    of_texts: TextPiece | None = None

    @property
    def of_scores(self) -> dict[str, str]:
        """The values that scores get beside queries and keys, by the op's arguments."""
        found = {name: getattr(self, name) for name in OF_SCORES}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.q, self.k, self.v, self.segments, *self.of_scores.values())

    @property
    def writes(self) -> tuple[str, ...]:
        return (self.out,)


LayerStep = AttentionStep | CrossAttentionStep | StateStep | PackedAttentionStep
Step = PieceStep | LayerStep
# Kinds of steps by the names that they are stored under.
_STEPS: dict[str, type[Step]] = {
    "piece": PieceStep,
    "attention": AttentionStep,
    "cross_attention": CrossAttentionStep,
    "state": StateStep,
    "packed_attention": PackedAttentionStep,
}
_STEP_NAMES = {kind: name for name, kind in _STEPS.items()}


def step_to_json(step: Step) -> dict[str, Any]:
    """The step as plain data."""
    return {"op": _STEP_NAMES[type(step)], **asdict(step)}


def step_from_json(data: Mapping[str, Any]) -> Step:
    """The step that step_to_json wrote.

    Raises:
        ArtifactError: there is no such kind; of other data KeyError, TypeError or ValueError.
    """
    kind = _STEPS.get(data["op"])
    if kind is None:
        raise ArtifactError(f"unknown step {data['op']!r} in the program; compile the model again")
    return from_json(kind, {name: value for name, value in data.items() if name != "op"})
