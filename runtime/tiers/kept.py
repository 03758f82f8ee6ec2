"""Slots that outlive the engine's process: a file in memory that the process which starts engines holds, or one with a
name (memory_file.py).

A page of header names the namespace, a table says which slot has which page or state, and the slots follow. A record
is written when its slot has its content, and cleared before the slot gets another one; its check is written last. So
whatever ends the process, what the table names is whole. One engine at a time has the file's lock.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np

from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.tiers.connector import KVConnectorError, Namespace
from mllm_compile.runtime.tiers.names import KEPT_FILE, KEPT_VARIABLE

_MAGIC = b"MLLMHT01"
_HEADER = struct.Struct("<8s16s32sQQQQ")  # magic, namespace, secret, slots of pages and their bytes, those of states
_CHECK_BYTES = 8
_PAGE = 4096
_HUGE_PAGE = 2 << 20
_LOCK_S = 10.0  # that an engine which was killed takes to end
_ENDING = 0x4  # PF_EXITING, of the flags in /proc/PID/stat
_RECORD = np.dtype(
    [
        ("key", "V16"), ("parent", "V16"), ("first", "V16"), ("parent_size", "<u8"), ("depth", "<u8"), ("used", "<f8"),
        ("until", "<f8"), ("is_ended", "<u8"), ("check", "<u8"), ("rest", "V32"),
    ]
)  # fmt: skip


def held_descriptor() -> int | None:
    """The descriptor of the file that this process was given; None: it has none."""
    number = os.environ.get(KEPT_VARIABLE, "")
    if not re.fullmatch(r"\d{1,6}", number):
        return None
    try:
        is_it = os.readlink(f"/proc/self/fd/{number}").startswith(f"/memfd:{KEPT_FILE}")
    except OSError:
        return None
    return int(number) if is_it else None


class KeptSlots:
    """The file, locked for this process.

    Args:
        descriptor: of a file in memory, open in the process that keeps it.
        secret: that keys must have been made with; None: any.
        is_bounded: its file system may be full: memory is reserved ahead of its use, by `reserve`.

    Attributes:
        secret: of the keys.
        data_start: where slots begin, in bytes.

    Raises:
        KVConnectorError: another process uses it.
        OSError: the system has too little memory.
    """

    def __init__(
        self,
        descriptor: int,
        namespace: Namespace,
        num_slots: int,
        num_states: int,
        secret: bytes | None = None,
        is_bounded: bool = False,
    ) -> None:
        self._is_bounded = is_bounded
        self._num_slots, num_records = num_slots, num_slots + num_states
        self._slot_bytes = np.repeat([namespace.page_bytes, namespace.state_bytes], [num_slots, num_states])
        self.data_start = _start_of(num_records)
        self.num_bytes = self.bytes_of(namespace, num_slots, num_states)
        self._file = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)  # with a lock of its own
        try:
            _lock(self._file)
            sizes = num_slots, namespace.page_bytes, num_states, namespace.state_bytes
            self.secret = self._content_of(namespace, sizes, secret)
            self.reserve(-self.data_start, self.data_start)
            self.map = mmap.mmap(self._file, self.num_bytes)
        except BaseException:
            os.close(self._file)
            raise
        self._table = np.frombuffer(self.map, dtype=_RECORD, count=num_records, offset=_PAGE)
        self._used = self._table["used"]

    @staticmethod
    def bytes_of(namespace: Namespace, num_slots: int, num_states: int) -> int:
        """Bytes of a file with so many slots."""
        slots = num_slots * namespace.page_bytes + num_states * namespace.state_bytes
        return _start_of(num_slots + num_states) + max(slots, _PAGE)

    def reserve(self, start: int, count: int) -> None:
        """Has the system give `count` bytes from `start` behind `data_start`, where they could be had no more later.

        Raises:
            OSError: the system refuses.
        """
        if self._is_bounded:
            os.posix_fallocate(self._file, self.data_start + start, count)

    def entries(self) -> Iterator[tuple[Entry, bool]]:
        """The table's entries, with True for states; a torn one is cleared."""
        for number in np.flatnonzero(self._table["check"]).tolist():
            record = self._table[number]
            key, parent, first = (record[name].tobytes() for name in ("key", "parent", "first"))
            is_state = number >= self._num_slots
            parent = parent[: int(record["parent_size"])]
            depth = int(record["depth"])
            if int(record["check"]) != _check_of(key, parent, first, depth, number):
                self._table["check"][number] = 0
                continue
            slot = number - self._num_slots * is_state
            used, until = float(record["used"]), float(record["until"])
            yield Entry(key, parent, first, depth, slot, 0, used, until, bool(record["is_ended"])), is_state

    def put(self, entry: Entry, is_state: bool) -> None:
        """Notes an entry whose slot has its content."""
        number = entry.slot + self._num_slots * is_state
        record = self._table[number]
        record["check"] = 0
        for name in ("key", "parent", "first"):
            record[name] = np.void(getattr(entry, name).ljust(16, b"\0"))
        record["parent_size"], record["depth"] = len(entry.parent), entry.depth
        record["used"], record["until"], record["is_ended"] = entry.used, entry.until, entry.is_ended
        record["check"] = _check_of(entry.key, entry.parent, entry.first, entry.depth, number)

    def drop(self, entry: Entry, is_state: bool) -> None:
        """Clears the record of an entry, ahead of its slot's next content."""
        self._table["check"][entry.slot + self._num_slots * is_state] = 0

    def use(self, entry: Entry, is_state: bool) -> None:
        """Notes when an entry was used."""
        self._used[entry.slot + self._num_slots * is_state] = entry.used

    def void(self) -> None:
        """Has the next process find nothing: what is stored from now on is not of this namespace."""
        self.map[: len(_MAGIC)] = bytes(len(_MAGIC))

    def close(self) -> None:
        """Lets another process have the file; the content stays, and takes no more memory than it has to."""
        self._give_back()
        fcntl.flock(self._file, fcntl.LOCK_UN)  # the map has the file open, too
        os.close(self._file)

    def _give_back(self) -> None:
        """Gives the memory of slots that hold nothing back to the system."""
        is_void = not any(self.map[: len(_MAGIC)])
        ends = self.data_start + np.cumsum(self._slot_bytes)
        is_free = np.ones(ends.size, dtype=bool) if is_void else self._table["check"] == 0
        edges = np.flatnonzero(np.diff(is_free, prepend=False, append=False)).reshape(-1, 2)
        for first, behind in edges.tolist():
            start = int(ends[first] - self._slot_bytes[first])
            if count := int(ends[behind - 1]) - start:
                with suppress(OSError):  # what the system does not take stays: the end goes on
                    self.map.madvise(mmap.MADV_REMOVE, start, count)

    def _content_of(self, namespace: Namespace, sizes: tuple[int, ...], secret: bytes | None) -> bytes:
        """The secret of what there is, where that is of this namespace; else that of a new, empty file."""
        name = bytes.fromhex(namespace.name)
        if os.fstat(self._file).st_size == self.num_bytes:
            found = os.pread(self._file, _HEADER.size, 0)
            check = os.pread(self._file, _CHECK_BYTES, _HEADER.size)
            magic, of_name, held, *of_sizes = _HEADER.unpack(found)
            is_whole = check == _sum_of(found) and magic == _MAGIC
            if is_whole and of_name == name and tuple(of_sizes) == sizes and secret in (None, held):
                return bytes(held)
        os.ftruncate(self._file, 0)  # gives the memory back
        os.ftruncate(self._file, self.num_bytes)
        made = secrets.token_bytes(32) if secret is None else secret
        header = _HEADER.pack(_MAGIC, name, made, *sizes)
        os.pwrite(self._file, header + _sum_of(header), 0)
        return made


