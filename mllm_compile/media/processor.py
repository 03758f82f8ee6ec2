"""A model's own processor, by Transformers: a prompt's text and its decoded images and sounds become a MediaPrompt.

Runs in a worker (worker.py), which alone imports Transformers. Each item goes through the processor by itself, so its
tensors need no cutting. Then the text, with the processor's output in place of each placeholder, is tokenized once. In
token ids, placeholders are replaced. Images are prepared by the processor's Pillow form on every machine: the same
image has the same tensors.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mllm_compile.errors import RequestError
from mllm_compile.files.served_part import served_part
from mllm_compile.media.decode import Refused
from mllm_compile.media.files import CONFIG_FILE, PROCESSOR_FILES, placeholder_of
from mllm_compile.media.processed_sounds import SoundPart, feature_extractor
from mllm_compile.media.prompt import KINDS, NOUNS, MediaItem, MediaKind, MediaPrompt
from mllm_compile.text.control_tokens import unmarked
from mllm_compile.text.tokenizer import Tokenizer, load_tokenizer
from mllm_compile.text.tokenizer_files import TOKENIZER_CONFIG_FILE

_NO_TENSORS = (
    *("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"),
    *("text_replacement_offsets", "video_metadata", "batch_num_images", "cross_attention_mask"),
)
_MOST_REASON = 400  # characters


@dataclass(frozen=True, eq=False)
class DecodedItem:
    """An image's pixels [1, height, width, 3] uint8, a video's [frames, height, width, 3] with its metadata, or samples
    [N] float32 of a sound at the processor's rate."""

    kind: MediaKind
    where: str
    frames: np.ndarray
    metadata: Mapping[str, Any] | None = None


@dataclass(frozen=True, eq=False)
class _Processed:
    """One item, processed by itself."""

    item: DecodedItem
    text: str  # that stands for its placeholder
    feature_id: int  # of the tokens that take its features
    num_features: int
    digest: bytes
    tensors: dict[str, np.ndarray]


