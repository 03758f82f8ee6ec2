"""The messages for a write that a disk, a quota or a limit on the size of files ends."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path

_SAID = {
    errno.ENOSPC: "the disk that holds {} is full",
    errno.EDQUOT: "the quota of the disk that holds {} is used up",
    errno.EFBIG: "a file in {} would be larger than the disk or a limit (ulimit -f) allows",
}
_MIB = 1 << 20


def is_full(error: BaseException) -> bool:
    """True if a write found no room: on the disk, in the quota, or within the largest size of a file."""
    return isinstance(error, OSError) and error.errno in _SAID


def full_disk(error: BaseException | None) -> OSError | None:
    """The error that `is_full` among `error` and what it came of; None where none is."""
    while error is not None and not is_full(error):
        error = error.__cause__ or error.__context__
    return error if isinstance(error, OSError) else None


def full_disk_said(text: str, folders: Sequence[Path]) -> OSError | None:
    """The error that a program or another process speaks of in `text`, None where it speaks of none.

    Args:
        folders: where it may have written; the error names one that `text` names, else that with the least room.
    """
    number = next((number for number in _SAID if os.strerror(number) in text), None)
    if number is None:
        return None
    named = [folder for folder in folders if str(folder) in text]
    folder = named[0] if named else min(folders, key=_free_bytes)
    return OSError(number, os.strerror(number), str(folder))


def _free_bytes(folder: Path) -> int:
    try:
        status = os.statvfs(folder)
    except OSError:
        return 0
    return status.f_bavail * status.f_frsize


def describe_full(error: OSError, folder: Path, needed_bytes: int | None = None) -> str:
    """Says which disk has no room and how much there is, for an error that `is_full`.

    Args:
        folder: a folder on that disk.
        needed_bytes: about what is written in all; None where that is not known.
    """
    said = _SAID[error.errno or errno.ENOSPC].format(folder)
    needed = "" if needed_bytes is None else f", about {-(-needed_bytes // _MIB):,} MiB needed"
    return f"{said} ({_free_bytes(folder) // _MIB:,} MiB free{needed})"
