"""Layers with a state as data: what a pass finds, the program stores and a backend is given. Imports no torch.

A mixer (a gated delta net, a Mamba block, a short convolution) is one or two such layers: a causal convolution, and a
recurrence. Each has one state a request, of a fixed size however long the request is. reference.py computes them.

Shape legend: T tokens, C channels, K kernel width, H heads, Hk key heads, Hv value heads, D key width, Dv value width,
G groups, N state size, P head width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from mllm_compile.runtime.files.json_data import from_json

Shapes = Mapping[str, Sequence[int]]  # of operands by name, with T as their first size unless they are constants


@dataclass(frozen=True)
class StateKind:
    """A recurrence with its settings; its fields are what the op of the trace has behind its operands.

    Attributes:
        name: of the trace's op, and as programs store it.
        operands: tensors that a call has, in the op's order.
        constants: operands that belong to the layer; all others have a row for each token.
        holds_inputs: the state is a part of the input, in its dtype; otherwise it is summed up, in
            runtime.state_dtype.
        holds_exponents: the state has exponents beside what is over them, and is in float32 alone: a small fall of a
            large exponent, rounded to fewer bits, is none, and the layer would forget nothing.
    """

    name: ClassVar[str]
    operands: ClassVar[tuple[str, ...]]
    constants: ClassVar[frozenset[str]]
    holds_inputs: ClassVar[bool] = False
    holds_exponents: ClassVar[bool] = False

    def state_shape(self, shapes: Shapes) -> tuple[int, ...]:
        """The shape of one request's state."""
        raise NotImplementedError

    def out_shape(self, shapes: Shapes) -> tuple[int, ...]:
        """The shape of one token's output."""
        raise NotImplementedError


@dataclass(frozen=True)
class CausalConv(StateKind):
    """Each channel's weighted sum of its last K inputs: x [T, C], weight [C, K], bias [C] → [T, C].

    The state is the last K - 1 inputs, [K - 1, C], the newest last.
    """

    name = "causal_conv"
    operands = ("x", "weight", "bias")
    constants = frozenset({"weight", "bias"})
    holds_inputs = True

    activation: str  # silu, or "" for none

    def state_shape(self, shapes: Shapes) -> tuple[int, ...]:
        channels, width = shapes["weight"]
        return width - 1, channels

    def out_shape(self, shapes: Shapes) -> tuple[int, ...]:
        return (shapes["x"][1],)


@dataclass(frozen=True)
class GatedDelta(StateKind):
    """The gated delta rule: q, k [T, Hk, D], v [T, Hv, Dv], g [T, Hv] or, a gate a channel, [T, Hv, D] (logarithms of
    decays), beta [T, Hv] → [T, Hv, Dv].

    S ← S·exp(g); S ← S + beta·(v - S·k) kᵀ; out = S·q / √D. The state is S, [Hv, Dv, D]. With A_log, dt_bias [Hv] g
    stands for -exp(A_log)·softplus(g + dt_bias), and beta for sigmoid(beta). With z [T, Hv, Dv], norm [Dv] each head's
    out becomes norm·out / √(mean(out²) + norm_eps)·norm_gate(z).
    """

    name = "gated_delta"
    operands = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "z", "norm")
    constants = frozenset({"A_log", "dt_bias", "norm"})

    qk_l2norm: bool  # q and k are divided by their norms
    norm_eps: float = 0.0
    norm_gate: str = ""  # silu or sigmoid, with z

    def state_shape(self, shapes: Shapes) -> tuple[int, ...]:
        return *shapes["v"][1:], shapes["k"][2]

    def out_shape(self, shapes: Shapes) -> tuple[int, ...]:
        return tuple(shapes["v"][1:])


@dataclass(frozen=True)
class Ssd(StateKind):
    """Mamba-2's scan: x [T, H, P], dt [T, H], A [H], B, C [T, G, N], D [H], dt_bias [H] → float32 [T, H, P].

    S ← S·exp(dt·A) + dt·x Bᵀ; out = S·C + D·x, with dt = clamp(softplus(dt + dt_bias)). The state is S, [H, P, N]. With
    z [T, H, P], norm [H·P] the outputs y = out·silu(z) become norm·y / √(mean(y²) + norm_eps), in x's type, with a mean
    for each of norm_groups parts of a token's numbers.
    """

    name = "ssd"
    operands = ("x", "dt", "A", "B", "C", "D", "dt_bias", "z", "norm")
    constants = frozenset({"A", "D", "dt_bias", "norm"})

    dt_softplus: bool
    dt_min: float
    dt_max: float | None  # None: no bound
    log_rates: bool = False  # A stands for -exp(A)
    norm_eps: float = 0.0
    norm_groups: int = 1

    def state_shape(self, shapes: Shapes) -> tuple[int, ...]:
        return *shapes["x"][1:], shapes["B"][2]

    def out_shape(self, shapes: Shapes) -> tuple[int, ...]:
        return tuple(shapes["x"][1:])


