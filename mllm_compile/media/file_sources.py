"""Files of images and sounds that a caller gives as bytes, data URLs, local paths or addresses: checked, not decoded.

No address is fetched here: fetch.py does that. Local paths are read for callers in this process alone.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mllm_compile.errors import RequestError
from mllm_compile.media.limits import MAX_FILE_BYTES
from mllm_compile.media.prompt import MediaKind
from mllm_compile.media.sound import MAX_BYTES
from mllm_compile.runtime.short_repr import short_repr, typed_repr


@dataclass(frozen=True)
class FileKind:
    """The kind of a file: of images, or of sounds.

    Attributes:
        noun: image or sound.
        mime: how the kind of its data URL begins.
        example: of a data URL.
        most: bytes of a file.
        smaller: how to make one smaller.
    """

    noun: str
    mime: str
    example: str
    most: int
    smaller: str

    @property
    def a_noun(self) -> str:
        return f"an {self.noun}" if self.noun == "image" else f"a {self.noun}"


_OF_IMAGES = "image", "image/", "data:image/png;base64,…"
IMAGE_FILE = FileKind(*_OF_IMAGES, MAX_FILE_BYTES, "Save it smaller, or as a JPEG.")
SOUND_FILE = FileKind(
    "sound", "audio/", "data:audio/wav;base64,…", MAX_BYTES, "Cut it, or save it with 16,000 samples a second."
)


def file_kind(kind: MediaKind) -> FileKind:
    """The files of an item's kind."""
    return SOUND_FILE if kind == "audio" else IMAGE_FILE


@dataclass(frozen=True)
class Source:
    """An image before it is decoded.

    Attributes:
        data: a file's bytes; or pixels, 3 bytes each, row by row.
        size: (height, width) of pixels; None: `data` is a file, or samples.
        rate: of samples, float32; None: `data` is no samples.
        url: the address of that file, whose `data` is empty until it is fetched.
    """

    data: bytes
    size: tuple[int, int] | None = None
    rate: int | None = None
    url: str | None = None


@dataclass(frozen=True)
class SourceItem:
    """An image, a video's frames in order, or a sound as the one frame.

    Attributes:
        where: names it in errors: "image 0".
        metadata: of a video: the keys of Transformers' VideoMetadata that a caller has given.
    """

    kind: MediaKind
    where: str
    frames: tuple[Source, ...]
    metadata: Mapping[str, Any] | None = None


def named_source(given: str | os.PathLike[str], where: str, kind: FileKind, local_paths: bool) -> Source:
    """The file of a data URL, an address or a local path.

    Raises:
        RequestError: no such file can be read, or it is too large.
    """
    if isinstance(given, str) and given[:5].lower() == "data:":
        return Source(of_data_url(given, where, kind))
    if isinstance(given, str) and "://" in given[:16]:
        if given[:8].lower().startswith(("http://", "https://")):
            return Source(b"", url=given)
        raise RequestError(
            f"{where}: {short_repr(given)} is an address of a kind that is never fetched. Give its bytes, or a data "
            f"URL ({kind.example})."
        )
    if not local_paths:
        raise RequestError(f"{where}: expected a data URL ({kind.example}), got {typed_repr(given)}.")
    return Source(_of_file(os.fspath(given), where, kind))


def bounded(data: bytes, where: str, kind: FileKind) -> bytes:
    """The same bytes.

    Raises:
        RequestError: no bytes are given, or too many.
    """
    if not data:
        raise RequestError(f"{where}: the {kind.noun} is empty; expected the bytes of {kind.a_noun}'s file.")
    if len(data) > kind.most:
        raise RequestError(
            f"{where}: the {kind.noun}'s file has {len(data):,} bytes; expected at most {kind.most:,}. {kind.smaller}"
        )
    return data


def of_data_url(url: str, where: str, kind: FileKind) -> bytes:
    """The bytes of `data:image/…;base64,…`, or of a sound's.

    Raises:
        RequestError: it is no such URL, or too long.
    """
    head, comma, body = url.partition(",")
    mime, *parameters = head[len("data:") :].lower().split(";")
    if not comma or "base64" not in parameters or not (mime.startswith(kind.mime) or not mime):
        raise RequestError(
            f"{where}: expected data:{kind.mime}…;base64,… with the {kind.noun}, got {short_repr(head[:60])}."
        )
    return of_base64(body, f"{where}: the data URL", where, kind)


def of_base64(text: str, what: str, where: str, kind: FileKind) -> bytes:
    """The bytes of base64; `what` names it in errors.

    Raises:
        RequestError: the text is no base64, or too long.
    """
    if len(text) > kind.most * 4 // 3 + 1024:
        raise RequestError(
            f"{what} has {len(text):,} characters; expected {kind.a_noun} of at most {kind.most:,} bytes. "
            f"{kind.smaller}"
        )
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise RequestError(f"{what} is no base64 ({error}). Encode the {kind.noun}'s bytes again.") from None
    return bounded(data, where, kind)


def _of_file(path: str | bytes, where: str, kind: FileKind) -> bytes:
    path = os.path.expanduser(os.fsdecode(path))
    try:
        # Not blocking: a pipe without a writer would hold the caller for good.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
            data = file.read(kind.most + 1) if is_file else b""
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(
            f"{where}: {short_repr(path)} cannot be read ({reason}). Give {kind.a_noun}'s file."
        ) from None
    if not is_file:
        raise RequestError(f"{where}: {short_repr(path)} is no regular file. Give {kind.a_noun}'s file.")
    return bounded(data, where, kind)
