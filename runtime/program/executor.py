"""Runs a program, cold or warm alike: names become registers, and each step learns which values die after it.

Shape legend: T tokens, S rows of logits, H query heads, Dv value head dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.errors import ArtifactError
from mllm_compile.runtime.ops.segments.ops import segment_attention_by_kernel
from mllm_compile.runtime.ops.segments.reference import segment_attention_with_output
from mllm_compile.runtime.program.linked_steps import (
    ByRows,
    BySize,
    LinkedAttention,
    LinkedCrossAttention,
    LinkedPackedAttention,
    LinkedPiece,
    LinkedState,
    LinkedStep,
    OutputBuffers,
    PieceFunction,
)
from mllm_compile.runtime.program.spec import BATCH_INPUTS, ROW_INPUT, TOKEN_INPUTS, Program
from mllm_compile.runtime.program.steps import (
    AttentionStep,
    CrossAttentionStep,
    LayerStep,
    PackedAttentionStep,
    PieceStep,
)


class ProgramExecutor:
    """Runs a program. Holds no batch state: safe inside a CUDA graph capture, values die at their last use."""

    def __init__(
        self, program: Program, pieces: Mapping[str, PieceFunction], weights: Mapping[str, torch.Tensor]
    ) -> None:
        """
        Args:
            program: the program to run.
            pieces: piece id → compiled function.
            weights: name → tensor, in its final place.

        Raises:
            ArtifactError: a piece, a weight, a layer or a value that the program names is not there.
        """
        missing = _missing_names(program, pieces, weights)
        if missing:
            raise ArtifactError(f"the program needs {', '.join(missing[:5])}, which the runtime does not hold")
        self.program = program
        self.weights = dict(weights)
        self._registers = {name: register for register, name in enumerate(self._given_names())}
        self._template: list[torch.Tensor | None] = [None] * (len(BATCH_INPUTS) + len(program.inputs))
        self._template += [self.weights[name] for name in program.weights]
        self._steps = self._link(pieces)
        # Indices of steps: the first that reads `logits_indices`, and the head. They are one step unless rows are
        # gathered ahead of the head (gather_rows_early.py), by a piece that makes hidden states [..., S, hidden].
        self._gather = self._first_row_step()
        self._has_tail = self._gather + 1 < len(self._steps)
        self._head = self._gather + 1 if self._has_tail else self._gather
        # The register of those hidden states; None where the head gathers.
        self._hidden = self._register_between(self._gather, self._head) if self._has_tail else None
        self._output_buffers: OutputBuffers = _new_output

    def set_output_buffers(self, buffers: OutputBuffers) -> None:
        """Says where layers between pieces write; CUDA graphs of pieces need fixed addresses there."""
        self._output_buffers = buffers

    def is_row_piece(self, index: int) -> bool:
        """True if the piece of step `index` always works on the S rows of logits (the head)."""
        return index >= self._head

    def wrap_pieces(self, wrap: Callable[[str, int, PieceFunction], PieceFunction]) -> None:
        """Calls every piece through `wrap(piece id, index of the call, its compiled function)`, in place of a wrapper
        from before."""
        self._steps = [
            replace(step, function=wrap(step.piece, step.index, step.compiled))
            if isinstance(step, LinkedPiece)
            else step
            for step in self._steps
        ]

    def __call__(self, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """
        Args:
            inputs: `input_ids` [T] int64, `positions` [T] int64, `slots` [T] int64 (of the KV cache; 0 for padding),
                `logits_indices` [S] int64, and the program's own.

        Returns:
            Logits [S, V] in the model's dtype.
        """
        return self.head(self.body(inputs), inputs["logits_indices"])

    def body(self, inputs: Mapping[str, torch.Tensor], all_rows: torch.Tensor | None = None) -> list[Any]:
        """Runs the part that works on the T tokens.

        Args:
            inputs: `input_ids`, `positions` and `slots`, [T] int64 each, and the program's own.
            all_rows: [T] int64, 0 to T - 1. Then steps behind the row gather, except the head, run here for all tokens,
                as in a graph of T tokens. None: `head` runs them for the wanted tokens.

        Returns:
            What `head` goes on from, any number of times.
        """
        values = self.values(inputs)
        self._run(self._steps[: self._gather], values)
        if all_rows is not None and self._has_tail:
            values[self._registers[ROW_INPUT]] = all_rows
            self._run(self._steps[self._gather : self._head], values)
        return values

    @property
    def num_body_steps(self) -> int:
        """Steps of the program that `body` runs without `all_rows`."""
        return self._gather

    def run_step(self, index: int, values: list[Any]) -> None:
        """Runs a single step; lets the caller interleave several bodies.

        Args:
            values: from `values`; after the last step they are what `body` gives.
        """
        self._run(self._steps[index : index + 1], values)

    def values(self, inputs: Mapping[str, torch.Tensor]) -> list[Any]:
        """The registers ahead of the first step; inputs as `body` takes them."""
        return self._values(inputs, (*TOKEN_INPUTS, *self.program.inputs))

    def run_tower(self, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Runs a program without pages, on inputs with Segments among them; gives all its outputs."""
        names = [name for name in (*TOKEN_INPUTS, *self.program.inputs) if name in inputs]
        values = self._values(inputs, names)
        self._run(self._steps, values)
        return self.outputs(values)

    def outputs(self, values: list[Any]) -> list[torch.Tensor]:
        """All outputs of a program without a head, whose steps have run: of a tower, or of a stage but the last."""
        return [values[self._registers[name]] for name in (self.program.output, *self.program.further_outputs)]

    def _values(self, inputs: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
        """The registers before the first step."""
        values: list[Any] = self._template.copy()
        values.extend([None] * (len(self._registers) - len(values)))
        for name in names:
            values[self._registers[name]] = inputs[name]
        return values

    def _given_names(self) -> tuple[str, ...]:
        return (*BATCH_INPUTS, *self.program.inputs, *self.program.weights)

    def map_body(self, body: list[Any], change: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
        """Applies `change` to every value of `body` that the program has computed."""
        given = len(self._template)
        return body[:given] + [None if value is None else change(value) for value in body[given:]]

    def head(self, body: list[Any], logits_indices: torch.Tensor) -> torch.Tensor:
        """Logits [S, V] of the rows `logits_indices` [S] int64 of what `body` gave."""
        values, start = body.copy(), self._gather
        if self._hidden is not None and values[self._hidden] is not None:
            values[self._hidden] = values[self._hidden].index_select(-2, logits_indices)
            start = self._head
        values[self._registers[ROW_INPUT]] = logits_indices
        self._run(self._steps[start:], values)
        output: torch.Tensor = values[self._registers[self.program.output]]
        return output

    def hidden_states(self, body: list[Any], num_tokens: int) -> torch.Tensor | None:
        """The hidden states [T, n * hidden] that the program gives of the first T = `num_tokens` tokens, beside each
        other, from what `body` gave; None: it gives none."""
        names = self.program.further_outputs
        if not names:
            return None
        values = [body[self._registers[name]].flatten(0, -2)[:num_tokens] for name in names]
        return values[0] if len(values) == 1 else torch.cat(values, -1)

    def _run(self, steps: Sequence[LinkedStep], values: list[Any]) -> None:
        for step in steps:
            step.run(values, self._output_buffers)
            for register in step.dead:
                values[register] = None

    def _first_row_step(self) -> int:
        """Index of the first step after rows are gathered: earlier steps do not know which are wanted."""
        steps = enumerate(self.program.steps)
        gathers = (index for index, step in steps if isinstance(step, PieceStep) and ROW_INPUT in step.inputs)
        return next(gathers, len(self.program.steps))

    def _register_between(self, writer: int, reader: int) -> int:
        """The register of the one value that step `reader` reads of step `writer`.

        Raises:
            ArtifactError: not exactly one exists.
        """
        steps = self.program.steps
        names = {name for name in steps[reader].reads if name in steps[writer].writes}
        if len(names) != 1:
            raise ArtifactError(f"step {reader} of the program reads {len(names)} values of the one before, not 1")
        return self._register(names.pop())

    def _link(self, pieces: Mapping[str, PieceFunction]) -> list[LinkedStep]:
        """Turns names into registers; each step learns which values die after it."""
        layers = {layer.name: layer for layer in self.program.layers}
        attentions = [step for step in self.program.steps if isinstance(step, AttentionStep)]
        leaving = {step.layer for step in attentions if step.rope_inputs is not None}
        last_use = self._last_uses()
        buffer_index = self._buffer_indices(last_use)
        states = {layer.name: layer for layer in self.program.state_layers}
        cross_layers = {layer.name: layer for layer in self.program.cross_layers}
        linked: list[LinkedStep] = []
        for index, step in enumerate(self.program.steps):
            dead = tuple(self._register(name) for name, last in last_use.items() if last == index)
            if isinstance(step, PieceStep):
                inputs = tuple(self._register(name) for name in step.inputs)
                outputs = tuple(self._register(name) for name in step.outputs)
                function = self._function(step.piece, pieces)
                kv_of, may_leave = step.writes_kv_of, step.writes_kv_of in leaving
                linked.append(
                    LinkedPiece(step.piece, index, function, function, inputs, outputs, kv_of, may_leave, dead)
                )
            elif isinstance(step, AttentionStep):
                q, k, v, out = (self._register(name) for name in (step.q, step.k, step.v, step.out))
                layer = layers[step.layer]
                out_shape = (layer.num_heads, layer.out_dim)
                buffer = buffer_index[step.out]
                of = step.rope_inputs
                rope_inputs = None if of is None else tuple(self._register(name) for name in of.values)
                eps = 0.0 if of is None else of.eps
                bias = None if step.bias is None else self._register(step.bias)
                indexer = tuple(self._register(name) for name in step.index)
                of_layer = rope_inputs, eps, bias, indexer, dead
                given = layer.name, out_shape, step.saves_kv, buffer, q, k, v, out, *of_layer
                linked.append(LinkedAttention(*given))
            elif isinstance(step, CrossAttentionStep):
                linked.append(self._link_cross_attention(cross_layers[step.layer], step, buffer_index[step.out], dead))
            elif isinstance(step, PackedAttentionStep):
                linked.append(self._link_packed_attention(step, pieces, buffer_index[step.out], dead))
            else:
                operands, state = tuple(map(self._register, step.operands)), states[step.layer]
                buffer, out, dtype = buffer_index[step.out], self._register(step.out), getattr(torch, state.out_dtype)
                linked.append(LinkedState(state.name, state.out_shape, dtype, buffer, operands, out, dead))
        return linked

    def _link_cross_attention(
        self, layer: LayerSpec, step: CrossAttentionStep, buffer: int, dead: tuple[int, ...]
    ) -> LinkedCrossAttention:
        q, out = self._register(step.q), self._register(step.out)
        return LinkedCrossAttention(layer.name, (layer.num_heads, layer.out_dim), buffer, q, out, dead)

    def _link_packed_attention(
        self, step: PackedAttentionStep, pieces: Mapping[str, PieceFunction], buffer: int, dead: tuple[int, ...]
    ) -> LinkedPackedAttention:
        q, k, v, segments, out = map(self._register, (*step.reads[:4], step.out))
        of_scores = {name: self._register(value) for name, value in step.of_scores.items()}
        attend: Callable[..., None] = segment_attention_by_kernel
        if not step.by_kernel:
            attend = partial(
                segment_attention_with_output,
                window_left=step.window_left,
                window_right=step.window_right,
                soft_cap=step.soft_cap,
            )
        shape, scale, of_texts = step.out_shape, step.sm_scale, step.of_texts
        by_rows = None if of_texts is None else ByRows(pieces[of_texts.piece], of_texts.strides)
        return LinkedPackedAttention(
            attend,
            buffer,
            q,
            k,
            v,
            segments,
            of_scores,
            out,
            shape,
            scale,
            step.layer,
            by_rows,
            step.by_kernel,
            dead,
        )

    def _function(self, piece: str, pieces: Mapping[str, PieceFunction]) -> PieceFunction:
        variants = self.program.variants.get(piece)
        if not variants:
            return pieces[piece]
        small = [(variant.max_size, pieces[variant.piece]) for variant in variants]
        return BySize(pieces[piece], small, variants[0].input, variants[0].dim)

    def _buffer_indices(self, last_use: Mapping[str, int]) -> dict[str, int]:
        """Output of a layer between pieces → the lowest index whose last owner is dead.

        The next piece may return views of a layer's output, which lives as long as they do. So it is with the first of
        two attentions in DiffLlama's layer, or with a convolution.
        """
        steps, end = self.program.steps, len(self.program.steps)
        handed_on: dict[str, list[str]] = {}
        for step in steps:
            if isinstance(step, PieceStep):
                for name in step.inputs:
                    handed_on.setdefault(name, []).extend(step.outputs)
        free_after: list[int] = []
        indices = {}
        for index, step in enumerate(steps):
            if isinstance(step, LayerStep):
                free = next((i for i, last in enumerate(free_after) if last < index), len(free_after))
                names = [step.out, *handed_on.get(step.out, ())]
                free_after[free : free + 1] = [max(last_use.get(name, end) for name in names)]
                indices[step.out] = free
        return indices

    def _register(self, name: str) -> int:
        return self._registers.setdefault(name, len(self._registers))

    def _last_uses(self) -> dict[str, int]:
        """Value → index of the last step that reads or makes it; weights, inputs and the output live on."""
        keep = {*self._given_names(), self.program.output, *self.program.further_outputs}
        last: dict[str, int] = {}
        for index, step in enumerate(self.program.steps):
            last.update({name: index for name in (*step.reads, *step.writes) if name not in keep})
        return last


def _missing_names(
    program: Program, pieces: Mapping[str, PieceFunction], weights: Mapping[str, torch.Tensor]
) -> list[str]:
    """The names that the program uses and neither the runtime nor an earlier step provides."""
    layers = {layer.name for layer in program.layers}
    all_layers = layers | {one.name for one in program.state_layers} | {one.name for one in program.cross_layers}
    known = {*BATCH_INPUTS, *program.inputs, *program.weights}
    missing = [name for name in program.weights if name not in weights]
    missing += [layer for layer in program.layer_kernels if layer not in all_layers]
    missing += [piece for piece in program.piece_ids() if piece not in pieces]
    for step in program.steps:
        if isinstance(step, PieceStep):
            missing += [step.writes_kv_of] if step.writes_kv_of not in {None, *layers} else []  # type: ignore[list-item]
        elif not isinstance(step, PackedAttentionStep) and step.layer not in all_layers:
            missing.append(step.layer)
        missing += [name for name in step.reads if name not in known]
        known.update(step.writes)
    missing += [name for name in (program.output, *program.further_outputs) if name not in known]
    return list(dict.fromkeys(missing))


def _new_output(index: int, like: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return like.new_empty((like.shape[0], *shape), dtype=dtype)
