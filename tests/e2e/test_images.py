"""The whole way of prompts with images, for every protocol of towers. Tokens equal Transformers', from its own forward
with pixel_values in float32, in any batch and for any cut, cached or recomputed prompt.

Each test of `served` is a case, and each model of MODELS goes through all of them. In `make test` one model of each
protocol does, and one of these through cases with a compile of their own.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile import Engine
from mllm_compile.compiler import build
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.compile_options import CompileOptions
from mllm_compile.engine.engine import Engine as AnyEngine
from mllm_compile.engine.start.assemble import assemble
from mllm_compile.errors import RequestError
from mllm_compile.media.prompt import MediaItem, MediaPrompt
from mllm_compile.process.timeline import Timeline
from mllm_compile.runtime.media.request import RequestMedia
from mllm_compile.store.artifact import WEIGHTS
from tests.fakes import all_pages_are_back
from tests.image_prompts import GREEDY, GROUPS, MAX_TOKENS, MODELS, SMALL, SMALL_TOO, TEXT, Prompts, shown, tokens
from tests.sample import sample_of
from tests.tiny_model import engine_of_pages
from tests.tiny_vision import (
    CROP_MODELS,
    IMAGE_TOKEN,
    VIDEO_TOKEN,
    VISION_MODELS,
    image,
    media_prompt,
    picture,
    save_vision_model,
    transformers_greedy,
    transformers_logprobs,
    vision_engine_config,
)

WITH_VIDEOS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen4_exp", "glm4v", "llava_onevision")


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
        return self.kind in ("gemma3", "gemma4")

    @property
    def few_tokens(self) -> int:
        """Of a step: as few as the model's images let be."""
        largest = max(item.length for item in self.prompts.long.items)
        return largest + 7 if self.sees_ahead else 9  # an image beside 7 decodes

    def config(self, **runtime: Any) -> Any:
        return vision_engine_config(self.folder, self.folder / "cache", **runtime)

    def engine(self, **runtime: Any) -> AnyEngine:
        return Engine(self.config(**runtime))


USUAL = [name for group in GROUPS for name in sample_of(tuple(group), 1)]


def slow_but(usual: list[str]) -> list[Any]:
    return [pytest.param(name, marks=() if name in usual else pytest.mark.slow) for name in MODELS]


@pytest.fixture(scope="module", params=slow_but(USUAL))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder, prompts = tmp_path_factory.mktemp(request.param), Prompts(request.param)
    model = save_vision_model(request.param, folder)
    answers = [transformers_greedy(model, prompt, MAX_TOKENS) for prompt in prompts.every]
    return Served(request.param, folder, model, prompts, answers)


def test_every_protocol_has_models_among_these() -> None:
    from mllm_compile.model.towers.find import PROTOCOLS
    from mllm_compile.runtime.media.registry import TOWERS
    from mllm_compile.runtime.media.sounds import SoundTower
    from mllm_compile.runtime.media.tiles import TileTower  # whose images take no token's place

    of_images = [tower for tower in TOWERS.values() if not issubclass(tower, (SoundTower, TileTower))]
    assert len(PROTOCOLS) == len(of_images) == len(GROUPS)
    assert set(WITH_VIDEOS) <= set(MODELS)
    page = Path(__file__).parents[2].joinpath("docs", "images.md").read_text()
    assert not [name for name in MODELS if f"`{name}`" not in page]


def test_answers_match_transformers_in_one_batch_and_alone(served: Served) -> None:
    """One image, two with text between, and of different sizes, beside text."""
    with served.engine(enable_prefix_cache=False) as engine:
        assert tokens(engine, served.prompts.every) == served.answers
        assert [tokens(engine, [prompt])[0] for prompt in served.prompts.every] == served.answers
        assert tokens(engine, served.prompts.every * 3) == served.answers * 3
        (output,) = engine.generate([served.prompts.two], replace(GREEDY, prompt_logprobs=0, max_tokens=1))
        assert all_pages_are_back(engine)
    ours = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
    assert np.abs(np.array(ours) - transformers_logprobs(served.model, served.prompts.two).numpy()).max() < 3e-4


