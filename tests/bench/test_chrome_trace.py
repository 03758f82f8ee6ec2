"""On traces made by hand, in the form in which torch writes them."""

from __future__ import annotations

from typing import Any

import pytest

from mllm_compile.bench.trace.chrome_trace import (
    BEFORE_FIRST_PIECE,
    COMPILED_LOOPS,
    OWN_LIBRARY,
    read_steps,
    short_name,
)


def event(category: str, name: str, ts: float, dur: float, correlation: int | None = None) -> dict[str, Any]:
    args = {} if correlation is None else {"correlation": correlation}
    return {"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1, "args": args}


def launch(ts: float, correlation: int, name: str = "cudaLaunchKernel") -> dict[str, Any]:
    return event(
        "cuda_driver" if name.startswith("cu") and name[2].isupper() else "cuda_runtime", name, ts, 1, correlation
    )


def trace(*events: dict[str, Any]) -> dict[str, Any]:
    return {"traceEvents": [{"ph": "M", "name": "process_name"}, *events]}


def test_a_kernel_belongs_to_the_piece_that_launched_it_not_to_when_it_ran():
    steps = read_steps(
        trace(
            event("user_annotation", "mllm step", 100, 100),
            event("user_annotation", "mllm piece 0", 110, 10),
            event("user_annotation", "mllm piece 2", 130, 10),
            launch(105, 1),
            launch(112, 2),
            launch(125, 3, "cuLaunchKernel"),
            launch(132, 4),
            launch(150, 5),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 106, 1, 1),
            event("kernel", "gemm", 140, 3, 2),
            event("kernel", "attend", 143, 2, 3),
            event("kernel", "gemm", 150, 4, 4),
            event("kernel", "argmax", 155, 1, 5),
        ),
        on_gpu=True,
    )
    assert [(k.name.split()[0], k.start_us, k.us, k.piece, k.inside) for k in steps[0]] == [
        ("Memcpy", 6, 1, BEFORE_FIRST_PIECE, False),
        ("gemm", 40, 3, 0, True),
        ("attend", 43, 2, 0, False),
        ("gemm", 50, 4, 2, True),
        ("argmax", 55, 1, 2, False),
    ]


def test_a_kernel_that_starts_early_is_timed_from_the_end_of_the_one_ahead_in_its_stream():
    steps = read_steps(
        trace(
            event("user_annotation", "mllm step", 0, 100),
            launch(5, 1, "cudaGraphLaunch"),
            *(
                {**event("kernel", name, ts, dur, 1), "args": {"correlation": 1, "stream": stream}}
                for name, ts, dur, stream in (("linear", 10, 8, 7), ("attend", 11, 12, 7), ("copy", 12, 2, 9))
            ),
        ),
        on_gpu=True,
    )
    assert [(k.name, k.start_us, k.us) for k in steps[0]] == [("linear", 10, 8), ("copy", 12, 2), ("attend", 18, 5)]


def test_no_time_counts_twice_when_an_early_kernel_ends_before_the_one_ahead():
    steps = read_steps(
        trace(
            event("user_annotation", "mllm step", 0, 100),
            launch(5, 1, "cudaGraphLaunch"),
            *(
                {**event("kernel", name, ts, dur, 1), "args": {"correlation": 1, "stream": 7}}
                for name, ts, dur in (("long", 10, 10), ("short", 12, 1), ("next", 14, 11))
            ),
        ),
        on_gpu=True,
    )
    assert sum(k.us for k in steps[0]) == 15


def test_kernels_of_a_graph_belong_to_the_step_that_replayed_it():
    steps = read_steps(
        trace(
            event("user_annotation", "mllm step", 100, 50),
            event("user_annotation", "mllm step", 200, 50),
            launch(110, 7, "cudaGraphLaunch"),
            launch(210, 8, "cudaGraphLaunch"),
            event("kernel", "a", 190, 5, 7),
            event("kernel", "b", 196, 5, 7),
            event("kernel", "a", 240, 5, 8),
            event("kernel", "outside", 300, 5),
        ),
        on_gpu=True,
    )
    assert [[kernel.name for kernel in step] for step in steps] == [["a", "b"], ["a"]]


def test_what_a_later_step_prepares_is_not_after_the_last_piece_of_the_step_before():
    steps = read_steps(
        trace(
            event("user_annotation", "mllm step", 100, 50),
            event("user_annotation", "mllm piece 0", 110, 10),
            event("user_annotation", "mllm step", 200, 50),
            event("user_annotation", "mllm piece 0", 220, 10),
            launch(205, 1),
            event("kernel", "upload", 206, 1, 1),
        ),
        on_gpu=True,
    )
    assert steps[1][0].piece == BEFORE_FIRST_PIECE


def test_on_a_cpu_operators_have_their_own_time_and_the_rest_is_of_loops_and_own_libraries():
    (step,) = read_steps(
        trace(
            event("user_annotation", "mllm step", 0, 100),
            event("user_annotation", "mllm piece 0", 10, 30),
            event("cpu_op", "aten::linear", 12, 10),
            event("cpu_op", "aten::mm", 14, 6),
            event("user_annotation", "mllm layer 1", 41, 20),
            event("cpu_op", "aten::empty", 42, 5),
            event("cpu_op", "aten::argmax", 70, 5),
        ),
        on_gpu=False,
    )
    assert [(k.name, k.us, k.piece, k.inside) for k in step] == [
        (COMPILED_LOOPS, 20, 0, True),
        ("aten::linear", 4, 0, True),
        ("aten::mm", 6, 0, True),
        (OWN_LIBRARY, 15, 0, False),
        ("aten::empty", 5, 0, False),
        ("aten::argmax", 5, 0, False),
    ]


@pytest.mark.parametrize(
    ("kernel", "short"),
    [
        ("void cublasLt::splitKreduce_kernel<32, 16, int>(cublasLt::Params<float>)", "splitKreduce_kernel"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"),
        ("void flashinfer::BatchDecode<(flashinfer::Mode)0, 2u>(flashinfer::Params)", "BatchDecode"),
        ("void at::native::(anonymous namespace)::reduce_kernel<512, 1>(at::X)", "reduce_kernel"),
        ("triton_poi_fused_add_3", "triton_poi_fused_add_3"),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD"),
        ("aten::mm", "aten::mm"),
        (COMPILED_LOOPS, COMPILED_LOOPS),
    ],
)
def test_names_are_cut_to_what_a_reader_knows_them_by(kernel, short):
    assert short_name(kernel) == short
