"""Models with towers of whole pictures: Transformers' tokens, from its own forward with pixel_values in float32,
whatever else is in the batch and however prompts are cut, kept or computed again. Images of Gemma 3 see ahead."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.engine.engine import Engine as AnyEngine
from mllm_compile.errors import RequestError
from mllm_compile.media.inputs import MediaPrompt
from tests.fakes import all_pages_are_back
from tests.tiny_model import engine_of_pages
from tests.tiny_vision import (
    CROP_MODELS,
    PACKED_MODELS,
    OfRows,
    OfSize,
    crop_tower,
    media_prompt,
    picture,
    save_vision_model,
    transformers_greedy,
    transformers_logprobs,
    vision_engine_config,
)

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEXT = [3, 4, 5, 6, 7]
# All of one size where towers take whole pictures; else each of its own: rows and columns of features.
SIZES = {1: (2, 3), 2: (3, 6), 3: (1, 4), 7: (2, 3)}
OF_CROPS = {1: (32, 64), 2: (60, 40), 3: (20, 21), 7: (32, 64)}  # and of pixels


def shown(kind: str, seed: int) -> Any:
    """A part of a prompt: a picture as the model's processor gives it."""
    if kind in CROP_MODELS:
        return OfSize(seed, *OF_CROPS[seed], crop_tower(kind))
    return OfRows(seed, *SIZES[seed]) if kind in PACKED_MODELS else picture(seed)


class Prompts:
    """The prompts of one kind of model."""

    def __init__(self, kind: str) -> None:
        first, second, third = (shown(kind, seed) for seed in (1, 2, 3))
        self.one = media_prompt([5, 6, 92], first, [93, 7, 8])
        self.two = media_prompt([5, 6, 92], second, [93, 7, 8, 92], third, [93, 9])
        self.long = media_prompt([11, 92], first, [93] * 9, second, [93, 12, 92], third, [4] * 5)
        self.last = media_prompt([4, 3], first)  # the first token follows a feature
        self.like_long = media_prompt([11, 92], shown(kind, 7), [93] * 9)  # with another picture
        self.every: list[Any] = [self.one, self.two, TEXT, self.long, self.last]


@dataclass(frozen=True)
class Served:
    """A model's folder, and Transformers' answers to the prompts."""

    kind: str
    folder: Path
    model: Any
    prompts: Prompts
    answers: list[list[int]]

    @property
    def sees_ahead(self) -> bool:
        return self.kind == "gemma3"

    def config(self, **runtime: Any) -> Any:
        return vision_engine_config(self.folder, self.folder / "cache", **runtime)


IN_EVERY_RUN = ("gemma3", "idefics3", "mistral3")  # each unlike the others
OTHERS = ("llava", "internvl", "smolvlm", "llava_of_pixtral", "llava_next", "llava_onevision")


