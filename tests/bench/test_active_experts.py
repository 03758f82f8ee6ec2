"""The experts that decode steps choose: counted, in limits, and what is no result for want of them."""

from __future__ import annotations

import io
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.limits.roofline import MatrixFacts, PieceFacts, StepFacts
from mllm_compile.bench.measure import harness
from mllm_compile.bench.measure.harness import Probe, probe_latency
from mllm_compile.bench.measure.results import ActiveExperts, BenchResult
from mllm_compile.bench.measure.setting import Setting
from mllm_compile.bench.measure.workloads import LatencyWork, random_prompts
from mllm_compile.bench.show.report import print_result
from mllm_compile.bench.trace.expert_steps import count_experts
from mllm_compile.runtime.program.spec import ExpertWeight
from tests.bench.result_cases import CEILINGS, result, run, tpot
from tests.bench.test_limits import QWEN3_30B
from tests.bench.test_worker import SETTING
from tests.model.tiny_configs import LAYERS, save_tiny_model, tiny_config

EXPERTS, CHOSEN, PROMPT, STEPS = 4, 2, 5, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    save_tiny_model(tiny_config("qwen3_moe", num_experts=EXPERTS), folder / "model")
    return folder


@pytest.fixture
def setting(folder) -> Setting:
    config = folder / "config.yaml"
    config.write_text(
        f"model: {{path: {folder / 'model'}, dtype: float32}}\ncache: {{dir: {folder / 'cache'}}}\n"
        "runtime: {device: cpu, max_model_len: 64, max_running_requests: 8}\n"
    )
    return replace(SETTING, source=str(config))


def share_by_transformers(folder, batch: int) -> float:
    """The experts that the greedy answers' tokens choose, one step after another."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    chosen: list[set[int]] = []

    def note(index: int, module: Any, args: Any, output: Any) -> None:
        chosen[index] |= set(output[2][-1].tolist())

    for index, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(partial(note, index))
    texts, shares = random_prompts(batch, PROMPT, SETTING.vocab_size, seed=batch), []
    with torch.no_grad():
        for _ in range(STEPS + 1):  # the first makes the token that the first decode reads
            chosen[:] = [set() for _ in range(LAYERS)]
            logits = [model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1] for text in texts]
            texts = [[*text, int(row.argmax())] for text, row in zip(texts, logits, strict=True)]
            shares.append(sum(map(len, chosen)) / (LAYERS * EXPERTS))
    return sum(shares[1:]) / STEPS


def test_experts_are_counted_as_transformers_chooses_them_and_what_does_not_fit_is_not(folder, setting):
    alone, three, too_many = count_experts(setting, [1, 3, 10_000], PROMPT, STEPS)
    assert alone == pytest.approx(CHOSEN / EXPERTS)
    assert three == pytest.approx(share_by_transformers(folder, 3))
    assert too_many is None


def probe(monkeypatch, shares: list[float | None], random_weights: bool = True) -> list[dict[str, Any]]:
    """Fake results of harness.probe_machine and a counting process; the jobs of the latter."""
    found = Probe(replace(SETTING, random_weights=random_weights), {}, CEILINGS, QWEN3_30B)
    jobs: list[dict[str, Any]] = []
    monkeypatch.setattr(harness, "probe_machine", lambda *args: found)
    monkeypatch.setattr(harness, "run_process", lambda module, job: jobs.append(job) or {"shares": shares})
    return jobs


def test_a_work_is_counted_over_its_own_prompts_and_all_its_decode_steps(monkeypatch):
    jobs = probe(monkeypatch, [8 / 128, 51 / 128])
    found, work = probe_latency("m.yaml", LatencyWork(batches=(1, 8), input_len=30, output_len=9))
    (job,) = jobs
    assert (job["task"], job["batches"], job["prompt_len"], job["steps"]) == ("experts", [1, 8], 30, 8)
    assert [(one.batch, one.touched) for one in found.experts] == [(1, 8.0), (8, 51.0)]
    assert [one.expected for one in found.experts] == [pytest.approx(8), pytest.approx(51.6, abs=0.05)]
    assert work.batches == (1, 8)


def test_random_weights_that_read_too_few_experts_are_no_result(monkeypatch, capsys):
    probe(monkeypatch, [8 / 128, 48 / 128, None])
    _, work = probe_latency("m.yaml", LatencyWork(batches=(1, 8, 64)))
    assert work.batches == (1, 64), "what was not counted counts as expected"
    said = (
        "batch 8 is left out: it reads 48.0 of 128 experts a layer at batch 8 (51.6 expected), and would be too quick"
    )
    assert said in capsys.readouterr().err
    with pytest.raises(BenchmarkError, match=r"reads too few experts .* 48\.0 of 128 .* 95 % .* Measure a checkpoint"):
        probe(monkeypatch, [48 / 128])
        probe_latency("m.yaml", LatencyWork(batches=(8,)))


def test_a_checkpoints_router_chooses_as_it_does(monkeypatch):
    probe(monkeypatch, [20 / 128], random_weights=False)
    found, work = probe_latency("m.yaml", LatencyWork(batches=(8,)))
    assert work.batches == (8,)
    lines = [tpot(8, 9.0)]
    (counted,) = harness.with_latency_limits(lines, work, found.figures, found.ceilings, found.experts)
    (expected,) = harness.with_latency_limits(lines, work, found.figures, found.ceilings)
    fewer_bytes = (found.experts[0].expected - 20) * QWEN3_30B.expert_params * 2
    assert counted.limit is not None and expected.limit is not None
    assert expected.limit - counted.limit == pytest.approx(fewer_bytes / CEILINGS.read_bytes_s * 1e3)


def test_no_process_counts_for_a_dense_model(monkeypatch):
    jobs = probe(monkeypatch, [])
    dense = replace(QWEN3_30B, num_experts=1)
    monkeypatch.setattr(harness, "probe_machine", lambda *args: Probe(SETTING, {}, CEILINGS, dense))
    found, _ = probe_latency("m.yaml", LatencyWork())
    assert (found.experts, jobs) == ((), [])


def test_a_roofline_counts_the_bytes_of_the_experts_that_were_read():
    plain = MatrixFacts("o", (32, 32), 2)
    up = MatrixFacts("experts.gate_up", (8, 32, 32), 2, ExpertWeight(8, 2, 32, 32, of_tokens=True))
    facts = StepFacts(4, (PieceFacts(0, 8, 8, (plain, up)),), (), 0).with_expert_share(3 / 8)
    (piece,) = facts.pieces
    assert [matrix.num_bytes(4) for matrix in piece.matrices] == [plain.num_bytes(4), 3 * 32 * 32 * 2]


def test_a_result_says_what_was_counted(tmp_path):
    experts = (ActiveExperts(batch=8, num_experts=128, touched=51.2, expected=51.6),)
    found = replace(result(run("mllm", tpot(8, 9.0))), experts=experts)
    found.write(tmp_path / "r.json")
    assert BenchResult.read(tmp_path / "r.json") == found
    shown = io.StringIO()
    print_result(found, shown)
    assert "read by a decode step: 51.2 of 128 experts a layer at batch 8 (51.6 expected)" in shown.getvalue()
