"""A step of two layers' worth of kernels, with bytes that can be worked out by hand."""

from __future__ import annotations

import io
import json
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from mllm_compile.bench.limits.roofline import (
    _CAPTURED_LABELS,
    BETWEEN_RANKS,
    PREPARE,
    SAMPLE,
    UNKNOWN,
    AttentionFacts,
    MatrixFacts,
    PieceFacts,
    RooflineRow,
    StepFacts,
    assign_jobs,
    jobs_by_name,
    part_times,
    roofline_rows,
)
from mllm_compile.bench.limits.roofline_report import Roofline, StepMap, print_roofline, run_roofline
from mllm_compile.bench.measure.results import Ceilings
from mllm_compile.bench.measure.workloads import StepWork
from mllm_compile.bench.trace.chrome_trace import BEFORE_FIRST_PIECE, COMPILED_LOOPS, TracedKernel
from mllm_compile.errors import ConfigError
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.ops import FAMILIES, family
from mllm_compile.runtime.program.spec import ExpertWeight

CEILINGS = Ceilings(read_bytes_s=1e9, flops_s=1e12)  # 1000 bytes a microsecond
QKV = MatrixFacts("model.layers.0.attn.qkv.weight", (64, 32), 2)
OUT = MatrixFacts("model.layers.0.attn.o.weight", (32, 32), 2)
UP = MatrixFacts("model.layers.0.mlp.up.weight", (128, 32), 2)
HEAD = MatrixFacts("lm_head.weight", (1000, 32), 2)
FACTS = StepFacts(
    rows=4,
    pieces=(PieceFacts(0, 32, 512, (QKV,)), PieceFacts(2, 256, 8000, (OUT, UP, HEAD))),
    attentions=(AttentionFacts(0, "model.layers.0.attn", kv_bytes=10_000, new_bytes=700),),
    logits_bytes=8000,
)


def kernel(name: str, us: float, piece: int, inside: bool = True) -> TracedKernel:
    return TracedKernel(name, 0.0, us, piece, inside)


STEP = [
    kernel("Memcpy HtoD", 2, BEFORE_FIRST_PIECE, inside=False),
    kernel("triton_poi_fused_embedding_0", 2, 0),
    kernel("nvjet_tst_64x8", 9, 0),
    kernel("write_kv", 3, 0, inside=False),
    kernel("BatchDecode", 20, 0, inside=False),
    kernel("gemvx::kernel", 8, 2),
    kernel("cublasLt::splitKreduce_kernel", 2, 2),
    kernel("triton_red_fused_mm_norm_1", 2, 2),
    kernel("nvjet_tst_64x8", 30, 2),
    kernel("nvjet_tst_128x8", 80, 2),
    kernel("argmax", 9, 2, inside=False),
    kernel("index_copy", 1, 2, inside=False),
]


def test_every_kernel_gets_its_job():
    jobs = assign_jobs(STEP, FACTS)
    assert [job.label for job in jobs] == [
        PREPARE,
        f"before {QKV.name}",
        QKV.name,
        "attention model.layers.0.attn: around it",
        "attention model.layers.0.attn",
        OUT.name,
        f"before {UP.name}",
        f"before {UP.name}",
        UP.name,
        HEAD.name,
        SAMPLE,
        SAMPLE,
    ]


def test_bytes_are_those_that_have_to_move():
    jobs = assign_jobs(STEP, FACTS)
    assert jobs[2].num_bytes == 64 * 32 * 2 + 4 * 32 * 2 + 4 * 64 * 2
    assert jobs[2].flops == 2 * 4 * 64 * 32
    assert jobs[4].num_bytes == 10_000
    # Two kernels share what the out projection wrote and the up projection reads.
    assert jobs[6].num_bytes == jobs[7].num_bytes == (4 * 32 * 2 + 4 * 32 * 2) // 2
    assert jobs[10].num_bytes == 8000
    assert jobs[11].num_bytes == 0