class MediaProcessor:
    """The processor in a folder with a model's files.

    Raises:
        Refused: Transformers cannot load it, or it is of no kind that is served.
    """

    def __init__(self, folder: Path) -> None:
        try:
            self._processor = _load(folder)
            self._tokenizer = _tokenizer(folder)
        except Refused:
            raise
        except Exception as error:  # whatever Transformers raises at strange files
            raise Refused(f"the model's processor cannot be loaded ({_reason(error)})") from None
        config = served_part(json.loads((folder / CONFIG_FILE).read_bytes()))
        self._ids = {kind: placeholder_of(config, kind) for kind in KINDS}
        pictures = getattr(self._processor, "image_processor", None)
        self._tokens = {kind: getattr(self._processor, f"{kind}_token", None) for kind in KINDS}
        if pictures is None:
            self._tokens["image"] = None
        if all(token is None for token in self._tokens.values()):
            raise Refused(f"the model's processor ({_class_name(folder)}) names no token of images, videos or sounds")
        self._settings = _settings_of(folder)
        # One of several images has fewer features then, as of LLaVA-OneVision.
        self._counts_images = pictures is not None and "batch_num_images" in pictures.model_input_names
        self._sounds = SoundPart.of(self._processor)

    @property
    def sound_rate(self) -> int:
        """Samples of a second that it takes.

        Raises:
            Refused: it takes no sounds.
        """
        if self._sounds is None:
            raise Refused("the model's processor prepares no sounds. Leave them out")
        return self._sounds.rate

    def prepare(
        self, prompt: str | Sequence[int], items: Sequence[DecodedItem], adds_special_tokens: bool
    ) -> MediaPrompt:
        """The prompt of a text with placeholders for `items` in their order; or of token ids, with a placeholder for
        each item or for each feature.

        Args:
            adds_special_tokens: to a text.

        Raises:
            Refused: places and items are not as many, or the processor refuses one.
        """
        self._check_kinds(items)
        if isinstance(prompt, str):
            self._check_counts(prompt, items)
        is_one_of_several = sum(item.kind == "image" for item in items) > 1
        processed = [self._process(item, is_one_of_several) for item in items]
        if isinstance(prompt, str):
            text, in_order = self._expanded(prompt, processed)
            token_ids = self._encoded(text, adds_special_tokens)
        else:
            token_ids, in_order = self._expanded_ids(prompt, processed)
        ids = {token_id for _, _, token_id in self._served()}
        places = {token_id: np.flatnonzero(np.asarray(token_ids) == token_id) for token_id in ids}
        is_feature = np.zeros(len(token_ids), bool)
        taken = dict.fromkeys(ids, 0)
        found = []
        for made in in_order:
            begin = taken[made.feature_id]
            own = places[made.feature_id][begin : begin + made.num_features]
            taken[made.feature_id] += made.num_features
            if len(own) < made.num_features:
                break
            is_feature[own] = True
            start, last = int(own[0]), int(own[-1])
            found.append(MediaItem(made.item.kind, start, last - start + 1, made.digest, made.tensors))
        if any(taken[token_id] != len(places[token_id]) for token_id in ids):
            raise Refused(
                "the prompt holds a token of images or videos beside its placeholders; write one placeholder for each "
                "item, and nothing that is repeated for its features"
            )
        return MediaPrompt(token_ids, tuple(sorted(found, key=lambda item: item.start)), is_feature)

    def _served(self) -> Iterator[tuple[MediaKind, str, int]]:
        """The kinds that the model takes, each with its placeholder's text and id."""
        for kind, token in self._tokens.items():
            token_id = self._ids[kind]
            if token is not None and token_id is not None:
                yield kind, token, token_id

    def _check_kinds(self, items: Sequence[DecodedItem]) -> None:
        served = {kind for kind, _, _ in self._served()}
        for kind in self._tokens:
            given = sum(item.kind == kind for item in items)
            if given and kind not in served:
                raise Refused(f"the model takes no {NOUNS[kind]}s, and the request has {given}. Leave them out")

    def _check_counts(self, text: str, items: Sequence[DecodedItem]) -> None:
        for kind, token, _ in self._served():
            given = sum(item.kind == kind for item in items)
            places = len(re.findall(unmarked(token), text))
            if places != given:
                raise Refused(
                    f"the prompt has {places} places for {NOUNS[kind]}s ({token}), but {given} {NOUNS[kind]}s were "
                    f"given. Write "
                    f"{token} once for each, where it belongs; a chat's template does so by itself"
                )

    def _expanded(self, text: str, processed: Sequence[_Processed]) -> tuple[str, list[_Processed]]:
        """The text with each placeholder replaced, and what the items became, in the order of their places."""
        kind_of = {token: kind for kind, token, _ in self._served()}
        turns = {kind: iter([made for made in processed if made.item.kind == kind]) for kind in KINDS}
        parts = re.split(f"({'|'.join(map(unmarked, kind_of))})", text)
        in_order = [next(turns[kind_of[part]]) for part in parts[1::2]]
        parts[1::2] = [made.text for made in in_order]
        return "".join(parts), in_order

    def _expanded_ids(
        self, token_ids: Sequence[int], processed: Sequence[_Processed]
    ) -> tuple[list[int], list[_Processed]]:
        """Token ids with each placeholder replaced, unless there is one a feature already; and as `_expanded`."""
        turns: dict[int, Iterator[_Processed]] = {}
        there: list[_Processed] = []  # whose features have their tokens
        for kind, token, token_id in self._served():
            own = [made for made in processed if made.item.kind == kind]
            places, features = token_ids.count(token_id), sum(made.num_features for made in own)
            if own and token_ids.count(own[0].feature_id) == features:
                there += own
            elif places == len(own):
                turns[token_id] = iter(own)
            elif own or all(made.feature_id != token_id for made in processed):
                raise Refused(
                    f"the prompt has {places} tokens {token_id} ({token}), but {len(own)} {NOUNS[kind]}s were given, "
                    f"which have {features} features. Put one where each {NOUNS[kind]} belongs, or one for each feature"
                )
        found: list[int] = []
        replaced: list[_Processed] = []
        for token_id in token_ids:
            if token_id not in turns:
                found.append(token_id)
                continue
            replaced.append(next(turns[token_id]))
            found += self._encoded(replaced[-1].text, False)
        return found, there + replaced

    def _encoded(self, text: str, adds_special_tokens: bool) -> list[int]:
        """Token ids by the tokenizer that reads texts without images, too."""
        try:
            return self._tokenizer.encode_chat(text, adds_special_tokens)
        except RequestError as error:
            raise Refused(str(error).rstrip(".")) from None

    def _process(self, item: DecodedItem, is_one_of_several: bool) -> _Processed:
        from PIL import Image

        token = self._tokens[item.kind] or ""
        if item.kind == "audio":
            assert self._sounds is not None, "it was asked for its rate"
            return self._heard(item, token, self._sounds)
        # A processor that prepares one of several images otherwise is given this one twice.
        count = 2 if item.kind == "image" and is_one_of_several and self._counts_images else 1
        if item.kind == "video":
            given = self._video_arguments(item)
        else:
            # Of an array a processor guesses which axis the channels are, and guesses wrong at 1, 3 or 4 rows.
            image = Image.fromarray(item.frames[0])
            given = {"images": [[image] * count] if self._counts_images else [image]}
        given |= {"return_tensors": "np", "return_text_replacement_offsets": True}
        try:
            made = self._processor(text=[token * count], **given)
            replaced = made.get("text_replacement_offsets")  # None: its placeholders stay as they are
            replacements = [{"replacement": token}] * count if replaced is None else replaced[0]
        except Exception as error:  # whatever a processor raises at sizes that it does not like
            raise Refused(f"{item.where}: the model's processor refuses it ({_reason(error)})") from None
        feature_id, num_features = self._features_of(item, np.asarray(made["input_ids"]))
        if len(replacements) != count or not num_features:
            raise Refused(f"{item.where}: the model's processor makes no features of it, so it cannot be served")
        num_features //= count
        tensors = _tensors(made, item.where)
        if count > 1:
            tensors = {name: value[:1] for name, value in tensors.items()}
        text = replacements[0]["replacement"]
        return _Processed(item, text, feature_id, num_features, self._digest(item, num_features), tensors)

    def _features_of(self, item: DecodedItem, token_ids: np.ndarray) -> tuple[int, int]:
        """The id of the tokens that take an item's features, and their number. A video may have images' tokens, as in
        GLM-4V."""
        kinds: tuple[MediaKind, ...] = ("video", "image") if item.kind == "video" else (item.kind,)
        counted = [(own, int((token_ids == own).sum())) for kind in kinds if (own := self._ids[kind]) is not None]
        return next((one for one in counted if one[1]), counted[0])

    def _heard(self, item: DecodedItem, token: str, sounds: SoundPart) -> _Processed:
        """A sound, processed by itself."""
        try:
            heard = sounds.prepare(item.frames, token)
            feature_id, num_features = self._features_of(item, np.asarray(heard.token_ids))
        except Refused as refusal:
            raise Refused(f"{item.where}: {refusal}") from None
        except Exception as error:  # whatever a processor raises at lengths that it does not like
            raise Refused(f"{item.where}: the model's processor refuses it ({_reason(error)})") from None
        if not num_features:
            raise Refused(f"{item.where}: the sound is too short for the model, which makes no feature of it")
        tensors = _tensors(heard.made, item.where)
        return _Processed(item, heard.text, feature_id, num_features, self._digest(item, num_features), tensors)

    def _video_arguments(self, item: DecodedItem) -> dict[str, Any]:
        if getattr(self._processor, "video_processor", None) is None:
            raise Refused(f"{item.where}: {_why_no_videos()}, or give single frames as images")
        given: dict[str, Any] = {"videos": [item.frames.transpose(0, 3, 1, 2)], "do_sample_frames": False}
        metadata = dict(item.metadata or {})
        metadata.setdefault("frames_indices", list(range(len(item.frames))))
        metadata.setdefault("total_num_frames", len(item.frames))
        if len(metadata["frames_indices"]) != len(item.frames):
            raise Refused(
                f"{item.where}: expected frames_indices of its {len(item.frames)} frames, got "
                f"{len(metadata['frames_indices'])}"
            )
        return given | {"video_metadata": [metadata]}

    def _digest(self, item: DecodedItem, num_features: int) -> bytes:
        about = [self._settings, item.kind, list(item.frames.shape), item.metadata, num_features]
        seen = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
        seen.update(np.ascontiguousarray(item.frames).data)
        return seen.digest()


