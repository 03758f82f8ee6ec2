"""Images that layers of a text attend to (Mllama): answers are Transformers' in any batch, for any cut, cached or
recomputed prompt, and beside other features, as docs/images.md tells it."""

from __future__ import annotations

import base64
import io
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import yaml

from mllm_compile import Engine, SamplingParams, trainable
from mllm_compile.engine.start.assemble import assemble
from mllm_compile.errors import RequestError
from mllm_compile.media.prompt import MediaPrompt
from mllm_compile.process.timeline import Timeline
from tests.fakes import all_pages_are_back
from tests.sample import slow_but_a_sample
from tests.server.harness import running
from tests.tiny_model import engine_of_pages
from tests.tiny_seen_images import IMAGE_TOKEN, STATES, TILES, Tiled, add_processor, prompt_of, save_mllama, scores_of
from tests.tiny_vision import vision_engine_config

COUNT = 6
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
TEXT = [3, 4, 5, 6, 7]
ONE = prompt_of([5, 6], Tiled(1, 2), [7, 8])
APART = prompt_of([5], Tiled(2, 3), [7, 8], Tiled(3, 1), [9, 9])
FIRST = prompt_of(Tiled(4, 4), [3, 4])
TOGETHER = prompt_of([3], Tiled(5, 1), Tiled(6, 2), [8, 9, 10])
LONG = prompt_of(range(3, 40), Tiled(7, 4), range(20, 60), Tiled(8, 3), Tiled(9, 1), [5] * 20)  # than a step
PROMPTS: list[Any] = [ONE, APART, TEXT, FIRST, TOGETHER, LONG]
EVENTS = {"enable_kv_cache_events": True, "publisher": "null"}
STORE = {"kv_connector": "tests.kv_connectors.broken_stores.MemoryStore", "trust_local_code": True}
WORKS: dict[str, Any] = {
    "runtime.enable_sleep_mode": {"runtime": {"enable_sleep_mode": True}},
    "runtime.kv_offloading_size": {"runtime": {"kv_offloading_size": 0.002}},
    "model.quantization": {"model": {"quantization": "int8"}},
}
TEXT_ALONE: dict[str, Any] = {
    "speculative.method": {"speculative": {"method": "ngram", "num_speculative_tokens": 3}},
    "lora.max_adapters": {"lora": {"max_adapters": 2, "max_rank": 4}},
    "runtime.deterministic": {"runtime": {"deterministic": True}},
    "runtime.kv_events_config": {"runtime": {"kv_events_config": EVENTS}},
    "runtime.kv_transfer_config": {"runtime": {"kv_transfer_config": STORE, "kv_offloading_size": 0.002}},
    "runtime.skip_compiled": {"runtime": {"skip_compiled": True}},
    "runtime.tensor_parallel_size": {"runtime": {"tensor_parallel_size": 2}},
    "runtime.pipeline_parallel_size": {"runtime": {"pipeline_parallel_size": 2}},
}


@dataclass(frozen=True)
class Served:
    folder: Path
    model: Any
    answers: list[list[int]]
    scores: list[list[float]]

    def config(self, backend: str = "eager", **runtime: Any) -> Any:
        return vision_engine_config(self.folder, self.folder / "cache", backend, **runtime)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    folder = tmp_path_factory.mktemp("mllama")
    model = save_mllama(folder)
    add_processor(folder)
    found = [scores_of(model, prompt, COUNT) for prompt in PROMPTS]
    return Served(folder, model, [answer for answer, _ in found], [scores for _, scores in found])


