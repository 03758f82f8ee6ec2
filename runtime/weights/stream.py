"""Brings byte ranges of files into tensors: several readers, and on CUDA a small ring of pinned memory.

On CUDA a reader copies a chunk from the page cache into one of its pinned buffers and goes on with the other while the
copy engine takes it to the device, on a stream of its own. On a CPU a reader reads straight into the tensor. Tensors
that lie one behind the other in a file share chunks: experts that are stored one by one are many and small. A tensor
that needs another dtype, or does not lie in one stretch, is copied as it is and converted on the device. So are several
that one weight is computed from: they are read one after the other, wherever they lie.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from mllm_compile.runtime.errors import CheckpointError
from mllm_compile.runtime.regular_file import open_regular
from mllm_compile.runtime.weights.safetensors_header import TensorEntry

# A reader copies 3–6 GB/s out of the page cache; eight keep the copy engine of a PCIe 5 GPU busy.
_READERS = 8
_BUFFERS_PER_READER = 2
_CHUNK_BYTES = 8 << 20

View = Callable[[torch.Tensor], torch.Tensor]
Fill = Callable[[torch.Tensor, Sequence[torch.Tensor]], None]


class Spacing(NamedTuple):
    """Bytes that lie in a file as equal stretches, at equal distances."""

    stretch: int
    distance: int


class Source(NamedTuple):
    """A tensor of a safetensors file: its bytes, dtype and shape there; or a part of it, with what lies between."""

    path: Path
    entry: TensorEntry
    spacing: Spacing | None = None

    @property
    def num_bytes(self) -> int:
        return self.entry.end - self.entry.begin


@dataclass
class TensorRead:
    """One tensor of a file and where it goes.

    Attributes:
        path: the safetensors file.
        entry: its bytes, dtype and shape there; of a part of a tensor the part's, as if it lay in one stretch.
        spacing: of a part that does not lie in one stretch.
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

    def target(self, index: int, start: int, num_bytes: int) -> torch.Tensor:
        """The landing place of a part of a source, [num_bytes] uint8."""
        return self.landing(index)[start : start + num_bytes]

    def landed(self, num_bytes: int) -> None:
        """Counts bytes that have been put on their way; converts after the last."""
        self._missing_bytes -= num_bytes
        if self._missing_bytes == 0:
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


@dataclass(frozen=True, slots=True)
class StraightRead:
    """A tensor of a file whose bytes are a stretch of a weight's: no tensor of its own is made of it, as of thousands
    of experts that takes longer than to read them.

    Attributes:
        source: where it is in its file.
        memory: [bytes] uint8, the whole weight on the device.
        offset: where the bytes go in it.
    """

    source: Source
    memory: torch.Tensor
    offset: int

    @property
    def sources(self) -> tuple[Source, ...]:
        return (self.source,)

    def landing(self, index: int = 0) -> torch.Tensor:
        return self.memory

    def landed(self, num_bytes: int) -> None:
        """Nothing is to be done with them."""


Read = TensorRead | StraightRead


def stream_tensors(
    reads: Sequence[TensorRead],
    advance: Callable[[int], None] = lambda num_bytes: None,
    chunk_bytes: int = _CHUNK_BYTES,
) -> None:
    """Does all reads, in the order of the files' bytes; returns when the device has them.

    Args:
        reads: all on one device.
        advance: called with the bytes read so far done, from the readers' threads.
        chunk_bytes: bytes that a reader takes at once.

    Raises:
        CheckpointError: a file ends too early or cannot be read.
    """
    if reads:
        in_order = sorted(reads, key=lambda read: (read.path, read.entry.begin))
        stream_in_order(in_order, reads[0].place.device, advance, chunk_bytes)


def stream_in_order(
    reads: Iterable[Read],
    device: torch.device,
    advance: Callable[[int], None] = lambda num_bytes: None,
    chunk_bytes: int = _CHUNK_BYTES,
) -> None:
    """Does all reads as they come: many small ones are made while others are read.

    Args:
        reads: in the order of the files' bytes, asked for from the readers' threads, one at a time.
        device: of all places.
        advance, chunk_bytes: as stream_tensors takes them.

    Raises:
        CheckpointError: as of stream_tensors.
    """
    stream = _copy_stream(device)
    num_readers = min(_READERS, os.cpu_count() or 1)
    with ExitStack() as opened, ThreadPoolExecutor(num_readers, "weights") as threads:
        chunks = _Chunks(reads, opened, chunk_bytes)
        jobs = [threads.submit(_read_chunks, chunks, stream, advance) for _ in range(num_readers)]
        for job in jobs:
            job.result()
    if stream is not None:
        stream.synchronize()


class _Stretch(NamedTuple):
    """Bytes of one of a read's sources that a reader takes at once: so many from `start` on."""

    read: Read
    source_index: int
    start: int
    num_bytes: int

    @property
    def source(self) -> Source:
        return self.read.sources[self.source_index]


class _Chunk(NamedTuple):
    """Stretches that lie one behind the other in a file, whose descriptor it has."""

    file: int
    stretches: list[_Stretch]

    def targets(self) -> list[torch.Tensor]:
        """Where the bytes go, [bytes] uint8, in their order: stretches that lie one behind the other in a weight too,
        as an expert's gate and up do, go there at once."""
        found: list[torch.Tensor] = []
        memory, begin, end = None, 0, 0
        for read, source_index, start, num_bytes in self.stretches:
            if isinstance(read, StraightRead) and read.memory is memory and read.offset + start == end:
                end += num_bytes
                continue
            if memory is not None:
                found.append(memory[begin:end])
            if isinstance(read, StraightRead):
                memory, begin = read.memory, read.offset + start
                end = begin + num_bytes
            else:
                memory = None
                found.append(read.target(source_index, start, num_bytes))
        return found if memory is None else [*found, memory[begin:end]]


