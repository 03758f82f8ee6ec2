"""Bytecode is kept in the user's cache where the installation does not keep it, and nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mllm_compile.errors import ConfigError
from mllm_compile.files.cache_folders import auto_cache_dir
from mllm_compile.process import bytecode
from mllm_compile.process.bytecode import compiled_ahead, kept_bytecode
from tests.hang_guard import HANG_S

# Imports a package that stands for torch, and says where its bytecode is, and where the next module's would be.
IMPORTS = """
import sys
from mllm_compile.process import bytecode
is_kept_beside = bytecode._is_kept_beside
bytecode._is_kept_beside = lambda package: is_kept_beside("stands_for_torch")
with bytecode.kept_bytecode():
    with bytecode.kept_bytecode():
        import stands_for_torch
with bytecode.kept_bytecode():
    import stands_for_torch.part
    print(bytecode.environment())
print(stands_for_torch.part.__cached__)
print(sys.pycache_prefix, sys.dont_write_bytecode)
"""


@pytest.fixture
def package(tmp_path) -> Path:
    folder = tmp_path / "site" / "stands_for_torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "part.py").write_text("made = True\n")
    return folder


def run(package: Path, cache: Path, program: str = IMPORTS, **environment: str) -> list[str]:
    """Lines that a program prints."""
    paths = os.pathsep.join([str(package.parent), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PYTHONPATH": paths, "MLLM_COMPILE_CACHE": str(cache)} | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_where_python_may_not_write_it_is_kept_in_the_cache(package, tmp_path):
    cache = tmp_path / "cache"
    for number in range(2):
        told, cached, after = run(package, cache, PYTHONDONTWRITEBYTECODE="1")
        (prefix,) = (cache / "bytecode").iterdir()
        assert Path(cached).is_relative_to(prefix) and Path(cached).is_file()
        assert told == str({"PYTHONPYCACHEPREFIX": str(prefix), "PYTHONDONTWRITEBYTECODE": ""})
        assert after == "None True", "as before"
        if number == 0:
            first = Path(cached).stat().st_mtime_ns
    assert Path(cached).stat().st_mtime_ns == first, "the second process takes it"
    assert (cache / "bytecode").stat().st_mode & 0o777 == 0o700
    assert not (package / "__pycache__").exists()


# The same where torch's bytecode is there and the project's own is not.
OWN = """
import sys
from mllm_compile.process import bytecode
bytecode._is_kept_beside = lambda package: True
bytecode._is_up_to_date = lambda source: False  # other tests may have written some
with bytecode.kept_bytecode():
    import mllm_compile.runtime.sampling.params
with bytecode.kept_bytecode():
    import stands_for_torch.part
    print(bytecode.environment())
import mllm_compile.runtime.speculation.drafter
print(sys.pycache_prefix, sys.dont_write_bytecode)
"""


def test_where_torchs_alone_is_there_the_projects_own_is_kept(package, tmp_path):
    times = []
    for _ in range(2):
        told, after = run(package, tmp_path / "cache", OWN, PYTHONDONTWRITEBYTECODE="1")
        assert (told, after) == ("{}", "None True"), "others' are where they were"
        (prefix,) = (tmp_path / "cache" / "bytecode").iterdir()
        kept = {path.name.partition(".")[0]: path for path in prefix.rglob("*.pyc")}
        assert {"params", "structured_params"} <= set(kept)
        assert not {"part", "numpy", "torch"} & set(kept)
        times.append(kept["params"].stat().st_mtime_ns)
    assert times[0] == times[1], "the second process takes it"
    assert not (package / "__pycache__").exists()


def value_of(source: Path) -> int:
    """The value of `a` in a module that is loaded as the project's."""
    names: dict[str, int] = {}
    code = bytecode._KeptLoader("changing", str(source)).get_code("changing")
    assert code is not None
    exec(code, names)
    return names["a"]


@pytest.mark.parametrize("is_torch_beside", [True, False])
def test_a_module_that_has_changed_is_compiled_anew(is_torch_beside, tmp_path, monkeypatch):
    source, folder = tmp_path / "changing.py", str(tmp_path / "kept")
    monkeypatch.setattr(bytecode, "_folder_or_none", lambda: folder)
    monkeypatch.setattr(sys, "pycache_prefix", None if is_torch_beside else folder)
    monkeypatch.setattr(sys, "dont_write_bytecode", is_torch_beside)
    for number in (1, 2, 33):  # two of one size, and all of one time: as in two images whose files have one
        source.write_text(f"a = {number}")
        os.utime(source, (10**9, 10**9))
        assert value_of(source) == number
    (kept,) = (tmp_path / "kept").rglob("*.pyc")
    assert kept.name.partition(".")[0] == "changing"
    kept.write_bytes(kept.read_bytes()[:-3])
    assert value_of(source) == 33, "a damaged file is compiled anew"
    compiled = kept.read_bytes()
    monkeypatch.setattr(bytecode._KeptLoader, "source_to_code", None)
    assert value_of(source) == 33 and kept.read_bytes() == compiled, "else it is taken as it is"


