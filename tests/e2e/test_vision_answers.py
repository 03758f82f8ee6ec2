"""The embedded vision model through the engine: images that nobody has trained on, asked about in one call."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import open_model
from mllm_compile.config.schema import EngineConfig
from mllm_compile.engine.engine import Engine
from mllm_compile.errors import RequestError
from mllm_compile.runtime.sampling.params import SamplingParams

ROOT = Path(__file__).parents[2]
GREEDY = SamplingParams(temperature=0, max_tokens=16)

pytestmark = pytest.mark.slow
pytest.importorskip("PIL")


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    """examples/tiny_models/vision_answers.py, as the demo runs it."""
    folder = str(ROOT / "examples" / "tiny_models")
    sys.path.insert(0, folder)
    yield importlib.import_module("vision_answers")
    sys.path.remove(folder)
    for name in ("vision_answers", "vision_pictures"):
        del sys.modules[name]


@pytest.fixture(scope="module")
def images(script: Any) -> Any:
    return sys.modules["vision_pictures"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    config = {
        "model": {"path": str(ROOT / "mllm_compile/model/tiny_vision"), "dtype": "float32"},
        "compile": {"backend": "eager"},
        "runtime": {"device": "cpu"},
        "cache": {"dir": str(tmp_path_factory.mktemp("cache"))},
    }
    with Engine(EngineConfig.from_dict(config)) as engine:
        yield engine


def test_held_out_images_are_answered(engine: Engine, script: Any) -> None:
    found = script.answered(engine, 200)
    assert sum(text == right for _, right, text in found) >= 190


def test_two_images_of_one_call_do_not_mix(engine, script, images):
    question = "How many shapes?"
    seen = [images.draw_picture(images.HELD_OUT + seed) for seed in range(500, 512)]
    alone = [engine.chat(script.chat(image.pixels, question), GREEDY)[0].outputs[0].text for image in seen]
    together = engine.chat([script.chat(image.pixels, question) for image in seen], GREEDY)
    assert [output.outputs[0].text for output in together] == alone
    assert len(set(alone)) > 3


def test_an_image_goes_with_prompts_of_text_and_one_that_is_refused(engine, script, images):
    image, question, answer = images.held_out(1)[0]
    text = [{"role": "user", "content": question}]
    outputs = engine.chat([text, script.chat(image.pixels, question), script.chat(b"no image", question), text], GREEDY)
    assert outputs[1].outputs[0].text == answer
    assert "image 0: the image is in no format" in (outputs[2].error or "")
    assert outputs[0].outputs[0].text == outputs[3].outputs[0].text


def test_an_image_by_hand_has_the_engines_answer(engine, script, images):
    chats = [script.chat(image.pixels, question) for image, question, _ in images.held_out(3)]
    expected = [engine.chat(chat, GREEDY)[0] for chat in chats]
    serve = runpy.run_path(str(ROOT / "examples" / "low_level.py"))["serve"]
    opened = open_model(str(engine.folder))
    opened.runner.initialize()
    for chat, output in zip(chats, expected, strict=True):
        read = opened.read_chat(chat)
        assert read.token_ids == output.prompt_token_ids
        assert serve(opened.runner, read, GREEDY.max_tokens, opened.eos_token_ids) == output.token_ids
    opened.runner.shutdown()


def test_an_image_whose_tokens_do_not_fit_is_refused(engine, script, images):
    pixels = images.draw_picture(images.HELD_OUT).pixels
    parts = [{"type": "image", "image": pixels}] * 60
    with pytest.raises(RequestError, match="but the model's context is 1,024 tokens"):
        engine.chat([{"role": "user", "content": [*parts, *[{"type": "text", "text": "shapes " * 600}]]}], GREEDY)
