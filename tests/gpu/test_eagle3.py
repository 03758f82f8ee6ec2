"""An EAGLE-3 head on a GPU: one that is right drafts every token, behind steps of any kind of graph; a random one
changes no bit of deterministic steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, SamplingParams
from mllm_compile.runtime.cuda_graph.verifies import VerifyGraphs
from tests.eagle_heads import head_config, markov_model, random_head, right_head, save_head, sizes_of
from tests.gpu.small_shape import ONE_RUNTIME
from tests.tiny_model import TINY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def answers(
    folder: Path,
    model: Path,
    head: Path | None,
    prompts: Any,
    params: SamplingParams,
    mode: str = "auto",
    **runtime: Any,
) -> tuple[list[list[int]], Any]:
    sections = {
        "model": {"path": str(model), "dtype": "bfloat16"},
        "cudagraph": {"mode": mode},
        "runtime": {"device": "cuda", "max_model_len": 256} | ONE_RUNTIME | runtime,
        "speculative": {} if head is None else {"method": "eagle3", "model": str(head), "num_speculative_tokens": 3},
        "cache": {"dir": str(folder / "cache")},
    }
    with Engine(EngineConfig.from_dict(sections)) as engine:
        return [output.token_ids for output in engine.generate(prompts, params)], engine.stats()


@pytest.fixture(scope="module")
def markov(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    folder = tmp_path_factory.mktemp("markov")
    behind = markov_model(folder / "model", head_dim=128)
    right_head(folder / "head", behind, head_dim=128)
    return folder, behind


@pytest.mark.parametrize("mode", ["auto", "none"])
def test_a_head_that_is_right_drafts_every_token(markov, mode):
    folder, behind = markov
    prompts = [[5, 9, 2], [1] * 90, [7, 8], list(range(21))] * 3
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    found, stats = answers(folder, folder / "model", folder / "head", prompts, params, mode)
    for prompt, answer in zip(prompts, found, strict=True):
        expected = [prompt[-1]]
        for _ in range(40):
            expected.append(int(behind[expected[-1]]))
        assert answer == expected[1:]
    # A prefix hit brings one key that another request's token made: of a head whose attention adds nothing no matter.
    # While a step is in flight some drafts go on behind an answer's end.
    assert stats.accepted_tokens >= stats.drafted_tokens - 3 * len(prompts) > 0
    assert stats.acceptance_length > 3


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_a_random_head_drafts_in_the_graphs_of_verify_steps(markov, tmp_path, kind, monkeypatch):
    """The start has compared its drafts with those of the same rows as prompts."""
    folder, _ = markov
    config = head_config(sizes_of(folder / "model") | {"head_dim": 128}, speculators_model_type=kind)
    save_head(tmp_path / "head", config | ({"mask_token_id": 7} if kind == "peagle" else {}))
    chained, launch = [], VerifyGraphs.launch

    def noted(graphs, fields, *of_step):
        chained.append(graphs.chain is not None)
        return launch(graphs, fields, *of_step)

    monkeypatch.setattr(VerifyGraphs, "launch", noted)
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=64, ignore_eos=True)
    _, stats = answers(folder, folder / "model", tmp_path / "head", [[5, 9, 2], [1] * 90], params)
    assert len(chained) > 20, "the start has left them out"
    assert all(chained)
    assert stats.drafts > 10


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_random_head_changes_no_bit_of_deterministic_steps(tmp_path, temperature):
    head = random_head(tmp_path / "head", TINY)
    prompts = ["x = 1\n" * 40, "The for statement is used to iterate over", "A"]
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=64, ignore_eos=True)
    plain, _ = answers(tmp_path, TINY, None, prompts, params, deterministic=True)
    drafted, stats = answers(tmp_path, TINY, head, prompts, params, deterministic=True)
    assert drafted == plain
    assert stats.drafts > 0
