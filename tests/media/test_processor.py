"""A model's processor by itself, without a worker: which folders it is made of, and what its settings change."""

from __future__ import annotations

import pytest

from mllm_compile.media.decode import Refused
from mllm_compile.media.processor import DecodedItem, MediaProcessor
from tests.media.cases import PLACE, make_files, pixels_of

pytest.importorskip("PIL")


def item(seed=0):
    return DecodedItem("image", "image 0", pixels_of(seed)[None])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("preprocessor_config.json", "{}", "names its processor_class"),
        ("preprocessor_config.json", '{"processor_class": "NoSuchProcessor"}', "this Transformers does not have"),
        ("preprocessor_config.json", '{"processor_class": "WhisperProcessor"}', "texts, images and videos are served"),
        ("preprocessor_config.json", '{"processor_class": "Qwen3VLProcessor"}', "names its image_processor_type"),
        (
            "preprocessor_config.json",
            '{"processor_class": "Qwen3VLProcessor", "image_processor_type": "NoSuchImageProcessor"}',
            "a NoSuchImageProcessor, of which this Transformers has no form for Pillow",
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


def test_a_model_without_videos_says_so(tmp_path):
    make_files(tmp_path)
    processor = MediaProcessor(tmp_path)
    processor._ids["video"] = None
    video = DecodedItem("video", "video 0", pixels_of(0)[None])
    with pytest.raises(Refused, match="the model takes no videos, and the request has 1"):
        processor.prepare("a", [video], True)