def test_steps_of_few_tokens_cut_prompts_anywhere_but_images_that_see_ahead(served: Served) -> None:
    """And one that is aborted meanwhile leaves nothing."""
    with served.engine(enable_prefix_cache=False, max_num_batched_tokens=served.few_tokens) as engine:
        stream = engine.stream(served.prompts.long, GREEDY, request_id="gone")
        engine.abort("gone")
        list(stream)
        assert tokens(engine, served.prompts.every * 2) == served.answers * 2
        assert all_pages_are_back(engine)


def test_the_same_image_is_found_again_and_another_is_not(served: Served) -> None:
    other = served.prompts.like_long
    with served.engine() as engine:
        assert tokens(engine, served.prompts.every) == served.answers
        before = engine.stats().prefix_hit_tokens
        assert tokens(engine, [other]) == [transformers_greedy(served.model, other, MAX_TOKENS)]
        assert engine.stats().prefix_hit_tokens == before
        # Hits of 16 tokens a page, which end within images: what is left of these takes its features.
        assert [tokens(engine, [prompt])[0] for prompt in served.prompts.every] == served.answers
        assert engine.stats().prefix_hit_tokens >= before + 48


def test_the_tower_runs_once_for_an_image_that_comes_with_other_text(served: Served) -> None:
    parts = assemble(served.config(max_num_batched_tokens=served.few_tokens), Timeline())
    again, media = served.prompts.large_again, parts.step_runner.media
    with Engine.from_parts(parts) as engine:
        assert tokens(engine, [served.prompts.long]) == [served.answers[3]]
        assert media.num_encoded == 3, "its three images are cut into many chunks"
        assert tokens(engine, [again]) == [transformers_greedy(served.model, again, MAX_TOKENS)]
        assert media.num_encoded == 3
        # Requests that share no KV share no features either.
        assert tokens(engine, [{"prompt": again, "cache_salt": "mine"}]) == tokens(engine, [again])
        assert media.num_encoded == 4
        # Other images drive it out of the pool of 256 features, and it is encoded again.
        count = 256 // again.items[0].length + 2
        others = [media_prompt([7, 92], shown(served.kind, seed), [93]) for seed in range(11, 11 + count)]
        tokens(engine, others, replace(GREEDY, max_tokens=1))
        engine.flush_prefix_cache()
        assert tokens(engine, [served.prompts.long]) == [served.answers[3]]
        assert media.num_encoded == 4 + len(others) + 3


def test_requests_with_images_among_many_without(served: Served) -> None:
    """With few pages, and with images that push each other out of the pool."""
    kinds = [2] * 30
    for place, kind in enumerate((0, 1, 3, 4, 3)):
        kinds.insert(6 * place, kind)
    with engine_of_pages(served.config(enable_prefix_cache=False), 20) as engine:
        gone = engine.stream(served.prompts.long, GREEDY, request_id="gone")
        found = engine.generate([served.prompts.every[kind] for kind in kinds], GREEDY)
        engine.abort("gone")
        list(gone)
        assert [list(output.token_ids) for output in found] == [served.answers[kind] for kind in kinds]
        assert all_pages_are_back(engine)


def test_a_preempted_prompt_is_computed_again(served: Served) -> None:
    params, prompts = replace(GREEDY, max_tokens=40), [served.prompts.one, served.prompts.two]
    expected = [transformers_greedy(served.model, prompt, 40) for prompt in prompts]
    with engine_of_pages(served.config(enable_prefix_cache=False), 7) as engine:
        assert tokens(engine, prompts, params) == expected
        assert engine.stats().preemptions > 0
        assert all_pages_are_back(engine)