@pytest.fixture(
    scope="module", params=[*IN_EVERY_RUN, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder, prompts = tmp_path_factory.mktemp(request.param), Prompts(request.param)
    model = save_vision_model(request.param, folder)
    return Served(request.param, folder, model, prompts, [transformers_greedy(model, p, 6) for p in prompts.every])


def tokens(engine: AnyEngine, prompts: list[Any], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(output.token_ids) for output in engine.generate(prompts, params)]


def test_answers_are_those_of_transformers_in_one_batch_alone_and_from_the_prefix_cache(served: Served) -> None:
    other = served.prompts.like_long
    with Engine(served.config()) as engine:
        assert tokens(engine, served.prompts.every) == served.answers
        before = engine.stats().prefix_hit_tokens
        assert tokens(engine, [other]) == [transformers_greedy(served.model, other, 6)]
        assert engine.stats().prefix_hit_tokens == before
        # Hits of 16 tokens a page, which end within pictures.
        assert [tokens(engine, [prompt])[0] for prompt in served.prompts.every] == served.answers
        assert engine.stats().prefix_hit_tokens >= before + 48
        (output,) = engine.generate([served.prompts.two], replace(GREEDY, prompt_logprobs=0, max_tokens=1))
    ours = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
    assert np.abs(np.array(ours) - transformers_logprobs(served.model, served.prompts.two).numpy()).max() < 3e-4


def test_steps_of_few_tokens_cut_prompts_anywhere_but_images_that_see_ahead(served: Served) -> None:
    step = 23 if served.sees_ahead else 9  # 16 tokens of a picture beside 7 decodes
    with Engine(served.config(enable_prefix_cache=False, max_num_batched_tokens=step)) as engine:
        assert tokens(engine, served.prompts.every * 2) == served.answers * 2
        assert all_pages_are_back(engine)


def test_deterministic_numbers_go_by_no_other_request_unless_images_see_ahead(served: Served) -> None:
    params, prompts = replace(GREEDY, logprobs=3, prompt_logprobs=3), served.prompts.every
    with Engine(served.config(enable_prefix_cache=False, deterministic=True)) as engine:
        if served.sees_ahead:
            with pytest.raises(RequestError, match="images see those behind them too: text alone is served"):
                engine.generate(served.prompts.one, GREEDY)
            assert tokens(engine, [TEXT]) == [served.answers[2]]
            return
        alone = [engine.generate([prompt], params)[0] for prompt in prompts]
        assert [list(output.token_ids) for output in alone] == served.answers
        for one, other in zip(alone, engine.generate(prompts, params), strict=True):
            assert (one.logprobs, one.prompt_logprobs) == (other.logprobs, other.prompt_logprobs)


def test_a_preempted_prompt_is_computed_again(served: Served) -> None:
    params, prompts = replace(GREEDY, max_tokens=24), [served.prompts.one, served.prompts.two]
    expected = [transformers_greedy(served.model, prompt, 24) for prompt in prompts]
    with engine_of_pages(served.config(enable_prefix_cache=False), 7) as engine:
        assert tokens(engine, prompts, params) == expected
        assert engine.stats().preemptions > 0
        assert all_pages_are_back(engine)


def test_what_does_not_fit_is_refused_and_the_others_go_on(served: Served) -> None:
    one = served.prompts.one
    tensors = one.items[0].tensors | {"pixel_values": np.zeros((1, 3, 8, 8))}
    small = MediaPrompt(one.prompt_token_ids, (replace(one.items[0], tensors=tensors),), one.is_feature)
    joined = media_prompt([5], shown(served.kind, 1), shown(served.kind, 2), [6])
    step = 20  # fewer than a picture's tokens beside decodes
    with Engine(served.config(max_num_batched_tokens=step)) as engine:
        with pytest.raises(RequestError, match=r"\[1, 3, 8, 8\]; expected (pictures of )?\["):
            engine.generate(small, GREEDY)
        if served.sees_ahead:
            with pytest.raises(RequestError, match=r"raise runtime\.max_num_batched_tokens to 23"):
                engine.generate(one, GREEDY)
            with pytest.raises(RequestError, match="two images follow each other at token 17"):
                engine.generate(joined, GREEDY)
            assert tokens(engine, [small, TEXT])[1] == served.answers[2]
        else:
            expected = transformers_greedy(served.model, joined, 6)
            assert tokens(engine, [small, joined, TEXT])[1:] == [expected, served.answers[2]]


@pytest.mark.slow
def test_text_is_served_without_images_that_the_self_check_finds_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mllm_compile.model.towers.pictures import Pictures  # which imports Transformers

    right = Pictures.said_of

    def darker(self: Any, images: Any, ids: Any) -> Any:
        said = right(self, images, ids)
        return said | {"pixel_values": said["pixel_values"] / 2}

    monkeypatch.setattr(Pictures, "said_of", darker)
    model = save_vision_model("idefics3", tmp_path / "model")
    with Engine(vision_engine_config(tmp_path / "model", tmp_path / "cache")) as engine:
        assert "its text is served without images: with two images in a prompt" in caplog.text
        assert tokens(engine, [TEXT]) == [transformers_greedy(model, TEXT, 6)]
        with pytest.raises(RequestError, match="the model takes text alone"):
            engine.generate(Prompts("idefics3").one, GREEDY)


@pytest.mark.slow  # the pieces of text, text with features and tower: a minute of two cores for each
@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "idefics3"])
def test_a_compiled_runtime_serves_pictures_in_a_process_without_transformers(kind: str, tmp_path: Path) -> None:
    model, prompts = save_vision_model(kind, tmp_path / "model"), Prompts(kind)
    expected = [transformers_greedy(model, prompt, 6) for prompt in prompts.every]
    with Engine(vision_engine_config(tmp_path / "model", tmp_path / "cache", "inductor")) as engine:
        assert tokens(engine, prompts.every) == expected
    places = [str(tmp_path / name) for name in ("model", "cache")]
    code = (
        "import sys; from pathlib import Path; from mllm_compile import Engine\n"
        "from tests.e2e.test_pictures import Prompts, tokens, vision_engine_config\n"
        f"config = vision_engine_config(*map(Path, {places}), 'inductor')\n"
        f"with Engine(config) as engine: print(tokens(engine, Prompts({kind!r}).every))\n"
        "assert not {'transformers', 'torch._dynamo', 'torch._inductor'} & set(sys.modules)\n"
    )
    warm = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert warm.stdout.strip().splitlines()[-1] == str(expected)
