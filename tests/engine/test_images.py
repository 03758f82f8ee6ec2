"""Prompts with images that arrive at an engine: what is refused, and that they count as one prompt."""

from __future__ import annotations

from typing import Any

import pytest

from mllm_compile.engine.prompts import as_prompt_list
from mllm_compile.engine.requests import RequestBuilder
from mllm_compile.errors import RequestError
from mllm_compile.runtime.media.grids import GridTower
from mllm_compile.runtime.sampling.params import SamplingParams
from tests.tiny_vision import IMAGE_TOKEN, PATCH_WIDTH, image, media_prompt

TOWER = GridTower(
    merge=2,
    patch_width=PATCH_WIDTH,
    feature_width=64,
    window=0,
    table_side=0,
    align_corners=False,
    image_token_id=IMAGE_TOKEN,
)
PROMPT = media_prompt([5, 6], image(1, (1, 4, 6)), [7])


def builder(**changes: Any) -> RequestBuilder:
    settings = {"vocab_size": 96, "eos_token_ids": frozenset(), "default_params": SamplingParams()}
    return RequestBuilder(tokenizer=None, **(settings | changes))


def test_a_model_of_text_alone_refuses_it() -> None:
    with pytest.raises(RequestError, match="the prompt has 1 images, and the model takes text alone"):
        builder().build_one(PROMPT, None)


def test_the_reason_why_none_are_served_is_told() -> None:
    with pytest.raises(RequestError, match="2 ranks: text alone"):
        builder(tower="2 ranks: text alone").build_one(PROMPT, None)


def test_a_token_beyond_the_vocabulary_is_refused_first() -> None:
    with pytest.raises(RequestError, match=r"token 2 is 90; expected ids from 0 to 79"):
        builder(tower=TOWER, vocab_size=80).build_one(PROMPT, None)


def test_every_answer_to_it_has_its_images() -> None:
    submission = builder(tower=TOWER).build_one(PROMPT, SamplingParams(n=2))
    assert [sequence.request.media is not None for sequence in submission.sequences] == [True, True]
    assert as_prompt_list(PROMPT) == [PROMPT]
    assert as_prompt_list([PROMPT, [1, 2]]) == [PROMPT, [1, 2]]
