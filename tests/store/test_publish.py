"""Where runtimes are: published whole, one compile a key, what dead compiles left, full disks, list, prune, verify."""

from __future__ import annotations

import errno
import os
import re
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

from mllm_compile.cli import run
from mllm_compile.compiler.build import _workers
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.compile_options import CompileOptions
from mllm_compile.errors import ConfigError
from mllm_compile.files.cache_folders import compiler_cache
from mllm_compile.files.save_tensors import save_tensors
from mllm_compile.store import publish
from mllm_compile.store.contents import Pruned, prune, remove_stored
from mllm_compile.store.locks import compile_lock, using_compiler_cache
from mllm_compile.store.publish import new_artifact_folder, runtimes_folder, sweep
from tests.hang_guard import HANG_S
from tests.tiny_model import shallow_tiny, tiny_config


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


def test_an_earlier_runtime_is_replaced(tmp_path):
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
        assert is_waiting.wait(HANG_S)
        order.append("first")
    thread.join(HANG_S)
    assert order == ["first", "second"]
    assert list(tmp_path.iterdir()) == []


def test_where_a_file_system_has_no_locks_compiles_go_on(tmp_path, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(publish.fcntl, "flock", no_locks)
    final = tmp_path / "runtimes" / "key"
    with compile_lock(final, pytest.fail), new_artifact_folder(final) as scratch:
        (scratch / "file").write_text("x")
    assert (final / "file").exists()
    assert sweep(final.parent) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_fills_up_meanwhile_is_told_with_the_place_and_leaves_nothing(tmp_path, number):
    cache = runtimes_folder(tmp_path) / "key"
    with pytest.raises(ConfigError, match=rf"cache\.dir {tmp_path} cannot be written: .*MiB free.*; make room"):
        fill_the_disk(new_artifact_folder(cache), number)
    with pytest.raises(ConfigError, match=rf"--output {tmp_path}/out cannot be written: .*MiB free.*; make room"):
        fill_the_disk(new_artifact_folder(tmp_path / "out", is_output=True), number)
    assert names(tmp_path) == set()
    assert [path.name for path in tmp_path.iterdir()] == ["runtimes"]


def fill_the_disk(folder: AbstractContextManager[Path], number: int) -> None:
    with folder:
        raise OSError(number, os.strerror(number))


def test_another_disk_that_fills_up_is_told_by_its_own_name(tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device", "/elsewhere/log")
    with (
        pytest.raises(
            ConfigError,
            match=r"^/elsewhere/log cannot be written: the disk that holds /elsewhere is full \(0 MiB free\)",
        ),
        new_artifact_folder(tmp_path / "key"),
    ):
        raise full


def test_a_copy_that_does_not_fit_is_told_by_where_it_was_to_go(tmp_path):
    cache = runtimes_folder(tmp_path) / "key"
    with (
        pytest.raises(ConfigError, match=rf"cache\.dir {tmp_path} cannot be written: .*make room"),
        new_artifact_folder(cache) as scratch,
    ):
        raise OSError(errno.ENOSPC, "No space left on device", "/model/tokenizer.json", None, str(scratch / "t.json"))
    with (
        pytest.raises(
            ConfigError,
            match=r"^/elsewhere/copy cannot be written: the disk that holds /elsewhere is full \(0 MiB free\)",
        ),
        new_artifact_folder(cache),
    ):
        raise OSError(errno.ENOSPC, "No space left on device", "/model/tokenizer.json", None, "/elsewhere/copy")


def test_an_error_of_telling_a_waiter_is_not_blamed_on_the_cache(tmp_path):
    def closed() -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    final = runtimes_folder(tmp_path) / "key"
    with compile_lock(final, closed), pytest.raises(BrokenPipeError), compile_lock(final, closed):
        pass


def test_an_unreadable_checkpoint_is_not_blamed_on_the_cache(tmp_path):
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
        lambda: remove_stored(runtimes_folder(cache) / "new"),
        lambda: prune(cache, 0),
    ):
        reason = f": the disk that holds {cache} is full" if number == errno.ENOSPC else f" ({os.strerror(number)})"
        with pytest.raises(ConfigError, match=re.escape(f"cache.dir {cache} cannot be written{reason}")):
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
        "import os, signal, sys; from pathlib import Path; from mllm_compile.store.publish import _make_scratch;"
        "_make_scratch(Path(sys.argv[1])); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(final)], check=False)
    (left,) = names(tmp_path)
    (final.parent / left / "file").write_text("four")
    with new_artifact_folder(final) as scratch:
        assert sweep(final.parent) == [4]
        assert names(tmp_path) == {scratch.name}


def test_what_compilers_keep_is_removed_when_nothing_compiles_and_not_before(tmp_path):
    with using_compiler_cache(tmp_path) as folder, using_compiler_cache(tmp_path):
        folder.mkdir()
        (folder / "kernel").write_text("four")
        assert prune(tmp_path, 0) == Pruned([], [], None, 0)
        assert (folder / "kernel").exists()
    assert prune(tmp_path, 0) == Pruned([], [], 4, 0)
    assert not folder.exists()


def test_a_compile_holds_what_compilers_keep_while_its_workers_run(tmp_path):
    config = SimpleNamespace(
        model=SimpleNamespace(pools=False, has_encoder=False),
        compile=SimpleNamespace(backend="inductor"),
        runtime=SimpleNamespace(device="cpu", max_num_batched_tokens=512, max_model_len=512),
        cache=SimpleNamespace(dir=str(tmp_path)),
    )
    with _workers(config, tmp_path):
        assert compiler_cache(tmp_path).is_dir()
        assert prune(tmp_path, 0).compiler_bytes is None
        assert compiler_cache(tmp_path).is_dir()
    assert prune(tmp_path, 0).compiler_bytes is not None
    assert not compiler_cache(tmp_path).exists()


def test_where_a_file_system_has_no_locks_what_compilers_keep_is_left(tmp_path, monkeypatch):
    def no_locks(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(publish.fcntl, "flock", no_locks)
    with using_compiler_cache(tmp_path) as folder:
        folder.mkdir()
    assert prune(tmp_path, 0).compiler_bytes is None
    assert folder.exists()


def somebody_elses(folder: Path) -> Path:
    """A folder with a manifest.json, as a web page has one; its file."""
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text('{"name": "a page", "format": 1}')
    (folder / "thesis.txt").write_text("precious")
    return folder / "thesis.txt"


def test_a_folder_of_something_else_with_a_manifest_is_neither_replaced_nor_pruned(tmp_path):
    precious = somebody_elses(tmp_path / "page")
    config = tiny_config(tmp_path / "cache", compile={"backend": "eager"})
    with pytest.raises(ConfigError, match="exists and is no runtime: it is not replaced"):
        load_or_compile(config, options=CompileOptions(output=tmp_path / "page"))
    assert precious.read_text() == "precious"
    pruned = somebody_elses(tmp_path / "project" / "runtimes" / "deno")
    prune(tmp_path / "project", 0)
    assert pruned.read_text() == "precious"


def test_an_output_that_is_a_link_is_put_where_it_leads(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.mkdir()
    link.symlink_to(real)
    cache, model = tmp_path / "cache", {"path": str(shallow_tiny(tmp_path / "model"))}
    config = tiny_config(cache, compile={"backend": "eager"}, model=model)
    first = load_or_compile(config, options=CompileOptions(output=link))
    other = tiny_config(cache, compile={"backend": "eager"}, model=model | {"dtype": "bfloat16"})
    second = load_or_compile(other, options=CompileOptions(output=link))
    assert first.folder == second.folder == real and link.is_symlink()
    assert second.artifact.factors["dtype"] == "bfloat16" != first.artifact.factors["dtype"]