def test_what_does_not_fit_is_refused_and_the_others_go_on(served: Served) -> None:
    one, fits = served.prompts.one, served.prompts.every
    ids = [5, 92, IMAGE_TOKEN, IMAGE_TOKEN, 93]
    short = MediaPrompt(ids, one.items, np.array(ids) == IMAGE_TOKEN)
    tensors = one.items[0].tensors | {"pixel_values": np.zeros((1, 3, 8, 8))}
    strange = MediaPrompt(one.prompt_token_ids, (replace(one.items[0], tensors=tensors),), one.is_feature)
    joined = media_prompt([5], shown(served.kind, SMALL), shown(served.kind, SMALL_TOO), [6])
    with served.engine() as engine:
        with pytest.raises(RequestError, match="an image's tokens are 3 to"):
            engine.generate(short, GREEDY)
        with pytest.raises(RequestError, match=r"\[1, 3, 8, 8\]; expected (images of )?\["):
            engine.generate(strange, GREEDY)
        outputs = engine.generate([short, one, strange, TEXT], GREEDY)
        assert [output.finish_reason for output in outputs] == ["error", "length"] * 2
        assert [list(output.token_ids) for output in outputs[1::2]] == [served.answers[0], served.answers[2]]
        if served.sees_ahead:
            with pytest.raises(RequestError, match=f"two images follow each other at token {joined.items[0].end}"):
                engine.generate(joined, GREEDY)
        elif served.kind not in VISION_MODELS:  # whose forward takes them for one
            assert tokens(engine, [joined]) == [transformers_greedy(served.model, joined, MAX_TOKENS)]
        assert tokens(engine, fits) == served.answers
    if served.sees_ahead:
        with (
            served.engine(max_num_batched_tokens=served.few_tokens - 1) as engine,
            pytest.raises(RequestError, match=rf"raise runtime\.max_num_batched_tokens to {served.few_tokens}"),
        ):
            engine.generate(served.prompts.long, GREEDY)


@pytest.mark.parametrize("served", slow_but(sample_of(USUAL, 1)), indirect=True)
def test_deterministic_numbers_go_by_no_other_request_unless_images_see_ahead(served: Served) -> None:
    params, prompts = replace(GREEDY, logprobs=3, prompt_logprobs=3), served.prompts.every[:3]
    with served.engine(enable_prefix_cache=False, deterministic=True) as engine:
        if served.sees_ahead:
            with pytest.raises(RequestError, match="images see those behind them too: text alone is served"):
                engine.generate(served.prompts.one, GREEDY)
            assert tokens(engine, [TEXT]) == [served.answers[2]]
            return
        alone = [engine.generate([prompt], params)[0] for prompt in prompts]
        assert [list(output.token_ids) for output in alone] == served.answers[:3]
        if served.kind == "qwen3_vl_moe":  # an expert's product has as many rows as tokens have chosen it, of text too
            return
        among = engine.generate([*prompts[::-1], TEXT, *prompts], params)
        for one, other in zip([*alone[::-1], alone[2], *alone], among, strict=True):
            assert (one.logprobs, one.prompt_logprobs) == (other.logprobs, other.prompt_logprobs)
        assert all_pages_are_back(engine)


@torch.inference_mode()
def test_a_batch_brings_its_own_images(served: Served) -> None:
    """By hand, as the step runner does not do it: positions and the decode's delta are made of pixels and grids."""
    parts, prompt = assemble(served.config(), Timeline()), served.prompts.two
    runner, count = parts.step_runner._runner, len(prompt.prompt_token_ids)
    facts = runner.model.media.facts
    items = [(item.start, item.length, item.digest, item.tensors) for item in prompt.items]
    media = RequestMedia.of(facts, prompt.prompt_token_ids, prompt.is_feature, items)
    slots = torch.arange(16, 16 + count + 1)
    runner.req_to_token_pool.req_to_token[1, : count + 1] = slots.int()
    one, length, none = (torch.tensor([number], dtype=torch.int32) for number in (1, count, 0))
    ids = torch.tensor(prompt.prompt_token_ids)
    batch = runner.prepare_forward_batch_extend(ids, one.long(), length, length, none, slots[:-1])
    batch.pixel_values = torch.from_numpy(np.concatenate([picture.pixels for picture in media.images]))
    batch.image_grid_thw = [picture.grid for picture in media.images]
    with Engine.from_parts(parts):
        first = int(runner.forward(batch).next_token_logits[0].argmax())
        if facts.axes > 1:
            assert torch.equal(batch.mrope_positions, torch.from_numpy(media.positions))
            assert batch.mrope_position_deltas.tolist() == [media.delta]
        decode = runner.prepare_forward_batch_decode(
            torch.tensor([first]),
            one.long(),
            length + 1,
            slots[-1:],
            mrope_position_deltas=batch.mrope_position_deltas,
        )
        assert [first, int(runner.forward(decode).next_token_logits[0].argmax())] == served.answers[1][:2]
        batch.image_grid_thw, batch.media = batch.image_grid_thw[:1], None
        batch.pixel_values = torch.from_numpy(media.images[0].pixels)
        with pytest.raises(RequestError, match=f"has {int(prompt.is_feature.sum())} placeholders"):
            runner.forward(batch)


