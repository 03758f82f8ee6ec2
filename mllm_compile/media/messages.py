"""Images and sounds in chats: parts in OpenAI's form or Transformers' become items, a template gets their places."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mllm_compile.errors import RequestError
from mllm_compile.media.file_sources import SOUND_FILE, SourceItem, of_base64
from mllm_compile.media.sound_sources import read_sound
from mllm_compile.media.sources import check_count, checked_items, read_image, read_video
from mllm_compile.runtime.short_repr import short_repr, typed_repr

_IMAGE_KINDS = ("image_url", "image", "image_pil", "input_image")
_VIDEO_KINDS = ("video", "video_url", "input_video")
_SOUND_KINDS = ("input_audio", "audio_url", "audio")
_KINDS = (*_IMAGE_KINDS, *_VIDEO_KINDS, *_SOUND_KINDS)
_SOUND_FORMATS = ("wav", "mp3", "flac", "ogg", "opus")
_DETAILS = (None, "auto", "high")


def has_media(messages: Any) -> bool:
    """True if a part of a message's content is an image, a video or a sound."""
    return any(_are_media(messages))


def _are_media(messages: Any) -> Iterator[bool]:
    """True for each part of the contents that is an image, a video or a sound, False for the others."""
    parts = (part for message in _listed(messages) for part in _parts(message))
    return (_kind(part) in _KINDS for part in parts)


def take_media(messages: Any, *, local_paths: bool) -> tuple[Any, list[SourceItem]]:
    """The messages with places where images and sounds were, and these in their order.

    A malformed message or part stays as it is: other checks refuse it.

    Args:
        local_paths: a part may name a file of this machine.

    Raises:
        RequestError: an image or a sound is malformed, or cannot be taken.
    """
    count = sum(_are_media(messages))
    if not count:
        return messages, []
    check_count(count)  # before one is read: there may be thousands
    items: list[SourceItem] = []
    found: list[Any] = []
    for n, message in enumerate(messages):
        if not _parts(message):
            found.append(message)
            continue
        where = f"messages: message {n}"
        content = [_without_media(part, where, items, local_paths) for part in message["content"]]
        found.append({**message, "content": content})
    return found, checked_items(items)


def _without_media(part: Any, where: str, items: list[SourceItem], local_paths: bool) -> Any:
    kind = _kind(part)
    if kind in _IMAGE_KINDS:
        given = _given_image(part, kind, where)
        items.append(read_image(given, f"image {_count(items, 'image')}", local_paths=local_paths))
        return {"type": "image"}
    if kind in _VIDEO_KINDS:
        if kind != "video" or part.get("video") is None:
            raise RequestError(
                f"{where}: video files are not read. Give frames from Python, as {{'type': 'video', 'video': …}} with "
                "a list of images, or send frames as images."
            )
        items.append(read_video(part["video"], f"video {_count(items, 'video')}", local_paths=local_paths))
        return {"type": "video"}
    if kind in _SOUND_KINDS:
        place = f"sound {_count(items, 'audio')}"
        items.append(read_sound(_given_sound(part, kind, where, place), place, local_paths=local_paths))
        return {"type": "audio"}
    return part


def _given_sound(part: Mapping[str, Any], kind: str, where: str, place: str) -> Any:
    """The sound of OpenAI's input_audio, of vLLM's audio_url, or of Transformers' part."""
    given = part.get(kind)
    form = "{'type': 'input_audio', 'input_audio': {'data': BASE64, 'format': 'wav'}}"
    if kind == "input_audio":
        data, format_ = (given.get(name) for name in ("data", "format")) if isinstance(given, Mapping) else (None, None)
        if not isinstance(data, str) or not data:
            raise RequestError(f"{where}: a part has the type 'input_audio', but no sound; expected {form}.")
        if format_ is not None and format_ not in _SOUND_FORMATS:
            raise RequestError(
                f"{where}: format: expected {', '.join(_SOUND_FORMATS)}, got {typed_repr(format_)}. Convert it: ffmpeg "
                "-i IN -ac 1 -ar 16000 -c:a pcm_s16le OUT.wav"
            )
        return of_base64(data, f"{place}: data", place, SOUND_FILE)
    given = given.get("url") if isinstance(given, Mapping) else given
    if given is None and kind == "audio":  # as Qwen's examples have it
        given = part.get("audio_url")
    if given is None or (isinstance(given, str) and not given):
        raise RequestError(f"{where}: a part has the type {short_repr(kind)}, but no sound; expected {form}.")
    return given


def _given_image(part: Mapping[str, Any], kind: str, where: str) -> Any:
    key = "image_url" if kind == "input_image" else kind
    given = part.get(key)
    detail = part.get("detail")
    if isinstance(given, Mapping):
        detail = given.get("detail", detail)
        given = given.get("url")
    if detail not in _DETAILS:
        raise RequestError(
            f"{where}: detail: expected auto or high, got {typed_repr(detail)}; the model's own processor sets the "
            "size."
        )
    if given is None or (isinstance(given, str) and not given):
        form = "{'type': 'image_url', 'image_url': {'url': 'data:image/png;base64,…'}}"
        raise RequestError(f"{where}: a part has the type {short_repr(kind)}, but no image; expected {form}.")
    return given


def _count(items: Sequence[SourceItem], kind: str) -> int:
    return sum(item.kind == kind for item in items)


def _listed(messages: Any) -> Sequence[Any]:
    return messages if isinstance(messages, (list, tuple)) else ()


def _parts(message: Any) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, (list, tuple)) else ()


def _kind(part: Any) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    return kind if isinstance(kind, str) else None