def tokens(engine: Any, prompts: list[Any], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [list(output.token_ids) for output in engine.generate(prompts, params)]


def test_answers_match_transformers_in_one_batch_and_alone_and_found_again(served: Served) -> None:
    with Engine(served.config()) as engine:
        outputs = engine.generate(PROMPTS, replace(GREEDY, logprobs=1))
        assert [list(output.token_ids) for output in outputs] == served.answers
        for output, scores in zip(outputs, served.scores, strict=True):
            own = [one[token].logprob for one, token in zip(output.outputs[0].logprobs, output.token_ids, strict=True)]
            assert own == pytest.approx(scores, abs=1e-4)
        before = engine.stats().prefix_hit_tokens
        assert [tokens(engine, [prompt])[0] for prompt in PROMPTS] == served.answers
        assert engine.stats().prefix_hit_tokens >= before + 96
        assert all_pages_are_back(engine)


def test_prompts_are_cut_at_every_place_beside_others(served: Served) -> None:
    with Engine(served.config(max_num_batched_tokens=9, enable_prefix_cache=False)) as engine:
        assert tokens(engine, PROMPTS * 2) == served.answers * 2


def test_the_tower_runs_once_for_requests_with_the_same_images(served: Served) -> None:
    parts = assemble(served.config(), Timeline())
    images = parts.step_runner.images
    other_text = prompt_of([5, 6, 11], Tiled(1, 2), [12])
    with Engine.from_parts(parts) as engine:
        assert tokens(engine, [ONE]) == served.answers[:1]
        assert images.num_encoded == 1
        assert tokens(engine, [ONE, other_text]) == [served.answers[0], scores_of(served.model, other_text, COUNT)[0]]
        assert images.num_encoded == 1
        engine.generate({"prompt": ONE, "cache_salt": "mine"}, GREEDY)
        assert images.num_encoded == 2
        # The same images, of which each token sees others.
        together = prompt_of([5], Tiled(2, 3), Tiled(3, 1), [9, 9])
        assert tokens(engine, [APART, together]) == [served.answers[1], scores_of(served.model, together, COUNT)[0]]
        assert images.num_encoded == 6
        several = engine.generate(ONE, replace(GREEDY, temperature=1.0, seed=0, n=3))[0]
        assert len(several.outputs) == 3 and images.num_encoded == 6


def test_the_same_text_beside_other_images_is_no_prefix_hit(served: Served) -> None:
    texts = [5] * 20, [6] * 20
    alike = [prompt_of(texts[0], image, texts[1]) for image in (Tiled(1, 2), Tiled(11, 2), Tiled(1, 3))]
    expected = [scores_of(served.model, prompt, COUNT)[0] for prompt in alike]
    assert expected[0] != expected[1] and expected[0] != expected[2]
    with Engine(served.config()) as engine:
        for place, (prompt, answer) in enumerate(zip(alike, expected, strict=True)):
            assert tokens(engine, [prompt]) == [answer], place
        assert engine.stats().prefix_hit_tokens == 0
        assert tokens(engine, alike) == expected
        assert engine.stats().prefix_hit_tokens == 3 * 32


def test_requests_whose_images_fit_into_no_pages_are_refused_alone(served: Served) -> None:
    apart = prompt_of(*(part for seed in range(4) for part in (Tiled(seed + 20, 4), [5])))
    with engine_of_pages(served.config(), 9) as engine:
        refused, text = engine.generate([apart, TEXT], GREEDY)
        said = r"needs 12 KV pages of 16 tokens \(11 of them for images, sound or text .*\), but only 8 exist"
        assert refused.finish_reason == "error" and re.search(said, refused.error or "")
        assert list(text.token_ids) == served.answers[2]
        assert all_pages_are_back(engine)


def test_requests_in_few_pages_are_preempted_and_go_on(served: Served) -> None:
    params, asked = replace(GREEDY, max_tokens=40), [ONE, FIRST, TEXT]
    expected = [scores_of(served.model, prompt, 40)[0] for prompt in asked]
    with engine_of_pages(served.config(enable_prefix_cache=False), 9) as engine:
        gone = engine.stream(APART, params, request_id="gone")
        next(gone)
        found = engine.generate(asked, params)
        engine.abort("gone")
        list(gone)
        assert [list(output.token_ids) for output in found] == expected
        assert engine.stats().preemptions > 0
        assert all_pages_are_back(engine)


def test_what_cannot_be_is_refused_alone(served: Served) -> None:
    item, most = ONE.items[0], 256 // STATES // TILES
    many = prompt_of(*(part for seed in range(most + 1) for part in (Tiled(seed + 20, 4), [5])))

    def with_tensors(**changed: np.ndarray) -> MediaPrompt:
        return MediaPrompt(ONE.prompt_token_ids, (replace(item, tensors=item.tensors | changed),), ONE.is_feature)

    holes, strange = np.array([[[1, 0, 1, 0]]]), np.zeros((1, 3, 8, 8), np.float32)
    wrong: list[tuple[Any, str]] = [
        (many, rf"the prompt's {most + 1} images have \d+ states, {TILES * STATES} each .*; expected at most 256"),
        (with_tensors(pixel_values=strange), r"pixel_values has the shape \[1, 3, 8, 8\]; expected \[1, 1, 4, 3"),
        (
            with_tensors(aspect_ratio_mask=holes),
            "an id from 1 to 8, and an image's tiles ahead of filled ones",
        ),
        (with_tensors(aspect_ratio_ids=np.array([[9]])), "aspect_ratio_ids is 9"),
        (MediaPrompt([5, IMAGE_TOKEN, IMAGE_TOKEN], (), np.zeros(3, bool)), "2 tokens of the prompt are placeholders"),
        ([5, IMAGE_TOKEN + 1], f"expected ids from 0 to {IMAGE_TOKEN}"),
    ]
    with Engine(served.config()) as engine:
        outputs = engine.generate([one for prompt, _ in wrong for one in (prompt, TEXT)], GREEDY)
        for refused, (_, said) in zip(outputs[::2], wrong, strict=True):
            assert refused.finish_reason == "error" and re.search(said, refused.error or "")
        assert [list(output.token_ids) for output in outputs[1::2]] == [served.answers[2]] * len(wrong)
        without = [5, IMAGE_TOKEN, 6]  # as Transformers takes it
        assert tokens(engine, [without]) == [scores_of(served.model, without, COUNT)[0]]
        for prompt in (ONE, without):
            with pytest.raises(RequestError, match=f"prompt_logprobs: expected none with the token {IMAGE_TOKEN}"):
                engine.generate(prompt, replace(GREEDY, prompt_logprobs=0))
        penalised = replace(GREEDY, repetition_penalty=1.3, presence_penalty=0.2)
        assert len(tokens(engine, [ONE], penalised)[0]) == COUNT  # the placeholder has no count


def test_a_chat_with_pictures_is_what_transformers_makes_of_it(served: Served) -> None:
    pictures = pytest.importorskip("PIL.Image")
    files = []
    for seed, shape in ((1, (30, 70, 3)), (2, (20, 20, 3))):
        data = io.BytesIO()
        pictures.fromarray(np.random.default_rng(seed).integers(0, 256, shape).astype(np.uint8)).save(data, "PNG")
        files.append(data.getvalue())
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "a"},
        {"type": "image", "image": files[0]},
        {"type": "text", "text": "b"},
        {"type": "image", "image": files[1]},
        {"type": "text", "text": "?"},
    ]
    with Engine(served.config()) as engine:
        (answer,) = engine.chat([{"role": "user", "content": parts}], GREEDY)
        from mllm_compile.media.sources import read_items

        items = read_items({"image": files}, local_paths=False)
        made = engine.media.prepare("<|begin|>a<|image|>b<|image|>?:", items, False)  # type: ignore[union-attr]
    assert answer.prompt_token_ids == made.prompt_token_ids and IMAGE_TOKEN in made.prompt_token_ids
    assert [int(item.tensors["aspect_ratio_mask"].sum()) for item in made.items] == [3, 1]
    assert answer.token_ids == scores_of(served.model, made, COUNT)[0]