def video(kind: str) -> MediaPrompt:
    """A prompt with a video of three frames, as the model's processor gives it."""
    token = IMAGE_TOKEN if kind == "glm4v" else VIDEO_TOKEN  # whose frames have images' tokens
    if kind in CROP_MODELS:
        frames = np.concatenate([picture(seed) for seed in (1, 2, 3)])[None]
        ids, tensors = [5, *[token] * 4, 93, 7], {"pixel_values_videos": frames}
    else:
        pixels, grid = image(5, (3, 4, 6))
        tensors = {"pixel_values_videos": pixels, "video_grid_thw": np.array([grid])}
        ids = [5, 92, *[token] * 18, 93, 7]
        if kind == "qwen2_5_vl":
            tensors["second_per_grid_ts"] = np.array([1.5])
        elif kind != "qwen2_vl":  # frames apart, behind what says when they are
            ids = [5, 92, *[token] * 6, 93, 30, 92, *[token] * 6, 93, 31, 92, *[token] * 6, 93, 7]
    is_feature = np.array(ids) == token
    first, last = np.flatnonzero(is_feature)[[0, -1]].tolist()
    return MediaPrompt(ids, (MediaItem("video", first, last - first + 1, b"v" * 32, tensors),), is_feature)


def test_videos_are_placed_in_time_or_refused(served: Served) -> None:
    if served.kind not in WITH_VIDEOS:
        tensors = {name: np.zeros((1, 1, 3, 32, 32)) for name in ("pixel_values_videos", "video_grid_thw")}
        wrong = MediaPrompt([VIDEO_TOKEN], (MediaItem("video", 0, 1, b"v" * 32, tensors),), np.ones(1, bool))
        with served.engine() as engine, pytest.raises(RequestError, match="and no videos"):
            engine.generate(wrong, GREEDY)
        return
    prompt = video(served.kind)
    # With a cache: tokens behind a long video are placed behind its last time, where a prompt's own text need not be.
    given: dict[str, Any] = {name: torch.from_numpy(array) for name, array in prompt.items[0].tensors.items()}
    given["input_ids"] = torch.tensor([prompt.prompt_token_ids])
    if served.kind in VISION_MODELS:
        given["mm_token_type_ids"] = torch.from_numpy(prompt.is_feature).long()[None] * 2
    expected: list[int] = []
    for _ in range(MAX_TOKENS):
        with torch.no_grad():
            output = served.model(**given, use_cache=True)
        expected.append(int(output.logits[0, -1].argmax()))
        given = {"input_ids": torch.tensor([expected[-1:]]), "past_key_values": output.past_key_values}
    with served.engine(max_num_batched_tokens=9) as engine:
        assert tokens(engine, [prompt, served.prompts.one]) == [expected, served.answers[0]]


@pytest.mark.slow
def test_text_is_served_without_images_that_the_self_check_finds_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mllm_compile.model.towers.fixed_size import FixedSizeImages  # which imports Transformers

    right = FixedSizeImages.said_of

    def darker(self: Any, images: Any, ids: Any) -> Any:
        said = right(self, images, ids)
        return said | {"pixel_values": said["pixel_values"] / 2}

    monkeypatch.setattr(FixedSizeImages, "said_of", darker)
    model = save_vision_model("idefics3", tmp_path / "model")
    with Engine(vision_engine_config(tmp_path / "model", tmp_path / "cache")) as engine:
        assert "its text is served without images: with two images in a prompt" in caplog.text
        assert tokens(engine, [TEXT]) == [transformers_greedy(model, TEXT, 6)]
        with pytest.raises(RequestError, match="the model takes text alone"):
            engine.generate(Prompts("idefics3").one, GREEDY)


