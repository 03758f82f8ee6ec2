"""Files of pages: damage is found, and folders that are not safe are refused."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import numpy as np
import pytest

from mllm_compile.runtime.tiers.connector import KVConnectorError, Namespace
from mllm_compile.runtime.tiers.disk import DiskFiles
from mllm_compile.runtime.tiers.disk_room import is_at
from mllm_compile.runtime.tiers.place import Place

PLACE = Place(b"k" * 16, b"p" * 16, b"f" * 16, 64, is_state=False)
DATA = np.arange(8192, dtype=np.uint16).view(np.uint8)


@pytest.fixture
def files(tmp_path: Path) -> DiskFiles:
    return DiskFiles(tmp_path / "tier", Namespace.of({"model": "a"}))


def file_of(files: DiskFiles) -> Path:
    return files.folder / PLACE.key[:1].hex() / PLACE.name


def test_a_page_is_read_as_it_was_written_and_found_again_by_its_name(files: DiskFiles) -> None:
    state = Place(b"s" * 16, b"", b"f" * 16, 128, is_state=True)
    assert files.store([PLACE], [DATA.data]) == [True]
    assert files.store([state], [DATA[:64].data]) == [True]
    found = np.zeros_like(DATA)
    assert files.load([PLACE], [found.data]) == [True]
    assert (found == DATA).all()
    assert {place for place, _ in files.places()} == {PLACE, state}
    files.remove([PLACE])
    assert files.load([PLACE], [found.data]) == [False]


def test_files_and_folders_are_of_this_user_alone(files: DiskFiles) -> None:
    assert files.store([PLACE], [DATA.data]) == [True]
    for path in [files.folder, *files.folder.rglob("*")]:
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


@pytest.mark.parametrize("place", [0, 9, 20, 130, -1])
def test_a_changed_byte_is_found_and_the_file_removed(files: DiskFiles, place: int) -> None:
    assert files.store([PLACE], [DATA.data]) == [True]
    damaged = bytearray(file_of(files).read_bytes())
    damaged[place] ^= 4
    file_of(files).write_bytes(damaged)
    assert files.load([PLACE], [np.zeros_like(DATA).data]) == [False]
    assert not file_of(files).exists()


def test_a_file_that_ends_early_or_has_another_name_is_not_taken(files: DiskFiles) -> None:
    assert files.store([PLACE], [DATA.data]) == [True]
    other = Place(b"o" * 16, PLACE.parent, PLACE.first, PLACE.depth, is_state=False)
    path = files.folder / "6f" / other.name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(file_of(files).read_bytes())
    file_of(files).write_bytes(file_of(files).read_bytes()[:-8])
    assert files.load([PLACE], [np.zeros_like(DATA).data]) == [False]
    assert files.load([other], [np.zeros_like(DATA).data]) == [False]


def test_what_an_end_in_the_midst_of_a_write_leaves_is_removed(files: DiskFiles) -> None:
    assert files.store([PLACE], [DATA.data]) == [True]
    left = file_of(files).with_name(file_of(files).name + ".12345678.new")
    left.write_bytes(b"half")
    assert [place for place, _ in files.places()] == [PLACE]
    assert not left.exists()


def test_what_others_have_put_there_stays_and_hinders_nothing(files: DiskFiles) -> None:
    assert files.store([PLACE], [DATA.data]) == [True]
    (file_of(files).parent / "folder").mkdir()
    (file_of(files).parent / "notes").write_text("mine")
    assert [place for place, _ in files.places()] == [PLACE]
    assert (file_of(files).parent / "notes").exists()


def test_folders_that_cannot_be_listed_are_one_line(files: DiskFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: object) -> object:
        raise OSError(5, "Input/output error", str(path))

    monkeypatch.setattr(os, "scandir", fails)
    with pytest.raises(KVConnectorError, match="Input/output error"):
        list(files.places())


def test_a_secret_that_was_not_written_is_made_anew(files: DiskFiles, tmp_path: Path) -> None:
    files.close()
    (files.folder / "secret").write_bytes(b"")
    again = DiskFiles(tmp_path / "tier", Namespace.of({"model": "a"}))
    assert len(again.secret) == 32
    assert (files.folder / "secret").read_bytes() == again.secret
    again.close()


def test_one_process_at_a_time_uses_a_namespace_and_others_have_their_own(files: DiskFiles, tmp_path: Path) -> None:
    with pytest.raises(KVConnectorError, match="used by another process"):
        DiskFiles(tmp_path / "tier", Namespace.of({"model": "a"}))
    other = DiskFiles(tmp_path / "tier", Namespace.of({"model": "b"}))
    assert other.secret != files.secret
    files.close()
    again = DiskFiles(tmp_path / "tier", Namespace.of({"model": "a"}))
    assert again.secret == files.secret
    again.close()
    other.close()


def test_a_folder_that_others_can_change_or_that_is_a_file_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(KVConnectorError, match="got mode 777"):
        DiskFiles(open_to_all, Namespace.of({}))
    (tmp_path / "file").write_text("")
    with pytest.raises(KVConnectorError, match="file"):
        DiskFiles(tmp_path / "file", Namespace.of({}))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(KVConnectorError, match="Permission denied"):
        DiskFiles(tmp_path / "tier", Namespace.of({}))


def stored(root: Path, name: str, count: int, most_bytes: int) -> DiskFiles:
    """A namespace that has stored so many values, as far as it may."""
    files = DiskFiles(root, Namespace.of({"model": name}), most_bytes)
    assert not list(files.places())
    places = [Place(bytes([number]) * 16, b"p" * 16, b"f" * 16, 64, is_state=False) for number in range(count)]
    assert files.store(places, [DATA.data] * count) == [True] * count
    return files


SIZE = DATA.nbytes + 128


def test_old_namespaces_go_when_the_folder_is_full_the_one_used_longest_ago_first(tmp_path: Path) -> None:
    root = tmp_path / "tier"
    folders = []
    for age, name in ((300, "a"), (200, "b")):
        files = stored(root, name, 2, 10 * SIZE)
        files.close()
        os.utime(files.folder / "used", (1e9 - age, 1e9 - age))
        folders.append(files.folder)
    third = stored(root, "c", 1, 4 * SIZE)
    third._room._looked_s = 0.0
    third._room.look()
    assert [folder.exists() for folder in folders] == [False, True]
    assert third.share == pytest.approx(0.5)
    third.close()
    assert {path.name for path in root.iterdir()} == {folders[1].name, third.folder.name}


def test_a_namespace_in_use_stays_and_leaves_the_rest_to_others(tmp_path: Path) -> None:
    root = tmp_path / "tier"
    first = stored(root, "a", 3, 4 * SIZE)
    second = DiskFiles(root, Namespace.of({"model": "b"}), 4 * SIZE)
    assert second.share == pytest.approx(0.25)
    first.remove([place for place, _ in first.places()][:2])
    second._room._looked_s = 0.0
    second._room.look()
    assert second.share == pytest.approx(0.75)
    first.clear()
    assert not list(first.places())
    second._room._looked_s = 0.0
    second._room.look()
    assert second.share == 1.0
    first.close()
    second.close()


def test_what_a_version_without_counts_has_left_is_counted_and_goes_first(tmp_path: Path) -> None:
    root = tmp_path / "tier"
    old = stored(root, "a", 3, 10 * SIZE)
    old.close()
    (old.folder / "used").unlink()
    recent = stored(root, "b", 1, 10 * SIZE)
    recent.close()
    files = DiskFiles(root, Namespace.of({"model": "c"}), 3 * SIZE)
    assert not old.folder.exists()
    assert recent.folder.exists()
    files.close()


def test_a_folder_that_is_removed_while_it_is_opened_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored(tmp_path / "tier", "a", 1, 10 * SIZE).close()
    checks = []

    def first_is_gone(lock: int, folder: Path) -> bool:
        checks.append(folder)
        if len(checks) == 1:
            shutil.rmtree(folder)
        return is_at(lock, folder)

    monkeypatch.setattr("mllm_compile.runtime.tiers.disk.is_at", first_is_gone)
    again = DiskFiles(tmp_path / "tier", Namespace.of({"model": "a"}), 10 * SIZE)
    assert again.store([PLACE], [DATA.data]) == [True]
    assert len(checks) == 2
    again.close()
