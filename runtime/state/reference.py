"""The layers with a state in plain torch, in float32: the CPU's way, and what kernels are compared with.

A decode and a prompt are the same arithmetic. `prepare` works on many tokens at once, each by itself. `advance` takes
the states of R requests one token on. `finish` works on tokens again. So a prompt in any pieces and the same tokens one
by one end in the same state. Nothing here waits for the device: a step of decodes can be captured.

Shape legend as in layer.py; R requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F

from mllm_compile.runtime.state.layer import CausalConv, GatedDelta, MatrixMemory, SelectiveScan, Ssd, StateKind, Wkv

Operands = Mapping[str, torch.Tensor]  # by name; tokens are the first dimension of all but constants
Kind = TypeVar("Kind", bound=StateKind)

_NORM_EPS = 1e-6  # of Transformers' and FLA's l2norm
_NO_TOP = -1e38  # the largest exponent of no token, as RWKV's own code has it


class StateMath(ABC, Generic[Kind]):
    """Computes one kind of layer."""

    @abstractmethod
    def step(self, kind: Kind, operands: Operands, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One token of each of R requests, whose states are [R, …]: outputs [R, …] and new states."""

    @abstractmethod
    def scan(self, kind: Kind, operands: Operands, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """T tokens of one request, whose state is [1, …]: outputs [T, …] and the new state."""


class _Recurrence(StateMath[Kind]):
    """A sum that decays: a token at a time."""

    def step(self, kind: Kind, operands: Operands, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, states = self.advance(self.prepare(kind, operands), states.float())
        return self.finish(kind, operands, out), states

    def scan(self, kind: Kind, operands: Operands, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        prepared, state, outs = self.prepare(kind, operands), state.float(), []
        for token in zip(*(values.split(1) for values in prepared), strict=True):
            out, state = self.advance(token, state)
            outs.append(out)
        return self.finish(kind, operands, torch.cat(outs)), state

    @abstractmethod
    def prepare(self, kind: Kind, operands: Operands) -> tuple[torch.Tensor, ...]:
        """Tensors; `advance` reads a row of each for each token."""

    @abstractmethod
    def advance(self, prepared: tuple[torch.Tensor, ...], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs and states of R requests after one token each."""

    def finish(self, kind: Kind, operands: Operands, out: torch.Tensor) -> torch.Tensor:
        """The layer's output, of what `advance` gave for each token."""
        return out


class ConvMath(StateMath[CausalConv]):
    def step(self, kind: CausalConv, operands: Operands, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen = torch.cat((states, operands["x"][:, None]), dim=1)  # [R, K, C]
        columns = [seen[:, column] for column in range(seen.shape[1])]
        return self._weighted(kind, operands, columns), seen[:, 1:]

    def scan(self, kind: CausalConv, operands: Operands, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens, width = operands["x"].shape[0], operands["weight"].shape[1]
        seen = torch.cat((state[0], operands["x"]))  # [K - 1 + T, C]
        columns = [seen[column : column + num_tokens] for column in range(width)]
        return self._weighted(kind, operands, columns), seen[None, num_tokens:]

    def _weighted(self, kind: CausalConv, operands: Operands, columns: list[torch.Tensor]) -> torch.Tensor:
        """The sum of K inputs of each token, [tokens, C] each, in the same order for any number of tokens."""
        weight, bias = operands["weight"], operands.get("bias")
        out = torch.zeros_like(columns[0], dtype=torch.float32)
        for column, values in enumerate(columns):
            out = out + values.float() * weight[:, column].float()
        if bias is not None:
            out = out + bias.float()
        out = out.to(weight.dtype)
        return F.silu(out) if kind.activation else out


class GatedDeltaMath(_Recurrence[GatedDelta]):
    def prepare(self, kind: GatedDelta, operands: Operands) -> tuple[torch.Tensor, ...]:
        q, k, v, g, beta = (operands[name].float() for name in ("q", "k", "v", "g", "beta"))
        if "A_log" in operands:
            g = -operands["A_log"].float().exp() * F.softplus(g + operands["dt_bias"].float())
            beta = beta.sigmoid()
        if kind.qk_l2norm:
            q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _NORM_EPS) for x in (q, k))
        repeats = v.shape[1] // q.shape[1]
        q, k = (x.repeat_interleave(repeats, dim=1) for x in (q * q.shape[-1] ** -0.5, k))
        decay = g.exp() if g.dim() == 3 else g.exp()[..., None]
        return q, k, v, decay, beta

    def advance(self, prepared: tuple[torch.Tensor, ...], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, decay, beta = prepared
        states = states * decay[:, :, None]
        known = (states * k[:, :, None]).sum(-1)  # [R, Hv, Dv]
        states = states + ((v - known) * beta[..., None])[..., None] * k[:, :, None]
        return (states * q[:, :, None]).sum(-1), states

    def finish(self, kind: GatedDelta, operands: Operands, out: torch.Tensor) -> torch.Tensor:
        if "z" in operands:
            act = F.silu if kind.norm_gate == "silu" else torch.sigmoid
            scale = torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + kind.norm_eps)
            out = out * scale * operands["norm"].float() * act(operands["z"].float())
        return out.to(operands["q"].dtype)


class SsdMath(_Recurrence[Ssd]):
    def prepare(self, kind: Ssd, operands: Operands) -> tuple[torch.Tensor, ...]:
        x = operands["x"].float()
        dt = _step_sizes(operands, kind.dt_softplus).clamp(kind.dt_min, kind.dt_max).float()
        repeats = x.shape[1] // operands["B"].shape[1]
        b, c = (operands[name].float().repeat_interleave(repeats, dim=1) for name in ("B", "C"))
        return x * dt[..., None], torch.exp(_rates(operands, kind.log_rates) * dt), b, c

    def advance(self, prepared: tuple[torch.Tensor, ...], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, decay, b, c = prepared
        states = states * decay[..., None, None] + x[..., None] * b[:, :, None]
        return (states * c[:, :, None]).sum(-1), states

    def finish(self, kind: Ssd, operands: Operands, out: torch.Tensor) -> torch.Tensor:
        if "D" in operands:
            out = out + operands["D"].float()[..., None] * operands["x"].float()
        if "z" not in operands:
            return out
        gated = (out * F.silu(operands["z"].float())).flatten(1).unflatten(1, (kind.norm_groups, -1))
        scale = torch.rsqrt(gated.pow(2).mean(-1, keepdim=True) + kind.norm_eps)
        normed: torch.Tensor = (
            (operands["norm"].float() * (gated * scale).flatten(1)).view_as(out).to(operands["x"].dtype)
        )
        return normed


class SelectiveScanMath(_Recurrence[SelectiveScan]):
    def prepare(self, kind: SelectiveScan, operands: Operands) -> tuple[torch.Tensor, ...]:
        dt = _step_sizes(operands, kind.dt_softplus).float()
        b, c = operands["B"].float(), operands["C"].float()
        return dt * operands["x"].float(), torch.exp(_rates(operands, kind.log_rates) * dt[..., None]), b, c

    def advance(self, prepared: tuple[torch.Tensor, ...], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, decay, b, c = prepared
        states = states * decay + x[..., None] * b[:, None]
        return (states * c[:, None]).sum(-1), states

    def finish(self, kind: SelectiveScan, operands: Operands, out: torch.Tensor) -> torch.Tensor:
        x = operands["x"]
        if "D" in operands:
            out = out + x.float() * operands["D"].float()
        if "z" in operands:
            out = out * F.silu(operands["z"].float())
        return out.to(x.dtype)


class WkvMath(_Recurrence[Wkv]):
    def prepare(self, kind: Wkv, operands: Operands) -> tuple[torch.Tensor, ...]:
        k, v = operands["k"].float(), operands["v"].float()
        fall = -operands["decay"].float().exp()
        return k, v, k + operands["bonus"].float(), fall.expand_as(k)

    def advance(self, prepared: tuple[torch.Tensor, ...], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k, v, with_bonus, fall = prepared
        num, den, top = states.unbind(1)  # [R, C] each
        top = torch.where(den > 0, top, _NO_TOP)
        highest = torch.maximum(top, with_bonus)
        old, new = (top - highest).exp(), (with_bonus - highest).exp()
        out = (num * old + v * new) / (den * old + new)
        fallen = top + fall
        top = torch.maximum(fallen, k)
        old, new = (fallen - top).exp(), (k - top).exp()
        return out, torch.stack((num * old + v * new, den * old + new, top), dim=1)

    def finish(self, kind: Wkv, operands: Operands, out: torch.Tensor) -> torch.Tensor:
        return out.to(operands["k"].dtype)


class MatrixMemoryMath(_Recurrence[MatrixMemory]):
    def prepare(self, kind: MatrixMemory, operands: Operands) -> tuple[torch.Tensor, ...]:
        q, k, v, i, f = (operands[name].float() for name in ("q", "k", "v", "i", "f"))
        return q * q.shape[-1] ** -0.5, k, v, i, F.logsigmoid(f), torch.full_like(i, kind.eps)

    def advance(self, prepared: tuple[torch.Tensor, ...], states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v, i, fall, eps = prepared
        sums, fallen = states[:, :, :-1], states[:, :, -1, 0] + fall  # S with n as its last row, [R, H, Dv + 1, D]
        top = torch.maximum(fallen, i)
        old, new = (fallen - top).exp(), (i - top).exp()
        rows = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1)  # n is what S would be of a value of 1
        sums = sums * old[..., None, None] + (rows * new[..., None])[..., None] * k[:, :, None]
        of_rows = (sums * q[:, :, None]).sum(-1)  # [R, H, Dv + 1]
        size = torch.maximum(of_rows[..., -1].abs(), (-top).exp()) + eps
        tops = F.pad(top[..., None, None], (0, k.shape[-1] - 1))
        return of_rows[..., :-1] / size[..., None], torch.cat((sums, tops), dim=2)

    def finish(self, kind: MatrixMemory, operands: Operands, out: torch.Tensor) -> torch.Tensor:
        return out.to(operands["q"].dtype)


def _rates(operands: Operands, are_logs: bool) -> torch.Tensor:
    """A: logarithms of decays are A times a step's size."""
    rates = operands["A"].float()
    return -rates.exp() if are_logs else rates


def _step_sizes(operands: Operands, is_softplus: bool) -> torch.Tensor:
    """dt with its bias, made positive."""
    dt = operands["dt"]
    if "dt_bias" in operands:
        dt = dt + operands["dt_bias"].to(dt.dtype)
    return F.softplus(dt) if is_softplus else dt


_MATH: dict[type[StateKind], StateMath[Any]] = {
    CausalConv: ConvMath(),
    GatedDelta: GatedDeltaMath(),
    Ssd: SsdMath(),
    SelectiveScan: SelectiveScanMath(),
    Wkv: WkvMath(),
    MatrixMemory: MatrixMemoryMath(),
}


def math_of(kind: StateKind) -> StateMath[Any]:
    """The arithmetic of this kind of layer."""
    return _MATH[type(kind)]
