"""Unpacked pieces: gone with their process, swept where it was killed, whole or not there."""

from __future__ import annotations

import errno
import io
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

from mllm_compile.errors import ConfigError
from mllm_compile.runtime.program import unpacked
from mllm_compile.runtime.program.unpacked import Unpacked

PREFIX = "mllm-pieces-"
HOLD = """
import io, sys, zipfile
from mllm_compile.runtime.program.unpacked import Unpacked
buffer = io.BytesIO()
with zipfile.ZipFile(buffer, "w") as archive:
    archive.writestr("model/a.so", b"code")
files = Unpacked(buffer.getvalue())
print(files.path, flush=True)
sys.stdin.read()
"""


def package(**members: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"model/{name}", data)
    return buffer.getvalue()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(unpacked, "_folder", None)
    return tmp_path


def holder(temporary: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process with a piece, and the folder that it is in."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def ours(temporary: Path) -> list[Path]:
    return sorted(temporary.glob(f"{PREFIX}*"))


def test_members_are_files_of_this_user_alone_and_go_with_the_object(temporary):
    files = Unpacked(package(a=b"one", b=b"two"))
    assert (files.path / "model" / "a").read_bytes() == b"one"
    (folder,) = ours(temporary)
    assert folder.stat().st_mode & 0o777 == files.path.stat().st_mode & 0o777 == 0o700
    path = files.path
    del files
    assert not path.exists()


def test_a_process_that_ends_leaves_nothing(temporary):
    process, path = holder(temporary)
    assert path.is_dir()
    process.communicate("")
    assert ours(temporary) == []


def test_what_a_killed_process_left_is_swept_and_what_a_live_one_has_is_not(temporary):
    killed, left = holder(temporary)
    live, held = holder(temporary)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert left.is_dir()
    other = temporary / f"{PREFIX}link"
    other.symlink_to(temporary / "elsewhere")
    (temporary / "elsewhere").mkdir()
    files = Unpacked(package(a=b"one"))
    assert not left.exists()
    assert (held / "model" / "a.so").read_bytes() == b"code"
    assert files.path.is_dir()
    assert (temporary / "elsewhere").is_dir()
    live.communicate("")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")
def test_another_users_folder_is_not_swept(temporary):
    (temporary / f"{PREFIX}theirs").mkdir()
    os.chown(temporary / f"{PREFIX}theirs", 12345, -1)
    Unpacked(package(a=b"one"))
    assert (temporary / f"{PREFIX}theirs").is_dir()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_without_room_nothing_half_is_left_and_the_disk_is_named(temporary, monkeypatch, number):
    kept = Unpacked(package(a=b"one"))

    def fill(self: zipfile.ZipFile, path: Path) -> None:
        (path / "half").write_bytes(b"x")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(zipfile.ZipFile, "extractall", fill)
    with pytest.raises(ConfigError, match=rf"{temporary}.*MiB free, about 3 MiB needed.*set TMPDIR") as refused:
        Unpacked(package(a=bytes(3 << 20)))
    assert "\n" not in str(refused.value)
    assert [path.name for path in kept.path.parent.iterdir()] == [kept.path.name]


def test_a_limit_on_the_size_of_files_is_told(temporary):
    """The kernel's own refusal, not a stand-in."""
    code = (
        "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n" + HOLD.replace('b"code"', "bytes(5000)")
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        input="",
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    assert "would be larger than the disk or a limit (ulimit -f) allows" in ended.stderr.splitlines()[-1]
    assert ours(temporary) == []


def test_a_loader_that_unpacks_itself_is_not_called_without_room(monkeypatch):
    unpacked.check_room(package(a=b"one"))
    full = os.statvfs_result((4096, 4096, 9, 0, 0, 9, 9, 9, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    with pytest.raises(ConfigError, match=r"the disk that holds /tmp is full \(0 MiB free, about 1 MiB needed\)"):
        unpacked.check_room(package(a=b"one"))
