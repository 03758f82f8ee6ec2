"""Files of a runtime's folder are ours, unwritable by others, unchanged, and read once."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from mllm_compile.errors import ArtifactError
from mllm_compile.files.trusted_folder import FileFacts, TrustedFolder

CONTENT = b"content"
FACTS = FileFacts(hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "runtime"
    (path / "sub").mkdir(parents=True)
    (path / "sub" / "file").write_bytes(CONTENT)
    for item in (path, path / "sub", path / "sub" / "file"):
        item.chmod(0o755)
    return path


def test_what_is_hashed_is_what_is_read(folder):
    trusted = TrustedFolder(folder)
    assert trusted.list_files() == {"sub/file"}
    assert trusted.read("sub/file", FACTS) == CONTENT
    assert trusted.read("sub/file") == CONTENT


@pytest.mark.parametrize("data", [b"contenT", b"conten", b"content ", b""])
def test_other_bytes_are_refused(folder, data):
    (folder / "sub" / "file").write_bytes(data)
    with pytest.raises(ArtifactError, match="sub/file is "):
        TrustedFolder(folder).read("sub/file", FACTS)


def test_a_file_is_not_read_beyond_its_size(folder):
    with open(folder / "sub" / "file", "wb") as file:
        file.truncate(1 << 40)  # sparse: a terabyte that is not there
    with pytest.raises(ArtifactError, match="larger than what was compiled"):
        TrustedFolder(folder).read("sub/file", FACTS)
    with pytest.raises(ArtifactError, match="larger than what was compiled"):
        TrustedFolder(folder).read("sub/file", max_bytes=100)


def test_a_folder_that_is_swapped_for_another_changes_nothing(folder, tmp_path):
    trusted = TrustedFolder(folder)
    folder.rename(tmp_path / "elsewhere")
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "file").write_bytes(b"evil")
    assert trusted.read("sub/file", FACTS) == CONTENT
    assert (trusted.pinned_path / "sub" / "file").read_bytes() == CONTENT


@pytest.mark.parametrize("name", ["", "sub", "sub/file"])
@pytest.mark.parametrize("mode", [0o757, 0o775, 0o777])
def test_what_others_can_write_is_refused(folder, name, mode):
    (folder / name).chmod(mode)
    with pytest.raises(ArtifactError, match=r"can be written by others \(mode 7.7?.?\): run chmod go-w on it"):
        read_all(folder)


@needs_root
@pytest.mark.parametrize("name", ["", "sub", "sub/file"])
def test_what_belongs_to_another_user_is_refused(folder, name):
    os.chown(folder / name, 12345, 12345)
    with pytest.raises(ArtifactError, match="belongs to user id 12345, not to you"):
        read_all(folder)


@pytest.mark.parametrize("name", ["sub/link", "link"])
def test_a_symbolic_link_in_the_folder_is_refused(folder, name):
    (folder / name).symlink_to(folder / "sub" / "file")
    with pytest.raises(ArtifactError, match="is no file that this version writes"):
        read_all(folder)
    with pytest.raises(ArtifactError, match="cannot be read"):
        TrustedFolder(folder).read(name, FACTS)


def test_a_link_to_a_folder_in_it_is_refused(folder, tmp_path):
    (folder / "sub").rename(tmp_path / "sub")
    (folder / "sub").symlink_to(tmp_path / "sub")
    with pytest.raises(ArtifactError, match="is no file that this version writes"):
        read_all(folder)


def test_a_named_pipe_does_not_block(folder):
    os.mkfifo(folder / "pipe")
    with pytest.raises(ArtifactError, match="is no regular file"):
        TrustedFolder(folder).read("pipe")


def test_a_folder_that_is_not_there_is_said_so(tmp_path):
    with pytest.raises(ArtifactError, match="there is no runtime at"):
        TrustedFolder(tmp_path / "none")


def read_all(folder: Path) -> None:
    trusted = TrustedFolder(folder)
    for name in trusted.list_files():
        trusted.read(name)
