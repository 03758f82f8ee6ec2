"""What is said where a disk, a quota or a limit on the size of files ends a write."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_SAID = {
    errno.ENOSPC: "the disk that holds {} is full",
    errno.EDQUOT: "the quota of the disk that holds {} is used up",
    errno.EFBIG: "a file in {} would be larger than the disk or a limit (ulimit -f) allows",
}
_MIB = 1 << 20


def is_full(error: BaseException) -> bool:
    """Whether a write found no room: on the disk, in the quota, or within the largest size of a file."""
    return isinstance(error, OSError) and error.errno in _SAID


def describe_full(error: OSError, folder: Path, needed_bytes: int | None = None) -> str:
    """Says which disk has no room and how much there is, for an error that `is_full`.

    Args:
        folder: what lies on that disk.
        needed_bytes: about what is written in all; None where that is not known.
    """
    said = _SAID[error.errno or errno.ENOSPC].format(folder)
    try:
        status = os.statvfs(folder)
    except OSError:
        return said
    needed = "" if needed_bytes is None else f", about {-(-needed_bytes // _MIB):,} MiB needed"
    return f"{said} ({status.f_bavail * status.f_frsize // _MIB:,} MiB free{needed})"
