"""The part of a model's processor about sounds: samples become what its tower takes, and a text of placeholders.

Runs in a worker, beside processor.py. A processor that would cut a sound has it refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mllm_compile.media.decode import Refused
from mllm_compile.runtime.media.tower import SOUND_INPUT

_MASKS = ("feature_attention_mask", "input_features_mask")
_OTHER_NAME = "audio_input_features"  # Phi-4-multimodal's, beside the number of features
_SPARE_FRAMES = 8  # by which extractors' ways of counting the frames of a sound differ


@dataclass(frozen=True, eq=False)
class Heard:
    """A sound as its processor gives it: what its tower takes, token ids, and the text that they are of."""

    made: Mapping[str, Any]
    token_ids: Any
    text: str


class SoundPart:
    """The part of one processor.

    Attributes:
        rate: samples of a second that it takes.
    """

    def __init__(self, processor: Any, extractor: Any) -> None:
        self._processor, self._extractor = processor, extractor
        self.rate = int(extractor.sampling_rate)

    @classmethod
    def of(cls, processor: Any) -> SoundPart | None:
        """None: the processor has none, or what it needs is missing."""
        extractor = getattr(processor, "feature_extractor", None) or getattr(processor, "audio_processor", None)
        return None if extractor is None or not hasattr(extractor, "sampling_rate") else cls(processor, extractor)

    def prepare(self, samples: np.ndarray, token: str) -> Heard:
        """
        Args:
            samples: [N] float32.
            token: the placeholder.

        Raises:
            Refused: it is longer than the model hears.
        """
        if hasattr(self._processor, "_retrieve_input_features"):
            return self._of_windows(samples, token)
        made = self._processor(
            text=[token],
            audio=[samples],
            return_tensors="pt",
            return_text_replacement_offsets=True,
            audio_kwargs={"sampling_rate": self.rate},
            text_kwargs={"padding": False},  # some tokenizers lack what fills up
        )
        text = made["text_replacement_offsets"][0][0]["replacement"]
        if _OTHER_NAME in made:
            return Heard({SOUND_INPUT: made[_OTHER_NAME]}, made["input_ids"], text)
        self._check_whole(made, samples.size)
        return Heard(made, made["input_ids"], text)

    def _of_windows(self, samples: np.ndarray, token: str) -> Heard:
        """The sound for Voxtral, whose processor takes chats alone: a feature is eight frames of whole windows."""
        settings = dict(self._processor.audio_kwargs)
        frames = settings.pop("max_source_positions")
        windows = self._processor._retrieve_input_features([samples], frames, **settings)
        count = windows.shape[0] * frames // 8
        return Heard({"input_features": windows}, [self._processor.audio_token_id] * count, token * count)

    def _check_whole(self, made: Mapping[str, Any], num_samples: int) -> None:
        """Refuses a sound that the extractor has cut, as most do in silence."""
        hop = getattr(self._extractor, "hop_length", None)
        mask = next((made[name] for name in _MASKS if name in made), None)
        if mask is None or not hop:
            return
        heard = int(np.count_nonzero(np.asarray(mask))) * hop
        if heard + _SPARE_FRAMES * hop < num_samples:
            raise Refused(
                f"the sound has {num_samples / self.rate:,.1f} s, and the model hears {heard / self.rate:,.1f} s of "
                "it. Cut it into shorter ones"
            )


def feature_extractor(folder: Path) -> Any:
    """The extractor of sounds; None: the folder describes none, or a library that it needs is missing."""
    from transformers import AutoFeatureExtractor

    try:
        return AutoFeatureExtractor.from_pretrained(folder)
    except (OSError, ValueError, ImportError):  # images are served all the same
        return None