def test_the_page_names_what_is_tried() -> None:
    page = (Path(__file__).parents[2] / "docs" / "images.md").read_text(encoding="utf-8")
    for ending, tried in ((" | works |", WORKS), (" | text alone |", TEXT_ALONE)):
        (row,) = (line for line in page.splitlines() if line.startswith("| `") and line.endswith(ending))
        assert set(re.findall(r"`(\w+\.\w+)`", row)) == set(tried)


def config_with(served: Served, sections: dict[str, Any]) -> dict[str, Any]:
    given = served.config().model_dump(mode="json")
    return given | {key: {**(given.get(key) or {}), **section} for key, section in sections.items()}


@pytest.mark.parametrize("name", slow_but_a_sample(WORKS, 1))
def test_what_works_with_them(served: Served, name: str) -> None:
    with Engine(config_with(served, WORKS[name])) as engine:
        if name == "model.quantization":  # the self-check compares such weights; here answers begin alike
            assert [answer[:2] for answer in tokens(engine, PROMPTS)] == [answer[:2] for answer in served.answers]
            return
        assert tokens(engine, PROMPTS) == served.answers
        if name == "runtime.enable_sleep_mode":
            engine.sleep(1)
            engine.wake_up()
        assert tokens(engine, PROMPTS * 3) == served.answers * 3


