"""A named file in memory is used where it is this user's alone and large enough; else a sentence says why."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mllm_compile.runtime.errors import DeviceMemoryError
from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.tiers.connector import KVConnectorError, Namespace
from mllm_compile.runtime.tiers.host_memory import HostMemory
from mllm_compile.runtime.tiers.kept import KeptSlots
from mllm_compile.runtime.tiers.memory_file import check_room, open_memory_file

NAMESPACE = Namespace.of({"model": "a"}, 8192, 4096)


@pytest.fixture
def path() -> Iterator[Path]:
    folder = Path("/dev/shm") / f"mllm-test-{secrets.token_hex(8)}"
    folder.mkdir(mode=0o700)
    yield folder / "kv"
    for left in folder.iterdir():
        left.unlink()
    folder.rmdir()


def slots_of(path: Path) -> KeptSlots:
    descriptor = open_memory_file(path)
    try:
        return KeptSlots(descriptor, NAMESPACE, 4, 2, is_bounded=True)
    finally:
        os.close(descriptor)


def test_what_is_in_it_is_there_for_the_next_process_and_takes_its_memory_at_once(path: Path) -> None:
    first = slots_of(path)
    HostMemory([4 * 8192, 2 * 4096], torch.device("cpu"), first).data[:3] = 7
    first.put(Entry(b"k" * 16, b"p" * 16, b"f" * 16, 64, 0), is_state=False)
    status = path.stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_blocks * 512 >= status.st_size
    first.close()
    again = slots_of(path)
    assert [entry.key for entry, _ in again.entries()] == [b"k" * 16]
    assert again.map[again.data_start : again.data_start + 4] == b"\7\7\7\0"
    again.close()


def test_a_file_of_others_or_none_in_memory_is_refused(path: Path, tmp_path: Path) -> None:
    os.close(open_memory_file(path))
    path.chmod(0o640)
    with pytest.raises(KVConnectorError, match=r"expected a file of user \d+ alone, got one of .* with mode 640"):
        open_memory_file(path)
    path.chmod(0o600)
    os.link(path, path.with_name("another"))
    with pytest.raises(KVConnectorError, match="expected a file with one name"):
        open_memory_file(path)
    path.with_name("another").unlink()
    path.rename(path.with_name("target"))
    path.symlink_to(path.with_name("target"))
    with pytest.raises(KVConnectorError, match="Too many levels of symbolic links"):
        open_memory_file(path)
    os.mkfifo(path.with_name("pipe"), 0o600)
    with pytest.raises(KVConnectorError, match="expected a file with one name"):
        open_memory_file(path.with_name("pipe"))
    with pytest.raises(KVConnectorError, match="No such file or directory"):
        open_memory_file(path.parent / "none" / "kv")
    if tmp_path.stat().st_dev != path.parent.stat().st_dev:
        with pytest.raises(KVConnectorError, match=r"expected a file in memory, as in /dev/shm; got one on \w+"):
            open_memory_file(tmp_path / "kv")


@pytest.mark.skipif(os.getuid() != 0, reason="gives a file to another user")
def test_a_file_of_another_user_is_refused(path: Path) -> None:
    os.close(open_memory_file(path))
    os.chown(path, 12345, 12345)
    with pytest.raises(KVConnectorError, match="got one of user 12345"):
        open_memory_file(path)


def test_a_file_system_without_room_is_told_before_and_meanwhile(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = open_memory_file(path)
    check_room(path, descriptor, 1 << 20)
    with pytest.raises(KVConnectorError, match=r"expected room for 1048576.00 GiB, got .* Lower runtime.kv_offloading"):
        check_room(path, descriptor, 1 << 50)
    os.close(descriptor)
    kept = slots_of(path)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DeviceMemoryError, match=r"refuses 0.00 GiB of memory \(No space left on device\). Lower it."):
        HostMemory([4 * 8192, 2 * 4096], torch.device("cpu"), kept)
    kept.close()