class KeptLedger:
    """The records of pages, or of states; a Ledger."""

    def __init__(self, kept: KeptSlots, is_state: bool) -> None:
        self.put = partial(kept.put, is_state=is_state)
        self.drop = partial(kept.drop, is_state=is_state)
        self.use = partial(kept.use, is_state=is_state)


def _start_of(num_records: int) -> int:
    table = _PAGE + num_records * _RECORD.itemsize
    return -(-table // _HUGE_PAGE) * _HUGE_PAGE


def held_bytes(descriptor: int) -> int:
    """The memory that the file takes now."""
    return Path(f"/proc/self/fd/{descriptor}").stat().st_blocks * 512


def _lock(file: int) -> None:
    """
    Raises:
        KVConnectorError: another process has it, and does not end.
    """
    end = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > end or any(_stays(owner) for owner in _owners(file)):
                raise KVConnectorError("the memory of runtime.kv_offloading_size is used by another process") from None
            time.sleep(0.01)
        else:
            return


def _owners(file: int) -> list[int]:
    """Processes that have the file's lock, of those that this one can see (proc(5), locks)."""
    status = os.fstat(file)
    name = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    found = []
    with suppress(OSError):
        for line in Path("/proc/locks").read_text(encoding="ascii", errors="replace").splitlines():
            fields = line.split()
            if len(fields) > 5 and fields[1] == "FLOCK" and fields[5] == name and int(fields[4]) > 0:
                found.append(int(fields[4]))
    return found


def _stays(process: int) -> bool:
    """True of a process that lives and is not about to end: no SIGKILL waits for it, and it is not on its way out."""
    try:
        stat = Path(f"/proc/{process}/stat").read_bytes().rpartition(b")")[2].split()
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    killed = 1 << (signal.SIGKILL - 1)
    pending = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigPnd:", "ShdPnd:"))]
    return stat[0] not in (b"Z", b"X") and not int(stat[6]) & _ENDING and not any(one & killed for one in pending)


def _check_of(key: bytes, parent: bytes, first: bytes, depth: int, number: int) -> int:
    """A sum over a record, never 0."""
    data = key + parent.ljust(16, b"\0") + first + struct.pack("<QQQ", len(parent), depth, number)
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") | 1


def _sum_of(header: bytes) -> bytes:
    return blake2b(header, digest_size=_CHECK_BYTES).digest()
