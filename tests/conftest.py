"""What several test files share. Fixtures that take long say so."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported. Tests are many and small: threads would only get in each other's way.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("any machine", deadline=None)  # a busy one takes longer than 0.2 s now and then
settings.load_profile("any machine")


@pytest.fixture(scope="session")
def inductor_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the embedded model's runtime in it, compiled by Inductor: a minute of CPU, once a session.

    MLLM_TEST_CACHE names a folder that keeps it for the next session.
    """
    from mllm_compile.compiler.load_or_compile import load_or_compile
    from tests.tiny_model import tiny_config

    kept = os.environ.get("MLLM_TEST_CACHE")
    cache = Path(kept) if kept else tmp_path_factory.mktemp("inductor_cache")
    load_or_compile(tiny_config(cache))
    return cache


@pytest.fixture(scope="session")
def eager_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the embedded model's runtime in it, its pieces run as traced: seconds, once a session."""
    from mllm_compile.compiler.load_or_compile import load_or_compile
    from tests.tiny_model import tiny_config

    cache = tmp_path_factory.mktemp("eager_cache")
    load_or_compile(tiny_config(cache, compile={"backend": "eager"}))
    return cache


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
