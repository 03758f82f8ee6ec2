"""Contents of a cache: listed, checked, and removed to make room; and the cache commands' output."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

import pytest

from mllm_compile.cli import run
from mllm_compile.errors import ConfigError, OtherFormatError
from mllm_compile.files.byte_sizes import format_bytes, parse_bytes
from mllm_compile.files.sealed_json import write_sealed
from mllm_compile.process import console
from mllm_compile.process.console import fitted
from mllm_compile.store.contents import Pruned, prune, stored_runtimes
from mllm_compile.store.key import FORMAT_VERSION
from mllm_compile.store.locks import using_compiler_cache
from mllm_compile.store.publish import runtimes_folder


def names(cache: Path) -> set[str]:
    return {path.name for path in runtimes_folder(cache).iterdir()}


def test_runtimes_are_listed_with_the_last_used_first(cache):
    runtimes = stored_runtimes(cache)
    assert [runtime.folder.name for runtime in runtimes] == ["broken", "new", "old"]
    assert [runtime.manifest is None for runtime in runtimes] == [True, False, False]
    assert "has format None" in str(runtimes[0].problem)
    assert [runtime.problem for runtime in runtimes[1:]] == [None, None]
    assert stored_runtimes(cache / "none") == []


def test_pruning_removes_the_unusable_then_the_least_recently_used(cache):
    broken, size = (runtime.num_bytes for runtime in stored_runtimes(cache)[:2])
    pruned = prune(cache, size)
    assert [runtime.folder.name for runtime in pruned.stored] == ["broken", "old"]
    assert pruned.num_bytes == broken + size
    assert names(cache) == {"new"}
    assert [runtime.folder.name for runtime in prune(cache, 0).stored] == ["new"]
    assert prune(cache, 0) == Pruned([], [], 0, 0)


def test_what_cannot_be_removed_is_not_said_to_be_freed(cache, monkeypatch, capsys):
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
    pruned = prune(cache, 0)
    assert [runtime.num_bytes for runtime in pruned.stored] == [0, 0, 0]
    assert pruned.num_bytes == 0
    assert run(["cache", "prune", "--dir", str(cache)]) == 0
    assert capsys.readouterr().out == "freed 0 B\n"


@pytest.mark.parametrize("command", ["list", "prune", "verify"])
def test_a_cache_that_is_no_folder_is_told_and_one_that_is_not_there_is_empty(tmp_path, monkeypatch, capsys, command):
    monkeypatch.setenv("MLLM_COMPILE_CACHE", str(tmp_path / "cache"))
    assert run(["cache", command]) == 0
    (tmp_path / "cache").write_text("")
    assert run(["cache", command]) == 2
    assert f"the cache ($MLLM_COMPILE_CACHE) is {tmp_path / 'cache'}, which is no folder" in capsys.readouterr().err


def test_a_folder_that_is_no_cache_loses_nothing(tmp_path, capsys):
    for place in ("runtimes/python", "runtimes/node", "compilers/gcc", f"checkpoints/{'ab' * 16}"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "file").write_text("somebody's")
    assert run(["cache", "prune", "--max-size", "0", "--dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "freed 0 B\n"
    assert sorted(path.name for path in tmp_path.rglob("file")) == ["file"] * 4


@pytest.mark.parametrize("place", ["runtimes/qwen3-0123456789abcdef", f"checkpoints/fetched-{'ab' * 16}"])
def test_of_a_link_to_another_disk_the_link_goes(tmp_path, place):
    other, link = tmp_path / "other", tmp_path / "cache" / place
    for folder in (other, link.parent):
        folder.mkdir(parents=True)
    (other / "file").write_text("kept")
    link.symlink_to(other)
    assert [(one.folder, one.num_bytes) for one in prune(tmp_path / "cache", 0).stored] == [(link, 0)]
    assert (other / "file").read_text() == "kept" and not list(link.parent.iterdir())


def test_what_a_damaged_runtime_left_is_removed(tmp_path):
    folder = runtimes_folder(tmp_path) / "qwen3-0123456789abcdef"
    folder.mkdir(parents=True)
    assert [runtime.folder for runtime in prune(tmp_path).stored] == [folder]


def test_pruning_without_a_size_keeps_every_usable_runtime(cache, capsys):
    assert run(["cache", "prune", "--dir", str(cache)]) == 0
    assert names(cache) == {"new", "old"}
    assert capsys.readouterr().out.startswith("removed broken: ")


def of_format(folder: Path, number: int) -> None:
    """As another version would have written it."""
    body = json.loads((folder / "manifest.json").read_text())
    del body["sha256"]
    write_sealed(folder / "manifest.json", body | {"format": number})


def test_a_runtime_of_an_older_version_is_old_and_not_damaged(cache, capsys):
    folder = runtimes_folder(cache) / "broken"
    shutil.copy(runtimes_folder(cache) / "new" / "manifest.json", folder)
    of_format(folder, FORMAT_VERSION - 1)
    said = f"{folder} has format {FORMAT_VERSION - 1}, this version reads {FORMAT_VERSION}; compile the model again"
    assert run(["cache", "list", "--dir", str(cache)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("  broken ")] == ["old"]
    assert f"broken is old: {said}" in lines
    assert run(["cache", "verify", "--dir", str(cache)]) == 0
    assert f"broken: old: {said}" in capsys.readouterr().out.splitlines()


def test_a_runtime_of_a_newer_version_is_not_damaged_either(cache, capsys):
    shutil.rmtree(runtimes_folder(cache) / "broken")
    folder = runtimes_folder(cache) / "new"
    of_format(folder, FORMAT_VERSION + 1)
    said = f"{folder} has format {FORMAT_VERSION + 1}, this version reads {FORMAT_VERSION}; upgrade mllm_compile, or"
    assert run(["cache", "verify", "--dir", str(cache)]) == 0
    assert f"new: newer: {said} compile the model again" in capsys.readouterr().out.splitlines()


def test_a_format_that_is_a_changed_byte_is_no_other_versions(cache):
    folder = runtimes_folder(cache) / "new"
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace(f'"format": {FORMAT_VERSION}', '"format": 0'))
    problems = {runtime.folder.name: runtime.problem for runtime in stored_runtimes(cache)}
    assert not any(isinstance(problem, OtherFormatError) for problem in problems.values())
    assert "has format 0, this version reads " in str(problems["new"])


def test_verify_says_where_nothing_is(tmp_path, capsys):
    assert run(["cache", "verify", "--dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"no runtimes in {tmp_path}\n"


@pytest.mark.parametrize("command", ["list", "prune", "verify"])
def test_another_folder_than_a_cache_is_refused_by_every_command(tmp_path, capsys, command):
    (tmp_path / "file").write_text("x")
    for name, what in (("file", "is no folder"), ("none", "does not exist")):
        assert run(["cache", command, "--dir", str(tmp_path / name)]) == 2
        said = f"error: --dir {tmp_path / name} {what}; give the folder that a config has as cache.dir\n"
        assert capsys.readouterr().err.endswith(said)


def test_pruning_says_what_it_freed_what_it_left_and_when_there_was_nothing(cache, capsys):
    def said() -> list[str]:
        assert run(["cache", "prune", "--max-size", "1G", "--dir", str(cache)]) == 0
        return capsys.readouterr().out.splitlines()

    shutil.rmtree(runtimes_folder(cache) / "broken")
    (runtimes_folder(cache) / ".key.x.part").mkdir()
    (runtimes_folder(cache) / ".key.x.part" / "file").write_bytes(bytes(1 << 10))
    with using_compiler_cache(cache) as folder:
        folder.mkdir()
        (folder / "kernel").write_bytes(bytes(2 << 10))
        assert run(["cache", "list", "--dir", str(cache)]) == 0
        assert capsys.readouterr().out.splitlines()[-1] == "kept by compilers in compilers/: 2.0 KiB"
        swept, left, freed = said()
        assert swept == "removed what killed compiles left: 1.0 KiB"
        assert left.startswith(f"left {folder}: something compiles with it ")
        assert freed == "freed 1.0 KiB"
    assert said() == ["removed what compilers kept: 2.0 KiB", "freed 2.0 KiB"]
    assert said() == ["freed 0 B"]


def test_a_runtime_is_listed_with_what_tells_it_from_others(cache, capsys):
    assert run(["cache", "list", "--dir", str(cache)]) == 0
    title, header, *rows = capsys.readouterr().out.splitlines()[:5]
    assert title == str(runtimes_folder(cache)), "with a name behind it, what every command takes"
    assert header.split() == ["runtime", "model", "dtype", "backend", "device", "size", "last", "used"]
    new = next(row for row in rows if row.startswith("  new "))
    assert new.split()[-6:-3] == ["float32", "eager", "cpu"]
    assert new.split()[-1] == time.strftime("%Y-%m-%d", time.localtime(1000))
    assert max(map(len, (header, *rows))) <= 100


def test_a_runtime_of_today_says_how_long_ago(cache, capsys):
    for age, name in ((30, "old"), (3700, "broken")):
        os.utime(runtimes_folder(cache) / name, (time.time() - age, time.time() - age))
    os.utime(runtimes_folder(cache) / "new", (time.time() - 180000, time.time() - 180000))
    assert run(["cache", "list", "--dir", str(cache)]) == 0
    rows = capsys.readouterr().out.splitlines()[2:5]
    assert [row.split()[0] for row in rows] == ["old", "broken", "new"]
    assert rows[0].endswith(" now") and rows[1].endswith(" 1 h ago") and rows[2].endswith(" 2 d ago")


@pytest.mark.parametrize(
    ("width", "left"),
    [
        (100, ["name", "model", "dtype", "backend"]),
        (46, ["name", "model", "dtype"]),
        (30, ["name", "model"]),
        (5, ["name", "model"]),
    ],
)
def test_a_table_without_room_has_fewer_columns_and_whole_names(width, left, monkeypatch):
    monkeypatch.setattr(console, "text_width", lambda stream: width)
    row = ["qwen3-0123456789", "/a/folder/of/models/Qwen3-8B", "float32", "inductor"]
    columns, ((name, model, *_),) = fitted(
        sys.stdout, ("name", "model", "dtype", "backend"), [row], "model", ("backend", "dtype")
    )
    assert columns == left
    assert name == "qwen3-0123456789"
    assert model.endswith("Qwen3-8B"[-7:])


def test_a_runtime_is_removed_by_its_name_or_how_it_begins(cache, capsys):
    assert run(["cache", "remove", "old", "nothing", "--dir", str(cache)]) == 2
    told = capsys.readouterr().err
    assert "no runtime and no fetched weights of a name that begins with 'nothing'; it has broken, new, old. " in told
    assert names(cache) == {"new", "old", "broken"}, "nothing is removed where a name is wrong"
    shutil.copytree(runtimes_folder(cache) / "new", runtimes_folder(cache) / "newer")
    assert run(["cache", "remove", "ne", "--dir", str(cache)]) == 2
    assert "'ne' begins several names in " in capsys.readouterr().err
    assert run(["cache", "remove", "new", "bro", "--dir", str(cache)]) == 0
    assert [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "removed new",
        "removed broken",
    ]
    assert names(cache) == {"newer", "old"}


def test_a_model_in_place_of_a_runtimes_name_is_told_the_names_of_its_runtimes(cache, capsys):
    (source,) = {one.manifest.config["model"]["source"] for one in stored_runtimes(cache) if one.manifest is not None}
    assert run(["cache", "remove", source, "--dir", str(cache)]) == 2
    told = capsys.readouterr().err
    assert f"{source!r} is a model; expected the name of a runtime. " in told
    assert "`mllm-compile cache remove new old` removes all that it has in " in told
    assert names(cache) == {"new", "old", "broken"}


def test_an_empty_cache_has_no_name_to_remove(tmp_path, capsys):
    assert run(["cache", "remove", "qwen3", "--dir", str(tmp_path)]) == 2
    assert "a name that begins with 'qwen3'; it is empty. `mllm-compile cache list`" in capsys.readouterr().err


def test_the_cache_commands(cache, capsys):
    assert run(["cache", "list", "--dir", str(cache)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["broken", "new", "old"]
    assert lines[5].startswith(f"broken is unusable: {runtimes_folder(cache) / 'broken'} has format None, ")
    assert lines[6].startswith("3 runtimes, ")
    assert lines[7] == "kept by compilers in compilers/: 0 B"
    assert run(["cache", "verify", "--dir", str(cache)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("broken: unusable: ") and lines[1] == "new: good"
    assert run(["cache", "prune", "--max-size", "1G", "--dir", str(cache)]) == 0
    assert capsys.readouterr().out.startswith("removed broken: ")
    assert run(["cache", "verify", "--dir", str(cache)]) == 0
    assert run(["cache", "prune", "--max-size", "lots", "--dir", str(cache)]) == 2
    assert "'lots' is no size; expected one such as 0, 500M or 20G" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("0", 0), ("500M", 500 << 20), ("1.5g", 3 << 29), ("20 GiB", 20 << 30), ("7B", 7)]
)
def test_sizes_are_read(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "G", "-1G", "1 0", "1X"])
def test_a_malformed_size_is_refused(text):
    with pytest.raises(ConfigError, match="is no size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (16 << 30, "16.0 GiB"), (1 << 42, "4.0 TiB")]
)
def test_sizes_are_shown(num_bytes, text):
    assert format_bytes(num_bytes) == text


def test_bytecode_goes_but_nothing_else_of_the_folder(cache):
    folder = cache / "bytecode" / "0123456789abcdef" / "opt"
    folder.mkdir(parents=True)
    (folder / "module.cpython-312.pyc").write_bytes(b"12345")
    (cache / "bytecode" / "somebody's").mkdir()
    assert prune(cache).bytecode_bytes == 5
    assert [path.name for path in (cache / "bytecode").iterdir()] == ["somebody's"]


def test_weights_of_another_node_are_listed_and_go_by_name_or_by_last_use(cache, capsys):
    fetched, others = (cache / "checkpoints" / name for name in ("fetched-" + "ab" * 16, "somebody's"))
    for folder in (fetched, others):
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(bytes(3 << 10))
    shutil.rmtree(runtimes_folder(cache) / "broken")
    os.utime(fetched, (500, 500))  # before the runtimes
    assert run(["cache", "list", "--dir", str(cache)]) == 0
    listed = f"weights from another node in checkpoints/: {fetched.name}, 3.0 KiB, last used 1970-01-01"
    assert listed in capsys.readouterr().out.splitlines()
    assert prune(cache).stored == [] and fetched.is_dir(), "without a size what is usable stays"
    room = sum(one.num_bytes for one in stored_runtimes(cache))
    assert [one.folder for one in prune(cache, room).stored] == [fetched]
    assert names(cache) == {"new", "old"} and others.is_dir()
    fetched.mkdir()
    assert run(["cache", "remove", "fetched-ab", "--dir", str(cache)]) == 0
    assert capsys.readouterr().out == f"removed {fetched.name}: 0 B\n" and not fetched.exists()
