"""Prefill apart from decode on a GPU: the bits of an answer are one engine's, in deterministic mode with any chunks.

Two engines of two layers with random weights share the GPU. tests/e2e/test_apart.py has the same for a CPU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from mllm_compile import Engine, EngineConfig, RequestOutput, SamplingParams
from mllm_compile.kv_connectors.peers.meeting import VARIABLE
from tests.gpu.small_shape import SHAPE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
PROMPTS = [[Random(f"{length} {place}").randrange(4000) for place in range(length)] for length in (437, 1750, 3500)]
SCORED = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, logprobs=5)
ASKED = replace(SCORED, max_tokens=1, kv_transfer_params={"do_remote_decode": True})  # type: ignore[arg-type]


class Engines:
    """Engines of one model; each has its own pages."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.opened = folder, ExitStack()
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text(json.dumps(SHAPE | {"num_hidden_layers": 2}))

    def __call__(self, role: str | None, **runtime: Any) -> Engine:
        sizes = {"device": "cuda", "max_model_len": 4096, "max_running_requests": 8, "max_total_tokens": 16384}
        if role is not None:
            connector = {"kv_connector": "PeerConnector", "kv_role": role, "kv_port": 0, "timeout_s": 30.0}
            sizes |= {"kv_offloading_size": 0.5, "kv_transfer_config": connector}
        sections = {
            "model": {"path": str(self.folder / "model"), "load_format": "dummy"},
            "compile": {"backend": "eager"},
            "cudagraph": {"mode": "none"},
            "runtime": sizes | runtime,
            "cache": {"dir": str(self.folder / "cache")},
        }
        return self.opened.enter_context(Engine(EngineConfig.from_dict(sections)))


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engines]:
    monkeypatch.setenv(VARIABLE, "a secret of engines")
    made = Engines(tmp_path)
    with made.opened:
        yield made


def bits_of(answer: RequestOutput) -> tuple[Any, ...]:
    """Tokens, and log-probabilities to their last bit."""
    return answer.token_ids, answer.logprobs


def handed_over(prefill: Engine, decode: Engine) -> list[RequestOutput]:
    """The decode engine's answers, each behind the prefill engine's pages."""
    answers = []
    for prompt in PROMPTS:
        told = prefill.generate(prompt, ASKED)[0].kv_transfer_params
        answers.append(decode.generate(prompt, replace(SCORED, kv_transfer_params=told))[0])
    assert all(one.num_disk_tokens > 0 for one in answers)
    return answers


def test_in_deterministic_mode_any_chunks_give_the_same_bits(engines: Engines) -> None:
    exact = {"deterministic": True}
    plain = engines(None, max_num_batched_tokens=2048, **exact)
    expected = [bits_of(plain.generate(prompt, SCORED)[0]) for prompt in PROMPTS]
    prefill = engines("kv_producer", max_num_batched_tokens=512, **exact)
    answers = handed_over(prefill, engines("kv_consumer", max_num_batched_tokens=1024, **exact))
    assert [bits_of(one) for one in answers] == expected


def test_the_same_chunks_of_a_prompt_give_the_same_bits(engines: Engines) -> None:
    plain = engines(None)
    for prompt in PROMPTS:
        plain.generate(prompt, SCORED)
    hits = [plain.generate(prompt, SCORED)[0] for prompt in PROMPTS]  # chunks end where those of a hand-over do
    answers = handed_over(engines("kv_producer"), engines("kv_consumer"))
    assert [one.num_disk_tokens for one in answers] == [one.num_cached_tokens for one in hits]
    assert [bits_of(one) for one in answers] == [bits_of(one) for one in hits]
