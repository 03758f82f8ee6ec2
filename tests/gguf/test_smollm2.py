"""A real model from a package: SmolLM2-135M-Instruct as Q4_1, against Transformers on the same numbers.

`make test` takes its first layers and some prompts, `make test-all` the whole model, compiled, and all forty.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.config.folders.model_folder import open_model_folder
from mllm_compile.config.schema import EngineConfig, ModelConfig
from tests.gguf.smollm2 import NUM_LAYERS, PACKAGE, PROMPTS, packaged_file, write_first_layers
from tests.gguf.test_architectures import loaded
from tests.sample import how_to_repeat, sample_of
from tests.tiny_model import engine_of_pages

pytestmark = pytest.mark.skipif(PACKAGE is None, reason="needs smollm2.gguf: python examples/demo.py --fetch")
MAX_TOKENS = 24
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.95, n=2, seed=7, max_tokens=MAX_TOKENS)


@dataclass
class Served:
    """An engine, its config, and what Transformers says to each of some prompts."""

    engine: Engine
    config: EngineConfig
    prompts: list[Any]
    token_ids: list[list[int]]
    expected: list[list[int]]

    def answers(self, engine: Engine, params: SamplingParams = GREEDY, salt: str = "of all") -> list[Any]:
        """Prompts share their KV within a salt."""
        prompts = [{"prompt_token_ids": ids, "cache_salt": salt} for ids in self.token_ids]
        return engine.generate(prompts, params, progress=False)

    def are_equal(self, outputs: list[Any]) -> bool:
        return [output.token_ids for output in outputs] == self.expected


WHOLE = pytest.mark.parametrize("served", [NUM_LAYERS], ids=["whole"], indirect=True)


@pytest.fixture(
    scope="module", params=[2, pytest.param(NUM_LAYERS, marks=pytest.mark.slow)], ids=["first layers", "whole"]
)
def served(request, tmp_path_factory, eager_cache):
    folder = tmp_path_factory.mktemp("smollm2")
    path = packaged_file()
    if request.param < NUM_LAYERS:
        path = folder / "first.gguf"
        write_first_layers(request.param, path)
    config = {
        "model": {"path": str(path)},
        "compile": {"backend": "eager" if request.param < NUM_LAYERS else "inductor"},
        "runtime": {"device": "cpu", "max_model_len": 2048},
        "cache": {"dir": str(eager_cache)},  # where the C++ for CPUs may be built already
    }
    prompts = PROMPTS if request.param == NUM_LAYERS else sample_of(PROMPTS[:-2], 5)
    with Engine(config) as engine:
        token_ids = [encoded(engine, prompt) for prompt in prompts]
        model = loaded(open_model_folder(ModelConfig(path=str(path)), str(eager_cache)))
        expected = [greedy(model, ids) for ids in token_ids]
        yield Served(engine, EngineConfig.from_dict(config), prompts, token_ids, expected)


def encoded(engine, prompt):
    one = replace(GREEDY, max_tokens=1)
    outputs = engine.generate(prompt, one) if isinstance(prompt, str) else engine.chat(prompt, one, progress=False)
    return outputs[0].prompt_token_ids


def greedy(model, prompt):
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "max_new_tokens": MAX_TOKENS, "eos_token_id": None, "pad_token_id": 2}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


def test_answers_match_transformers_cold_and_by_prefix_hits(served):
    cold, warm = (served.answers(served.engine, salt="first here") for _ in range(2))
    assert served.are_equal(cold) and served.are_equal(warm), how_to_repeat()
    longest = max(warm, key=lambda output: len(output.prompt_token_ids))
    assert longest.num_cached_tokens >= len(longest.prompt_token_ids) - 16  # a page


def test_a_stream_adds_up_to_the_same(served):
    whole = served.answers(served.engine)
    for ids, expected, output in zip(served.token_ids, served.expected, whole, strict=True):
        parts = list(served.engine.stream(ids, GREEDY))
        assert [token for part in parts for token in part.token_ids] == expected, how_to_repeat()
        assert "".join(part.text for part in parts) == output.text


@WHOLE
@pytest.mark.slow
def test_preempted_chunked_prompts_and_seeded_draws_give_the_same(served):
    drawn = served.answers(served.engine, DRAWN)
    longest = max(map(len, served.token_ids)) + MAX_TOKENS
    runtime = served.config.runtime.model_copy(update={"max_num_batched_tokens": 160, "max_model_len": longest})
    with engine_of_pages(served.config.model_copy(update={"runtime": runtime}), longest // 16 + 4) as tight:
        assert served.are_equal(served.answers(tight))
        again = served.answers(tight, DRAWN)
        assert tight.stats().preemptions > 0
    for one, other in zip(drawn, again, strict=True):
        assert [completion.token_ids for completion in one.outputs] == [
            completion.token_ids for completion in other.outputs
        ]
    assert any(one.outputs[0].token_ids != one.outputs[1].token_ids for one in drawn)


@WHOLE
@pytest.mark.slow
def test_all_forty_prompts_are_asked_and_a_question_has_its_answer(served):
    assert len(served.prompts) == 40
    assert 1400 < max(map(len, served.token_ids)) < 1600
    (output,) = served.engine.chat(PROMPTS[0], GREEDY, progress=False)
    assert "Paris" in output.outputs[0].text
