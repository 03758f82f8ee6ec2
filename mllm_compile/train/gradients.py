"""Gradients of log-probabilities, by the plain program: its steps forward, then each of them backward.

Between the two only what steps hand to each other is kept. A step is computed again under autograd when its turn comes,
and the head for some rows at a time. So there are never logits of all tokens, nor what autograd keeps of two pieces.

Shape legend: T tokens, S rows whose log-probabilities have a gradient, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from mllm_compile.errors import UnsupportedModelError
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.program.spec import ROW_INPUT
from mllm_compile.runtime.program.steps import AttentionStep, PieceStep, StateStep, Step
from mllm_compile.runtime.state.layer import StateLayer
from mllm_compile.train.layers import (
    AttentionOperands,
    Bounds,
    attend,
    attention_gradients,
    recur,
    state_gradients,
)
from mllm_compile.train.plain_program import PlainProgram

_LOGITS = 1 << 22  # of the head at once: 16 MiB in float32

Values = dict[str, torch.Tensor]
Found = Iterable[tuple[str | None, torch.Tensor | None]]  # (name of what a step reads, its gradient)
Add = Callable[[str, torch.Tensor], None]


class Gradients:
    """Computes gradients of a plain program's weights.

    Args:
        weights: name → tensor, constants among them; read at each call.
        vocab_size: V.

    Raises:
        UnsupportedModelError: the program's head is not one piece.
    """

    def __init__(self, plain: PlainProgram, weights: Mapping[str, torch.Tensor], vocab_size: int) -> None:
        self._pieces, self._weights = plain.pieces, weights
        self._rows_at_once = max(1, _LOGITS // vocab_size)
        self._trained = {spec.name for spec in plain.weights}
        self._attention: dict[str, LayerSpec] = {layer.name: layer for layer in plain.program.layers}
        self._states: dict[str, StateLayer] = {layer.name: layer for layer in plain.program.state_layers}
        *self._body, head = plain.program.steps
        if not isinstance(head, PieceStep) or head.outputs != (plain.program.output,):
            raise UnsupportedModelError("trainable: the model's head is not one piece at the end of its program")
        self._head = head
        # The hidden states of the wanted rows, where a piece before has gathered them.
        self._hidden = None if ROW_INPUT in head.inputs else _read_of(head, self._body[-1])

    @torch.no_grad()
    def run(
        self,
        token_ids: torch.Tensor,
        lengths: Sequence[int],
        grad: torch.Tensor,
        temperature: float,
        add: Add,
        given: Mapping[str, torch.Tensor],
    ) -> None:
        """
        Args:
            token_ids: [T] int64, sequence after sequence.
            lengths: of each sequence.
            grad: [T] float32, of the tokens' log-probabilities; those of sequences' first tokens do not count.
            add: told of weights' gradients, of one perhaps several times: they are to be added up.
            given: further inputs of steps by name (routes.py).
        """
        ends = torch.tensor(lengths).cumsum(0).tolist()
        bounds = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
        grad = grad.clone()
        grad[[start for start, _ in bounds]] = 0
        scored = grad.nonzero().squeeze(1)
        if not scored.numel():
            return
        positions = torch.cat([torch.arange(length, device=token_ids.device) for length in lengths])
        # A token's log-probability is of the logits before it.
        values: Values = {"input_ids": token_ids, "positions": positions, ROW_INPUT: scored - 1, **given}
        values["slots"] = torch.zeros_like(positions)
        for step in self._body:
            self._forward(step, values, bounds)
        grads: Values = {}
        self._head_backward(values, grads, token_ids[scored], grad[scored], temperature, add)
        for step in reversed(self._body):
            if any(name in grads for name in step.writes):
                self._give(self._backward(step, values, grads, bounds), values, grads, add)
            for name in step.writes:
                values.pop(name)
                grads.pop(name, None)

    def _value(self, name: str, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return values[name] if name in values else self._weights[name]

    def _forward(self, step: Step, values: Values, bounds: Bounds) -> None:
        if isinstance(step, PieceStep):
            outputs = self._pieces[step.piece](*(self._value(name, values) for name in step.inputs))
            values.update(zip(step.outputs, outputs, strict=True))
        elif isinstance(step, AttentionStep):
            values[step.out] = attend(self._attention[step.layer], self._attention_operands(step, values), bounds)
        elif isinstance(step, StateStep):
            values[step.out] = recur(self._states[step.layer], self._state_operands(step, values), bounds)

    def _backward(self, step: Step, values: Values, grads: Values, bounds: Bounds) -> Found:
        """Gradients of what a step reads, by those of its outputs."""
        if isinstance(step, PieceStep):
            inputs, outputs = self._with_autograd(step, values)
            named = zip(step.outputs, outputs, strict=True)
            return _gradients(step, inputs, [(output, grads[name]) for name, output in named if name in grads])
        if isinstance(step, AttentionStep):
            layer, operands = self._attention[step.layer], self._attention_operands(step, values)
            found = attention_gradients(layer, operands, bounds, grads[step.out])
            return zip((step.q, step.k, step.v, layer.sinks), found, strict=True)
        if isinstance(step, StateStep):
            of = state_gradients(self._states[step.layer], self._state_operands(step, values), bounds, grads[step.out])
            return zip(step.operands, of.values(), strict=True)
        raise TypeError(f"a text's program has no step of {type(step).__name__}")

    def _head_backward(
        self, values: Values, grads: Values, targets: torch.Tensor, grad: torch.Tensor, temperature: float, add: Add
    ) -> None:
        """Gradients of what the head reads, by those [S] of the log-probabilities of `targets` [S]."""
        hidden, head = self._hidden, self._head
        if hidden is not None:
            grads[hidden] = torch.zeros_like(values[hidden])
        for start in range(0, len(targets), self._rows_at_once):
            rows = slice(start, start + self._rows_at_once)
            count = len(targets[rows])
            cut = {ROW_INPUT: values[ROW_INPUT][rows]}
            if hidden is not None:
                cut[hidden] = values[hidden].narrow(-2, start, count)
            inputs, (logits,) = self._with_autograd(head, {**values, **cut})
            with torch.enable_grad():
                logits = logits.float() / temperature
                scores = logits.gather(1, targets[rows, None]).squeeze(1) - logits.logsumexp(-1)
            found = dict(_gradients(head, inputs, [(scores, grad[rows])]))
            if hidden is not None:
                of_hidden = found.pop(hidden)
                grads[hidden].narrow(-2, start, count).copy_(of_hidden)  # type: ignore[arg-type]  # the head reads it
            self._give(found.items(), values, grads, add)

    def _with_autograd(
        self, step: PieceStep, values: Mapping[str, torch.Tensor]
    ) -> tuple[list[torch.Tensor], Sequence[torch.Tensor]]:
        """(inputs, outputs) of a piece that autograd watches."""
        inputs = [_leaf(self._value(name, values)) for name in step.inputs]
        with torch.enable_grad():
            return inputs, self._pieces[step.piece](*inputs)

    def _give(self, found: Found, values: Values, grads: Values, add: Add) -> None:
        """Adds gradients to those of values, or tells of weights'."""
        for name, one in found:
            if name is None or one is None:
                continue
            if name in values:
                grads[name] = grads[name] + one if name in grads else one
            elif name in self._trained:
                add(name, one)

    def _attention_operands(self, step: AttentionStep, values: Values) -> AttentionOperands:
        sinks = self._attention[step.layer].sinks
        q, k, v = (self._value(name, values) for name in (step.q, step.k, step.v))
        return AttentionOperands(q, k, v, None if sinks is None else self._value(sinks, values))

    def _state_operands(self, step: StateStep, values: Values) -> Values:
        names = self._states[step.layer].operands
        return {name: self._value(of, values) for name, of in zip(names, step.operands, strict=True)}


def _read_of(head: PieceStep, before: Step) -> str:
    """The value that the head reads of the step before, which gathers rows."""
    names = [name for name in head.inputs if name in before.writes]
    if len(names) != 1 or ROW_INPUT not in before.reads:
        raise UnsupportedModelError(
            "trainable: the model's head does not begin with the hidden states of chosen tokens"
        )
    return names[0]


def _leaf(value: torch.Tensor) -> torch.Tensor:
    return value.detach().requires_grad_() if value.is_floating_point() else value


def _gradients(
    step: PieceStep, inputs: Sequence[torch.Tensor], seeds: Iterable[tuple[torch.Tensor, torch.Tensor]]
) -> list[tuple[str, torch.Tensor | None]]:
    """(name, gradient) of a piece's inputs, by (output, gradient)."""
    known = [(output, grad) for output, grad in seeds if output.requires_grad]
    if not known:
        return []
    leaves = [(name, one) for name, one in zip(step.inputs, inputs, strict=True) if one.requires_grad]
    outputs, grads = zip(*known, strict=True)
    found = torch.autograd.grad(outputs, [one for _, one in leaves], grads, allow_unused=True)
    return [(name, grad) for (name, _), grad in zip(leaves, found, strict=True)]
