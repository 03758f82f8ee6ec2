"""The experts that verify_experts.py counts, beside the choices of Transformers for the same text."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.steps.verify_experts import counting_engine, prompts_of, read, requests_of, step
from mllm_compile import EngineConfig
from tests.model.tiny_configs import LAYERS, save_tiny_model, tiny_config

EXPERTS, CHOSEN, PROMPT, STEPS, DRAFTED = 16, 2, 24, 3, 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    changes = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "vocab_size": 1000}
    save_tiny_model(tiny_config("qwen3_moe", **changes), folder / "model")
    return folder


@pytest.fixture(scope="module")
def parts(folder):
    config = {"model": {"path": str(folder / "model"), "dtype": "float32"}, "cache": {"dir": str(folder / "cache")}}
    engine = counting_engine(EngineConfig.from_dict(config | {"runtime": {"device": "cpu"}}), DRAFTED, 3, 60)
    yield engine
    engine.shutdown()


def routes(folder, text: list[int]) -> list[list[set[int]]]:
    """By layer and token: the experts that Transformers chooses."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    chosen: list[list[set[int]]] = [[] for _ in range(LAYERS)]

    def note(index: int, module: Any, args: Any, output: Any) -> None:
        chosen[index] = [set(row) for row in output[2].tolist()]

    for index, layer in enumerate(model.model.layers):
        layer.mlp.gate.register_forward_hook(partial(note, index))
    with torch.no_grad():
        model(input_ids=torch.tensor([text]), use_cache=False)
    return chosen


def test_a_plain_step_reads_what_transformers_chooses_for_the_first_new_tokens(parts, folder):
    prompts = prompts_of(3, PROMPT, 0)
    requests = requests_of(parts, prompts, 1)
    while step(parts) is not None:
        pass
    chosen = [routes(folder, p + request.output_token_ids) for p, request in zip(prompts, requests, strict=True)]
    read_by_layer = [len(set.union(*(one[layer][-1] for one in chosen))) for layer in range(LAYERS)]
    found = read(parts, prompts, 1, 1)
    assert found.experts == pytest.approx(sum(read_by_layer) / LAYERS)
    assert found.independent == pytest.approx(EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** 3))


def test_what_no_ngram_is_found_for_is_drafted_by_how_the_text_begins(parts):
    (prompt,) = prompts_of(1, PROMPT, 5)
    (request,) = requests_of(parts, [prompt], 9)
    step(parts)
    batch = step(parts)
    assert batch is not None
    assert batch.verify_token_ids.tolist() == [request.output_token_ids[0], *prompt[:DRAFTED]]
    parts.scheduler.abort(request)


def test_a_verify_step_reads_for_all_rows_of_its_drafts(parts):
    prompts = prompts_of(3, PROMPT, 0)
    plain, verify = read(parts, prompts, 1, 1), read(parts, prompts, 1 + DRAFTED, STEPS)
    assert plain.experts < verify.experts <= EXPERTS
    assert verify.independent == pytest.approx(EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** 12))