@pytest.mark.slow
def test_packed_weights_are_the_texts_alone_where_images_are_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_vision_model("idefics3", tmp_path / "model")
    monkeypatch.setattr(build, "self_check", lambda *args: "with an image in a prompt it computes something else")
    config = vision_engine_config(tmp_path / "model", tmp_path / "cache")
    packed = load_or_compile(config, None, CompileOptions(tmp_path / "out", pack_weights=True))
    assert not any("vision" in spec.name for spec in packed.artifact.weights)
    sizes = [path.stat().st_size for path in (tmp_path / "out" / WEIGHTS).iterdir()]
    assert sum(sizes) < (tmp_path / "model" / "model.safetensors").stat().st_size
    with Engine(tmp_path / "out") as engine:
        assert tokens(engine, [TEXT]) == [transformers_greedy(model, TEXT, 6)]


@pytest.mark.slow  # two processes, and a program for two ranks
def test_two_ranks_take_images_which_rank_0_encodes(tmp_path: Path) -> None:
    model, prompts = save_vision_model("qwen3_vl", tmp_path / "model"), Prompts("qwen3_vl")
    asked = [*prompts.every, prompts.large_again]
    expected = [transformers_greedy(model, prompt, MAX_TOKENS) for prompt in asked]
    config = vision_engine_config(tmp_path / "model", tmp_path / "cache", tensor_parallel_size=2)
    with Engine(config) as engine:
        assert tokens(engine, asked) == expected
        assert tokens(engine, asked[-1:]) == expected[-1:]


@pytest.mark.slow
def test_ranks_that_share_experts_take_images_of_their_own_requests(tmp_path: Path) -> None:
    model, prompts = save_vision_model("qwen3_vl_moe", tmp_path / "model"), Prompts("qwen3_vl_moe")
    asked = [*prompts.every, prompts.large_again, [3, 4, 5, 6]]
    expected = [transformers_greedy(model, prompt, MAX_TOKENS) for prompt in asked]
    config = vision_engine_config(tmp_path / "model", tmp_path / "cache", expert_parallel_size=2)
    with Engine(config) as engine:
        assert tokens(engine, asked) == expected
        assert tokens(engine, asked[::-1]) == expected[::-1]  # with hits, and on other ranks
        assert tokens(engine, asked[-2:-1]) == expected[-2:-1]  # while the other rank has nothing to do
        assert tokens(engine, [*asked, *asked]) == [*expected, *expected]


@pytest.mark.slow  # the pieces of text, text with features and tower: a minute of two cores for each
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "gemma4", "mistral3", "idefics3", "llava_onevision"])
def test_a_compiled_runtime_serves_images_in_a_process_without_transformers(kind: str, tmp_path: Path) -> None:
    model, prompts = save_vision_model(kind, tmp_path / "model"), Prompts(kind)
    expected = [transformers_greedy(model, prompt, MAX_TOKENS) for prompt in prompts.every]
    with Engine(vision_engine_config(tmp_path / "model", tmp_path / "cache", "inductor")) as engine:
        assert tokens(engine, prompts.every) == expected
    places = [str(tmp_path / name) for name in ("model", "cache")]
    code = (
        "import sys; from pathlib import Path; from mllm_compile import Engine\n"
        "from tests.image_prompts import Prompts, tokens\nfrom tests.tiny_vision import vision_engine_config\n"
        f"config = vision_engine_config(*map(Path, {places}), 'inductor')\n"
        f"with Engine(config) as engine: print(tokens(engine, Prompts({kind!r}).every))\n"
        "assert not {'transformers', 'torch._dynamo', 'torch._inductor'} & set(sys.modules)\n"
    )
    warm = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert warm.stdout.strip().splitlines()[-1] == str(expected)