def test_a_module_may_be_imported_while_another_is_compiled(tmp_path, monkeypatch):
    """As the collector may have a finaliser do, or another thread."""
    monkeypatch.setattr(bytecode, "_folder_or_none", lambda: str(tmp_path / "kept"))
    monkeypatch.setattr(sys, "pycache_prefix", None)
    (tmp_path / "other.py").write_text("a = 2")
    (tmp_path / "changing.py").write_text("a = 1")
    values, compile_one = [], bytecode._KeptLoader.source_to_code

    def compile_both(self: bytecode._KeptLoader, data: bytes, path: str) -> object:
        assert sys.pycache_prefix is None, "other threads' imports look where they always do"
        if path.endswith("changing.py"):
            importer = threading.Thread(target=lambda: values.append(value_of(tmp_path / "other.py")), daemon=True)
            importer.start()
            importer.join(HANG_S)
        return compile_one(self, data, path)

    monkeypatch.setattr(bytecode._KeptLoader, "source_to_code", compile_both)
    values.append(value_of(tmp_path / "changing.py"))
    assert values == [2, 1]


def test_where_torchs_is_not_there_either_the_projects_own_goes_by_its_hash(package, tmp_path):
    program = OWN.replace("lambda package: True", "lambda package: False")
    told, after = run(package, tmp_path / "cache", program, PYTHONDONTWRITEBYTECODE="1")
    (prefix,) = (tmp_path / "cache" / "bytecode").iterdir()
    assert str(prefix) in told and after == "None True"
    kept = {path.name.partition(".")[0]: path for path in prefix.rglob("*.pyc")}
    for name, flags in (("params", 3), ("drafter", 3), ("part", 0)):
        assert kept[name].read_bytes()[4] == flags, name


# A process that is started as this project's are.
STARTED = """
import os, subprocess, sys
from mllm_compile.process import bytecode
bytecode._is_kept_beside = lambda package: package == "mllm_compile"
with bytecode.kept_bytecode():
    program = "from mllm_compile.process.bytecode import kept_bytecode\\nwith kept_bytecode():"
    program += "\\n    import mllm_compile.runtime.sampling.params, stands_for_torch.part"
    subprocess.run([sys.executable, "-c", program], env=os.environ | bytecode.environment(), check=True)
"""


def test_a_process_that_is_started_keeps_the_projects_own_by_its_hash_and_takes_it(package, tmp_path):
    times = []
    for _ in range(2):
        run(package, tmp_path / "cache", STARTED, PYTHONDONTWRITEBYTECODE="1")
        (prefix,) = (tmp_path / "cache" / "bytecode").iterdir()
        assert {"params", "bytecode", "errors"} <= {path.name.partition(".")[0] for path in prefix.rglob("*.pyc")}
        ours = str(prefix) + str(Path(bytecode.__file__).parents[1]) + os.sep
        flags = {str(path): path.read_bytes()[4] for path in prefix.rglob("*.pyc")}
        assert {flag for path, flag in flags.items() if path.startswith(ours)} == {3}
        assert flags[str(next(prefix.rglob("part.*.pyc")))] == 0, "others' are as Python has them"
        times.append({path: Path(path).stat().st_mtime_ns for path in flags})
    assert times[0] == times[1]


# A helper process, which does not keep any bytecode itself.
HELPED = """
from mllm_compile.process import bytecode
from mllm_compile.process.helper_process import HelperProcesses
bytecode._is_kept_beside = lambda package: package == "mllm_compile"
limits = {"seconds": 1000, "max_wait_s": HANG_S, "max_start_s": HANG_S, "max_answer": 1000, "most": 1}
helpers = HelperProcesses("tests.process.helper", b"", task="that helps", kept_after=(b"A",), **limits)
assert helpers.ask(b"") == (b"A", b"")
"""


def test_a_helper_keeps_the_projects_own_by_its_hash_and_takes_it(package, tmp_path):
    times = []
    for _ in range(2):
        run(package, tmp_path / "cache", HELPED.replace("HANG_S", str(HANG_S)), PYTHONDONTWRITEBYTECODE="1")
        kept = {path.name.partition(".")[0]: path for path in (tmp_path / "cache" / "bytecode").rglob("*.pyc")}
        for name, flags in (("helper_server", 3), ("hashed_bytecode", 3), ("helper", 0)):
            assert kept[name].read_bytes()[4] == flags, name
        times.append({name: path.stat().st_mtime_ns for name, path in kept.items()})
    assert times[0] == times[1]


def test_where_python_keeps_it_nothing_is_different(package, tmp_path):
    for _ in range(2):
        told, cached, after = run(package, tmp_path / "cache", PYTHONDONTWRITEBYTECODE="")
        assert (told, after) == ("{}", "None False")
        assert Path(cached).is_file() and Path(cached).parent == package / "__pycache__"
    told, cached, after = run(package, tmp_path / "cache", PYTHONDONTWRITEBYTECODE="1")
    assert (told, after) == ("{}", "None True"), "it is there"
    assert not (tmp_path / "cache").exists()


