"""Where runtimes lie: published whole, one compile a key, what dead compiles left, full disks, list, prune, verify."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors.torch
from safetensors import SafetensorError

from mllm_compile import artifact_store
from mllm_compile.artifact_store import (
    Pruned,
    compile_lock,
    compiler_cache,
    new_artifact_folder,
    prune,
    remove_runtime,
    runtimes_folder,
    stored_runtimes,
    sweep,
    using_compiler_cache,
)
from mllm_compile.byte_sizes import format_bytes, parse_bytes
from mllm_compile.cache_key import FORMAT_VERSION
from mllm_compile.cli import run
from mllm_compile.compile import _workers, load_or_compile
from mllm_compile.compile_options import CompileOptions
from mllm_compile.errors import ConfigError, OldFormatError
from mllm_compile.sealed_json import write_sealed
from mllm_compile.tensor_file import save_tensors
from tests.tiny_model import tiny_config


@pytest.fixture
def cache(eager_cache: Path, tmp_path: Path) -> Path:
    """With three runtimes, `old` used before `new`, and a broken one."""
    (whole,) = runtimes_folder(eager_cache).iterdir()
    for age, name in enumerate(("new", "old", "broken")):
        folder = runtimes_folder(tmp_path) / name
        shutil.copytree(whole, folder)
        os.utime(folder, (1000 - age, 1000 - age))
    (runtimes_folder(tmp_path) / "broken" / "manifest.json").write_text("{}")
    os.utime(runtimes_folder(tmp_path) / "broken", (2000, 2000))
    return tmp_path


def names(cache: Path) -> set[str]:
    return {path.name for path in runtimes_folder(cache).iterdir()}


def test_a_folder_is_at_its_place_when_it_is_whole_and_not_before(tmp_path):
    final = tmp_path / "runtimes" / "key"
    with new_artifact_folder(final) as scratch:
        (scratch / "file").write_text("x")
        assert not final.exists()
        assert scratch.stat().st_mode & 0o777 == 0o700
    assert (final / "file").read_text() == "x"
    assert final.stat().st_mode & 0o777 == 0o700
    assert names(tmp_path) == {"key"}


def test_a_body_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError), new_artifact_folder(tmp_path / "runtimes" / "key"):
        raise ZeroDivisionError
    assert names(tmp_path) == set()


def test_what_lay_there_is_replaced(tmp_path):
    final = tmp_path / "runtimes" / "key"
    (final / "pieces").mkdir(parents=True)
    (final / "pieces" / "old").write_text("x")
    with new_artifact_folder(final) as scratch:
        (scratch / "new").write_text("x")
    assert [path.name for path in final.iterdir()] == ["new"]
    assert names(tmp_path) == {"key"}


def test_a_second_compile_of_a_key_waits_for_the_first_and_leaves_no_lock(tmp_path):
    order: list[str] = []
    is_waiting = threading.Event()

    def second() -> None:
        with compile_lock(tmp_path / "key", is_waiting.set):
            order.append("second")

    with compile_lock(tmp_path / "key", lambda: order.append("nobody waits")):
        thread = threading.Thread(target=second)
        thread.start()
        assert is_waiting.wait(10)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    assert list(tmp_path.iterdir()) == []


def test_where_a_file_system_has_no_locks_compiles_go_on(tmp_path, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(artifact_store.fcntl, "flock", no_locks)
    final = tmp_path / "runtimes" / "key"
    with compile_lock(final, pytest.fail), new_artifact_folder(final) as scratch:
        (scratch / "file").write_text("x")
    assert (final / "file").exists()
    assert sweep(final.parent) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_meanwhile_is_told_with_the_place_and_leaves_nothing(tmp_path, number):
    cache = runtimes_folder(tmp_path) / "key"
    with pytest.raises(ConfigError, match=rf"cache\.dir {tmp_path} cannot be written .*make room"):
        fill_the_disk(new_artifact_folder(cache), number)
    with pytest.raises(ConfigError, match=rf"--output {tmp_path}/out cannot be written .*make room"):
        fill_the_disk(new_artifact_folder(tmp_path / "out", is_output=True), number)
    assert names(tmp_path) == set()
    assert [path.name for path in tmp_path.iterdir()] == ["runtimes"]


def fill_the_disk(folder: AbstractContextManager[Path], number: int) -> None:
    with folder:
        raise OSError(number, os.strerror(number))


def test_what_cannot_be_read_meanwhile_is_no_matter_of_the_cache(tmp_path):
    with pytest.raises(PermissionError), new_artifact_folder(tmp_path / "key"):
        raise PermissionError(errno.EACCES, "Permission denied", "a checkpoint")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC])
def test_a_cache_that_refuses_to_be_written_is_told_by_whatever_writes_it(cache, monkeypatch, number):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    compiler_cache(cache).mkdir()
    final = runtimes_folder(cache) / "key"
    for module, name in ((os, "open"), (os, "mkdir"), (tempfile, "mkdtemp")):
        monkeypatch.setattr(module, name, refuse)
    for use in (
        lambda: compile_lock(final, pytest.fail).__enter__(),
        lambda: new_artifact_folder(final).__enter__(),
        lambda: using_compiler_cache(cache).__enter__(),
        lambda: sweep(runtimes_folder(cache)),
        lambda: remove_runtime(runtimes_folder(cache) / "new"),
        lambda: prune(cache, 0),
    ):
        with pytest.raises(
            ConfigError, match=re.escape(f"cache.dir {cache} cannot be written ({os.strerror(number)})")
        ):
            use()


def test_a_cache_that_cannot_be_read_is_told(cache, monkeypatch, capsys):
    def refuse(_: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    assert run(["cache", "list", "--dir", str(cache)]) == 2
    assert f"{runtimes_folder(cache)} cannot be read (Permission denied); set cache.dir" in capsys.readouterr().err


def test_a_cached_runtime_is_found_where_nothing_can_be_written_and_only_hashes_are_not_remembered(cache, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    config = tiny_config(cache, compile={"backend": "eager"})
    load_or_compile(config)
    monkeypatch.setattr(os, "mkdir", refuse)
    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    assert load_or_compile(config).was_cached
    with pytest.raises(ConfigError, match=r"cannot be written \(Read-only file system\)"):
        load_or_compile(config, options=CompileOptions(verify_weights=True))


def test_a_full_disk_is_an_os_error_when_tensors_are_written_too(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.torch, "save_file", refuse)
    with pytest.raises(OSError, match="No space left on device") as refused:
        save_tensors({}, tmp_path / "file")
    assert refused.value.errno == errno.ENOSPC


def test_what_a_dead_compile_left_is_swept_and_what_a_living_one_writes_is_not(tmp_path):
    final = tmp_path / "runtimes" / "key"
    code = (
        "import os, signal, sys; from pathlib import Path; from mllm_compile.artifact_store import _make_scratch;"
        "_make_scratch(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(final)], check=False)
    (left,) = names(tmp_path)
    (final.parent / left / "file").write_text("four")
    with new_artifact_folder(final) as scratch:
        assert sweep(final.parent) == [4]
        assert names(tmp_path) == {scratch.name}


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
    assert [runtime.folder.name for runtime in pruned.runtimes] == ["broken", "old"]
    assert pruned.num_bytes == broken + size
    assert names(cache) == {"new"}
    assert [runtime.folder.name for runtime in prune(cache, 0).runtimes] == ["new"]
    assert prune(cache, 0) == Pruned([], [], 0)


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


def test_a_format_that_is_a_changed_byte_or_a_newer_versions_is_not_old(cache):
    folder = runtimes_folder(cache) / "new"
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace(f'"format": {FORMAT_VERSION}', '"format": 0'))
    of_format(runtimes_folder(cache) / "old", FORMAT_VERSION + 1)
    problems = {runtime.folder.name: runtime.problem for runtime in stored_runtimes(cache)}
    assert not any(isinstance(problem, OldFormatError) for problem in problems.values())
    assert "has format 0, this version reads " in str(problems["new"])
    assert f"has format {FORMAT_VERSION + 1}, this version reads {FORMAT_VERSION}" in str(problems["old"])


@pytest.mark.parametrize("command", ["list", "prune", "verify"])
def test_what_is_no_cache_folder_is_refused_by_every_command(tmp_path, capsys, command):
    (tmp_path / "file").write_text("x")
    for name, what in (("file", "is no folder"), ("none", "does not exist")):
        assert run(["cache", command, "--dir", str(tmp_path / name)]) == 2
        said = f"error: --dir {tmp_path / name} {what}; give the folder that a config has as cache.dir\n"
        assert capsys.readouterr().err.endswith(said)


def test_what_compilers_keep_is_removed_when_nothing_compiles_and_not_before(tmp_path):
    with using_compiler_cache(tmp_path) as folder, using_compiler_cache(tmp_path):
        folder.mkdir()
        (folder / "kernel").write_text("four")
        assert prune(tmp_path, 0) == Pruned([], [], None)
        assert (folder / "kernel").exists()
    assert prune(tmp_path, 0) == Pruned([], [], 4)
    assert not folder.exists()


def test_a_compile_holds_what_compilers_keep_while_its_workers_run(tmp_path):
    config = SimpleNamespace(
        compile=SimpleNamespace(backend="inductor"),
        runtime=SimpleNamespace(device="cpu", max_num_batched_tokens=512),
        cache=SimpleNamespace(dir=str(tmp_path)),
    )
    with _workers(config):
        assert compiler_cache(tmp_path).is_dir()
        assert prune(tmp_path, 0).compiler_bytes is None
        assert compiler_cache(tmp_path).is_dir()
    assert prune(tmp_path, 0).compiler_bytes is not None
    assert not compiler_cache(tmp_path).exists()


def test_where_a_file_system_has_no_locks_what_compilers_keep_is_left(tmp_path, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(artifact_store.fcntl, "flock", no_locks)
    with using_compiler_cache(tmp_path) as folder:
        folder.mkdir()
    assert prune(tmp_path, 0).compiler_bytes is None
    assert folder.exists()


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
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="is no size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (16 << 30, "16.0 GiB"), (1 << 42, "4.0 TiB")]
)
def test_sizes_are_shown(num_bytes, text):
    assert format_bytes(num_bytes) == text