def test_gemms_whose_names_are_not_known_are_the_longest_kernels():
    renamed = [kernel(f"k{i}", k.us, k.piece, k.inside) for i, k in enumerate(STEP)]
    labels = [job.label for job in assign_jobs(renamed, FACTS)]
    assert [labels[i] for i in (2, 5, 8, 9)] == [QKV.name, OUT.name, UP.name, HEAD.name]


def test_inductors_triton_gemms_are_known_by_name_though_others_take_longer():
    step = [kernel("triton_red_fused_mm_norm_0", 50, 0), kernel("triton_tem_fused_mm_1", 9, 0)]
    assert [job.label for job in assign_jobs(step, FACTS)] == [f"before {QKV.name}", QKV.name]


@pytest.mark.parametrize(
    "name",
    [
        "push_norm",
        "push_sum",
        "send_norm",
        "send_sum",
        "choose_token",
        "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
    ],
)
def test_traffic_between_ranks_has_a_line_of_its_own(name):
    step = [kernel("triton_poi_fused_embedding_0", 2, 0), kernel(name, 50, 0), kernel("nvjet_tst_64x8", 9, 0)]
    assert [job.label for job in assign_jobs(step, FACTS)] == [f"before {QKV.name}", BETWEEN_RANKS, QKV.name]


# Functions of the kernel families, and Triton's of experts.
OUR_GEMMS = {
    "expert_down",
    "expert_gate_up",
    "expert_rows",
    "expert_tiles",
    "gated_linear",
    "quantised_linear",
    "quantised_tiles",
    "stream_linear",
    "wide_linear",
    "_grouped_linear_kernel",
}


@pytest.mark.parametrize("name", sorted(OUR_GEMMS))
def test_kernels_of_ours_are_known_by_name_though_others_take_longer(name):
    step = [kernel("_gather_kernel", 50, 0), kernel("_order_kernel", 60, 0), kernel(name, 9, 0)]
    assert [job.label for job in assign_jobs(step, FACTS)] == [f"before {QKV.name}"] * 2 + [QKV.name]


def test_those_are_the_functions_of_all_families():
    for name in FAMILIES:
        family(name)
    kinds = [CudaKernel]
    for kind in kinds:
        kinds += kind.__subclasses__()
    functions = {kind.function for kind in kinds if hasattr(kind, "function") and ".runtime.ops." in kind.__module__}
    attend = {"segment_attention"}
    assert functions - attend == OUR_GEMMS - {"_grouped_linear_kernel"}


def test_a_piece_of_compiled_loops_does_all_its_gemms_in_one():
    step = [kernel(COMPILED_LOOPS, 9, 0), kernel("aten::empty", 1, 2), kernel(COMPILED_LOOPS, 90, 2)]
    jobs = assign_jobs(step, FACTS)
    assert jobs[2].num_bytes == 256 + 8000 + sum(matrix.num_bytes(4) for matrix in (OUT, UP, HEAD))
    assert jobs[2].label == f"{OUT.name} … {HEAD.name}"
    assert jobs[1].num_bytes == 0


def test_kernels_of_a_graph_have_the_jobs_of_those_outside_of_it():
    jobs = assign_jobs(STEP, FACTS)
    replayed = [kernel(k.name, k.us, BEFORE_FIRST_PIECE, inside=False) for k in STEP[1:]]
    replayed.append(kernel("nvjet_tst_64x8", 5, BEFORE_FIRST_PIECE, inside=False))
    found = jobs_by_name(replayed, STEP, jobs, logits_bytes=20)
    assert found[:-1] == jobs[1:]
    assert found[-1].label == UNKNOWN


def test_kernels_that_a_captured_decode_alone_has_are_known_by_their_names():
    names = ["_begin_kernel", "_block_numbers_kernel", "_end_kernel", "_other_kernel"]
    replayed = [kernel(name, 1, BEFORE_FIRST_PIECE, inside=False) for name in names]
    found = jobs_by_name(replayed, STEP, assign_jobs(STEP, FACTS), logits_bytes=20)
    assert [(job.label, job.num_bytes) for job in found] == [(PREPARE, 0), (SAMPLE, 20), (SAMPLE, 0), (UNKNOWN, 0)]


