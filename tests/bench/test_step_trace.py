from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from mllm_compile.bench.limits.limits import ModelFigures
from mllm_compile.bench.limits.roofline import StepFacts
from mllm_compile.bench.limits.step_parts import step_parts
from mllm_compile.bench.measure import worker
from mllm_compile.bench.trace.chrome_trace import TracedKernel
from mllm_compile.bench.trace.decode_steps import model_runner
from mllm_compile.bench.trace.step_trace import _PieceRecorder, typical_step
from mllm_compile.ranks.steps import RankedStepRunner
from mllm_compile.report.speed import weight_sizes
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.program.spec import ExpertWeight, Program, QuantisedWeight
from mllm_compile.runtime.program.steps import AttentionStep, PieceStep, RopeInputNames
from mllm_compile.runtime.runner_config import RunnerConfig
from mllm_compile.store.artifact import open_artifact
from tests.runtime.runner_cases import DEFAULTS
from tests.tiny_model import TINY

CONFIG = RunnerConfig(dtype=torch.float32, runtime=DEFAULTS)


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
    recorder = _PieceRecorder(executor, CONFIG)
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
    told = RopeInputNames(("q0", "k0", "cos", "sin"), 1e-6)
    steps = (
        PieceStep("p", ("input_ids", "cos", "sin"), ("q", "k", "v", "q0", "k0"), writes_kv_of="layers.0"),
        AttentionStep("layers.0", "q", "k", "v", "out", saves_kv=False, rope_inputs=told),
    )
    layer = LayerSpec("layers.0", 0, 2, 1, 4, 4, 0.5, 0.0, -1, None)
    wraps = []
    executor = SimpleNamespace(
        program=Program(steps, (layer,), ("weight",), "out"),
        weights={"weight": torch.zeros(8, 8)},
        wrap_pieces=wraps.append,
    )
    recorder = _PieceRecorder(executor, CONFIG)
    outputs = [torch.zeros(count) for count in (1, 10, 100, 1000, 10000)]
    slots, cache = torch.zeros(num_slots, dtype=torch.int64), torch.zeros(64, 1, 4)
    ids, angles = torch.zeros(3, dtype=torch.int64), torch.zeros(3, 4)
    wraps[0]("p", 0, lambda inputs: outputs)([ids, angles, angles, slots, cache, cache])
    (piece,) = recorder.facts(batch=3, context=20).pieces
    assert piece.out_bytes == 4 * (111 if num_slots else 11100)
    assert piece.in_bytes == ids.nbytes + (2 * angles.nbytes if num_slots else 0)


def test_of_several_ranks_this_process_is_traced():
    runner = object()
    alone = SimpleNamespace(_runner=runner)
    for steps in (alone, RankedStepRunner(alone, None)):
        assert model_runner(SimpleNamespace(step_runner=steps)) is runner


def facts_of(program: Program, weights: dict[str, torch.Tensor], **runtime: str) -> StepFacts:
    """Of 256 requests of 576 tokens, of a model in bfloat16 whose pieces have run, for nothing."""
    wraps = []
    executor = SimpleNamespace(program=program, weights=weights, wrap_pieces=wraps.append)
    recorder = _PieceRecorder(executor, RunnerConfig(dtype=torch.bfloat16, runtime=replace(DEFAULTS, **runtime)))
    for index, step in enumerate(program.steps):
        if isinstance(step, PieceStep):
            outputs = [torch.zeros(0) for _ in step.outputs]
            wraps[0](step.piece, index, lambda inputs, made=outputs: made)([weights[name] for name in step.inputs])
    return recorder.facts(batch=256, context=576)


@pytest.mark.parametrize(("kv_cache_dtype", "itemsize"), [("bfloat16", 2), ("float8_e4m3fn", 1)])
def test_attention_reads_and_writes_numbers_of_the_caches_type(kv_cache_dtype, itemsize):
    """A layer of Qwen3-8B; queries and outputs are in the model's type whatever the cache has."""
    layer = LayerSpec("layers.0", 0, 32, 8, 128, 128, 0.1, 0.0, -1, None)
    program = Program((PieceStep("p", (), ("q",)), AttentionStep("layers.0", "q", "k", "v", "out")), (layer,), (), "q")
    (attention,) = facts_of(program, {}, kv_cache_dtype=kv_cache_dtype).attentions
    assert attention.kv_bytes == 256 * 576 * 2 * 8 * 128 * itemsize
    assert attention.new_bytes == 256 * (2 * 8 * 128 * itemsize + 2 * 32 * 128 * 2)


def test_linears_with_weights_of_fp8_may_be_multiplied_in_fp8_and_no_others():
    weights = {
        "fp8": torch.zeros(16, 32, dtype=torch.float8_e4m3fn),
        "experts": torch.zeros(2, 16, 32, dtype=torch.float8_e4m3fn),
        "int4": torch.zeros(16, 16, dtype=torch.uint8),
    }
    quantised = {name: QuantisedWeight(f"{name}_scales", None, 16, 32) for name in weights}
    weights |= {one.scales: torch.zeros(16, 1, dtype=torch.float8_e4m3fn) for one in quantised.values()}
    weights |= {"plain": torch.zeros(16, 32, dtype=torch.bfloat16)}
    program = Program(
        (PieceStep("p", tuple(weights), ("out",)),),
        (),
        tuple(weights),
        "out",
        expert_weights={"experts": ExpertWeight(2, 1, 32, 16, of_tokens=True)},
        quantised_weights=quantised,
    )
    (piece,) = facts_of(program, weights).pieces
    assert {matrix.name: matrix.may_be_in_fp8 for matrix in piece.matrices} == {
        "fp8": True,
        "experts": False,
        "int4": False,
        "plain": False,
    }


def test_a_step_has_the_work_that_the_limits_of_latency_have_and_the_page(tmp_path):
    """In fp8, over a cache of fp8."""
    config = {
        "model": {"path": str(TINY), "dtype": "float32", "quantization": "fp8"},
        "runtime": {"device": "cpu", "kv_cache_dtype": "fp8_e4m3", "max_running_requests": 2},
        "compile": {"backend": "eager"},
        "cache": {"dir": str(tmp_path / "cache")},
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    sizes = {"largest_batch": 2, "longest_request": 64, "ceilings": True}
    probed = worker.probe({"config": str(tmp_path / "c.yaml")} | sizes)
    work = {"batches": [2], "context": 40, "steps": 1}
    traced = worker.roofline({"setting": probed["setting"], "work": work, "ranges": True})
    facts = StepFacts.from_json(traced["steps"][0]["facts"])
    artifact = open_artifact(Path(traced["place"]["folder"]))
    parts = step_parts(artifact.program, weight_sizes(artifact), torch.float8_e4m3fn, batch=2, context=40)
    figures = ModelFigures(**probed["figures"])

    kv_bytes = [sum(one.kv_bytes for one in found) for found in (facts.attentions, parts)]
    assert kv_bytes == [2 * 40 * figures.kv_bytes_per_token] * 2
    matrices = [matrix for piece in facts.pieces for matrix in piece.matrices]
    in_fp8 = sum(matrix.flops(2) for matrix in matrices if matrix.may_be_in_fp8), sum(part.fp8_flops for part in parts)
    assert in_fp8 == (2 * 2 * figures.fp8_params,) * 2 and figures.fp8_params > 0
    others = sum(matrix.flops(2) for matrix in matrices if not matrix.may_be_in_fp8), sum(part.flops for part in parts)
    assert others == (2 * 2 * figures.head_params,) * 2