def test_whoever_has_a_place_of_their_own_keeps_it(package, tmp_path):
    own = {"PYTHONPYCACHEPREFIX": str(tmp_path / "own"), "PYTHONDONTWRITEBYTECODE": "1"}
    told, _, after = run(package, tmp_path / "cache", **own)
    assert told == str({"PYTHONPYCACHEPREFIX": str(tmp_path / "own")})
    assert after == f"{tmp_path / 'own'} True"
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_others_can_write_to_is_not_used(package, tmp_path):
    (tmp_path / "cache" / "bytecode").mkdir(parents=True)
    (tmp_path / "cache" / "bytecode").chmod(0o777)
    told, cached, after = run(package, tmp_path / "cache", PYTHONDONTWRITEBYTECODE="1")
    assert (told, after) == ("{}", "None True")
    assert not os.path.exists(cached)


def test_packages_of_another_user_are_as_good_as_unwritten(package, monkeypatch):
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert bytecode._is_kept_beside("stands_for_torch")
    monkeypatch.setattr(os, "access", lambda path, mode: path != str(package))
    assert not bytecode._is_kept_beside("stands_for_torch")
    assert bytecode._is_kept_beside("no_such_package")


def test_it_is_as_before_after_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("MLLM_COMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(bytecode, "_is_kept_beside", lambda package: False)
    before = sys.pycache_prefix, sys.dont_write_bytecode
    with pytest.raises(ImportError), kept_bytecode():
        assert Path(sys.pycache_prefix).parent == tmp_path / "bytecode" and not sys.dont_write_bytecode
        raise ImportError
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == before


def test_each_installation_and_its_versions_have_a_place_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("MLLM_COMPILE_CACHE", str(tmp_path))
    first = bytecode._folder()
    assert bytecode._folder() == first
    monkeypatch.setattr(bytecode, "_version", lambda package: "0.0.1")
    other = bytecode._folder()
    monkeypatch.setattr(sys, "prefix", "/somewhere")
    assert len({first, other, bytecode._folder()}) == 3


@pytest.mark.parametrize("prefix", [None, "/a/place/of/their/own"])
def test_a_user_without_a_home_does_without(monkeypatch, prefix):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("MLLM_COMPILE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(bytecode, "_is_kept_beside", lambda package: False)
    monkeypatch.setattr(sys, "pycache_prefix", prefix)
    with kept_bytecode():
        assert sys.pycache_prefix == prefix
    with pytest.raises(
        ConfigError, match=r"where the cache is \(Could not .*\): set cache\.dir, or MLLM_COMPILE_CACHE"
    ):
        auto_cache_dir()


# Compiles a package ahead; says whether a module and a test of it are compiled after a while, and whether that would be
# done again.
AHEAD = """
import importlib.util, os, sys, time
from mllm_compile.process import bytecode
folder = sys.argv[1]
os.cpu_count = lambda: 4
bytecode._is_kept_beside = lambda package: False
packages = ("stands_for_torch", "no_such_package")
with bytecode.kept_bytecode(), bytecode.compiled_ahead(packages):
    names = ("__init__", "part", "tests/part")
    *wanted, other = (importlib.util.cache_from_source(f"{folder}/{name}.py") for name in names)
    deadline = time.monotonic() + float(sys.argv[2])
    while not all(map(os.path.exists, wanted)) and time.monotonic() < deadline:
        time.sleep(0.05)
    print(all(map(os.path.exists, wanted)), os.path.exists(other), bytecode._start_compiling(packages))
"""


def test_a_compile_has_other_processes_make_what_it_will_import(package, tmp_path):
    (package / "tests").mkdir()
    (package / "tests" / "part.py").write_text("")
    paths = os.pathsep.join([str(package.parent), str(Path(__file__).parents[2])])
    added = {"PYTHONPATH": paths, "MLLM_COMPILE_CACHE": str(tmp_path / "cache"), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", AHEAD, str(package), str(HANG_S)]
    done = subprocess.run(command, env=os.environ | added, capture_output=True, text=True, check=True)
    assert done.stdout == "True False None\n"


def test_with_few_cores_or_no_room_for_a_process_whoever_imports_compiles(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    assert bytecode._start_compiling(bytecode.OF_TORCH) is None
    monkeypatch.setattr(os, "cpu_count", lambda: 4)

    def refuse(*arguments, **options):
        raise BlockingIOError

    monkeypatch.setattr("mllm_compile.process.bytecode.ProcessGroup", refuse)
    with pytest.raises(BlockingIOError):
        bytecode._start_compiling(bytecode.OF_TORCH)
    with compiled_ahead(bytecode.OF_TORCH):
        pass
