"""Brings byte ranges of files into tensors: several readers, and on CUDA a small ring of pinned memory.

On CUDA a reader copies a chunk from the page cache into one of its pinned buffers. It goes on with the other while the
copy engine takes the chunk to the device, on a stream of its own. On a CPU a reader reads straight into the tensor.
Tensors that are one behind the other in a file share chunks: experts that are stored one by one are many and small. A
tensor that needs another dtype, or is not in one stretch, is copied as it is and converted on the device. So are
several that one weight is computed from: they are read one after the other, wherever they are.

The caller's thread finds the chunks while readers read. A reader that did so would hold the interpreter for long, and
each of eight readers that releases it has to wait for it again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import torch

from mllm_compile.runtime.cuda.driver import scatter_pinned
from mllm_compile.runtime.errors import CheckpointError
from mllm_compile.runtime.files.regular_file import open_regular
from mllm_compile.runtime.weights.tensor_entry import TensorEntry

# A reader copies 3–6 GB/s out of the page cache; eight keep the copy engine of a PCIe 5 GPU busy.
_READERS = 8
_BUFFERS_PER_READER = 2
_CHUNK_BYTES = 8 << 20
# Of chunks that wait for a reader: beyond that their finder sleeps, as readers want the interpreter too. They take
# some 10 ms to read.
_MOST_WAITING, _SLEEP_SECONDS = 64, 0.001
_MOST_VIEWS = 1024  # that a system call fills (IOV_MAX of Linux)

View = Callable[[torch.Tensor], torch.Tensor]
Fill = Callable[[torch.Tensor, Sequence[torch.Tensor]], None]


class Spacing(NamedTuple):
    """Bytes that are in a file as equal stretches, at equal distances."""

    stretch: int
    distance: int


class Source(NamedTuple):
    """A tensor of a safetensors file: its bytes, dtype and shape there; or a part of it, with what is between."""

    path: Path
    entry: TensorEntry
    spacing: Spacing | None = None

    @property
    def begin(self) -> int:
        return self.entry.begin

    @property
    def num_bytes(self) -> int:
        return self.entry.end - self.entry.begin


@dataclass
class TensorRead:
    """One tensor of a file and where it goes.

    Attributes:
        path: the safetensors file.
        entry: its bytes, dtype and shape there; of a part of a tensor the part's, as if it were contiguous.
        spacing: of a part that is not in one stretch.
        place: the tensor to fill; any strides, any dtype.
        view: makes the tensor of the file the shape of `place`; None where it has it.
        fill: computes the place, from the tensor and `others`; None where the tensor is copied into it.
        others: further tensors, for `fill`.
    """

    path: Path
    entry: TensorEntry
    place: torch.Tensor
    view: View | None = None
    fill: Fill | None = None
    others: Sequence[Source] = ()
    spacing: Spacing | None = None
    _landings: dict[int, torch.Tensor] = field(default_factory=dict, init=False)
    _missing_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._missing_bytes = self.entry.end - self.entry.begin
        if self.others:
            self._missing_bytes += sum(source.num_bytes for source in self.others)

    @property
    def sources(self) -> tuple[Source, ...]:
        return (Source(self.path, self.entry, self.spacing), *self.others)

    @property
    def begin(self) -> int:
        return self.entry.begin

    @property
    def is_direct(self) -> bool:
        """True if the file's bytes are the bytes of the place."""
        is_copied = self.view is None and self.fill is None
        return is_copied and self.place.is_contiguous() and self.place.dtype == self.entry.dtype

    def landing(self, index: int = 0) -> torch.Tensor:
        """The landing place of a source, [bytes] uint8 on the device: the place itself, or what is converted into it
        at the end.
        """
        if index not in self._landings:
            if self.is_direct:
                self._landings[index] = self.place.reshape(-1).view(torch.uint8)
            else:
                num_bytes = self.sources[index].num_bytes
                self._landings[index] = torch.empty(num_bytes, dtype=torch.uint8, device=self.place.device)
        return self._landings[index]

    def landed(self, num_bytes: int) -> bool:
        """Counts bytes that have been put on their way; True after the last."""
        self._missing_bytes -= num_bytes
        return self._missing_bytes == 0

    def finish(self) -> None:
        """Converts what has landed, where it has to be."""
        if not self.is_direct:
            self._convert()
        self._landings.clear()

    def _convert(self) -> None:
        entries = [source.entry for source in self.sources]
        tensors = [self.landing(index).view(entry.dtype).view(entry.shape) for index, entry in enumerate(entries)]
        if self.fill is not None:
            self.fill(self.place, tensors)
        else:
            self.place.copy_(tensors[0] if self.view is None else self.view(tensors[0]))


class StraightRead(NamedTuple):
    """Bytes of a file that are a stretch of a weight's: no tensor is made of them: with thousands of experts that takes
    longer than reading them.

    Attributes:
        path, begin, num_bytes: where they are.
        memory: [bytes] uint8, the whole weight on the device.
        offset: where the bytes go in it.
    """

    path: Path
    begin: int
    num_bytes: int
    memory: torch.Tensor
    offset: int