def test_those_names_are_the_kernels_names():
    source = Path(find_spec("mllm_compile.runtime.ops.tokens.decode_loop").origin).read_text()
    assert all(f"def {name}(" in source for name in _CAPTURED_LABELS)


def test_rows_join_layers_and_are_sorted_by_time_lost():
    layers = [f"model.layers.{index}.attn.o.weight" for index in (0, 11)]
    facts = StepFacts(
        rows=1,
        pieces=tuple(PieceFacts(i, 0, 0, (MatrixFacts(name, (10, 10), 2),)) for i, name in enumerate(layers)),
        attentions=(),
        logits_bytes=20,
    )
    step = [kernel("gemm", 1.0, 0), kernel("gemm", 2.0, 1), kernel("argmax", 9.0, 1, inside=False)]
    rows = roofline_rows(step, assign_jobs(step, facts), CEILINGS)
    assert [(row.label, row.kernel, row.count, row.us) for row in rows] == [
        (SAMPLE, "argmax", 1, 9.0),
        ("attn.o", "gemm", 2, 3.0),
    ]
    assert rows[1].num_bytes == 2 * (200 + 20 + 20)
    assert rows[1].limit_us == pytest.approx(0.48)
    assert rows[1].lost_us == pytest.approx(2.52)
    assert rows[1].share == pytest.approx(0.16)


def test_operations_bind_where_they_take_longer_than_bytes():
    slow = Ceilings(read_bytes_s=1e12, flops_s=1e9)
    (row, *_) = roofline_rows(STEP, assign_jobs(STEP, FACTS), slow)
    assert row.limit_us <= row.us or row.flops
    by_label = {row.label: row for row in roofline_rows(STEP, assign_jobs(STEP, FACTS), slow)}
    assert by_label["attn.qkv"].limit_us == pytest.approx(2 * 4 * 64 * 32 / 1e9 * 1e6)


H200 = Ceilings(read_bytes_s=4.47e12, flops_s=787e12, fp8_flops_s=1514e12)
# The last linear of Qwen3-8B's layers, with its scales, and the head.
DOWN_IN_FP8 = MatrixFacts(
    "mlp.down.weight", (4096, 12288), 2, quantised_bytes=4096 * 12288 + 4 * 4096, may_be_in_fp8=True
)
PLAIN_HEAD = MatrixFacts("lm_head.weight", (151_936, 4096), 2)


@pytest.mark.parametrize(
    ("name", "us"), [("wide_linear", 22.7), ("nvjet_sm90_qqtst_128x256_128x4_1x2_h_bz_coopA_algo2_ovscale_TNT", 32.9)]
)
def test_products_in_fp8_are_held_against_the_rate_of_fp8(name, us):
    facts = StepFacts(256, (PieceFacts(0, 0, 0, (DOWN_IN_FP8, PLAIN_HEAD)),), (), 0)
    step = [kernel(name, us, 0), kernel("nvjet_tst_128x256", 420, 0)]
    down, head = sorted(roofline_rows(step, assign_jobs(step, facts), H200), key=lambda row: row.us)
    assert down.limit_us == pytest.approx(2 * 256 * 4096 * 12288 / 1514e12 * 1e6)
    assert down.lost_us > 0 and down.share < 1
    assert down.flops == 2 * 256 * 4096 * 12288, "all its operations are told"
    assert head.limit_us == pytest.approx(2 * 256 * 151_936 * 4096 / 787e12 * 1e6), "which is in bfloat16"


def test_products_in_fp8_are_held_against_the_only_rate_if_fp8_was_not_measured():
    facts = StepFacts(256, (PieceFacts(0, 0, 0, (DOWN_IN_FP8,)),), (), 0)
    step = [kernel("aten::mm", 9e3, 0)]
    (row,) = roofline_rows(step, assign_jobs(step, facts), replace(H200, fp8_flops_s=None))
    assert row.limit_us == pytest.approx(2 * 256 * 4096 * 12288 / 787e12 * 1e6)