def _load(folder: Path) -> Any:
    """The processor, its images by Pillow, its videos where torchvision is installed."""
    from transformers import AutoTokenizer
    from transformers.models.auto.processing_auto import processor_class_from_name

    name = _class_name(folder)
    kind = processor_class_from_name(name)
    if kind is None:
        raise Refused(f"the model's processor is a {name}, which this Transformers does not have")
    load: dict[str, Callable[[], Any]] = {
        # Of placeholders alone, which it must know, whatever users' texts are read as.
        "tokenizer": lambda: AutoTokenizer.from_pretrained(folder, split_special_tokens=False),
        "image_processor": lambda: _image_processor(folder, is_needed="audio_processor" not in parts),
        "video_processor": lambda: _video_processor(folder),
        "feature_extractor": lambda: feature_extractor(folder),
        "audio_processor": lambda: feature_extractor(folder),
    }
    parts = kind.get_attributes()
    other = next((part for part in parts if part not in load), None)
    of_media = {"image_processor", "feature_extractor", "audio_processor"} & set(parts)
    if other is not None or "tokenizer" not in parts or not of_media:
        raise Refused(
            f"the model's processor ({name}) is of {', '.join(parts)}; texts, images, videos and sounds are served"
        )
    options, _ = kind.get_processor_dict(folder)
    return _may_lack_parts(kind).from_args_and_dict([load[part]() for part in parts], options)