Read = TensorRead | StraightRead


def stream_tensors(
    reads: Iterable[Read],
    device: torch.device,
    advance: Callable[[int], None] = lambda num_bytes: None,
    chunk_bytes: int = _CHUNK_BYTES,
) -> None:
    """Does all reads as they come, many small ones being made meanwhile; returns when the device has them.

    Args:
        reads: in the order of the files' bytes, asked for while others are read.
        device: of all places.
        advance: called with the bytes read so far done, from the readers' threads.
        chunk_bytes: bytes that a reader takes at once.

    Raises:
        CheckpointError: a file ends too early or cannot be read.
    """
    stream = _copy_stream(device)
    num_readers = min(_READERS, os.cpu_count() or 1)
    chunks = _Chunks(chunk_bytes)
    try:
        with ExitStack() as opened, ThreadPoolExecutor(num_readers, "weights") as threads:
            jobs = [threads.submit(_read_chunks, chunks, stream, advance) for _ in range(num_readers)]
            try:
                chunks.find(reads, opened)
            except BaseException:
                chunks.is_stopped = True
                raise
            finally:
                for _ in jobs:
                    chunks.waiting.put(None)
            for job in jobs:
                job.result()
    finally:
        if stream is not None:
            stream.synchronize()  # what failed too leaves no copy on its way


class _Landing(NamedTuple):
    """The landing place of one of a read's sources, which a reader allocates when it comes to it."""

    read: TensorRead
    source_index: int


# Bytes of a file that follow each other in memory: memory [bytes] uint8, the first byte there, and how many.
_Stretch = tuple[torch.Tensor | _Landing, int, int]


