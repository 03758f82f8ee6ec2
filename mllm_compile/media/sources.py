"""Checks what a caller gives as an image or a video, and brings it into one form: bytes that a worker decodes.
sound_sources.py is for sounds.

Nothing is decoded here, and no address is fetched: fetch.py does that. Local paths are read for callers in this process
alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mllm_compile.errors import RequestError
from mllm_compile.media.file_sources import IMAGE_FILE, Source, SourceItem, bounded, named_source
from mllm_compile.media.limits import MAX_FRAMES, MAX_ITEMS, MAX_PIXELS, MAX_PROMPT_PIXELS
from mllm_compile.media.prompt import KINDS
from mllm_compile.media.sound_sources import check_seconds, listed_sounds, read_sound
from mllm_compile.runtime.short_repr import short_repr, typed_repr

_IMAGE = "a PIL image, the bytes of a file, a data URL, a local path, or an array [height, width, 3] of uint8"
_VIDEO = "an array [frames, height, width, 3] of uint8, a list of images, or (frames, {'fps': …})"
_FRAMES_KEYS = ("fps", "frames_indices", "total_num_frames", "duration")


def read_items(multi_modal_data: Any, *, local_paths: bool) -> list[SourceItem]:
    """The items of vLLM's `multi_modal_data`, images first.

    Args:
        multi_modal_data: {"image": one or a list, "video": likewise, "audio": likewise}.
        local_paths: a text that is no URL is a path that is read.

    Raises:
        RequestError: it is something else, or exceeds a bound.
    """
    if not isinstance(multi_modal_data, Mapping):
        raise RequestError(
            f"multi_modal_data: expected {{'image': …, 'video': …, 'audio': …}}, got {typed_repr(multi_modal_data)}. "
            f"{_give(_IMAGE)}"
        )
    unknown = next((key for key in multi_modal_data if key not in KINDS), None)
    if unknown is not None:
        raise RequestError(
            f"multi_modal_data: expected the keys 'image', 'video' and 'audio', got {short_repr(unknown)}. "
            "Embeddings are not served."
        )
    images, videos = multi_modal_data.get("image"), multi_modal_data.get("video")
    items = [read_image(one, f"image {n}", local_paths=local_paths) for n, one in enumerate(_listed(images))]
    items += [read_video(one, f"video {n}", local_paths=local_paths) for n, one in enumerate(_listed_videos(videos))]
    sounds = enumerate(listed_sounds(multi_modal_data.get("audio")))
    items += [read_sound(one, f"sound {n}", local_paths=local_paths) for n, one in sounds]
    return checked_items(items)


def check_count(count: int) -> None:
    """
    Raises:
        RequestError: a prompt has too many images, videos and sounds.
    """
    if count > MAX_ITEMS:
        raise RequestError(
            f"expected at most {MAX_ITEMS} images, videos and sounds in a prompt, got {count}. Give fewer."
        )


def checked_items(items: list[SourceItem]) -> list[SourceItem]:
    """The same items.

    Raises:
        RequestError: they are too many, or have too many pixels or samples that need no decoding.
    """
    check_count(len(items))
    check_seconds(items)
    pixels = sum(math.prod(frame.size) for item in items for frame in item.frames if frame.size is not None)
    if pixels > MAX_PROMPT_PIXELS:
        raise RequestError(
            f"the prompt's images and videos have {pixels:,} pixels; expected at most {MAX_PROMPT_PIXELS:,}. "
            "Give smaller ones, or fewer."
        )
    return items


def read_image(given: Any, where: str, *, local_paths: bool) -> SourceItem:
    """
    Raises:
        RequestError: it is no image, or exceeds a bound.
    """
    return SourceItem("image", where, (_source(given, where, local_paths),))


def read_video(given: Any, where: str, *, local_paths: bool) -> SourceItem:
    """
    Raises:
        RequestError: it is no video, has no frames, or exceeds a bound.
    """
    frames, metadata = given, None
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Mapping):
        frames, metadata = given
        metadata = _checked_metadata(metadata, where)
    if isinstance(frames, np.ndarray):
        frames = list(frames) if frames.ndim == 4 else None
    if not isinstance(frames, Sequence) or isinstance(frames, (str, bytes, bytearray)):
        raise RequestError(
            f"{where}: expected {_VIDEO}, got {typed_repr(given)}. Video files are not read: give frames."
        )
    if not 1 <= len(frames) <= MAX_FRAMES:
        raise RequestError(f"{where}: expected 1 to {MAX_FRAMES} frames, got {len(frames)}. Sample it to fewer frames.")
    found = [_source(frame, f"{where}, frame {n}", local_paths) for n, frame in enumerate(frames)]
    return SourceItem("video", where, tuple(found), metadata)


def _checked_metadata(metadata: Mapping[str, Any], where: str) -> dict[str, Any]:
    unknown = next((key for key in metadata if key not in _FRAMES_KEYS), None)
    if unknown is not None:
        raise RequestError(
            f"{where}: expected the keys {', '.join(_FRAMES_KEYS)} beside frames, got {short_repr(unknown)}."
        )
    found: dict[str, Any] = {}
    for key, value in metadata.items():
        if key == "frames_indices":
            value = value.tolist() if isinstance(value, np.ndarray) else value
            is_right = isinstance(value, list) and all(type(index) is int and index >= 0 for index in value)
        else:
            is_right = isinstance(value, (int, float)) and math.isfinite(value) and value > 0
        if not is_right:
            raise RequestError(f"{where}: {key}: expected positive numbers, got {typed_repr(value)}.")
        found[key] = value
    return found


def _listed(given: Any) -> list[Any]:
    if given is None:
        return []
    return list(given) if isinstance(given, (list, tuple)) else [given]


def _listed_videos(given: Any) -> list[Any]:
    """One video is an array, a list of images, or a pair with its metadata; several are a list of these."""
    if given is None:
        return []
    if not isinstance(given, (list, tuple)) or (isinstance(given, tuple) and len(given) == 2):
        return [given]
    is_several = bool(given) and all(
        isinstance(one, (list, tuple)) or (isinstance(one, np.ndarray) and one.ndim == 4) for one in given
    )
    return list(given) if is_several else [given]


def _source(given: Any, where: str, local_paths: bool) -> Source:
    if isinstance(given, (bytes, bytearray, memoryview)):
        return Source(bounded(bytes(given), where, IMAGE_FILE))
    if isinstance(given, np.ndarray):
        return _of_array(given, where)
    if isinstance(given, (str, os.PathLike)):
        return named_source(given, where, IMAGE_FILE, local_paths)
    if callable(getattr(given, "tobytes", None)) and hasattr(given, "getexif"):
        return _of_pil(given, where)
    raise RequestError(f"{where}: expected {_IMAGE}, got {typed_repr(given)}.")


def _of_array(pixels: np.ndarray, where: str) -> Source:
    if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8:
        raise RequestError(
            f"{where}: expected an array [height, width, 3] of uint8, got {list(pixels.shape)} of {pixels.dtype}."
        )
    size = check_size(pixels.shape[0], pixels.shape[1], where)
    return Source(np.ascontiguousarray(pixels).tobytes(), size)


def _of_pil(image: Any, where: str) -> Source:
    from mllm_compile.media.decode import Refused, rgb_of

    width, height = image.size
    check_size(height, width, where)
    try:
        pixels = rgb_of(image)
    except (Refused, OSError, ValueError, SyntaxError) as error:  # a lazy image reads its file now
        raise RequestError(f"{where}: the PIL image cannot be read ({error}). Give one that was loaded.") from None
    return Source(pixels.tobytes(), (pixels.shape[0], pixels.shape[1]))


def check_size(height: int, width: int, where: str) -> tuple[int, int]:
    """(height, width).

    Raises:
        RequestError: there are no pixels, or too many.
    """
    if height < 1 or width < 1 or height * width > MAX_PIXELS:
        raise RequestError(
            f"{where}: the image is {width:,} × {height:,}; expected 1 to {MAX_PIXELS:,} pixels. Give a smaller image."
            if height and width
            else f"{where}: the image is {width} × {height}, without a pixel. Give another image."
        )
    return height, width


def _give(what: str) -> str:
    return f"An image is {what}."
