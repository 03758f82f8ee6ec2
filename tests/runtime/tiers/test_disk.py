"""Files of pages: damage is found, and folders that are not safe are refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from mllm_compile.runtime.tiers.disk import DiskFiles, DiskTierError, Place

PLACE = Place(b"k" * 16, b"p" * 16, b"f" * 16, 64, is_state=False)
DATA = np.arange(8192, dtype=np.uint16).view(np.uint8)


@pytest.fixture
def files(tmp_path: Path) -> DiskFiles:
    return DiskFiles(tmp_path / "tier", {"model": "a"})


def file_of(files: DiskFiles) -> Path:
    return files.folder / PLACE.name


def test_a_page_is_read_as_it_was_written_and_found_again_by_its_name(files: DiskFiles) -> None:
    state = Place(b"s" * 16, b"", b"f" * 16, 128, is_state=True)
    files.write(PLACE, DATA)
    files.write(state, DATA[:64])
    found = np.zeros_like(DATA)
    assert files.read(PLACE, found)
    assert (found == DATA).all()
    assert {place for place, _ in files.places()} == {PLACE, state}
    files.remove(PLACE)
    assert not files.read(PLACE, found)


def test_files_and_folders_are_of_this_user_alone(files: DiskFiles) -> None:
    files.write(PLACE, DATA)
    for path in [files.folder, *files.folder.rglob("*")]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


@pytest.mark.parametrize("place", [0, 9, 20, 130, -1])
def test_a_changed_byte_is_found_and_the_file_removed(files: DiskFiles, place: int) -> None:
    files.write(PLACE, DATA)
    damaged = bytearray(file_of(files).read_bytes())
    damaged[place] ^= 4
    file_of(files).write_bytes(damaged)
    assert not files.read(PLACE, np.zeros_like(DATA))
    assert not file_of(files).exists()


def test_a_file_that_ends_early_or_has_another_name_is_not_taken(files: DiskFiles) -> None:
    files.write(PLACE, DATA)
    other = Place(b"o" * 16, PLACE.parent, PLACE.first, PLACE.depth, is_state=False)
    (files.folder / other.name).parent.mkdir(exist_ok=True)
    (files.folder / other.name).write_bytes(file_of(files).read_bytes())
    file_of(files).write_bytes(file_of(files).read_bytes()[:-8])
    assert not files.read(PLACE, np.zeros_like(DATA))
    assert not files.read(other, np.zeros_like(DATA))


def test_what_an_end_in_the_midst_of_a_write_leaves_is_removed(files: DiskFiles) -> None:
    files.write(PLACE, DATA)
    left = file_of(files).with_name(file_of(files).name + ".12345678.new")
    left.write_bytes(b"half")
    assert [place for place, _ in files.places()] == [PLACE]
    assert not left.exists()


def test_what_others_have_put_there_stays_and_hinders_nothing(files: DiskFiles) -> None:
    files.write(PLACE, DATA)
    (file_of(files).parent / "folder").mkdir()
    (file_of(files).parent / "notes").write_text("mine")
    assert [place for place, _ in files.places()] == [PLACE]
    assert (file_of(files).parent / "notes").exists()


def test_folders_that_cannot_be_listed_are_one_line(files: DiskFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: object) -> object:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(os, "scandir", fails)
    with pytest.raises(DiskTierError, match="Input/output error"):
        list(files.places())


def test_a_secret_that_was_not_written_is_made_anew(files: DiskFiles, tmp_path: Path) -> None:
    files.close()
    (files.folder / "secret").write_bytes(b"")
    again = DiskFiles(tmp_path / "tier", {"model": "a"})
    assert len(again.secret) == 32
    assert (files.folder / "secret").read_bytes() == again.secret
    again.close()


def test_one_process_at_a_time_uses_a_namespace_and_others_have_their_own(files: DiskFiles, tmp_path: Path) -> None:
    with pytest.raises(DiskTierError, match="used by another process"):
        DiskFiles(tmp_path / "tier", {"model": "a"})
    other = DiskFiles(tmp_path / "tier", {"model": "b"})
    assert other.secret != files.secret
    files.close()
    again = DiskFiles(tmp_path / "tier", {"model": "a"})
    assert again.secret == files.secret
    again.close()
    other.close()


def test_a_folder_that_others_can_change_or_that_is_a_file_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(DiskTierError, match="got mode 777"):
        DiskFiles(open_to_all, {})
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskTierError, match="file"):
        DiskFiles(tmp_path / "file", {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(DiskTierError, match="Permission denied"):
        DiskFiles(tmp_path / "tier", {})