@pytest.mark.parametrize("name", slow_but_a_sample(TEXT_ALONE, 1))
def test_where_text_alone_is_served_an_image_is_refused(served: Served, name: str) -> None:
    with Engine(config_with(served, TEXT_ALONE[name])) as engine:
        with pytest.raises(RequestError, match=rf"{name} is set, under which text alone is served|takes text alone"):
            engine.generate(ONE, GREEDY)
        assert tokens(engine, [TEXT]) == [served.answers[2]]


def test_of_such_a_model_the_text_alone_is_trained(served: Served) -> None:
    trained = trainable(served.config(deterministic=True))
    try:
        trained(TEXT, [len(TEXT)]).sum().backward()
        assert all(parameter.grad is not None for parameter in trained.parameters())
        assert not any("vision" in name or "cross_attn" in name for name, _ in trained.named_parameters())
    finally:
        trained.close()


@pytest.mark.slow  # pieces of three programs
def test_a_compiled_runtime_serves_them(served: Served) -> None:
    with Engine(served.config("inductor")) as engine:
        assert tokens(engine, PROMPTS) == served.answers


@pytest.mark.slow
def test_text_is_served_without_images_that_the_self_check_finds_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from mllm_compile.model.sources.seen_images import SeenImagesAdapter  # which imports Transformers

    right = SeenImagesAdapter.said_of

    def all_see_all(self: Any, images: Any, ids: Any) -> Any:
        said = right(self, images, ids)
        return said | {"cross_attention_mask": torch.ones_like(said["cross_attention_mask"])}

    monkeypatch.setattr(SeenImagesAdapter, "said_of", all_see_all)
    model = save_mllama(tmp_path / "model")
    with Engine(vision_engine_config(tmp_path / "model", tmp_path / "cache")) as engine:
        assert "its text is served without images: with images in prompts its logits are off" in caplog.text
        assert tokens(engine, [TEXT]) == [scores_of(model, TEXT, COUNT)[0]]


@pytest.mark.slow  # a server of its own
def test_a_chat_over_http_is_the_engines(served: Served, tmp_path: Path) -> None:
    pictures = pytest.importorskip("PIL.Image")
    data = io.BytesIO()
    pictures.fromarray(np.random.default_rng(1).integers(0, 256, (30, 70, 3)).astype(np.uint8)).save(data, "PNG")
    url = "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()
    parts: list[Any] = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    messages: list[Any] = [{"role": "user", "content": parts}]
    with Engine(served.config()) as engine:
        (expected,) = engine.chat(messages, SamplingParams(temperature=0, max_tokens=COUNT))
        (text,) = engine.chat([{"role": "user", "content": parts[1:]}], SamplingParams(temperature=0, max_tokens=COUNT))
    (tmp_path / "mllama.yaml").write_text(yaml.safe_dump(served.config().model_dump(mode="json", exclude_unset=True)))
    command = [sys.executable, "-m", "mllm_compile", "serve", str(tmp_path / "mllama.yaml"), "--port", "0"]
    asked: dict[str, Any] = {"model": served.folder.name, "temperature": 0, "max_tokens": COUNT}
    with (
        running(command, tmp_path / "log") as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        answer = client.chat.completions.create(messages=messages, **asked)
        plain = client.chat.completions.create(messages=[{"role": "user", "content": parts[1:]}], **asked)
        with pytest.raises(openai.BadRequestError, match="image"):
            client.chat.completions.create(messages=[{"role": "user", "content": [{"type": "image"}]}], **asked)
        again = client.chat.completions.create(messages=messages, stream=True, **asked)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in again if chunk.choices)
    assert answer.choices[0].message.content == streamed == expected.text
    assert plain.choices[0].message.content == text.text != expected.text
    assert answer.usage is not None and answer.usage.prompt_tokens == len(expected.prompt_token_ids)
