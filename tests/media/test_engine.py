"""Images at an engine's calls: as vLLM's users and OpenAI's write them. The model is a fake."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest

from mllm_compile.errors import RequestError
from mllm_compile.files.json_file import HeldFiles
from mllm_compile.media.sources import read_items
from mllm_compile.text.tokenizer import load_tokenizer
from tests.engine.cases import params
from tests.fakes import fake_engine
from tests.media.cases import PLACE, TEMPLATE, TOWER, file_of, make_preprocessor, pixels_of, png_that_says


@pytest.fixture(scope="module")
def tokenizer(files):
    return load_tokenizer(Path("model"), HeldFiles({**files, "chat_template.jinja": TEMPLATE.encode()}))


@pytest.fixture
def engine(preprocessor, tokenizer):
    with fake_engine(tokenizer=tokenizer, vocab_size=300, media=preprocessor, tower=TOWER) as engine:
        yield engine


def chat(*parts):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "How many?"}]}]


def url_part(data):
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def test_a_prompt_with_multi_modal_data_is_answered(engine):
    prompt = {"prompt": f"{PLACE}How many?", "multi_modal_data": {"image": pixels_of(1)}}
    (output,) = engine.generate(prompt, params())
    assert output.prompt == prompt["prompt"]
    assert output.prompt_token_ids.count(3) == 6
    assert len(output.outputs[0].token_ids) == 8


def test_token_ids_with_a_placeholder_an_image_or_a_feature_are_the_texts_prompt(engine, tokenizer):
    data = {"image": [pixels_of(1), pixels_of(2, 64, 32)]}
    text = f"a{PLACE}bc{PLACE}d"
    ids = tokenizer.encode(text)
    assert ids.count(3) == 2
    prompts = [{"prompt": text}, {"prompt_token_ids": ids}, {"prompt": "shown", "prompt_token_ids": ids}]
    built = [engine.builder.build_one({**prompt, "multi_modal_data": data}, params()) for prompt in prompts]
    expanded = built[0].sequences[0].request.prompt_token_ids
    assert expanded.count(3) == 6 + 8
    built.append(engine.builder.build_one({"prompt_token_ids": expanded, "multi_modal_data": data}, params()))
    for one in built:
        request = one.sequences[0].request
        assert request.prompt_token_ids == expanded
        assert [(image.start, image.end) for image in request.media.images] == [(2, 8), (12, 20)]
        assert (request.cache_keys == built[0].sequences[0].request.cache_keys).all()


def test_the_images_reach_the_request(engine):
    built = engine.builder.build_one(
        {"prompt": f"{PLACE}?", "multi_modal_data": {"image": [pixels_of(1)]}, "cache_salt": "mine"}, params()
    )
    (image,) = built.sequences[0].request.media.images
    assert (image.start, image.end, image.grid) == (1, 7, (1, 4, 6))
    assert built.sequences[0].request.cache_salt == ("mine",)


def test_a_media_prompt_that_was_prepared_is_taken_with_a_salt(engine, preprocessor):
    prepared = preprocessor.prepare(f"{PLACE}?", read_items({"image": pixels_of(1)}, local_paths=True), True)
    for prompt in (prepared, {"prompt": prepared, "cache_salt": "mine"}):
        assert len(engine.generate(prompt, params())[0].outputs[0].token_ids) == 8


def test_a_chat_with_image_parts_is_answered(engine):
    data = file_of(pixels_of(2))
    (output,) = engine.chat(chat(url_part(data), {"type": "image", "image": data}), params())
    assert output.prompt_token_ids.count(3) == 12
    assert output.prompt.count(PLACE) == 2
    assert len(output.outputs[0].token_ids) == 8


def test_of_several_prompts_only_the_wrong_one_is_refused(engine):
    good = {"prompt": PLACE, "multi_modal_data": {"image": pixels_of(3)}}
    bad = {"prompt": PLACE, "multi_modal_data": {"image": b"no image"}}
    outputs = engine.generate([good, bad, "text"], params())
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
    assert "image 0: the image is in no format that can be read" in str(outputs[1].error)


MISTAKES = [  # a prompt's text, what it comes with, and the one line that a user reads
    (PLACE, {"image": lambda: file_of(pixels_of(1))[:90]}, "image 0: the image is broken or cut off"),
    (PLACE, {"image": lambda: np.zeros((0, 8, 3), np.uint8)}, "image 0: the image is 8 × 0, without a pixel"),
    (PLACE, {"image": lambda: png_that_says(32_000, 32_000)}, "1,024,000,000 pixels by its header; expected at most"),
    (PLACE, {"image": lambda: [pixels_of(1)] * 2}, "has 1 places for images (<|image_pad|>), but 2 images were given"),
    (PLACE * 2, {"image": lambda: pixels_of(1)}, "has 2 places for images (<|image_pad|>), but 1 images were given"),
    ("a", {"image": lambda: pixels_of(1)}, "has 0 places for images"),
    (PLACE, {}, "the prompt's text has the token 3, which stands for images, and none was given"),
    (PLACE, {"video": list}, "video 0: expected 1 to 768 frames, got 0"),
    (
        PLACE * 17,
        {"image": lambda: [pixels_of(1, 64, 64)] * 17},
        "272 of them for 17 images, videos or sounds, but the model",
    ),
    (PLACE, {"image": lambda: "https://host/cat.png"}, "is an address, and none is fetched"),
    (PLACE, {"image": lambda: pixels_of(1, 4, 2000)}, "image 0: the model's processor refuses it"),
]


def test_each_mistake_has_its_own_line_and_the_others_go_on(engine):
    images = pytest.importorskip("PIL.Image")
    turned, animated = images.Exif(), io.BytesIO()
    turned[0x0112] = 6  # to be turned by a quarter
    frames = [images.fromarray(pixels_of(seed, 32, 48)) for seed in (4, 5)]
    frames[0].save(animated, "GIF", save_all=True, append_images=frames[1:])
    good = [file_of(pixels_of(3, 32, 48), "JPEG", exif=turned), animated.getvalue()]
    prompts = [(text, {kind: give() for kind, give in data.items()}) for text, data, _ in MISTAKES]
    prompts.insert(3, (PLACE * 2, {"image": good}))
    outputs = engine.generate([{"prompt": text, "multi_modal_data": data} for text, data in prompts], params())
    answered = outputs.pop(3)
    assert answered.outputs[0].finish_reason == "length" and answered.prompt_token_ids.count(3) == 6 + 6
    for output, (_, _, said) in zip(outputs, MISTAKES, strict=True):
        assert output.outputs[0].finish_reason == "error"
        assert said in str(output.error) and "\n" not in str(output.error)
    built = engine.builder.build_one({"prompt": PLACE * 2, "multi_modal_data": {"image": good}}, params())
    assert [image.grid for image in built.sequences[0].request.media.images] == [(1, 6, 4), (1, 4, 6)]


def test_text_goes_its_way_without_a_worker(files, tokenizer):
    preprocessor = make_preprocessor(files)
    with fake_engine(tokenizer=tokenizer, vocab_size=300, media=preprocessor, tower=TOWER) as engine:
        engine.generate([{"prompt": "a", "multi_modal_data": {}}, "b"], params())
        engine.chat(chat(), params())
    assert preprocessor._workers is None


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({"prompt_token_ids": [7], "multi_modal_data": {"image": pixels_of(0)}}, r"has 0 tokens 3 \(<\|image_pad\|>\)"),
        ({"prompt_token_ids": [1, 3, 3, 2], "multi_modal_data": {"image": pixels_of(0)}}, "which have 6 features"),
        ({"prompt_token_ids": [1, 3, 400], "multi_modal_data": {"image": pixels_of(0)}}, "token 2 is 400"),
        ({"prompt_token_ids": [1, 4, 2], "multi_modal_data": {"image": pixels_of(0)}}, "has 0 tokens 3"),
        ({"multi_modal_data": {"image": b"x"}}, "has prompt or prompt_token_ids"),
        ({"prompt": PLACE, "multi_modal_data": {"embeds": b"x"}}, "got 'embeds'"),
        ({"prompt": PLACE, "multi_modal_data": pixels_of(0)}, "multi_modal_data: expected {'image'"),
        ({"prompt": PLACE, "multi_modal_data": {"image": "https://host/cat.png"}}, "none is fetched"),
        ({"prompt": "a", "mm_processor_kwargs": {"x": 1}}, "got 'mm_processor_kwargs'"),
    ],
)
def test_a_wrong_prompt_is_refused(engine, prompt, said):
    with pytest.raises(RequestError, match=said):
        engine.generate(prompt, params())


def test_an_engine_of_text_refuses_images():
    with fake_engine() as engine, pytest.raises(RequestError, match="this engine takes text alone"):
        engine.generate({"prompt": "a", "multi_modal_data": {"image": pixels_of(0)}})


def test_a_runtime_without_a_program_refuses_images(files, tokenizer):
    preprocessor = make_preprocessor(files, why_not="this runtime has no program for images")
    with (
        fake_engine(tokenizer=tokenizer, vocab_size=300, media=preprocessor, tower=TOWER) as engine,
        pytest.raises(RequestError, match="has no program for images"),
    ):
        engine.chat(chat(url_part(b"x")), params())
