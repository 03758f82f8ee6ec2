"""A folder with a tokenizer and a processor of Qwen3-VL's kind, images as files, and an engine that takes them."""

from __future__ import annotations

import io
import json
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mllm_compile.media.preprocessor import MediaPreprocessor
from mllm_compile.runtime.media.grids import GridTower

SPECIAL = ("<|end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IMAGE_ID, VIDEO_ID = 3, 4
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
MODEL_LEN = 256
VIDEO_PLACE = PLACE.replace("image", "video")
TOWER = GridTower(
    merge=2,
    patch_width=384,
    feature_width=64,
    align_corners=True,
    image_token_id=IMAGE_ID,
    video_token_id=VIDEO_ID,
)
TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}" + PLACE + "{% elif part.type == "
    "'video' %}" + VIDEO_PLACE + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}:"
)


def make_files(folder: Path, **settings: Any) -> dict[str, bytes]:
    """The files of a model whose images have a token for 16 by 16 pixels; `settings` are the processor's."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=261, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    processor = {
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 8,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
    }
    texts = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIAL[0]},
        "preprocessor_config.json": processor | settings,
        "config.json": {"model_type": "qwen3_vl", "image_token_id": IMAGE_ID, "video_token_id": VIDEO_ID},
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def make_preprocessor(files: dict[str, bytes], **changes: Any) -> MediaPreprocessor:
    options: dict[str, Any] = {"model": "tiny", "files": files, "max_model_len": MODEL_LEN, "why_not": None}
    return MediaPreprocessor(**options | changes)


def pixels_of(seed: int, height: int = 32, width: int = 48) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3)).astype(np.uint8)


def file_of(pixels: np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    images = pytest.importorskip("PIL.Image")
    data = io.BytesIO()
    images.fromarray(pixels).save(data, kind, **options)
    return data.getvalue()


def png_that_says(width: int, height: int) -> bytes:
    """A PNG whose header names a size, with next to no data behind it."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
