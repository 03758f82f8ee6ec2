"""Processors of every protocol of towers: what they make of an image is what a tower of the protocol takes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mllm_compile.media.prompt import MediaPrompt
from mllm_compile.runtime.errors import RequestError
from mllm_compile.runtime.media.crops import CropTower
from mllm_compile.runtime.media.fixed_size import FixedSizeTower
from mllm_compile.runtime.media.grids import GridTower
from mllm_compile.runtime.media.packed import PackedTower
from mllm_compile.runtime.media.placed import PlacedTower
from mllm_compile.runtime.media.request import RequestMedia
from mllm_compile.runtime.media.tower import Tower
from tests.media.cases import pixels_of

IMAGE, BEGIN, END, BREAK = "<image>", "<begin>", "<end>", "<break>"
SPECIAL = ("<eos>", IMAGE, BEGIN, END, BREAK, "<video>", "<fake_token_around_image>", "<global-img>")
SIZE = {"height": 32, "width": 32}
_OF_ROWS_AND_COLUMNS = tuple(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))


@dataclass(frozen=True)
class Case:
    """A processor's settings, the tokenizer's named tokens, and the tower that its images are for."""

    processor: dict[str, Any]
    images: dict[str, Any]
    named: dict[str, str]
    tower: Tower
    place: str = IMAGE
    features: tuple[int, ...] = (16,)  # of each image that becomes of an image of 32 by 48
    image_id: int = 1
    features_of_several: tuple[int, ...] = ()  # of one of several images; (): as many
    videos: dict[str, Any] | None = None
    features_of_video: tuple[int, ...] = ()  # of what the tower takes of four frames


PINPOINTS = [[32, 64], [64, 32], [64, 64]]
IMAGES = {"feature_width": 8, "image_token_id": 1, "features": 16, "shape": (3, 32, 32), "rows": 16}
CASES = {
    "llava": Case(
        {"processor_class": "LlavaProcessor", "patch_size": 8, "vision_feature_select_strategy": "full"},
        {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 32}, "crop_size": SIZE},
        {"image_token": IMAGE},
        FixedSizeTower(**IMAGES),
    ),
    "gemma3": Case(
        {"processor_class": "Gemma3Processor", "image_seq_length": 16},
        {"image_processor_type": "Gemma3ImageProcessor", "size": SIZE},
        {"image_token": IMAGE, "boi_token": BEGIN, "eoi_token": END},
        FixedSizeTower(**IMAGES, sees_ahead=True),
        place=BEGIN,
    ),
    "internvl": Case(
        {"processor_class": "InternVLProcessor", "image_seq_length": 16},
        {"image_processor_type": "GotOcr2ImageProcessor", "size": SIZE, "crop_to_patches": True, "max_patches": 4},
        {
            "start_image_token": BEGIN,
            "end_image_token": END,
            "context_image_token": IMAGE,
            "video_token": "<video>",
        },
        FixedSizeTower(**IMAGES),
        features=(16,) * 3,
    ),
    "idefics3": Case(
        {"processor_class": "Idefics3Processor", "image_seq_len": 16},
        {
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": 32},
            "do_image_splitting": True,
        },
        {"image_token": IMAGE},
        FixedSizeTower(**IMAGES),
        features=(16,) * 5,
    ),
    "mistral3": Case(
        {
            "processor_class": "PixtralProcessor",
            "patch_size": 4,
            "spatial_merge_size": 2,
            "image_token": IMAGE,
            "image_break_token": BREAK,
            "image_end_token": END,
        },
        {"image_processor_type": "PixtralImageProcessor", "size": {"longest_edge": 48}, "patch_size": 4},
        {},
        PackedTower(merge=2, patch_width=48, channels=3, patch_size=4, feature_width=8, image_token_id=1),
        features=(24,),
    ),
    "gemma4": Case(
        {"processor_class": "Gemma4Processor"},
        {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "pooling_kernel_size": 2}
        | {"max_soft_tokens": 70},
        {"image_token": IMAGE, "boi_token": BEGIN, "eoi_token": END}
        | {"audio_token": BREAK, "boa_token": BREAK, "eoa_token": BREAK},
        PlacedTower(merge=2, patch_width=48, feature_width=8, image_token_id=1, sees_ahead=True),
        features=(60,),
    ),
    "llava_next": Case(
        {"processor_class": "LlavaNextProcessor", "patch_size": 8, "vision_feature_select_strategy": "full"},
        {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": PINPOINTS}
        | {"size": {"shortest_edge": 32}, "crop_size": SIZE},
        {"image_token": IMAGE},
        CropTower(**IMAGES, pinpoints=tuple(map(tuple, PINPOINTS))),
        features=(16 + 4 * 7,),
    ),
    "llava_onevision": Case(
        {"processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 16, "vision_aspect_ratio": "anyres_max_1"}
        | {"vision_feature_select_strategy": "full", "video_token": "<video>"},
        {"image_processor_type": "LlavaOnevisionImageProcessor", "image_grid_pinpoints": PINPOINTS, "size": SIZE},
        {"image_token": IMAGE},
        CropTower(**IMAGES, pinpoints=tuple(map(tuple, PINPOINTS)), most_crops=1, video_token_id=5),
        features=(16 + 3 * 5,),
        features_of_several=(17,),
        videos={"video_processor_type": "LlavaOnevisionVideoProcessor", "size": SIZE},
        features_of_video=(4, 4, 4, 5),
    ),
    "glm4v": Case(
        {"processor_class": "Glm4vProcessor"},
        {
            "image_processor_type": "Glm4vImageProcessor",
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 256, "longest_edge": 4096},
        },
        {"image_token": IMAGE, "video_token": "<video>"},
        GridTower(merge=2, patch_width=96, feature_width=8, image_token_id=1, video_token_id=1),
        features=(24,),
        videos={"video_processor_type": "Glm4vVideoProcessor", "patch_size": 4, "merge_size": 2}
        | {"temporal_patch_size": 2, "size": {"shortest_edge": 256, "longest_edge": 8192}},
        features_of_video=(24, 24),
    ),
}


def make_processor(folder: Path, case: Case) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from mllm_compile.media.processor import MediaProcessor

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [*SPECIAL, *_OF_ROWS_AND_COLUMNS]
    trainer = trainers.BpeTrainer(special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL[0],
            "pad_token": SPECIAL[0],
            "extra_special_tokens": case.named,
        },
        "processor_config.json": case.processor,
        "preprocessor_config.json": case.images,
        "config.json": {"image_token_id": case.image_id, "video_token_id": SPECIAL.index("<video>")},
    }
    if case.videos is not None:
        files["video_preprocessor_config.json"] = case.videos
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return MediaProcessor(folder)


def media_of(case: Case, prompt: MediaPrompt) -> RequestMedia:
    items = [(item.start, item.length, item.digest, item.tensors) for item in prompt.items]
    return RequestMedia.of(case.tower, prompt.prompt_token_ids, prompt.is_feature, items)


@pytest.mark.parametrize("name", CASES)
def test_an_image_becomes_what_the_tower_takes(name: str, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from mllm_compile.media.processor import DecodedItem

    case = CASES[name]
    if case.processor["processor_class"] == "PixtralProcessor":
        pytest.importorskip("torchvision")  # which Transformers wants for it
    processor = make_processor(tmp_path, case)
    first, second = (DecodedItem("image", f"image {seed}", pixels_of(seed)[None]) for seed in (1, 2))
    prompt = processor.prepare(f"a{case.place}b{case.place}c", [first, second], adds_special_tokens=False)
    media = media_of(case, prompt)
    counts = [int(media.is_feature[image.start : image.end].sum()) for image in media.images]
    assert counts == [*(case.features_of_several or case.features)] * 2
    assert len({image.digest for image in media.images}) == len(counts)
    for image in media.images:
        assert image.pixels.shape == (case.tower.pixel_rows(image.grid), case.tower.pixel_width)
        assert np.isfinite(image.pixels).all()
    # The same image has the same keys wherever it is.
    again = media_of(case, processor.prepare(f"{case.place}d", [second], adds_special_tokens=False))
    if case.features_of_several:
        assert [image.end - image.start for image in again.images] == [*case.features]
        assert again.images[0].digest != media.images[1].digest
        return
    behind = media.images[len(case.features)]
    width = behind.end - behind.start
    assert np.array_equal(
        media.keys[behind.start : behind.end], again.keys[again.images[0].start : again.images[0].start + width]
    )


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.videos is not None])
def test_a_video_becomes_what_the_tower_takes_among_images(name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    from mllm_compile.media.decode import Refused
    from mllm_compile.media.processor import DecodedItem

    case = CASES[name]
    processor = make_processor(tmp_path, case)
    picture = DecodedItem("image", "image 0", pixels_of(1)[None])
    frames = np.stack([pixels_of(seed) for seed in range(4)])
    video = DecodedItem("video", "video 0", frames, {"fps": 2.0})
    text = f"a<video>b{case.place}c"
    media = media_of(case, prompt := processor.prepare(text, [picture, video], adds_special_tokens=False))
    assert [item.kind for item in prompt.items] == ["video", "image"]
    assert [int(media.is_feature[one.start : one.end].sum()) for one in media.images] == [
        *case.features_of_video,
        *case.features,
    ]
    # By token ids with a place each; of a video alone by those with a token a feature, too.
    ids = processor._encoded(text, False)
    assert processor.prepare(ids, [picture, video], False).prompt_token_ids == prompt.prompt_token_ids
    alone = processor.prepare("a<video>b", [video], adds_special_tokens=False)
    again = processor.prepare(alone.prompt_token_ids, [video], adds_special_tokens=False)
    assert again.prompt_token_ids == alone.prompt_token_ids and again.items[0].start == alone.items[0].start
    if name == "glm4v":
        with pytest.raises(Refused, match="Put one where each image belongs"):
            processor.prepare([*alone.prompt_token_ids, *[1] * 24], [picture, video], adds_special_tokens=False)


def test_a_folder_without_a_processor_of_videos_serves_images(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    from mllm_compile.media.decode import Refused
    from mllm_compile.media.processor import DecodedItem

    processor = make_processor(tmp_path, replace(CASES["internvl"], videos=None))
    video = DecodedItem("video", "video 0", pixels_of(0)[None])
    with pytest.raises(Refused, match="describe no processor of videos"):
        processor.prepare("<video>", [video], adds_special_tokens=False)


def test_an_image_of_another_size_than_the_towers_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    from mllm_compile.media.processor import DecodedItem

    case = CASES["llava"]
    settings = case.images | {"crop_size": {"height": 64, "width": 64}, "size": {"shortest_edge": 64}}
    processor = make_processor(tmp_path, Case(case.processor, settings, case.named, case.tower))
    prompt = processor.prepare(IMAGE, [DecodedItem("image", "image", pixels_of(1)[None])], adds_special_tokens=False)
    with pytest.raises(RequestError, match=r"\[1, 3, 64, 64\]; expected images of \[3, 32, 32\]"):
        media_of(case, prompt)


def test_an_image_of_any_size_is_cut_into_the_patches_of_each_feature() -> None:
    """Pixtral's processor gives this, by Pillow too, where its class can be imported."""
    tower = CASES["mistral3"].tower
    picture = np.arange(3 * 16 * 24, dtype=np.float32).reshape(1, 3, 16, 24)
    padded = np.pad(picture, [(0, 0), (0, 0), (0, 8), (0, 0)])
    ((pixels, grid),) = tower.read({"pixel_values": padded, "image_sizes": np.array([[16, 24]])}).images
    assert grid == (1, 4, 6)
    assert pixels.shape == (6, 4 * 48)
    patches = pixels.reshape(6, 4, 3, 4, 4)
    assert np.array_equal(patches[0, 1], picture[0, :, 0:4, 4:8])
    assert np.array_equal(patches[0, 2], picture[0, :, 4:8, 0:4])
    assert np.array_equal(patches[4, 3], picture[0, :, 12:16, 12:16])
    for sizes in ([[16, 20]], [[16, 24], [16, 24]]):
        with pytest.raises(RequestError, match="expected rows and columns of one image, multiples of 8"):
            tower.read({"pixel_values": padded, "image_sizes": np.array(sizes)})
    with pytest.raises(RequestError, match=r"\[1, 3, 8, 8\]; expected \[1, 3, 16, 24\]"):
        tower.read({"pixel_values": np.zeros((1, 3, 8, 8)), "image_sizes": np.array([[16, 24]])})
