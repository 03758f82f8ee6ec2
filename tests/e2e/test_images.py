"""The whole way of prompts with images, for every protocol of towers: Transformers' tokens, from its own forward with
pixel_values in float32, whatever else is in the batch and however prompts are cut, kept or computed again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile import Engine, SamplingParams
from mllm_compile.engine.assemble import assemble
from mllm_compile.engine.engine import Engine as AnyEngine
from mllm_compile.errors import RequestError
from mllm_compile.media.inputs import MediaItem, MediaPrompt
from mllm_compile.process.timeline import Timeline
from tests.fakes import all_pages_are_back
from tests.tiny_model import engine_of_pages
from tests.tiny_vision import (
    IMAGE_TOKEN,
    image,
    media_prompt,
    save_vision_model,
    transformers_greedy,
    transformers_logprobs,
    vision_engine_config,
)

MAX_TOKENS = 6
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
SMALL, WIDE, LARGE = image(1, (1, 4, 6)), image(2, (1, 8, 14)), image(3, (1, 16, 22))  # 6, 28 and 88 features
ONE = media_prompt([5, 6, 92], SMALL, [93, 7, 8])
TWO = media_prompt([5, 6, 92], WIDE, [93, 7, 8, 92], SMALL, [93, 9])
CUT = media_prompt([11, 92], LARGE, [93, 12, 13])  # longer than a step
LAST = media_prompt([4, 3], SMALL)  # the first token follows a feature
TEXT = [3, 4, 5, 6, 7]
PROMPTS: list[MediaPrompt | list[int]] = [ONE, TWO, CUT, LAST, TEXT]


TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")  # each unlike the others
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("glm4v", "qwen3_5")]


@dataclass(frozen=True)
class Served:
    """A model's folder, and Transformers' answers to PROMPTS."""

    folder: Path
    cache: Path
    model: Any
    answers: list[list[int]]

    def engine(self, **runtime: Any) -> AnyEngine:
        return Engine(vision_engine_config(self.folder, self.cache, **runtime))


@pytest.fixture(scope="module", params=[*TOWERS, *OTHERS])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_vision_model(request.param, folder)
    yield Served(folder, folder / "cache", model, [transformers_greedy(model, p, MAX_TOKENS) for p in PROMPTS])


def tokens(engine: AnyEngine, prompts: list[Any], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(output.token_ids) for output in engine.generate(prompts, params)]


def test_answers_are_those_of_transformers_in_one_batch_and_alone(served: Served) -> None:
    with served.engine(enable_prefix_cache=False) as engine:
        assert tokens(engine, PROMPTS) == served.answers
        assert [tokens(engine, [prompt])[0] for prompt in PROMPTS] == served.answers
        # One token a step of a prompt beside decodes, and images cut at every place.
        assert tokens(engine, PROMPTS * 3) == served.answers * 3
        assert all_pages_are_back(engine)


def test_steps_of_few_tokens_cut_images_anywhere(served: Served) -> None:
    with served.engine(enable_prefix_cache=False, max_num_batched_tokens=9) as engine:
        assert tokens(engine, PROMPTS) == served.answers


def test_the_same_image_is_found_again_and_another_is_not(served: Served) -> None:
    other = media_prompt([11, 92], image(4, (1, 16, 22)), [93, 12, 13])
    with served.engine() as engine:
        assert tokens(engine, [CUT]) == [served.answers[2]]
        assert engine.stats().prefix_hit_tokens == 0
        assert tokens(engine, [CUT]) == [served.answers[2]]
        hits = engine.stats().prefix_hit_tokens
        assert hits >= 80  # nearly all of its 93 tokens
        assert tokens(engine, [other]) == [transformers_greedy(served.model, other, MAX_TOKENS)]
        assert engine.stats().prefix_hit_tokens == hits
        # A hit that ends within an image: what is left of it takes its features.
        longer = media_prompt([11, 92], LARGE, [93, 12, 13, 92], WIDE, [93, 20])
        assert tokens(engine, [longer]) == [transformers_greedy(served.model, longer, MAX_TOKENS)]


def test_the_tower_runs_once_for_an_image_that_comes_with_other_text(served: Served) -> None:
    parts = assemble(vision_engine_config(served.folder, served.cache, max_num_batched_tokens=9), Timeline())
    again = media_prompt([7, 92], LARGE, [93, 20])
    with Engine.from_parts(parts) as engine:
        assert tokens(engine, [CUT]) == [served.answers[2]]
        assert parts.step_runner.media.num_encoded == 1, "it is cut into ten chunks"
        assert tokens(engine, [again]) == [transformers_greedy(served.model, again, MAX_TOKENS)]
        assert parts.step_runner.media.num_encoded == 1
        # The pool holds 256 features: other images drive it out, and it is encoded again.
        for seed in (11, 12):
            tokens(engine, [media_prompt([7, 92], image(seed, (1, 16, 22)), [93, 20])])
        assert parts.step_runner.media.num_encoded == 3
        last = media_prompt([8, 92], LARGE, [93, 20])
        assert tokens(engine, [last]) == [transformers_greedy(served.model, last, MAX_TOKENS)]
        assert parts.step_runner.media.num_encoded == 4
        # Requests that share no KV share no features either.
        salted = {"prompt": last, "cache_salt": "mine"}
        assert tokens(engine, [salted]) == tokens(engine, [last])
        assert parts.step_runner.media.num_encoded == 5


def test_requests_with_images_among_many_without(served: Served) -> None:
    """With few pages, and with images that push each other out of the pool."""
    kinds = [4] * 30
    for place, kind in enumerate((0, 1, 2, 3, 2)):
        kinds.insert(6 * place, kind)
    config = vision_engine_config(served.folder, served.cache, enable_prefix_cache=False)
    with engine_of_pages(config, 20) as engine:
        gone = engine.stream(CUT, GREEDY, request_id="gone")
        found = engine.generate([PROMPTS[kind] for kind in kinds], GREEDY)
        engine.abort("gone")
        list(gone)
        assert [list(output.token_ids) for output in found] == [served.answers[kind] for kind in kinds]
        assert all_pages_are_back(engine)


def test_a_preempted_prompt_is_computed_again(served: Served) -> None:
    params = replace(GREEDY, max_tokens=40)
    expected = [transformers_greedy(served.model, prompt, 40) for prompt in (ONE, TWO)]
    config = vision_engine_config(served.folder, served.cache, enable_prefix_cache=False)
    with engine_of_pages(config, 7) as engine:
        assert tokens(engine, [ONE, TWO], params) == expected
        assert engine.stats().preemptions > 0
        assert all_pages_are_back(engine)


def test_an_aborted_prompt_leaves_nothing(served: Served) -> None:
    parts = assemble(vision_engine_config(served.folder, served.cache, max_num_batched_tokens=9), Timeline())
    with Engine.from_parts(parts) as engine:
        stream = engine.stream(CUT, GREEDY, request_id="gone")
        engine.abort("gone")
        list(stream)
        assert tokens(engine, PROMPTS) == served.answers
        assert all_pages_are_back(engine)


def test_log_probabilities_of_a_prompt_with_images_are_those_of_transformers(served: Served) -> None:
    with served.engine() as engine:
        (output,) = engine.generate([ONE], replace(GREEDY, prompt_logprobs=0, max_tokens=1))
    expected = transformers_logprobs(served.model, ONE)
    ours = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
    assert np.abs(np.array(ours) - expected.numpy()).max() < 3e-4


def test_a_prompt_that_does_not_fit_its_images_is_refused_and_the_others_go_on(served: Served) -> None:
    ids = [5, 92, 90, 90, 93]
    wrong = MediaPrompt(ids, ONE.items, np.array(ids) == 90)
    with served.engine() as engine:
        with pytest.raises(RequestError, match="an image's tokens are 3 to 8 of a prompt of 5"):
            engine.generate(wrong, GREEDY)
        outputs = engine.generate([wrong, ONE], GREEDY)
    assert [output.finish_reason for output in outputs] == ["error", "length"]
    assert list(outputs[1].token_ids) == served.answers[0]


def numbers(output: Any) -> tuple[Any, ...]:
    """Every log-probability to its last bit."""
    return output.token_ids, output.logprobs, output.prompt_logprobs


def test_deterministic_numbers_go_by_no_other_request(served: Served) -> None:
    params = replace(GREEDY, logprobs=3, prompt_logprobs=3)
    with served.engine(deterministic=True, enable_prefix_cache=False) as engine:
        alone = [engine.generate([prompt], params)[0] for prompt in PROMPTS]
        assert [list(output.token_ids) for output in alone] == served.answers
        among = engine.generate([*PROMPTS[::-1], *[TEXT, ONE] * 2], params)
        assert [numbers(output) for output in among[:5]] == [numbers(output) for output in alone[::-1]]
        assert [numbers(output) for output in among[5:]] == [numbers(alone[4]), numbers(alone[0])] * 2
        assert all_pages_are_back(engine)


def test_videos_are_placed_in_time(served: Served) -> None:
    pixels, grid = image(5, (3, 4, 6))
    tensors = {"pixel_values_videos": pixels, "video_grid_thw": np.array([grid])}
    kind = served.model.config.model_type
    token = IMAGE_TOKEN if kind == "glm4v" else 91  # whose frames have images' tokens
    if kind in ("qwen3_vl", "qwen3_5", "glm4v"):  # frames apart, behind what says when they are
        ids = [5, 92, *[token] * 6, 93, 30, 92, *[token] * 6, 93, 31, 92, *[token] * 6, 93, 7]
    else:
        ids = [5, 92, *[token] * 18, 93, 7]
    if kind == "qwen2_5_vl":
        tensors["second_per_grid_ts"] = np.array([1.5])
    is_feature = np.array(ids) == token
    first, last = np.flatnonzero(is_feature)[[0, -1]].tolist()
    prompt = MediaPrompt(ids, (MediaItem("video", first, last - first + 1, b"v" * 32, tensors),), is_feature)
    # With a cache: tokens behind a long video are placed behind its last time, where a prompt's own text need not be.
    given: dict[str, Any] = {name: torch.from_numpy(array) for name, array in tensors.items()}
    given |= {"input_ids": torch.tensor([ids]), "mm_token_type_ids": torch.from_numpy(is_feature).long()[None] * 2}
    expected: list[int] = []
    for _ in range(MAX_TOKENS):
        with torch.no_grad():
            output = served.model(**given, use_cache=True)
        expected.append(int(output.logits[0, -1].argmax()))
        given = {"input_ids": torch.tensor([expected[-1:]]), "past_key_values": output.past_key_values}
    with served.engine(max_num_batched_tokens=9) as engine:
        assert tokens(engine, [prompt, ONE]) == [expected, served.answers[0]]


def test_a_text_with_experts_takes_images_too(tmp_path: Path) -> None:
    model = save_vision_model("qwen3_vl_moe", tmp_path / "model")
    with Engine(vision_engine_config(tmp_path / "model", tmp_path / "cache")) as engine:
        assert tokens(engine, [TWO, TEXT]) == [transformers_greedy(model, p, MAX_TOKENS) for p in (TWO, TEXT)]


@pytest.mark.slow  # two processes, and a program for two ranks
def test_two_ranks_take_images_which_rank_0_encodes(tmp_path: Path) -> None:
    model = save_vision_model("qwen3_vl", tmp_path / "model")
    again = media_prompt([7, 92], LARGE, [93, 20])
    prompts = [*PROMPTS, again]
    expected = [transformers_greedy(model, prompt, MAX_TOKENS) for prompt in prompts]
    config = vision_engine_config(tmp_path / "model", tmp_path / "cache", tensor_parallel_size=2)
    with Engine(config) as engine:
        assert tokens(engine, prompts) == expected
        assert tokens(engine, [again]) == [expected[-1]]


@pytest.mark.slow  # the pieces of text, text with features and tower: a minute of two cores
def test_a_compiled_runtime_serves_images_in_a_process_without_transformers(tmp_path: Path) -> None:
    model = save_vision_model("qwen3_vl", tmp_path / "model")
    config = vision_engine_config(tmp_path / "model", tmp_path / "cache", "inductor")
    expected = [transformers_greedy(model, prompt, MAX_TOKENS) for prompt in PROMPTS]
    with Engine(config) as engine:
        assert tokens(engine, PROMPTS) == expected
    places = [str(tmp_path / name) for name in ("model", "cache")]
    code = (
        "import sys; from pathlib import Path; from mllm_compile import Engine\n"
        "from tests.e2e.test_images import GREEDY, PROMPTS, tokens, vision_engine_config\n"
        f"config = vision_engine_config(*map(Path, {places}), 'inductor')\n"
        "with Engine(config) as engine: print(tokens(engine, PROMPTS))\n"
        "assert not {'transformers', 'torch._dynamo', 'torch._inductor'} & set(sys.modules)\n"
    )
    warm = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert warm.stdout.strip().splitlines()[-1] == str(expected)
