"""The part of a program that one stage of a pipeline runs: a program of its own, with what it takes and hands on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from mllm_compile.runtime.program.spec import TOKEN_INPUTS, HandedValue, Program
from mllm_compile.runtime.program.steps import AttentionStep, StateStep

_TOKENS = TOKEN_INPUTS[0]


@dataclass(frozen=True)
class StageProgram:
    """A stage.

    Attributes:
        program: its steps, over the layers and the weights that these read. It reads the batch's inputs and
            `takes`, its output the first of `gives`; of the last stage the logits.
        takes: the values of the stage before; none of the first.
        gives: those that the next one takes; none of the last.
        token_stages: the stages that read the batch's tokens, mostly the first alone.
    """

    program: Program
    takes: tuple[HandedValue, ...] = ()
    gives: tuple[HandedValue, ...] = ()
    token_stages: frozenset[int] = frozenset()


def stage_program(program: Program, stage: int) -> StageProgram:
    """The stage of this index."""
    if not program.stages:
        return StageProgram(program)
    starts = [0, *(one.step for one in program.stages), len(program.steps)]
    takes = program.stages[stage - 1].takes if stage else ()
    gives = program.stages[stage].takes if stage < len(program.stages) else ()
    steps = program.steps[starts[stage] : starts[stage + 1]]
    of_steps = {step.layer for step in steps if isinstance(step, AttentionStep | StateStep)}
    layers = [layer for layer in program.layers if layer.name in of_steps]
    state_layers = [layer for layer in program.state_layers if layer.name in of_steps]
    read = {name for step in steps for name in step.reads}
    read |= {name for layer in layers for name in (layer.sinks, layer.up_projection) if name is not None}
    weights = tuple(name for name in program.weights if name in read)
    own = replace(
        program,
        steps=steps,
        layers=tuple(replace(layer, layer_id=index) for index, layer in enumerate(layers)),
        state_layers=tuple(replace(layer, state_id=index) for index, layer in enumerate(state_layers)),
        weights=weights,
        inputs=(*program.inputs, *(value.name for value in takes)),
        layer_kernels={name: one for name, one in program.layer_kernels.items() if name in of_steps},
        expert_weights={name: one for name, one in program.expert_weights.items() if name in read},
        counted_experts=tuple(name for name in program.counted_experts if name in read),
        quantised_weights={name: one for name, one in program.quantised_weights.items() if name in read},
        panels={name: unit for name, unit in program.panels.items() if name in read},
        decode_loop=None,  # a stage's decode is no whole one
        verify=None,
        stages=(),
    )
    pieces = set(own.step_pieces())
    own = replace(own, variants={name: some for name, some in program.variants.items() if name in pieces})
    if gives:
        own = replace(own, output=gives[0].name, further_outputs=tuple(value.name for value in gives[1:]))
    return StageProgram(own, takes, gives, _stages_with_tokens(program, starts))


def _stages_with_tokens(program: Program, starts: list[int]) -> frozenset[int]:
    parts = (program.steps[begin:end] for begin, end in pairwise(starts))
    return frozenset(index for index, steps in enumerate(parts) if any(_TOKENS in step.reads for step in steps))
