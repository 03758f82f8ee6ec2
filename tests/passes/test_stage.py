"""stage: where layers are cut into stages, what each computes anew, and that the numbers stay."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from mllm_compile.compiler.program_builder import build_program
from mllm_compile.passes.base import NUM_STAGES, STAGE, STATE_LAYERS, PassTarget
from mllm_compile.passes.split_at_attention import SplitAtAttention
from mllm_compile.passes.stage import Stage
from mllm_compile.passes.verify import verify_graph
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.program.stages import stage_program
from tests.passes.support.graph_builder import HIDDEN, GraphBuilder, apply, done, model_of_layers, run


def staged(gm: fx.GraphModule, num_stages: int) -> fx.GraphModule:
    gm.meta[NUM_STAGES] = num_stages
    before = run(gm)
    gm = apply(Stage(), gm)
    verify_graph(gm, done("stage"))
    torch.testing.assert_close(run(gm), before, rtol=0, atol=0)
    return gm


def program_of(gm: fx.GraphModule) -> Program:
    gm = apply(SplitAtAttention(), gm)
    gm.meta.setdefault(STATE_LAYERS, [])
    return build_program(gm)


def layers_of_stages(program: Program) -> list[int]:
    return [len(stage_program(program, stage).program.layers) for stage in range(len(program.stages) + 1)]


@pytest.mark.parametrize(("num_layers", "num_stages"), [(2, 2), (4, 2), (6, 3), (5, 2)])
def test_stages_hold_about_as_many_layers_and_are_handed_one_hidden_state(num_layers, num_stages):
    builder, logits = model_of_layers(num_layers)
    program = program_of(staged(builder.lowered(logits), num_stages))
    counts = layers_of_stages(program)
    assert len(counts) == num_stages and sum(counts) == num_layers and max(counts) - min(counts) <= 1
    assert [[value.shape for value in stage.takes] for stage in program.stages] == [[(-1, HIDDEN)]] * (num_stages - 1)


def test_a_large_head_gives_its_stage_fewer_layers():
    builder = GraphBuilder()
    x = builder.embed()
    for index in range(6):
        x = builder.layer(x, index)
    rows = builder.call(torch.index_select, x, 0, builder.rows)
    wide = builder.linear(builder.linear(rows, "up", 40 * HIDDEN), "down", HIDDEN)
    program = program_of(staged(builder.lowered(wide), 2))
    first, last = layers_of_stages(program)
    assert first > last


def test_what_follows_from_inputs_alone_is_computed_by_each_stage():
    builder = GraphBuilder()
    positions = builder.call(torch.cos, builder.method("float", builder.token_ids))
    x = builder.embed()
    for index in range(2):
        angle = builder.method("unsqueeze", positions, -1)
        x = builder.call(operator.mul, builder.layer(x, index), angle)
    gm = staged(builder.lowered(builder.head(x)), 2)
    stages = [node.meta[STAGE] for node in gm.graph.nodes if node.target is torch.cos]
    assert stages == [0, 1]
    (takes,) = (stage.takes for stage in program_of(gm).stages)
    assert [value.shape for value in takes] == [(-1, HIDDEN)]


def test_a_value_of_the_first_stage_that_the_third_reads_goes_through_the_second():
    builder = GraphBuilder()
    first = builder.embed()
    x = first
    for index in range(3):
        x = builder.layer(x, index)
    program = program_of(staged(builder.lowered(builder.head(builder.call(torch.add, x, first))), 3))
    parts = [stage_program(program, stage) for stage in range(3)]
    assert [len(part.takes) for part in parts] == [0, 2, 2]
    assert parts[1].gives == parts[2].takes and parts[0].gives == parts[1].takes
    (kept,) = {value.name for value in parts[1].takes} & {value.name for value in parts[1].gives}
    assert kept in parts[1].program.inputs


def test_a_model_with_too_few_layers_is_left_as_it_is():
    builder, logits = model_of_layers(2)
    gm = builder.lowered(logits)
    gm.meta[NUM_STAGES] = 3
    result = Stage()(gm)
    assert result.matches == 0 and not any(STAGE in node.meta for node in gm.graph.nodes)


def test_without_stages_it_is_left_out():
    target = PassTarget("cpu", True, False, False, "float32", "float32")
    assert Stage.obstacle(target) == "runtime.pipeline_parallel_size is 1"
