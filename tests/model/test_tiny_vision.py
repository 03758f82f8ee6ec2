"""The embedded vision model: a whole folder, small, whose answers about held-out images are right."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import mllm_compile.model
from mllm_compile.media.decode import decode
from mllm_compile.media.processor import DecodedItem, MediaProcessor
from mllm_compile.text.tokenizer import load_tokenizer

FOLDER = Path(mllm_compile.model.__file__).parent / "tiny_vision"
EXAMPLES = Path(__file__).parents[2] / "examples" / "tiny_models"


@pytest.fixture(scope="module")
def training():
    """The modules of examples/tiny_models that have made it."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        yield importlib.import_module("train_vision")
    finally:
        sys.path.remove(str(EXAMPLES))


def test_it_is_small_and_its_page_says_what_it_answers():
    assert (FOLDER / "model.safetensors").stat().st_size <= 3_000_000
    config = json.loads((FOLDER / "config.json").read_text())
    assert config["architectures"] == ["Qwen3VLForConditionalGeneration"]
    assert re.search(r"answered right, word for word \| \d+ of 200 ", (FOLDER / "README.md").read_text())


def test_a_chats_image_is_a_place_in_the_prompt():
    tokenizer = load_tokenizer(FOLDER)
    content = [{"type": "image"}, {"type": "text", "text": "How many red circles?"}]
    text = tokenizer.apply_chat_template([{"role": "user", "content": content}])
    place = "<|vision_start|><|image_pad|><|vision_end|>"
    assert text == f"<|im_start|>user\n{place}How many red circles?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode("<|image_pad|>") == [json.loads((FOLDER / "config.json").read_text())["image_token_id"]]


def test_it_was_trained_on_what_its_processor_gives(training):
    pytest.importorskip("PIL")
    processor = MediaProcessor(FOLDER)
    for seed in range(20):
        pixels = training.draw_picture(seed).pixels
        prompt = processor.prepare("<|image_pad|>", [DecodedItem("image", "image 0", pixels[None])], False)
        np.testing.assert_allclose(
            prompt.items[0].tensors["pixel_values"], training.patches_of(pixels), atol=1e-6, err_msg=str(seed)
        )


def test_the_image_of_the_demo_has_three_red_circles(training):
    pytest.importorskip("PIL")
    assert np.array_equal(
        decode((EXAMPLES.parent / "shapes.png").read_bytes()), training.draw_picture(1_000_001_690).pixels
    )
    things = [(thing.colour, thing.what) for thing in training.draw_picture(1_000_001_690).things]
    assert things.count(("red", "circle")) == 3


@pytest.mark.slow
def test_transformers_answers_held_out_images(training):
    pytest.importorskip("PIL")
    right, wrong = training.count_right(FOLDER, 200)
    assert right >= 190, wrong
