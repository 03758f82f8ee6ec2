"""The table of features in docs/tiers.md says what an engine does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, SamplingParams, StructuredOutputsParams
from mllm_compile.errors import ConfigError
from tests.tiny_model import engine_of_pages
from tests.tiny_model import tiny_config as config_of

PAGE = Path(__file__).parents[2] / "docs" / "tiers.md"
TIER = {"kv_offloading_size": 0.01, "kv_offloading_min_gain": 0, "max_model_len": 256}
PROMPT = list(range(3, 120))
GREEDY = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


def rows() -> dict[str, str]:
    """The table: a feature, and what it says of it."""
    table = PAGE.read_text().partition("## Features")[2]
    return {cells[1]: cells[2] for line in table.splitlines() if len(cells := re.split(r"\s*\|\s*", line)) == 4}


def twice(engine: Engine, **params: Any) -> tuple[Any, Any]:
    """The output before and behind a load."""
    first = engine.generate(PROMPT, SamplingParams(**GREEDY | params))[0]
    engine.core.while_still(lambda requests: requests.drop_kv())
    return first, engine.generate(PROMPT, SamplingParams(**GREEDY | params))[0]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def engine_with(cache: Path, compile: str = "eager", **sections: Any) -> Engine:
    runtime = TIER | sections.pop("runtime", {})
    return engine_of_pages(config_of(cache, runtime=runtime, compile={"backend": compile}, **sections), 40)


def test_every_row_of_the_table_has_a_verdict_that_some_test_holds() -> None:
    verdicts = rows()
    assert len(verdicts) > 8
    for feature, verdict in verdicts.items():
        if feature not in ("feature", "---"):
            assert verdict.split(":")[0] in ("works", "refused"), feature


def test_grammars_and_log_probabilities_work_behind_a_load(cache: Path) -> None:
    with engine_with(cache) as engine:
        for params in (
            {},
            {"logprobs": 2},
            {"structured_outputs": StructuredOutputsParams(regex="[a-z]+"), "ignore_eos": False},
        ):
            first, again = twice(engine, **params)
            assert again.token_ids == first.token_ids
            assert again.num_host_tokens > 0
        first, again = twice(engine, prompt_logprobs=1)
        assert again.num_host_tokens == 0
        assert again.prompt_logprobs == first.prompt_logprobs


def test_drafts_work_behind_a_load(cache: Path) -> None:
    with engine_with(cache, speculative={"method": "ngram", "num_speculative_tokens": 2}) as engine:
        first, again = twice(engine)
        assert again.token_ids == first.token_ids
        assert again.num_host_tokens > 0


def test_a_salt_finds_its_own_pages_alone(cache: Path) -> None:
    with engine_with(cache) as engine:

        def salted(salt: str) -> Any:
            prompt = {"prompt_token_ids": PROMPT, "cache_salt": salt}
            return engine.generate([prompt], SamplingParams(**GREEDY))[0]

        salted("one")
        engine.core.while_still(lambda requests: requests.drop_kv())
        assert salted("another").num_cached_tokens == 0
        assert salted("one").num_host_tokens > 0


@pytest.mark.parametrize(
    "key", ["expert_parallel_size", "pipeline_parallel_size", "routed_experts", "enable_prefix_cache"]
)
def test_what_is_refused_is_refused_by_name(cache: Path, key: str) -> None:
    value = {"routed_experts": True, "enable_prefix_cache": False}.get(key, 2)
    with pytest.raises(ConfigError, match=f"kv_offloading_size is 0.01, which runtime.{key}"):
        engine_with(cache, runtime={key: value})


def test_a_tier_smaller_than_a_page_is_refused(cache: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_offloading_size is .*, and a page of runtime.page_size"):
        engine_with(cache, runtime={"kv_offloading_size": 1e-6})