class _Chunk(NamedTuple):
    """Bytes that a reader takes at once: from byte `begin` on of the file, whose descriptor it has, or of a source with
    spacing.

    Attributes:
        path: the file's.
        spaced: that source; else None.
        stretches: where they go, in their order.
        landings: of stretches with a landing place, which it is and its bytes.
    """

    file: int
    path: Path
    begin: int
    num_bytes: int
    spaced: Source | None
    stretches: list[_Stretch]
    landings: list[tuple[_Landing, int]]

    def targets(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        """The stretches in memory."""
        for place, start, num_bytes in self.stretches:
            yield place.read.landing(place.source_index) if isinstance(place, _Landing) else place, start, num_bytes


class _Chunks:
    """Chunks that wait for a reader, in order, and None for each reader at the end.

    Attributes:
        num_bytes: of a chunk at most.
        waiting: the queue.
        lock: guards what a TensorRead allocates and counts.
        is_stopped: something has failed; readers are to leave.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.waiting: SimpleQueue[_Chunk | None] = SimpleQueue()
        self.lock = threading.Lock()
        self.is_stopped = False

    def find(self, reads: Iterable[Read], opened: ExitStack) -> None:
        """Puts the chunks of all reads into the queue; files are closed with `opened`."""
        files: dict[Path, int] = {}
        for path, begin, num_bytes, spaced, stretches in _split(reads, self.num_bytes):
            while self.waiting.qsize() > _MOST_WAITING and not self.is_stopped:
                time.sleep(_SLEEP_SECONDS)
            if self.is_stopped:
                return
            if path not in files:
                files[path] = opened.enter_context(_open_file(path))
            landings = [(place, count) for place, _, count in stretches if isinstance(place, _Landing)]
            self.waiting.put(_Chunk(files[path], path, begin, num_bytes, spaced, stretches, landings))


def _split(reads: Iterable[Read], chunk_bytes: int) -> Iterator[tuple[Path, int, int, Source | None, list[_Stretch]]]:
    """The chunks, as what _Chunk says of each: path, begin, num_bytes, spaced, stretches.

    Stretches that follow each other in memory too, as an expert's gate and up do, are one.
    """
    path, begin, size = Path(), 0, 0  # of the chunk that is being filled
    stretches: list[_Stretch] = []
    last: torch.Tensor | _Landing | None = None
    end = 0
    for path_read, start, num_bytes, place, offset, spaced in _places(reads):
        if size and (spaced is not None or (path_read, start) != (path, begin + size)):
            yield path, begin, size, None, stretches
            size = 0
        if spaced is not None:
            for done in range(0, num_bytes, chunk_bytes):
                count = min(chunk_bytes, num_bytes - done)
                yield path_read, done, count, spaced, [(place, done, count)]
            continue
        while num_bytes:
            if size == chunk_bytes:
                yield path, begin, size, None, stretches
                size = 0
            if size == 0:
                path, begin, stretches, last, end = path_read, start, [], None, 0
            count = min(chunk_bytes - size, num_bytes)
            if place is last and offset == end:
                stretches[-1] = (place, stretches[-1][1], stretches[-1][2] + count)
            else:
                stretches.append((place, offset, count))
            size, start, num_bytes, offset = size + count, start + count, num_bytes - count, offset + count
            last, end = place, offset
    if size:
        yield path, begin, size, None, stretches


def _places(reads: Iterable[Read]) -> Iterator[tuple[Path, int, int, torch.Tensor | _Landing, int, Source | None]]:
    """The sources: path, first byte and bytes, where they go and from which byte on, and itself if it has spacing."""
    for read in reads:
        if isinstance(read, StraightRead):
            yield *read, None
            continue
        for index, source in enumerate(read.sources):
            spaced = source if source.spacing else None
            yield source.path, source.begin, source.num_bytes, _Landing(read, index), 0, spaced


def _read_chunks(chunks: _Chunks, stream: torch.cuda.Stream | None, advance: Callable[[int], None]) -> None:
    """Does one reader's work."""
    with ExitStack() as entered:
        try:
            entered.enter_context(torch.inference_mode())
            bring = _bring
            if stream is not None:
                entered.enter_context(torch.cuda.stream(stream))
                bring = entered.enter_context(_PinnedRing(stream, chunks.num_bytes)).bring
            while (chunk := chunks.waiting.get()) is not None and not chunks.is_stopped:
                if chunk.landings:
                    with chunks.lock:
                        for place, _ in chunk.landings:
                            place.read.landing(place.source_index)
                try:
                    bring(chunk)
                except OSError as error:
                    raise CheckpointError(f"{chunk.path} cannot be read: {error.strerror or error}") from error
                if chunk.landings:
                    with chunks.lock:
                        whole = [place.read for place, num_bytes in chunk.landings if place.read.landed(num_bytes)]
                    for read in whole:  # on a CPU a conversion takes as long as reading
                        read.finish()
                advance(chunk.num_bytes)
        except BaseException:
            chunks.is_stopped = True
            raise


class _PinnedRing:
    """The buffers of one reader; each is filled again when the device has what was in it."""

    def __init__(self, stream: torch.cuda.Stream, chunk_bytes: int) -> None:
        self._stream = stream
        self._buffers = [
            torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_BUFFERS_PER_READER)
        ]
        self._views = [buffer.numpy().data for buffer in self._buffers]
        self._taken = [torch.cuda.Event(blocking=True) for _ in self._buffers]
        self._next = 0

    def __enter__(self) -> _PinnedRing:
        return self

    def __exit__(self, *raised: object) -> None:
        """Waits for the device: torch's allocator, which gets the buffers back, does not know that they are read."""
        for event in self._taken:
            event.synchronize()

    def bring(self, chunk: _Chunk) -> None:
        index = self._next
        self._next = (index + 1) % len(self._buffers)
        if not self._taken[index].query():
            self._taken[index].synchronize()
        _read_chunk(chunk, [self._views[index][: chunk.num_bytes]])
        targets = [(memory.data_ptr() + start, num_bytes) for memory, start, num_bytes in chunk.targets()]
        scatter_pinned(self._buffers[index], targets, self._stream.cuda_stream, self._stream.device_index)
        self._taken[index].record(self._stream)


def _bring(chunk: _Chunk) -> None:
    """Reads into tensors of the CPU."""
    targets = chunk.targets()
    _read_chunk(chunk, [memory[start : start + num_bytes].numpy().data for memory, start, num_bytes in targets])


def _read_chunk(chunk: _Chunk, views: list[memoryview]) -> None:
    """Fills memory with the chunk's bytes."""
    source = chunk.spaced
    if source is None or source.spacing is None:
        _read_exactly(chunk.file, chunk.begin, views)
        return
    (view,), (stretch, distance) = views, source.spacing
    done = 0
    while done < len(view):
        row, within = divmod(chunk.begin + done, stretch)
        count = min(stretch - within, len(view) - done)
        _read_exactly(chunk.file, source.begin + row * distance + within, [view[done : done + count]])
        done += count


def _read_exactly(file: int, offset: int, views: list[memoryview]) -> None:
    """Fills memory, one stretch after the other, from the file."""
    views = views[::-1]
    while views:
        count = os.preadv(file, views[: -_MOST_VIEWS - 1 : -1], offset)
        if count == 0:
            missing = sum(map(len, views))
            raise OSError(0, f"the file ends at byte {offset}, {missing} bytes too early")
        offset += count
        while views and count >= len(views[-1]):
            count -= len(views.pop())
        if count:
            views[-1] = views[-1][count:]


def _copy_stream(device: torch.device) -> torch.cuda.Stream | None:
    """A stream of its own, behind whatever the current one still does to the places; None on a CPU."""
    if device.type != "cuda":
        return None
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


@contextmanager
def _open_file(path: Path) -> Iterator[int]:
    try:
        file = open_regular(path)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    try:
        yield file
    finally:
        os.close(file)
