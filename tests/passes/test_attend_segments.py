"""attend_segments: which attentions it takes; the program then has their kernels."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import fx

from mllm_compile.compiler.program_builder import build_program
from mllm_compile.kernels.cuda import kernels_of
from mllm_compile.passes.attend_segments import AttendSegments
from mllm_compile.passes.deduplicate_pieces import DeduplicatePieces
from mllm_compile.passes.lower_attention import LowerAttention
from mllm_compile.passes.split_at_attention import SplitAtAttention
from mllm_compile.runtime.ops.segments.kernel import segments_kernels
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.program.steps import PackedAttentionStep
from tests.passes.support.graph_builder import HIDDEN, GraphBuilder, run, targets
from tests.passes.support.stand_ins import streamed_ops_on_cpu


def tower(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> fx.GraphModule:
    """Attention of two heads, lowered."""
    builder = GraphBuilder()
    x = builder.embed()
    heads = builder.method("to", builder.linear(x, "qkv", 2 * head_dim), dtype)
    attended = builder.method("to", builder.packed_attention(heads, head_dim), torch.float32)
    x = builder.call(operator.add, x, builder.linear(attended, "out", HIDDEN))
    return LowerAttention()(builder.canonical(builder.head(x))).gm


def test_heads_that_the_kernels_take_are_given_to_them():
    gm = tower(72)
    with streamed_ops_on_cpu():
        before = run(gm)
        result = AttendSegments()(gm)
        result.gm.recompile()
        assert result.matches == 1
        assert torch.equal(run(result.gm), before)
    assert "segment_attention_by_kernel.default" in targets(result.gm)
    assert AttendSegments()(result.gm).matches == 0


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(72, torch.float16), (72, torch.float32), (76, torch.bfloat16), (32, torch.bfloat16)]
)
def test_others_stay(head_dim, dtype):
    gm = tower(head_dim, dtype)
    assert AttendSegments()(gm).matches == 0
    assert "segment_attention_with_output.default" in targets(gm)


@pytest.mark.parametrize("head_dim", [72, 76])
def test_the_program_says_which_attentions_are_by_kernels_and_has_these(head_dim):
    gm = tower(head_dim)
    for graph_pass in (AttendSegments, SplitAtAttention, DeduplicatePieces):
        gm = graph_pass()(gm).gm
    program = build_program(gm)
    attentions = [step for step in program.steps if isinstance(step, PackedAttentionStep)]
    assert [step.by_kernel for step in attentions] == [head_dim == 72]
    assert kernels_of(gm, program) == ({"segments": segments_kernels(72)} if head_dim == 72 else {})
    assert Program.from_json(program.to_json()).steps == program.steps