@dataclass(frozen=True)
class SelectiveScan(StateKind):
    """Mamba-1's scan: x, dt, z [T, C], A [C, N], B, C [T, N], D [C], dt_bias [C] → [T, C].

    S ← S·exp(dt·A) + dt·x Bᵀ; out = (S·C + D·x)·silu(z), with dt = softplus(dt + dt_bias). The state is S, [C, N].
    """

    name = "selective_scan"
    operands = ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")
    constants = frozenset({"A", "D", "dt_bias"})

    dt_softplus: bool
    log_rates: bool = False  # A stands for -exp(A)

    def state_shape(self, shapes: Shapes) -> tuple[int, ...]:
        return tuple(shapes["A"])

    def out_shape(self, shapes: Shapes) -> tuple[int, ...]:
        return tuple(shapes["x"][1:])


@dataclass(frozen=True)
class Wkv(StateKind):
    """RWKV-4's weighted mean: k, v [T, C], decay, bonus [C] → [T, C].

    out = (num + exp(bonus + k)·v) / (den + exp(bonus + k)); then num ← num·w + exp(k)·v and den ← den·w + exp(k), with
    w = exp(-exp(decay)). The state is [3, C]: num and den, both over exp(top), and top, the largest exponent so far.
    After any token den is at least 1, so 0 says that there was none.
    """

    name = "wkv"
    operands = ("k", "v", "decay", "bonus")
    constants = frozenset({"decay", "bonus"})
    holds_exponents = True

    def state_shape(self, shapes: Shapes) -> tuple[int, ...]:
        return 3, shapes["k"][1]

    def out_shape(self, shapes: Shapes) -> tuple[int, ...]:
        return (shapes["k"][1],)


@dataclass(frozen=True)
class MatrixMemory(StateKind):
    """xLSTM's matrix memory (mLSTM): q, k [T, H, D], v [T, H, Dv], i, f [T, H] (gates ahead of exp and sigmoid) →
    [T, H, Dv].

    S ← S·sigmoid(f) + exp(i)·v kᵀ; n ← n·sigmoid(f) + exp(i)·k; out = S·q / (max(|n·q|, 1) + eps), with q / √D. All is
    over exp(top), the largest exponent so far, which begins at 0; eps is not. The state is [H, Dv + 2, D]: S, n, and
    top in the first column.
    """

    name = "matrix_memory"
    operands = ("q", "k", "v", "i", "f")
    constants = frozenset()
    holds_exponents = True

    eps: float

    def state_shape(self, shapes: Shapes) -> tuple[int, ...]:
        heads, width = shapes["v"][1:]
        return heads, width + 2, shapes["k"][2]

    def out_shape(self, shapes: Shapes) -> tuple[int, ...]:
        return tuple(shapes["v"][1:])


_ALL = (CausalConv, GatedDelta, Ssd, SelectiveScan, Wkv, MatrixMemory)
KINDS: dict[str, type[StateKind]] = {kind.name: kind for kind in _ALL}


@dataclass(frozen=True)
class StateLayer:
    """One call of a recurrence by the model.

    Attributes:
        name: unique per call, the key of attn_metadata and no_compile_layers.
        state_id: index into GDNPool.
        operands: the kind's operands that this call has, in order.
        state_shape: of one request's state.
        out_shape: of one token's output; out_dtype: its type.
        dtype: the type of its input.
    """

    name: str
    state_id: int
    kind: StateKind
    operands: tuple[str, ...]
    state_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    out_dtype: str
    dtype: str

    def state_dtype(self, of_sums: str) -> str:
        """The type of its state, where sums are kept in `of_sums` (runtime.state_dtype)."""
        return self.dtype if self.kind.holds_inputs else of_sums

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"kind": self.kind.name, "settings": asdict(self.kind)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StateLayer:
        """Raises KeyError, TypeError or ValueError for anything that to_json would not have written."""
        fields = dict(data)
        fields["kind"] = from_json(KINDS[fields["kind"]], fields.pop("settings"))
        if unknown := set(fields["operands"]) - set(fields["kind"].operands):
            raise ValueError(f"{fields['kind'].name} has no operand {min(unknown)!r}")
        return from_json(_StoredLayer, {**fields, "kind": None}).with_kind(fields["kind"])


@dataclass(frozen=True)
class _StoredLayer:
    """The fields of a StateLayer as JSON has them, its kind apart."""

    name: str
    state_id: int
    kind: None
    operands: tuple[str, ...]
    state_shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    out_dtype: str
    dtype: str

    def with_kind(self, kind: StateKind) -> StateLayer:
        return StateLayer(**{**vars(self), "kind": kind})
