"""The table of docs/rollouts.md on scores and routes: they are right with each feature, or are refused by its name.

Scores are compared with the raw ones of the whole vocabulary, and routes with those of the whole text as a prompt.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile import Engine, EngineConfig, RequestOutput, SamplingParams, StructuredOutputsParams
from mllm_compile.errors import ConfigError
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as shape_of
from tests.sample import slow_but_a_sample
from tests.tiny_model import TINY, engine_of_pages, tiny_config
from tests.tiny_vision import image, media_prompt, save_vision_model, vision_engine_config

PAGE = Path(__file__).parents[2] / "docs" / "rollouts.md"
PROMPTS = [[41, 30, 77, 12, 5, 90, 12, 5] * 2, [7, 7, 81, 7, 7, 81, 7, 7, 81], list(range(3, 34))]
TEMPERATURE, TOP_K = 0.8, 5
ASKED = SamplingParams(
    temperature=TEMPERATURE, top_k=TOP_K, seed=3, max_tokens=8, ignore_eos=True, logprobs=-1, return_routed_experts=True
)


def save_experts(folder: Path) -> Path:
    """A mixture of experts that reads text as the embedded model does."""
    shape = {"num_experts": 4, "num_experts_per_tok": 2, "vocab_size": 3072, "eos_token_id": 2}
    save_tiny_model(shape_of("qwen3_moe", **shape), folder)
    for path in TINY.glob("tokenizer*.json"):
        shutil.copy(path, folder)
    return folder


def config_of(folder: Path, cache: Path, quantization: str = "auto", **sections: Any) -> EngineConfig:
    """With the routes of tokens."""
    runtime = {"routed_experts": True, "max_model_len": 64, "page_size": 4} | sections.pop("runtime", {})
    model = {"path": str(folder), "dtype": "float32", "quantization": quantization}
    return tiny_config(cache, model=model, compile={"backend": "eager"}, runtime=runtime, **sections)


def scores_of(output: RequestOutput) -> torch.Tensor:
    """[tokens, V] log-probabilities."""
    rows = [[scores[token].logprob for token in range(len(scores))] for scores in output.logprobs or ()]
    return torch.tensor(rows)


def check_scores(engine: Engine, prompts: Sequence[Any], asked: SamplingParams) -> list[RequestOutput]:
    """The answers, after a look that each mode has the distribution that it names."""
    modes = ("raw_logprobs", "tempered_logprobs", "processed_logprobs")
    found = [engine.generate(prompts, replace(asked, logprobs_mode=mode)) for mode in modes]
    for outputs in zip(*found, strict=True):
        assert len({tuple(one.token_ids) for one in outputs}) == 1 and len(outputs[0].token_ids) == asked.max_tokens
        raw, tempered, processed = map(scores_of, outputs)
        if asked.structured_outputs is not None:
            assert (tempered == -torch.inf).any()
        scores = raw.masked_fill(tempered == -torch.inf, -torch.inf) / TEMPERATURE
        assert torch.allclose(tempered, scores.log_softmax(-1), atol=1e-4)
        kept = scores.masked_fill(scores < scores.topk(TOP_K).values[:, -1:], -torch.inf)
        assert torch.allclose(processed, kept.log_softmax(-1), atol=1e-4)
    return found[-1]


def check_routes(plain: Engine, prompts: Sequence[Any], outputs: Sequence[RequestOutput]) -> None:
    """Compares with the routes of the whole text as a prompt of an engine without the feature."""
    one = SamplingParams(temperature=0, max_tokens=1, return_routed_experts=True)
    for prompt, output in zip(prompts, outputs, strict=True):
        routes = output.outputs[0].routed_experts
        assert routes is not None and routes.shape[0] == len(output.prompt_token_ids) + len(output.token_ids) - 1
        whole = prompt + list(output.token_ids[:-1]) if isinstance(prompt, list) else prompt
        expected = plain.generate(whole, one)[0].outputs[0].routed_experts
        assert np.array_equal(routes[: len(expected)], expected)


def check(
    folder: Path,
    asked: SamplingParams = ASKED,
    num_pages: int | None = None,
    also: Callable[[Engine], object] | None = None,
    quantization: str = "auto",
    save: Callable[[Path], object] = save_experts,
    **sections: Any,
) -> None:
    save(folder / "model")
    config = partial(config_of, folder / "model", folder / "cache", quantization)
    with engine_of_pages(config(**sections), num_pages) as engine:
        outputs = check_scores(engine, PROMPTS, asked)
        assert also is None or also(engine)
    with Engine(config()) as plain:
        check_routes(plain, PROMPTS, outputs)


def save_states(folder: Path) -> None:
    save_tiny_model(shape_of("qwen3_next", num_experts=4, num_experts_per_tok=2), folder)


def check_images(folder: Path) -> None:
    save_vision_model("qwen3_vl_moe", folder / "model")
    prompts = [media_prompt([5, 6], image(1, (1, 4, 6)), [7, 8]), [9, 10, 11]]
    config = vision_engine_config(folder / "model", folder / "cache", routed_experts=True)
    with Engine(config) as engine:
        outputs = check_scores(engine, prompts, ASKED)
        check_routes(engine, prompts, outputs)


def check_spread(folder: Path) -> None:
    with pytest.raises(ConfigError, match="routed_experts"):
        check(folder, runtime={"expert_parallel_size": 2})
    spread = {"expert_parallel_size": 2, "routed_experts": False}
    with Engine(config_of(folder / "model", folder / "cache", runtime=spread)) as engine:
        check_scores(engine, PROMPTS, replace(ASKED, return_routed_experts=False))


CHECKS: dict[str, tuple[str, str, Callable[[Path], None]]] = {
    "structured outputs": (
        "works",
        "works",
        partial(
            check,
            asked=replace(
                ASKED, ignore_eos=False, structured_outputs=StructuredOutputsParams(regex="(x = [0-9]\n){8}")
            ),
        ),
    ),
    "deterministic mode": (
        "works",
        "works",
        partial(check, runtime={"deterministic": True, "max_num_batched_tokens": 16, "max_running_requests": 8}),
    ),
    "preemption": (
        "works",
        "works",
        partial(
            check, asked=replace(ASKED, max_tokens=24), num_pages=20, also=lambda engine: engine.stats().preemptions
        ),
    ),
    "prefix cache": (
        "works",
        "works",
        partial(check, also=lambda engine: engine.generate(PROMPTS, ASKED)[0].num_cached_tokens),
    ),
    "drafts": (
        "works",
        "works",
        partial(check, speculative={"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}),
    ),
    "images": ("works", "works", check_images),
    "recurrent states": ("works", "works", partial(check, save=save_states)),
    "quantised weights": ("works", "works", partial(check, quantization="int4")),
    "`tensor_parallel_size`": ("works", "works", partial(check, runtime={"tensor_parallel_size": 2})),
    "`expert_parallel_size`": ("works", "refused", check_spread),
}


def test_the_page_says_what_is_tested_here():
    table = PAGE.read_text().partition("| feature | `logprobs_mode` | routed experts |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|]+) \| (works|refused) \| (works|refused) \|$", table, re.MULTILINE)
    assert rows == [(feature, scores, routes) for feature, (scores, routes, _) in CHECKS.items()]


@pytest.mark.parametrize("feature", slow_but_a_sample(CHECKS, 1))
def test_scores_and_routes_are_right_with_a_feature_or_refused_by_name(feature, tmp_path):
    CHECKS[feature][2](tmp_path)
