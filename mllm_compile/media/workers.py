"""Asks workers (worker.py) to decode images and sounds, and to run a model's processor; from any thread.

The result is a SharedPrompt: token ids, and the name of the shared memory with the tensors. In this process `take`
makes a MediaPrompt of it; a server sends its fields to the engine's process, which does the same there.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from mllm_compile.errors import MllmError, RequestError
from mllm_compile.media.file_sources import SourceItem
from mllm_compile.media.limits import MAX_HELD_BYTES, MAX_MEMORY, MAX_SECONDS, MAX_TENSOR_BYTES
from mllm_compile.media.prompt import MediaItem, MediaPrompt
from mllm_compile.media.protocol import (
    MAX_ANSWER,
    PREPARED,
    REFUSAL,
    TOO_LARGE,
    TOO_MUCH_MEMORY,
    pack,
    unpack,
)
from mllm_compile.media.segment import Segment, remove_left_segments, remove_segment, take_tensors
from mllm_compile.process.helper_process import HelperProcesses, NoAnswer

_MOST_PROCESSES = 2
_MAX_WAIT_S = 60
_MAX_START_S = 180  # it imports Transformers
_ADVICE = "Give smaller images or shorter sounds, or fewer."


class TooManyImagesError(MllmError):
    """The images of requests that wait hold too much memory; another try may do."""


class SharedPrompt:
    """A prompt whose tensors are in shared memory, which is given back with it.

    Args:
        segment: the memory's name.
        token_ids: int32.
        is_feature: a byte a token.
        items: of each item kind, start, length, digest (in hexadecimal) and its tensors' layout (segment.py).
        remove: gives the memory back, called once; None: its name is removed.
    """

    def __init__(
        self,
        segment: str,
        token_ids: bytes,
        is_feature: bytes,
        items: list[dict[str, Any]],
        remove: Callable[[], None] | None = None,
    ) -> None:
        self.segment = segment
        self.token_ids = token_ids
        self.is_feature = is_feature
        self.items = items
        # Also when a request is given up before anybody holds it.
        self._remove = weakref.finalize(self, remove or partial(remove_segment, segment))

    def take(self) -> MediaPrompt:
        """The prompt with its tensors; once.

        Raises:
            MllmError: the memory is not there any more.
        """
        try:
            tensors = take_tensors(self.segment, [item["tensors"] for item in self.items])
        except (OSError, ValueError) as error:
            raise MllmError(f"the request's images are not in shared memory any more ({error}). Ask again.") from None
        finally:
            self.remove()
        items = tuple(
            MediaItem(item["kind"], item["start"], item["length"], bytes.fromhex(item["digest"]), own)
            for item, own in zip(self.items, tensors, strict=True)
        )
        token_ids = np.frombuffer(self.token_ids, np.int32).tolist()
        return MediaPrompt(token_ids, items, np.frombuffer(self.is_feature, bool))

    def remove(self) -> None:
        """Gives the memory back, unless it was taken; may be called again."""
        self._remove()


class MediaWorkers(HelperProcesses):
    """Workers for one model.

    Args:
        files: name → bytes of the model's tokenizer, processor and config.json.
    """

    def __init__(self, files: Mapping[str, bytes]) -> None:
        super().__init__(
            "mllm_compile.media.worker",
            pack({"files": list(files)}, list(files.values())),
            task="that decodes images and sounds",
            seconds=MAX_SECONDS,
            max_wait_s=_MAX_WAIT_S,
            max_start_s=_MAX_START_S,
            max_answer=MAX_ANSWER,
            most=_MOST_PROCESSES,
            kept_after=(PREPARED, REFUSAL, TOO_LARGE),
        )
        self._held_lock = threading.RLock()  # taken by finalizers, which may run in between
        self._held_bytes = 0  # by what is prepared and not taken
        remove_left_segments()

    def prepare(
        self, prompt: str | Sequence[int], items: Sequence[SourceItem], adds_special_tokens: bool
    ) -> SharedPrompt:
        """The prompt of a text, or of token ids, with placeholders and its items. Its memory is the caller's: `take` it
        or `remove` it.

        Raises:
            RequestError: an image or the text is refused, or exceeds a limit.
            TooManyImagesError: other requests' images hold too much memory.
            MllmError: no process can be started, or there is no shared memory.
        """
        if self._held_bytes > MAX_HELD_BYTES:
            raise TooManyImagesError(
                f"images and sounds of requests that wait hold {self._held_bytes >> 20} MiB of shared memory; expected "
                f"at most {MAX_HELD_BYTES >> 20} MiB. Ask again later."
            )
        segment = Segment(MAX_TENSOR_BYTES)
        try:
            header, blobs = self._prepared(prompt, items, adds_special_tokens, segment.name)
        except BaseException:
            segment.remove()
            raise
        num_bytes = header["num_bytes"]
        self._hold(num_bytes)
        remove = partial(self._give_back, segment, num_bytes)
        return SharedPrompt(segment.name, bytes(blobs[0]), bytes(blobs[1]), header["items"], remove)

    def _hold(self, num_bytes: int) -> None:
        with self._held_lock:
            self._held_bytes += num_bytes

    def _give_back(self, segment: Segment, num_bytes: int) -> None:
        segment.remove()
        self._hold(-num_bytes)

    def _prepared(
        self, prompt: str | Sequence[int], items: Sequence[SourceItem], adds_special_tokens: bool, segment: str
    ) -> tuple[dict[str, Any], list[memoryview]]:
        asked = [
            {
                "kind": item.kind,
                "where": item.where,
                "frames": [frame.size for frame in item.frames],
                "rates": [frame.rate for frame in item.frames],
                "metadata": item.metadata,
            }
            for item in items
        ]
        text, ids = (prompt, ()) if isinstance(prompt, str) else (None, prompt)
        request = pack(
            {"text": text, "items": asked, "adds_special_tokens": adds_special_tokens, "segment": segment},
            [np.asarray(ids, np.int32).tobytes(), *(frame.data for item in items for frame in item.frames)],
        )
        try:
            kind, answer = self.ask(request)
        except NoAnswer as none:
            end = f", the most it may. {_ADVICE}" if none.is_limit else ". Ask again."
            raise RequestError(f"decoding the request's images or sounds {none.why}{end}") from None
        if kind == PREPARED:
            return unpack(answer)
        limit = {
            TOO_MUCH_MEMORY: f"decoding the request's images or sounds needs more than {MAX_MEMORY >> 30} GiB of "
            "memory",
            TOO_LARGE: f"the request's images or sounds become more than {MAX_TENSOR_BYTES >> 20} MiB, or than is left "
            "of the machine's shared memory (/dev/shm)",
        }.get(kind)
        raise RequestError(answer.decode("utf-8", "replace") if limit is None else f"{limit}. {_ADVICE}")
