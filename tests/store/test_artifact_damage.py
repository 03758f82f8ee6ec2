"""Single flipped bytes and cut files: a runtime is refused every time, rebuilt, and its tokens are right after.

The full count (600 flips, every file cut and rebuilt, an Inductor runtime) is slow; a sample of it always runs.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.errors import ArtifactError
from mllm_compile.store.artifact import open_artifact
from mllm_compile.store.measurements import MEASURED, device_key, read_measured
from tests.tiny_model import tiny_config

EAGER = {"backend": "eager"}
GREEDY = SamplingParams(temperature=0, max_tokens=12)
PROMPT = "The for statement is used to"


@pytest.fixture
def cache(eager_cache: Path, tmp_path: Path) -> Path:
    shutil.copytree(eager_cache, tmp_path / "cache")
    return tmp_path / "cache"


def runtime_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.parent.name != MEASURED)


def flip(path: Path, place: int, bit: int) -> None:
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ (1 << bit)]))


def assert_every_flip_is_refused(folder: Path, count: int) -> None:
    """`count` flips, spread over all files."""
    chance = random.Random(0)
    files = runtime_files(folder)
    for index in range(count):
        path = files[index % len(files)]
        place, bit = chance.randrange(path.stat().st_size), chance.randrange(8)
        flip(path, place, bit)
        with pytest.raises(ArtifactError):
            open_artifact(folder)
        flip(path, place, bit)
    open_artifact(folder)


def assert_every_cut_is_refused(folder: Path) -> None:
    for path in runtime_files(folder):
        whole = path.read_bytes()
        for length in (0, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:length])
            with pytest.raises(ArtifactError):
                open_artifact(folder)
        path.write_bytes(whole)
    open_artifact(folder)


def test_a_flipped_byte_is_refused_wherever_it_is(cache):
    assert_every_flip_is_refused(load_or_compile(tiny_config(cache, compile=EAGER)).folder, 60)


def test_a_cut_file_is_refused_whichever_it_is(cache):
    assert_every_cut_is_refused(load_or_compile(tiny_config(cache, compile=EAGER)).folder)


def test_after_damage_the_runtime_is_rebuilt_and_the_tokens_are_the_same(cache):
    config = tiny_config(cache, compile=EAGER)
    expected = tokens(config)
    flip(next(load_or_compile(config).folder.glob("pieces/*.py")), 100, 3)
    assert tokens(config) == expected
    assert load_or_compile(config).was_cached


def test_damaged_measurements_are_as_good_as_none(cache):
    config = tiny_config(cache, compile=EAGER)
    expected = tokens(config)
    runtime = load_or_compile(config)
    (path,) = (runtime.folder / MEASURED).glob("*.json")
    key = device_key("cpu")
    assert read_measured(path.parent, key)["starts"][0]["kv_tokens"] > 0
    for place in range(0, path.stat().st_size, 97):
        flip(path, place, 1)
        assert read_measured(path.parent, key) == {}
        flip(path, place, 1)
    flip(path, 20, 1)
    assert load_or_compile(config).was_cached
    assert tokens(config) == expected
    assert read_measured(path.parent, key)["starts"][0]["kv_tokens"] > 0, "measured again"


@pytest.mark.slow
def test_six_hundred_flipped_bytes_are_refused(inductor_cache, tmp_path):
    shutil.copytree(inductor_cache, tmp_path / "inductor")
    assert_every_flip_is_refused(load_or_compile(tiny_config(tmp_path / "inductor")).folder, 600)


@pytest.mark.slow
def test_every_file_can_be_damaged_and_is_rebuilt_with_the_same_tokens(cache):
    config = tiny_config(cache, compile=EAGER)
    expected = tokens(config)
    names = [path.relative_to(load_or_compile(config).folder) for path in runtime_files(load_or_compile(config).folder)]
    for index, name in enumerate(names):
        path = load_or_compile(config).folder / name
        if index % 2:
            path.write_bytes(path.read_bytes()[:-1])
        else:
            flip(path, path.stat().st_size // 2, index % 8)
        assert not load_or_compile(config).was_cached, name
        assert tokens(config) == expected, name


def tokens(config) -> list[int]:
    with Engine(config) as engine:
        return engine.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
