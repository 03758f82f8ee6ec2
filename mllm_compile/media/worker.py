"""The process that decodes images and sounds, and runs a model's processor: what a stranger's file does, it does here.

It reads no file that a request names, writes none, fetches nothing, and has limits on memory and on processor time;
workers.py is the side that asks. It alone imports Transformers and Pillow, once, when the first image comes.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from mllm_compile.errors import RequestError
from mllm_compile.media.decode import Refused, decode
from mllm_compile.media.limits import MAX_MEMORY, MAX_PROMPT_PIXELS, MAX_SOUND_SECONDS
from mllm_compile.media.processor import DecodedItem, MediaProcessor
from mllm_compile.media.protocol import PREPARED, REFUSAL, TOO_LARGE, TOO_MUCH_MEMORY, pack, unpack
from mllm_compile.media.segment import SegmentFull, write_tensors
from mllm_compile.media.sound import read_file, resampled
from mllm_compile.media.sound_sources import too_long
from mllm_compile.process.helper_server import Answer, limit_files_and, serve


def main() -> None:
    """Answers requests until the pipe of requests ends."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    serve(_open)


def _open(first: bytes) -> Callable[[bytes], Answer]:
    header, blobs = unpack(first)
    try:
        with TemporaryDirectory(prefix="mllm-media-") as folder:
            for name, data in zip(header["files"], blobs, strict=True):
                path = Path(folder, name)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(data)
            processor = MediaProcessor(Path(folder))
    except Refused as refusal:
        answer = REFUSAL, f"{refusal}.".encode()
        return lambda request: answer
    limit_files_and(resource.RLIMIT_DATA, MAX_MEMORY)
    return lambda request: _answer(processor, request)


def _answer(processor: MediaProcessor, request: bytes) -> Answer:
    header, blobs = unpack(request)
    try:
        asked_prompt = np.frombuffer(blobs[0], np.int32).tolist() if header["text"] is None else header["text"]
        frames = iter(blobs[1:])
        pixels, seconds = 0, 0.0
        items = []
        for asked in header["items"]:
            item = _decoded(asked, frames) if asked["kind"] != "audio" else _heard(asked, next(frames), processor)
            if asked["kind"] == "audio":
                seconds += item.frames.size / processor.sound_rate
                if seconds > MAX_SOUND_SECONDS:
                    raise Refused(f"{item.where}: with it {too_long(seconds).rstrip('.')}")
                items.append(item)
                continue
            pixels += item.frames[..., 0].size
            if pixels > MAX_PROMPT_PIXELS:
                raise Refused(
                    f"{item.where}: with it the prompt's images and videos have {pixels:,} pixels; expected at most "
                    f"{MAX_PROMPT_PIXELS:,}. Give smaller ones, or fewer"
                )
            items.append(item)
        prompt = processor.prepare(asked_prompt, items, header["adds_special_tokens"])
        layouts = write_tensors(header["segment"], [item.tensors for item in prompt.items])
    except Refused as refusal:
        return REFUSAL, f"{refusal}.".encode("utf-8", "replace")
    except SegmentFull:
        return TOO_LARGE, b""
    except MemoryError:
        return TOO_MUCH_MEMORY, b""
    about = [
        {"kind": item.kind, "start": item.start, "length": item.length, "digest": item.digest.hex(), "tensors": layout}
        for item, layout in zip(prompt.items, layouts, strict=True)
    ]
    ids = np.asarray(prompt.prompt_token_ids, np.int32).tobytes()
    num_bytes = sum(item.num_bytes for item in prompt.items)
    return PREPARED, pack({"items": about, "num_bytes": num_bytes}, [ids, prompt.is_feature.tobytes()])


def _heard(asked: dict[str, Any], data: memoryview, processor: MediaProcessor) -> DecodedItem:
    """A sound's samples at the rate that the model's processor takes.

    Raises:
        Refused: it is no sound, or the model takes none.
    """
    (rate,) = asked["rates"]
    try:
        samples, rate = read_file(bytes(data)) if rate is None else (np.frombuffer(data, np.float32), rate)
    except RequestError as error:
        raise Refused(f"{asked['where']}: {str(error).rstrip('.')}") from None
    # A zero of either sign is the same sound.
    return DecodedItem("audio", asked["where"], resampled(samples, rate, processor.sound_rate) + np.float32(0))


def _decoded(asked: dict[str, Any], blobs: Any) -> DecodedItem:
    """
    Raises:
        Refused: a frame is no image, or of another size than the first.
    """
    frames: list[np.ndarray] = []
    for n, size in enumerate(asked["frames"]):
        where = asked["where"] if asked["kind"] == "image" else f"{asked['where']}, frame {n}"
        data = next(blobs)
        try:
            pixels = np.frombuffer(data, np.uint8).reshape(*size, 3) if size else decode(bytes(data))
        except Refused as refusal:
            raise Refused(f"{where}: the image {refusal}") from None
        if frames and pixels.shape != frames[0].shape:
            (height, width, _), (first_height, first_width, _) = pixels.shape, frames[0].shape
            raise Refused(
                f"{where}: the frame is {width} × {height}; expected {first_width} × {first_height} as the first one "
                "is. Scale all frames alike"
            )
        frames.append(pixels)
        if sum(frame[..., 0].size for frame in frames) > MAX_PROMPT_PIXELS:
            raise Refused(
                f"{where}: the frames have more than {MAX_PROMPT_PIXELS:,} pixels. Give fewer, or smaller ones"
            )
    return DecodedItem(asked["kind"], asked["where"], np.stack(frames), asked["metadata"])


if __name__ == "__main__":
    main()
