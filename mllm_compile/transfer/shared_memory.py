"""Shared memory of other processes of this user, by name. It is read, never mapped for its numbers: a sender that cuts
it off while it is read would end this process."""

from __future__ import annotations

import mmap
import os
import re
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from mllm_compile.errors import TransferError, WeightUpdateError

FOLDER = Path("/dev/shm")
_NAME = re.compile(r"/?([A-Za-z0-9_.\-]{1,200})")
_HEADER_BYTES = 64  # of torch's, ahead of counts
_COUNTS = 10_000  # of CUDA's receivers in a file (CUDA_IPC_REF_COUNTER_FILE_SIZE)


@contextmanager
def opened_file(name: str, flags: int = os.O_RDONLY) -> Iterator[tuple[int, int]]:
    """A file of shared memory, and its bytes.

    Raises:
        WeightUpdateError: it has no such name, is another user's, or there is none.
    """
    found = _NAME.fullmatch(name)
    if found is None or found[1] in (".", ".."):
        raise WeightUpdateError(f"{name[:100]!r} is no name of shared memory; expected one of {FOLDER}")
    try:
        file = os.open(FOLDER / found[1], flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise TransferError(
            f"shared memory {found[1]!r} cannot be opened ({error.strerror}): its sender is gone"
        ) from None
    try:
        what = os.fstat(file)
        if what.st_uid != os.geteuid() or not stat.S_ISREG(what.st_mode):
            raise WeightUpdateError(f"shared memory {found[1]!r} is not of the engine's user; send from one of its own")
        yield file, what.st_size
    finally:
        os.close(file)


def read_into(file: int, begin: int, tensor: torch.Tensor) -> None:
    """Fills a tensor of the CPU, [bytes] uint8, from a file.

    Raises:
        TransferError: it ends before.
    """
    view, done = tensor.numpy().data, 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], begin + done)
        if count == 0:
            raise TransferError(f"shared memory ends {len(view) - done:,} bytes too early: its sender has cut it off")
        done += count


def drop_reader(name: str) -> None:
    """Lowers torch's count of who has a file, which its sender has raised for this receiver, and waits meanwhile.

    Raises:
        WeightUpdateError: it is too small for torch's.
    """
    _lower(name, "i", 0, least=2, needed=_HEADER_BYTES)


def drop_cuda_reader(name: str, place: int) -> None:
    """Likewise of CUDA memory, whose counts are in a file: at 0 its sender may free it."""
    if place >= _COUNTS:
        raise WeightUpdateError(f"a count at {place:,} is beyond its file, which has {_COUNTS:,}")
    _lower(name, "q", _HEADER_BYTES + 8 * place, least=1, needed=_HEADER_BYTES + 8 * _COUNTS)


def _lower(name: str, form: str, begin: int, least: int, needed: int) -> None:
    with opened_file(name, os.O_RDWR) as (file, num_bytes):
        if num_bytes < needed:
            raise WeightUpdateError(f"shared memory {name[:100]!r} has no counts of torch's")
        with mmap.mmap(file, needed) as memory:
            (count,) = struct.unpack_from(form, memory, begin)
            if count >= least:
                struct.pack_into(form, memory, begin, count - 1)
