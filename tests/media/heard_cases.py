"""Folders of models that take sounds: a tokenizer, and a processor of each protocol of their towers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mllm_compile.runtime.media.clips import ClipTower
from mllm_compile.runtime.media.conformers import ConformerTower
from mllm_compile.runtime.media.sounds import SoundTower

SOUND_ID = 24  # which Voxtral's processor takes for its own
SOUND, BEGIN, END = "<audio>", "<begin>", "<end>"
SPECIAL = ("<eos>", *(f"<{n}>" for n in range(1, SOUND_ID)), SOUND, BEGIN, END)
TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'audio' %}"
    + SOUND
    + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}:"
)
_TOWER = {"feature_width": 8, "image_token_id": SOUND_ID, "bins": 80, "frames": 3000}
_NAMED = {"audio_token": SOUND, "audio_bos_token": BEGIN, "audio_eos_token": END}


@dataclass(frozen=True)
class Case:
    """A processor, its extractor, the tokenizer's named tokens, and the tower that its sounds are for.

    Attributes:
        features: of sounds of 2 and of 31.5 s; 0: the longer one is refused.
    """

    processor: str
    tower: SoundTower
    features: tuple[int, int]
    extractor: str = "WhisperFeatureExtractor"
    named: dict[str, str] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    pictures: dict[str, Any] = field(default_factory=dict)


CASES = {
    "qwen2_audio": Case("Qwen2AudioProcessor", SoundTower(**_TOWER, merge=2), (50, 0), named=_NAMED),
    "audioflamingo3": Case(
        "AudioFlamingo3Processor", SoundTower(**_TOWER, merge=2), (50, 787), settings={"audio_token": SOUND}
    ),
    "glmasr": Case(
        "GlmAsrProcessor", SoundTower(**_TOWER, merge=4, sees_filling=True), (25, 393), settings={"audio_token": SOUND}
    ),
    "voxtral": Case(
        "VoxtralProcessor", SoundTower(**_TOWER, merge=4, keeps_filling=True, sees_filling=True), (375, 750)
    ),
    "qwen3_asr": Case(
        "Qwen3ASRProcessor",
        SoundTower(**_TOWER | {"frames": 100}, halvings=3, window=8),
        (26, 410),
        extractor="Qwen3ASRFeatureExtractor",
        named=_NAMED,
    ),
    "gemma4": Case(
        "Gemma4Processor",
        ConformerTower(**_TOWER | {"frames": 48}, halvings=2, window=1, edges="last"),
        (50, 0),
        extractor="Gemma4AudioFeatureExtractor",
        named={"audio_token": SOUND, "boa_token": BEGIN, "eoa_token": END}
        | dict.fromkeys(("image_token", "boi_token", "eoi_token"), "<1>"),
        pictures={"image_processor_type": "Gemma4ImageProcessor", "patch_size": 4, "pooling_kernel_size": 2}
        | {"max_soft_tokens": 70},
    ),
    "gemma3n": Case(
        "Gemma3nProcessor",
        ClipTower(**_TOWER | {"frames": 3008}, halvings=4, window=1, edges="last"),
        (188, 0),
        extractor="Gemma3nAudioFeatureExtractor",
        named={"audio_token": SOUND, "boa_token": BEGIN, "eoa_token": END}
        | dict.fromkeys(("image_token", "boi_token", "eoi_token"), "<1>"),
        pictures={"image_processor_type": "SiglipImageProcessor"},
    ),
    "phi4_multimodal": Case(
        "Phi4MultimodalProcessor",
        ConformerTower(**_TOWER | {"frames": 4000}, halvings=3, is_masked=False, window=1, edges="last"),
        (25, 394),
        extractor="Phi4MultimodalFeatureExtractor",
        named={"audio_token": SOUND, "image_token": "<1>"},
        pictures={"image_processor_type": "Phi4MultimodalImageProcessor"},
    ),
}


def make_folder(folder: Path, name: str) -> dict[str, bytes]:
    """Writes the files of one case; returns them by name."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    case = CASES[name]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(SPECIAL), special_tokens=list(SPECIAL), initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    token = {"audio_token_id": SOUND_ID}
    texts = {
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<eos>",
            "extra_special_tokens": case.named,
        },
        "preprocessor_config.json": {
            "feature_extractor_type": case.extractor,
            "feature_size": 80,
            "processor_class": case.processor,
            **case.pictures,
        },
        "processor_config.json": {"processor_class": case.processor, **case.settings},
        "config.json": {"model_type": name}
        | ({"audio_config": token} if name == "phi4_multimodal" else token),  # of which it is the tower's own
    }
    for file, content in texts.items():
        (folder / file).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return {path.name: path.read_bytes() for path in folder.iterdir()}
