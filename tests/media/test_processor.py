"""A model's processor by itself, without a worker: which folders it is made of, and what its settings change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mllm_compile.media.decode import Refused
from mllm_compile.media.processor import DecodedItem, MediaProcessor
from mllm_compile.text.added_tokens import told_to_split
from mllm_compile.text.tokenizer import load_tokenizer
from tests.media.cases import PLACE, TEMPLATE, make_files, pixels_of

pytest.importorskip("PIL")


def item(seed=0):
    return DecodedItem("image", "image 0", pixels_of(seed)[None])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("preprocessor_config.json", "{}", "names its processor_class"),
        ("preprocessor_config.json", '{"processor_class": "NoSuchProcessor"}', "this Transformers does not have"),
        (
            "preprocessor_config.json",
            '{"processor_class": "WhisperProcessor"}',
            "names no token of images, videos or sounds",
        ),
        ("preprocessor_config.json", '{"processor_class": "Qwen3VLProcessor"}', "names its image_processor_type"),
        (
            "preprocessor_config.json",
            '{"processor_class": "Qwen3VLProcessor", "image_processor_type": "NoSuchImageProcessor"}',
            "a NoSuchImageProcessor, and this Transformers has no Pillow version of it",
        ),
        ("preprocessor_config.json", "{", "cannot be loaded"),
        ("tokenizer.json", "{}", "cannot be loaded"),
    ],
)
def test_files_of_a_strange_processor_are_refused(tmp_path, name, content, said):
    make_files(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(Refused, match=said):
        MediaProcessor(tmp_path)


def test_a_digest_is_of_settings_too(tmp_path):
    digests = []
    for mean in (0.5, 0.4):
        folder = tmp_path / str(mean)
        folder.mkdir()
        make_files(folder, image_mean=[mean] * 3)
        digests.append(MediaProcessor(folder).prepare(PLACE, [item()], True).items[0].digest)
    assert digests[0] != digests[1]


@pytest.mark.parametrize("splits", [False, True])
def test_a_users_own_placeholder_is_a_place_unless_it_is_read_as_text(tmp_path, splits):
    files = make_files(tmp_path) | {"chat_template.jinja": TEMPLATE.encode()}
    for name, data in (told_to_split(files, tmp_path) if splits else files).items():
        (tmp_path / name).write_bytes(data)
    tokenizer, processor = load_tokenizer(tmp_path), MediaProcessor(tmp_path)
    chat = [{"role": "user", "content": [{"type": "text", "text": f"a {PLACE} b"}, {"type": "image"}]}]
    text = tokenizer.apply_chat_template(chat)
    if not splits:
        with pytest.raises(Refused, match="the prompt has 2 places for images"):
            processor.prepare(text, [item()], False)
        return
    prompt = processor.prepare(text, [item()], False)
    pad = tokenizer.token_to_id("<|image_pad|>")
    assert prompt.prompt_token_ids.count(pad) == prompt.is_feature.sum() == 6
    assert tokenizer.decode(prompt.prompt_token_ids, False).startswith(f"a {PLACE} b{PLACE[:16]}")


def test_a_text_with_an_image_has_the_ids_of_a_text_without(tmp_path):
    make_files(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"extra_special_tokens": ["<tool>"]}))
    tokenizer = load_tokenizer(tmp_path)
    ids = MediaProcessor(tmp_path).prepare(f"a<tool>b{PLACE}c <tool>", [item()], True).prompt_token_ids
    assert ids[: ids.index(tokenizer.token_to_id("<|vision_start|>"))] == tokenizer.encode("a<tool>b")
    assert tokenizer.token_to_id("<tool>") is not None and ids[-1] == tokenizer.token_to_id("<tool>")


def test_a_model_without_videos_says_so(tmp_path):
    make_files(tmp_path)
    processor = MediaProcessor(tmp_path)
    processor._ids["video"] = None
    video = DecodedItem("video", "video 0", pixels_of(0)[None])
    with pytest.raises(Refused, match="the model takes no videos, and the request has 1"):
        processor.prepare("a", [video], True)


_SQUARE = {"height": 32, "width": 32}
_PINPOINTS = {"image_grid_pinpoints": [[32, 64], [64, 32]]}
_LLAVA = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
# By processor: its image processor, what that is told, and what the processor itself is told.
KINDS = {
    "Qwen2_5_VLProcessor": ("Qwen2VLImageProcessor", {"size": {"shortest_edge": 256, "longest_edge": 4096}}, {}),
    "LlavaProcessor": ("CLIPImageProcessor", {"size": {"shortest_edge": 32}, "crop_size": _SQUARE}, _LLAVA),
    "LlavaNextProcessor": (
        "LlavaNextImageProcessor",
        {"size": {"shortest_edge": 32}, "crop_size": _SQUARE, **_PINPOINTS},
        _LLAVA,
    ),
    "LlavaOnevisionProcessor": (
        "LlavaOnevisionImageProcessor",
        {"size": _SQUARE, **_PINPOINTS},
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "video_token": "<|video_pad|>"},
    ),
    "Gemma3Processor": ("Gemma3ImageProcessor", {"size": _SQUARE}, {"image_seq_length": 4}),
    "InternVLProcessor": ("GotOcr2ImageProcessor", {"size": _SQUARE, "crop_to_patches": True}, {"image_seq_length": 4}),
}
TOKENS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "context_image_token": "<|image_pad|>"}
TOKENS |= dict.fromkeys(("boi_token", "start_image_token"), "<|vision_start|>")
TOKENS |= dict.fromkeys(("eoi_token", "end_image_token"), "<|vision_end|>")
SMALL = [*((height, width) for height in (1, 2, 3, 4) for width in (1, 3, 4, 40)), (40, 1), (40, 3), (40, 4)]


def make_processor(folder: Path, kind: str) -> MediaProcessor:
    image_kind, image_settings, settings = KINDS[kind]
    make_files(folder)
    for name, content in {
        "preprocessor_config.json": {"image_processor_type": image_kind, **image_settings},
        "processor_config.json": {"processor_class": kind, "image_token": "<|image_pad|>", **settings},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "image_token_id": 3, **TOKENS},
    }.items():
        (folder / name).write_text(json.dumps(content))
    return MediaProcessor(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_of_few_rows_or_columns_is_what_transformers_makes_of_the_image(kind, tmp_path):
    from PIL import Image

    processor = make_processor(tmp_path, kind)
    for height, width in SMALL:
        pixels = pixels_of(height * 100 + width, height, width) // (128 if width == 4 else 1)  # nor are they fractions
        prompt = processor.prepare(processor._tokens["image"], [DecodedItem("image", "image 0", pixels[None])], True)
        expected = processor._processor.image_processor([Image.fromarray(pixels)], return_tensors="np")
        compared = [name for name in prompt.items[0].tensors if name in expected]
        assert "pixel_values" in compared
        for name in compared:
            assert np.array_equal(prompt.items[0].tensors[name], expected[name]), (name, height, width)
