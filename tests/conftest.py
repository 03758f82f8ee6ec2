"""Fixtures that several test files share. Fixtures that take long say so."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from mllm_compile.process.no_gc import gc_paused
from tests.remembered_traces import remembered_traces, remembers

# Before torch is imported. Tests are many and small: threads would only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("any machine", deadline=None)  # a busy one takes longer than 0.2 s now and then
settings.load_profile("any machine")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Keeps the garbage collector from what imports and the list of tests make: a million objects that stay to the end.

    Every compile and every engine that ends collects garbage, and looking through those took 0.5 s each time.
    """
    with gc_paused():
        result = yield
    gc.collect()
    gc.freeze()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """Does the same with what a file has imported and traced: else each collection takes seconds in the end."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return result


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    """Escapes lone surrogates: xdist sends reports as UTF-8, and a worker that cannot would end without a word."""
    return _sendable((yield))


def _sendable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_sendable(key): _sendable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_sendable, value)) if type(value) in (list, tuple) else value
    return value


@pytest.fixture(scope="session")
def graphs_of_traces() -> dict[str, Any]:
    """The traces of this process (remembered_traces.py)."""
    return {}


@pytest.fixture(scope="session", autouse=True)
def auto_is_float32() -> Iterator[None]:
    """On a CPU with AMX too, where `auto` is bfloat16: tests compare tokens of float32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mllm_compile.config.resolution.resolve.has_amx", lambda device: False)
        yield


@pytest.fixture(scope="module", autouse=True)
def traces_are_remembered(request: pytest.FixtureRequest, graphs_of_traces: dict[str, Any]) -> Iterator[None]:
    """In the folders whose tests are not about the trace."""
    folder = request.path.relative_to(Path(__file__).parent).parts[0]
    if not remembers(folder):
        yield
        return
    with remembered_traces(graphs_of_traces):
        yield


def compiled_once(tmp_path_factory: pytest.TempPathFactory, name: str, **sections: dict) -> Path:
    """A cache folder of this process's own with the embedded model's runtime in it.

    One process of a run compiles it, the others wait and copy: a test may compile more beside it.
    """
    from mllm_compile.compiler.load_or_compile import load_or_compile
    from tests.tiny_model import tiny_config

    own = tmp_path_factory.mktemp(name)
    # pytest-xdist puts the workers' folders side by side into the run's folder.
    shared = own.parent.parent / name if "PYTEST_XDIST_WORKER" in os.environ else own
    load_or_compile(tiny_config(shared, **sections))
    if shared == own:
        return own
    # A lock's file goes when the last process that waited for it lets it go.
    return shutil.copytree(shared, own / "copy", symlinks=True, ignore=shutil.ignore_patterns("*.lock"))


@pytest.fixture(scope="session")
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the embedded model's runtime in it, compiled by Inductor: a minute of CPU, once a run.

    MLLM_TEST_CACHE names a folder that keeps it for the next session.
    """
    from mllm_compile.compiler.load_or_compile import load_or_compile
    from tests.tiny_model import tiny_config

    kept = os.environ.get("MLLM_TEST_CACHE")
    if not kept:
        return compiled_once(tmp_path_factory, "inductor_cache")
    load_or_compile(tiny_config(Path(kept)))
    return Path(kept)


@pytest.fixture(scope="session")
def eager_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the embedded model's runtime in it, its pieces run as traced: seconds, once a run."""
    return compiled_once(tmp_path_factory, "eager_cache", compile={"backend": "eager"})


@pytest.fixture(scope="session")
def eager_folder(eager_cache: Path) -> Path:
    """The folder of `eager_cache`'s runtime: other tests may have compiled theirs beside it."""
    from mllm_compile.compiler.load_or_compile import load_or_compile
    from tests.tiny_model import tiny_config

    return load_or_compile(tiny_config(eager_cache, compile={"backend": "eager"})).artifact.folder


@pytest.fixture
def cache(eager_folder: Path, tmp_path: Path) -> Path:
    """With two runtimes, `old` used before `new`, and a broken one."""
    from mllm_compile.store.publish import runtimes_folder

    for age, name in enumerate(("new", "old", "broken")):
        folder = runtimes_folder(tmp_path) / name
        shutil.copytree(eager_folder, folder)
        os.utime(folder, (1000 - age, 1000 - age))
    (runtimes_folder(tmp_path) / "broken" / "manifest.json").write_text("{}")
    os.utime(runtimes_folder(tmp_path) / "broken", (2000, 2000))
    return tmp_path
