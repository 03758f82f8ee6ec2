"""Requests with adapters, in one batch with others, against Transformers with the merged weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import open_model
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.schema import EngineConfig, LoraConfig
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.speculation.drafter import Speculation
from mllm_compile.runtime.speculation.ngram import NgramGuesser
from mllm_compile.runtime.speculation.texts import TextDrafter
from tests.lora_factors import greedy_of, logprobs_of, random_factors
from tests.model.tiny_configs import VOCAB, save_tiny_model
from tests.model.tiny_configs import tiny_config as config_of
from tests.runtime.runner_cases import Loop

PROMPTS = ([41, 30, 77, 102, 5, 90, 12], [7, 7, 81], [3, 4, 5, 6, 7, 8, 9, 10], [17, 33])
SLOTS = (1, -1, 0, 1)


class Served:
    """A tiny model with adapters in two slots, and the same by Transformers."""

    def __init__(self, model_type: str, folder: Path, cache: Path, backend: str = "eager", **lora: Any) -> None:
        self.model = save_tiny_model(config_of(model_type), folder)
        sections = {
            "model": {"path": str(folder), "dtype": "float32"},
            "compile": {"backend": backend},
            "runtime": {"device": "cpu", "max_model_len": 64, "max_running_requests": 8},
            "lora": {"max_adapters": 2, "max_rank": 8} | lora,
            "cache": {"dir": str(cache)},
        }
        self.config = EngineConfig.from_dict(sections)
        self.opened = open_model(self.config)
        self.runner: ModelRunner = self.opened.runner
        self.runner.initialize()
        assert self.runner.model.lora is not None
        self.pool = self.runner.model.lora.pool
        self.factors = [random_factors(self.pool, seed, rank) for seed, rank in ((1, 8), (2, 3))]
        for slot, factors in enumerate(self.factors):
            self.pool.write(slot, factors)

    def expected(self, prompt: list[int], slot: int) -> torch.Tensor:
        return logprobs_of(self.model, prompt, None if slot < 0 else self.factors[slot])

    def run(self, prompts: Any, slots: Any) -> list[torch.Tensor]:
        """Log-probabilities [T, V] of each prompt, all in one batch."""
        runner = self.runner
        lengths = torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int32)
        rows = torch.arange(1, len(prompts) + 1)
        page = runner.config.runtime.page_size
        starts = [page * (1 + 2 * index) for index in range(len(prompts))]
        places = [torch.arange(start, start + len(prompt)) for start, prompt in zip(starts, prompts, strict=True)]
        for row, place in zip(rows.tolist(), places, strict=True):
            runner.req_to_token_pool.req_to_token[row, : len(place)] = place.int()
        with torch.inference_mode():
            batch = runner.prepare_forward_batch_extend(
                torch.tensor([token for prompt in prompts for token in prompt]),
                rows,
                lengths,
                lengths,
                torch.zeros_like(lengths),
                torch.cat(places),
            )
            if max(slots) >= 0:
                batch.adapter_slots = torch.tensor(slots, dtype=torch.int32).repeat_interleave(lengths.long())
                batch.num_active_loras = len(set(slots) - {-1})
            batch.logits_indices = torch.arange(batch.num_tokens)
            logits = runner.forward(batch).next_token_logits
        return list(logits.log_softmax(-1).split(lengths.tolist()))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, eager_cache: Path) -> Iterator[Served]:
    served = Served("qwen3", tmp_path_factory.mktemp("qwen3"), eager_cache)
    yield served
    served.runner.shutdown()


def test_a_batch_of_several_adapters_has_the_numbers_of_merged_weights(served: Served) -> None:
    together = served.run(PROMPTS, SLOTS)
    for prompt, slot, found in zip(PROMPTS, SLOTS, together, strict=True):
        assert torch.allclose(found, served.expected(prompt, slot), atol=1e-4)
        assert torch.allclose(found, served.run([prompt], [slot])[0], atol=1e-5)
    assert not torch.allclose(together[0], served.expected(PROMPTS[0], -1), atol=1e-2)


def test_requests_without_adapters_have_the_pieces_and_steps_of_a_model_that_takes_none(served: Served) -> None:
    without = served.config.model_copy(update={"lora": LoraConfig()})
    plain, beside = load_or_compile(without).artifact, load_or_compile(served.config).artifact
    assert plain.program.lora is None
    assert beside.program.lora is not None
    assert replace(beside.program, lora=None) == plain.program
    assert {name: beside.pieces[name] for name in plain.pieces} == dict(plain.pieces)
    assert beside.pieces.keys() > plain.pieces.keys()


KINDS = (
    *("llama", "gemma2", "gemma3_text", "olmo2", "phi3"),
    *("qwen3_moe", "gpt_oss", "deepseek_v3"),  # experts, and latents
    *("qwen3_next", "mamba2", "falcon_h1", "granitemoehybrid"),  # states
)


# Its gated norm makes rounding 40 times as large where a token's outputs are near zero. Transformers in float32 is as
# far from float64 as ours is, in the other direction (docs/lab/states.md).
AMPLIFIES = "granitemoehybrid"


@pytest.mark.slow
@pytest.mark.parametrize("model_type", KINDS)
def test_so_do_models_of_other_kinds(model_type: str, tmp_path: Path) -> None:
    served = Served(model_type, tmp_path / "model", tmp_path / "cache")
    answers = served.run(PROMPTS, SLOTS)
    if model_type == AMPLIFIES:
        served.model.double().set_experts_implementation("eager")  # torch's grouped products take no float64
    for prompt, slot, found in zip(PROMPTS, SLOTS, answers, strict=True):
        assert (found - served.expected(prompt, slot)).abs().max() < 1e-4
    served.runner.shutdown()


@pytest.mark.parametrize("is_drafted", [False, True], ids=["plain", "drafted"])
def test_steps_of_several_requests_answer_as_merged_weights_do(served: Served, is_drafted: bool) -> None:
    speculation = (
        Speculation(drafter=TextDrafter(NgramGuesser(1, 3)), num_tokens=3, vocab_size=VOCAB) if is_drafted else None
    )
    loop = Loop(served.runner, speculation=speculation)
    prompts = [list(prompt) * 2 for prompt in PROMPTS]
    requests = [loop.add(prompt, max_tokens=10) for prompt in prompts]
    for request, slot in zip(requests, SLOTS, strict=True):
        request.adapter_slot = slot
    loop.run()
    assert any(batch.has_drafts for batch in loop.batches) == is_drafted
    for request, prompt, slot in zip(requests, prompts, SLOTS, strict=True):
        factors = None if slot < 0 else served.factors[slot]
        assert request.output_token_ids == greedy_of(served.model, prompt, 10, factors)