def test_few_tokens_of_fp8_are_bound_by_bytes():
    facts = StepFacts(8, (PieceFacts(0, 0, 0, (DOWN_IN_FP8,)),), (), 0)
    step = [kernel("quantised_linear", 15, 0)]
    (row,) = roofline_rows(step, assign_jobs(step, facts), H200)
    assert row.limit_us == pytest.approx(row.num_bytes / 4.47e12 * 1e6)


def test_a_fused_piece_has_products_in_fp8_and_others():
    facts = StepFacts(256, (PieceFacts(0, 0, 0, (DOWN_IN_FP8, PLAIN_HEAD)),), (), 0)
    step = [kernel(COMPILED_LOOPS, 9e3, 0)]
    (row,) = roofline_rows(step, assign_jobs(step, facts), H200)
    seconds = 2 * 256 * (4096 * 12288 / 1514e12 + 151_936 * 4096 / 787e12)
    assert row.limit_us == pytest.approx(seconds * 1e6)


# 8 experts, 2 chosen by a token, hidden size 32, inner size 16.
GATE_UP = MatrixFacts("experts.gate_up", (8, 32, 32), 2, ExpertWeight(8, 2, 32, 32, of_tokens=True))
DOWN = MatrixFacts("experts.down", (8, 32, 16), 2, ExpertWeight(8, 2, 16, 32, of_tokens=False))


def test_experts_are_read_and_multiplied_as_tokens_choose_them():
    assert DOWN.num_bytes(1) == 2 * 32 * 16 * 2
    assert DOWN.num_bytes(4) == round(8 * (1 - (3 / 4) ** 4) * 32 * 16 * 2)
    assert DOWN.flops(4) == 2 * 4 * 2 * 32 * 16


def test_both_linears_of_experts_make_a_row_a_choice_and_the_second_is_given_as_many():
    assert (GATE_UP.in_bytes(4), GATE_UP.out_bytes(4)) == (4 * 32 * 2, 4 * 2 * 32 * 2)
    assert (DOWN.in_bytes(4), DOWN.out_bytes(4)) == (4 * 2 * 16 * 2, 4 * 2 * 32 * 2)


def test_transposed_experts_move_what_others_do():
    transposed = MatrixFacts("experts.down", (8, 16, 32), 2, DOWN.experts)
    for figure in ("num_bytes", "in_bytes", "out_bytes", "flops"):
        assert getattr(transposed, figure)(4) == getattr(DOWN, figure)(4)


def test_facts_go_to_json_and_back():
    with_experts = replace(FACTS, pieces=(*FACTS.pieces, PieceFacts(4, 8, 8, (GATE_UP, DOWN))))
    for facts in (FACTS, with_experts):
        assert StepFacts.from_json(json.loads(json.dumps(asdict(facts)))) == facts


def test_the_printed_map_is_at_most_120_columns_wide():
    rows = roofline_rows(
        [*STEP, kernel("a_kernel_with_a_very_long_name_of_many_words_that_goes_on_123", 5, 2)],
        [*assign_jobs(STEP, FACTS), assign_jobs(STEP, FACTS)[3]],
        CEILINGS,
    )
    step = StepMap(batch=4, wall_us=300.0, span_us=200.0, rows=tuple(rows), parts=(), other_us=0.0)
    roofline = map_of(step)
    stream = io.StringIO()
    print_roofline(roofline, top=5, stream=stream)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 120
    assert "lm_head" in "".join(lines)
    assert any(line.split()[:1] == ["GEMMs"] for line in lines)
    assert any("more rows" in line for line in lines)


@pytest.mark.parametrize(
    ("ceilings", "told"),
    [(H200, "limits at 4470 GB/s and 787 TFLOP/s, in fp8 1514, measured"), (CEILINGS, " 1 TFLOP/s, measured")],
)
def test_the_map_tells_the_rates_of_its_limits(ceilings, told):
    stream = io.StringIO()
    print_roofline(replace(map_of(), ceilings=ceilings), top=5, stream=stream)
    assert told in stream.getvalue()


