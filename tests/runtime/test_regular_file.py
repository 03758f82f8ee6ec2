"""Only regular files are read, and only up to a bound; nothing waits."""

from __future__ import annotations

import errno
import os

import pytest

from mllm_compile.runtime.files.regular_file import open_regular, read_regular


@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "link to a device", "socket"])
def test_other_than_regular_files_are_refused_at_once(kind, tmp_path):
    path = tmp_path / "config.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "link to a device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        import socket

        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
    else:
        path = "/dev/zero"
    with pytest.raises(OSError) as refused:
        read_regular(path, 100)
    assert refused.value.errno in (errno.EINVAL, errno.ENXIO)


def test_a_file_is_read_up_to_its_bound(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert read_regular(path, 5) == b"12345"
    with pytest.raises(OSError) as refused:
        read_regular(path, 4)
    assert refused.value.errno == errno.EFBIG
    with open(path, "r+b") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(OSError) as refused:
        read_regular(path, 1 << 20)
    assert refused.value.errno == errno.EFBIG


def test_a_file_of_proc_whose_size_is_not_told_is_read_up_to_the_bound():
    with pytest.raises(OSError) as refused:
        read_regular("/proc/self/maps", 10)
    assert refused.value.errno == errno.EFBIG


def test_a_link_is_followed_only_where_it_may_be(tmp_path):
    (tmp_path / "file").write_bytes(b"1")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 1) == b"1"
    with pytest.raises(OSError):
        open_regular(tmp_path / "link", follow_links=False)