def _tokenizer(folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(folder)
    if tokenizer is None:
        raise Refused("the model has no tokenizer, and a text with images needs one")
    return tokenizer


def _video_processor(folder: Path) -> Any:
    """The processor of videos; None: the folder describes none, or torchvision is missing."""
    from transformers import AutoVideoProcessor
    from transformers.utils import is_torchvision_available

    if not is_torchvision_available():
        return None
    try:
        return AutoVideoProcessor.from_pretrained(folder)
    except (OSError, ValueError):  # no file of the folder names one: images are served all the same
        return None


def _why_no_videos() -> str:
    from transformers.utils import is_torchvision_available

    if is_torchvision_available():
        return "the model's files describe no processor of videos. Add its video_preprocessor_config.json"
    return (
        "Transformers prepares videos with torchvision, which is not installed. Install the torchvision that fits torch"
    )


def _image_processor(folder: Path, is_needed: bool) -> Any:
    """The image processor's Pillow form; None: it has none, and sounds are served all the same. Not by
    AutoImageProcessor, which needs torchvision in some releases."""
    import transformers

    own = [_read_json(folder / name) for name in PROCESSOR_FILES]
    names = [found.get("image_processor_type") for one in own for found in (one, one.get("image_processor") or {})]
    name = next((name for name in names if isinstance(name, str)), None)
    if name is None:
        raise Refused(f"none of the model's files ({', '.join(PROCESSOR_FILES)}) names its image_processor_type")
    kind = getattr(transformers, f"{name.removesuffix('Fast').removesuffix('Pil')}Pil", None)
    if kind is None and is_needed:
        raise Refused(f"the model's image processor is a {name}, and this Transformers has no Pillow version of it")
    return None if kind is None else kind.from_pretrained(folder)


def _may_lack_parts(kind: Any) -> Any:
    """The class, whose parts for videos, which need torchvision, and for sound may be None."""

    def check(self: Any, name: str, part: Any) -> Any:
        return None if part is None else kind.check_argument_for_proper_class(self, name, part)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})


def _class_name(folder: Path) -> str:
    for file in (*PROCESSOR_FILES, TOKENIZER_CONFIG_FILE):
        name = _read_json(folder / file).get("processor_class")
        if isinstance(name, str):
            return name
    raise Refused(f"none of the model's files ({', '.join(PROCESSOR_FILES)}) names its processor_class")


def _read_json(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_bytes()) if path.exists() else {}
    return found if isinstance(found, dict) else {}


def _settings_of(folder: Path) -> list[str]:
    """The things that tensors depend on beside pixels."""
    import transformers

    files = [folder / name for name in PROCESSOR_FILES]
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "" for path in files]
    return [transformers.__version__, *sums]


def _tensors(made: Mapping[str, Any], where: str) -> dict[str, np.ndarray]:
    """The tensors of what a processor gives, for an item's tower."""
    return {name: _array(value, where) for name, value in made.items() if name not in _NO_TENSORS}


def _array(value: Any, where: str) -> np.ndarray:
    array = np.ascontiguousarray(value)
    if array.dtype.kind not in "fiub":
        raise Refused(f"{where}: the model's processor makes a {array.dtype} of it, which no program takes")
    return array


def _reason(error: Exception) -> str:
    said = " ".join(str(error).split())
    return (said if len(said) <= _MOST_REASON else f"{said[:_MOST_REASON]}…") or type(error).__name__
