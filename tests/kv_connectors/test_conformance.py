"""The test of stores passes those that follow the interface, and finds each way to break it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.folder_store import FolderStore
from mllm_compile.kv_connectors import KVConnector, KVConnectorError, Namespace
from mllm_compile.kv_connectors.conformance import TESTS, check, main, places_of
from mllm_compile.runtime.tiers.disk import DiskFiles
from mllm_compile.runtime.tiers.guarded import GuardedConnector
from tests.kv_connectors import broken_stores
from tests.kv_connectors.broken_stores import MemoryStore

ROOT = Path(__file__).parents[2]


def test_files_follow_the_interface(tmp_path: Path) -> None:
    assert len(check(lambda namespace: DiskFiles(tmp_path / "tier", namespace))) == len(TESTS)


def test_a_store_of_others_behind_its_guard_follows_it() -> None:
    assert len(check(lambda namespace: GuardedConnector(MemoryStore, namespace, {}, 60.0, "a store"))) == len(TESTS)


def test_the_example_follows_it_and_the_command_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mllm_compile.kv_connectors.conformance", "examples.folder_store.FolderStore"]
    options = json.dumps({"folder": str(tmp_path)})
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, options], capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("holds: ") == len(TESTS)
    assert not list(tmp_path.glob("*/*")), "it removes what it has stored"


def test_the_example_reads_files_of_this_user_alone(tmp_path: Path) -> None:
    root, namespace = tmp_path / "kv", Namespace.of({"a": "b"}, 8)
    options, (place, linked, opened) = {"folder": str(root)}, places_of(3)
    store = FolderStore(namespace, options)
    buffer = bytearray(8)
    assert store.store([place, opened], [memoryview(b"contents")] * 2) == [True, True]
    (root / namespace.name / linked.name).symlink_to(root / namespace.name / place.name)
    (root / namespace.name / opened.name).chmod(0o644)
    found = [store.load([one], [memoryview(buffer)]) for one in (place, linked, opened)]
    assert found == [[True], [False], [False]]
    (root / "secret").chmod(0o640)
    with pytest.raises(KVConnectorError, match="expected a file of 32 bytes, of this user alone"):
        FolderStore(namespace, options)
    (root / "secret").chmod(0o600)
    assert FolderStore(namespace, options).secret == store.secret
    root.chmod(0o722)
    with pytest.raises(KVConnectorError, match=r"closed to others; got one of user \d+ with mode 722 \(chmod 700 "):
        FolderStore(namespace, options)
    root.chmod(0o700)
    root.rename(tmp_path / "elsewhere")
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(KVConnectorError, match="expected a folder of user"):
        FolderStore(namespace, options)


@pytest.mark.skipif(os.getuid() != 0, reason="gives a file to another user")
def test_the_example_reads_no_file_of_another_user(tmp_path: Path) -> None:
    namespace, (place,) = Namespace.of({"a": "b"}, 8), places_of(1)
    store = FolderStore(namespace, {"folder": str(tmp_path)})
    store.store([place], [memoryview(b"contents")])
    os.chown(tmp_path / namespace.name / place.name, 12345, 12345)
    assert store.load([place], [memoryview(bytearray(8))]) == [False]
    os.chown(tmp_path / namespace.name, 12345, 12345)
    with pytest.raises(KVConnectorError, match="got one of user 12345"):
        FolderStore(namespace, {"folder": str(tmp_path)})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ChangesAByte", r"the bytes of load: got \[False, False, False\]"),
        ("KeepsTheCallersMemory", r"the bytes of load: got \[False\]"),
        ("StopsAtTheFirstMiss", r"lookup: got \[True\], expected \[True, False, True\]"),
        ("MixesPagesAndStates", r"lookup: got \[True, True\], expected \[True, False\]"),
        ("ForgetsNamespaces", r"lookup in another namespace: got \[True\]"),
        ("RemovesNothing", r"lookup: got \[True, True\], expected \[False, True\]"),
        ("HasANewSecretEachTime", "the secret behind a restart: got False"),
        ("IsOfAnotherVersion", "its version is 2, expected 1"),
        ("HasAShortSecret", "its secret is not of 16 to 64 bytes"),
    ],
)
def test_a_store_that_breaks_it_is_found(name: str, message: str) -> None:
    def open_store(namespace: Namespace) -> KVConnector:
        store: KVConnector = getattr(broken_stores, name)(namespace, {})
        return store

    with pytest.raises(KVConnectorError, match=message):
        check(open_store)


def test_what_is_no_store_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for name, message in (
        ("tests.kv_connectors.broken_stores.Lacks", "lacks lookup, load, store, remove, close"),
        ("tests.kv_connectors.broken_stores.Nothing", "has no class Nothing"),
        ("tests.kv_connectors.nowhere.Store", "cannot be imported: ModuleNotFoundError"),
    ):
        assert main([name]) == 1
        told = capsys.readouterr().err
        assert message in told
        assert told.count("\n") == 1


def test_options_that_are_no_object_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for options in ("5", "[1]", "{"):
        assert main(["examples.folder_store.FolderStore", options]) == 1
        assert capsys.readouterr().err.count("\n") == 1


def test_the_example_without_a_folder_says_what_it_takes(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "folder_store.py")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 1
    assert "python examples/folder_store.py /mnt/shared/kv" in done.stderr
    assert "Traceback" not in done.stderr
