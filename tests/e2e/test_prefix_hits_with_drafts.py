"""Reports on other engines, of drafts that meet cached prefixes, on models with states above all.

vLLM issues 43559, 43650, 47194, 53912: other answers, or empty ones, behind prefix hits; 53504, 54360: hits come late,
or not at all; 38182: they are much shorter; 57721: no start.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, SamplingParams
from tests.dflash_heads import random_dflash_head
from tests.e2e.test_speculation import config_of, prompts_of
from tests.eagle_heads import random_head
from tests.prediction_layers import save_with_prediction_layer
from tests.sample import slow_but_a_sample

PAGE = 4
PARAMS = (
    SamplingParams(temperature=0, max_tokens=11, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=11, ignore_eos=True, allowed_token_ids=[11, 12, 13]),
)


def drafts_of(method: str, make_head: Callable[[Path, Path], Any] | None = None) -> Callable[[Path], dict[str, Any]]:
    def section(folder: Path) -> dict[str, Any]:
        head = {} if make_head is None else {"model": str(make_head(folder / method, folder / "model"))}
        return {"method": method, "num_speculative_tokens": 3} | head

    return section


METHODS = {
    "ngram": drafts_of("ngram"),
    "mtp": drafts_of("mtp"),
    "eagle3": drafts_of("eagle3", random_head),
    "dflash": drafts_of("dflash", random_dflash_head),
}
# Methods whose keys follow from the token behind: their hits end a page earlier, but not those that end at a state.
A_PAGE_LESS = [("glm4_moe", "mtp"), ("glm4_moe", "eagle3")]


def talk(folder: Path, speculative: dict[str, Any]) -> tuple[list[list[int]], list[int], int]:
    """(answers, cached tokens of each, drafts) of one request at a time: the same prompt again, behind others that
    begin alike, and turns of a conversation."""
    found: list[list[int]] = []
    hits: list[int] = []
    config = config_of(folder, speculative=speculative, runtime={"max_num_batched_tokens": 16, "page_size": PAGE})
    with Engine(config) as engine:

        def ask(prompt: list[int]) -> list[int]:
            for one in PARAMS:
                output = engine.generate([prompt], one)[0]
                found.append(output.token_ids)
                hits.append(output.num_cached_tokens)
            return found[-len(PARAMS)]  # the greedy one

        first, other = prompts_of(5)[3:]
        for prompt in (first, [*first[:17], *other[:9]], first, first):
            answer = ask(prompt)
        for more in ([5, 6], [7, 8, 9]):
            first = [*first, *answer, *more]
            answer = ask(first)
        ask(first)
        return found, hits, engine.stats().drafts


@pytest.mark.parametrize("method", slow_but_a_sample(METHODS, 1))
@pytest.mark.parametrize("architecture", ["qwen3_next", pytest.param("glm4_moe", marks=pytest.mark.slow)])
def test_answers_behind_hits_are_those_without_drafts_and_hits_are_as_long(architecture, method, tmp_path):
    save_with_prediction_layer(architecture, tmp_path / "model")
    plain, plain_hits, _ = talk(tmp_path, {"method": "none"})
    drafted, hits, drafts = talk(tmp_path, METHODS[method](tmp_path))
    assert drafts > 0
    assert all(len(answer) == PARAMS[0].max_tokens for answer in drafted)
    assert drafted == plain
    less = PAGE if (architecture, method) in A_PAGE_LESS else 0
    assert sum(count > 0 for count in plain_hits) >= 10
    assert hits == [max(0, count - less) for count in plain_hits]