class _Chunks:
    """Hands out chunks to the readers in order; its lock also guards what a TensorRead counts."""

    def __init__(self, reads: Iterable[Read], opened: ExitStack, chunk_bytes: int) -> None:
        self.num_bytes = chunk_bytes
        self.lock = threading.Lock()
        self._chunks = _split(reads, chunk_bytes)
        self._opened = opened
        self._files: dict[Path, int] = {}
        self._is_stopped = False

    def next(self) -> _Chunk | None:
        """A chunk whose landing places are allocated."""
        with self.lock:
            stretches = None if self._is_stopped else next(self._chunks, None)
            if stretches is None:
                return None
            for stretch in stretches:
                stretch.read.landing(stretch.source_index)
            return _Chunk(self._file(stretches[0].source.path), stretches)

    def stop(self) -> None:
        """Stops the other readers after one has failed."""
        self._is_stopped = True

    def _file(self, path: Path) -> int:
        """The file's descriptor, which is closed with `opened`."""
        if path not in self._files:
            self._files[path] = self._opened.enter_context(_open_file(path))
        return self._files[path]


def _split(reads: Iterable[Read], chunk_bytes: int) -> Iterator[list[_Stretch]]:
    """The stretches of each chunk."""
    chunk: list[_Stretch] = []
    size, end = 0, None  # of the chunk; where a source that joins it begins
    for read in reads:
        for index, source in enumerate(read.sources):
            is_whole = source.spacing is None
            if chunk and not (is_whole and (source.path, source.entry.begin) == end):
                yield chunk
                chunk, size = [], 0
            start, num_bytes = 0, source.num_bytes
            while start < num_bytes:
                if size == chunk_bytes:
                    yield chunk
                    chunk, size = [], 0
                count = min(chunk_bytes - size, num_bytes - start)
                chunk.append(_Stretch(read, index, start, count))
                size, start = size + count, start + count
            end = (source.path, source.entry.end) if is_whole else None
    if chunk:
        yield chunk


def _read_chunks(chunks: _Chunks, stream: torch.cuda.Stream | None, advance: Callable[[int], None]) -> None:
    """Does one reader's work."""
    with torch.inference_mode(), nullcontext() if stream is None else torch.cuda.stream(stream):
        try:
            bring = _bring if stream is None else _PinnedRing(stream, chunks.num_bytes).bring
            while (chunk := chunks.next()) is not None:
                try:
                    bring(chunk)
                except OSError as error:
                    path = chunk.stretches[0].source.path
                    raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
                with chunks.lock:
                    for stretch in chunk.stretches:
                        stretch.read.landed(stretch.num_bytes)
                advance(sum(stretch.num_bytes for stretch in chunk.stretches))
        except BaseException:
            chunks.stop()
            raise


class _PinnedRing:
    """The buffers of one reader; each is filled again when the device has what was in it."""

    def __init__(self, stream: torch.cuda.Stream, chunk_bytes: int) -> None:
        self._stream = stream
        self._buffers = [
            torch.empty(chunk_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(_BUFFERS_PER_READER)
        ]
        self._taken = [torch.cuda.Event(blocking=True) for _ in self._buffers]
        self._next = 0

    def bring(self, chunk: _Chunk) -> None:
        index = self._next
        self._next = (index + 1) % len(self._buffers)
        self._taken[index].synchronize()
        buffer, first = self._buffers[index], chunk.stretches[0]
        source = first.source
        if source.spacing is None:
            num_bytes = sum(stretch.num_bytes for stretch in chunk.stretches)
            _read_exactly(chunk.file, source.entry.begin + first.start, buffer[:num_bytes])
        else:
            _read_source(chunk.file, source, first.start, buffer[: first.num_bytes])
        start = 0
        for target in chunk.targets():
            end = start + target.numel()
            target.copy_(buffer[start:end], non_blocking=True)
            start = end
        self._taken[index].record(self._stream)


def _bring(chunk: _Chunk) -> None:
    """Reads into tensors of the CPU."""
    first = chunk.stretches[0]
    source, start = first.source, first.start
    for target in chunk.targets():
        _read_source(chunk.file, source, start, target)
        start += target.numel()  # behind the source lie the others, where there are any


def _read_source(file: int, source: Source, start: int, target: torch.Tensor) -> None:
    """Fills a CPU tensor [bytes] uint8 with the bytes of a source from `start` on."""
    first, spacing, size = source.entry.begin, source.spacing, target.numel()
    if spacing is None:
        _read_exactly(file, first + start, target)
        return
    done = 0
    while done < size:
        row, within = divmod(start + done, spacing.stretch)
        count = min(spacing.stretch - within, size - done)
        _read_exactly(file, first + row * spacing.distance + within, target[done : done + count])
        done += count


def _read_exactly(file: int, offset: int, target: torch.Tensor) -> None:
    """Fills a CPU tensor [bytes] uint8 from the file."""
    view = target.numpy().data
    while view:
        count = os.preadv(file, [view], offset)
        if count == 0:
            raise OSError(0, f"the file ends at byte {offset}, {len(view)} bytes too early")
        view, offset = view[count:], offset + count


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
