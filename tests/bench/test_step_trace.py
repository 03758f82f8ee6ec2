from types import SimpleNamespace

import pytest
import torch

from mllm_compile.bench.trace.chrome_trace import TracedKernel
from mllm_compile.bench.trace.decode_steps import model_runner
from mllm_compile.bench.trace.step_trace import _PieceRecorder, typical_step
from mllm_compile.ranks.steps import RankedStepRunner
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.program.spec import AttentionStep, PieceStep, Program, UnrotatedStep


def step(*kernels: tuple[str, float]) -> list[TracedKernel]:
    return [TracedKernel(name, 10.0 * index, us, 0, True) for index, (name, us) in enumerate(kernels)]


def test_the_typical_step_is_the_commonest_sequence_with_median_times():
    steps = [
        step(("page", 50), ("gemm", 9), ("norm", 1)),
        step(("gemm", 4), ("norm", 2)),
        step(("gemm", 6), ("norm", 1)),
        step(("gemm", 90), ("norm", 3)),
    ]
    assert [(kernel.name, kernel.us) for kernel in typical_step(steps)] == [("gemm", 6), ("norm", 2)]


def test_what_a_piece_gets_to_write_the_cache_is_not_among_its_own_bytes():
    layer = LayerSpec("layers.0", 0, 2, 1, 4, 4, 0.5, 0.0, -1, None)
    steps = (
        PieceStep("p", ("input_ids", "hidden", "weight"), ("q", "k", "v"), writes_kv_of="layers.0"),
        AttentionStep("layers.0", "q", "k", "v", "out", saves_kv=False),
    )
    program = Program(steps, (layer,), ("weight",), "out")
    wraps = []
    executor = SimpleNamespace(program=program, weights={"weight": torch.zeros(8, 8)}, wrap_pieces=wraps.append)
    recorder = _PieceRecorder(executor, "float32")
    (wrap,) = wraps

    hidden, slots, cache = torch.zeros(3, 8), torch.zeros(3, dtype=torch.int64), torch.zeros(64, 1, 4)
    ids, outputs = torch.zeros(3, dtype=torch.int64), [torch.zeros(3, 2, 4), torch.zeros(3, 1, 4), torch.zeros(3, 1, 4)]
    run = wrap("p", 0, lambda inputs: outputs)
    assert run([ids, hidden, executor.weights["weight"], slots, cache, cache]) is outputs

    (piece,) = recorder.facts(batch=3, context=20).pieces
    assert piece.in_bytes == ids.nbytes + hidden.nbytes
    assert piece.out_bytes == sum(output.nbytes for output in outputs)


@pytest.mark.parametrize("num_slots", [3, 0])
def test_of_q_and_k_and_what_they_are_made_of_one_counts(num_slots):
    told = UnrotatedStep(("q0", "k0", "cos", "sin"), 1e-6)
    steps = (
        PieceStep("p", ("input_ids", "cos", "sin"), ("q", "k", "v", "q0", "k0"), writes_kv_of="layers.0"),
        AttentionStep("layers.0", "q", "k", "v", "out", saves_kv=False, unrotated=told),
    )
    layer = LayerSpec("layers.0", 0, 2, 1, 4, 4, 0.5, 0.0, -1, None)
    wraps = []
    executor = SimpleNamespace(
        program=Program(steps, (layer,), ("weight",), "out"),
        weights={"weight": torch.zeros(8, 8)},
        wrap_pieces=wraps.append,
    )
    recorder = _PieceRecorder(executor, "float32")
    outputs = [torch.zeros(count) for count in (1, 10, 100, 1000, 10000)]
    slots, cache = torch.zeros(num_slots, dtype=torch.int64), torch.zeros(64, 1, 4)
    ids, angles = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 4)
    wraps[0]("p", 0, lambda inputs: outputs)([ids, angles, angles, slots, cache, cache])
    (piece,) = recorder.facts(batch=3, context=20).pieces
    assert piece.out_bytes == 4 * (111 if num_slots else 11100)
    assert piece.in_bytes == ids.nbytes + (2 * angles.nbytes if num_slots else 0)


def test_of_several_ranks_that_of_this_process_is_traced():
    runner = object()
    alone = SimpleNamespace(_runner=runner)
    for steps in (alone, RankedStepRunner(alone, None)):
        assert model_runner(SimpleNamespace(step_runner=steps)) is runner