def test_every_kernels_time_goes_to_its_step_of_the_program_or_to_none():
    times, others = part_times(STEP, STEP, FACTS)
    assert times == {0: 11.0, 1: 23.0, 2: 122.0}, "the pieces are steps 0 and 2, the attention between them 1"
    assert others == 12.0 and sum(times.values()) + others == sum(kernel.us for kernel in STEP)
    replayed = [kernel(found.name, 1.0, BEFORE_FIRST_PIECE, inside=False) for found in STEP]
    assert part_times([*replayed, kernel("_end_kernel", 7.0, -1)], STEP, FACTS) == ({0: 2.0, 1: 2.0, 2: 5.0}, 10.0)


def map_of(*steps: StepMap) -> Roofline:
    return Roofline(
        model="m", context=576, with_graphs=True, environment={"commit": "abc"}, ceilings=CEILINGS, steps=steps
    )


def test_several_steps_are_side_by_side():
    def row(label: str, name: str, count: int, us: float) -> RooflineRow:
        return RooflineRow(label, name, count, us, num_bytes=10, flops=0, limit_us=1.0)

    one = StepMap(
        batch=1,
        wall_us=9.0,
        span_us=9.0,
        rows=(row("up", "gemv", 2, 6.0), row("argmax", "max", 1, 1.0)),
        parts=(),
        other_us=0.0,
    )
    eight = StepMap(
        batch=8,
        wall_us=9.0,
        span_us=9.0,
        rows=(row("up", "gemm", 2, 8.0), row("up", "sum", 2, 4.0)),
        parts=(),
        other_us=0.0,
    )
    stream = io.StringIO()
    print_roofline(map_of(one, eight), top=5, stream=stream)
    *_, table = stream.getvalue().split("µs of all kernels of a job")
    rows = [line.split() for line in table.splitlines()]
    assert ["job", "1", "8"] in rows
    assert ["up", "6.0", "12.0"] in rows
    assert ["argmax", "1.0", "0.0"] in rows


def test_an_attention_of_one_kernel_moves_the_new_tokens_part_too():
    attention = AttentionFacts(0, "attn", kv_bytes=1000, new_bytes=77)
    piece = PieceFacts(0, 8, 8, (MatrixFacts("w", (2, 2), 2),))
    kernels = [TracedKernel("gemm", 0.0, 1.0, 0, True), TracedKernel("attend", 1.0, 1.0, 0, False)]
    jobs = assign_jobs(kernels, StepFacts(1, (piece,), (attention,), 0))
    assert jobs[1].num_bytes == 1077


def test_a_layer_with_a_state_moves_the_states_of_its_requests():
    state = AttentionFacts(0, "model.layers.3.ssd", kv_bytes=1000, new_bytes=77, what="state")
    piece = PieceFacts(0, 8, 8, (MatrixFacts("w", (2, 2), 2),))
    kernels = [TracedKernel("gemm", 0.0, 1.0, 0, True), TracedKernel("_ssd_kernel", 1.0, 2.0, 0, False)]
    facts = StepFacts(1, (piece,), (state,), 0)
    (row,) = [
        row for row in roofline_rows(kernels, assign_jobs(kernels, facts), CEILINGS) if row.label.startswith("state")
    ]
    assert (row.label, row.num_bytes, row.us) == ("state ssd", 1077, 2.0)


def test_ranks_with_requests_of_their_own_have_no_roofline(tmp_path):
    config = tmp_path / "mixture.yaml"
    config.write_text("model: {path: nowhere}\nruntime: {expert_parallel_size: 2}\n")
    with pytest.raises(ConfigError, match=r"expert_parallel_size is 2: bench roofline shows the kernels of one rank"):
        run_roofline(str(config), StepWork(batches=(1,), context=64))
