"""Two checkpoints of one model differ in nothing but data: each is served with its own, packed or not."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from mllm_compile import Engine, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.compile_options import CompileOptions
from mllm_compile.errors import CheckpointError
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as shape_of
from tests.tiny_model import tiny_config

PROMPT = [5, 6, 7, 8]
EAGER = {"backend": "eager"}
PACKED = CompileOptions(pack_weights=True)
GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[Path, Path]:
    """A model, and one that says something else."""
    first, second = (tmp_path_factory.mktemp("checkpoints") / name for name in ("first", "second"))
    save_tiny_model(
        shape_of("qwen3", num_hidden_layers=1, layer_types=["full_attention"], max_position_embeddings=512), first
    )
    shutil.copytree(first, second)
    change(second)
    return first, second


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, checkpoints) -> Path:
    """A cache with their runtime, compiled from the first."""
    folder: Path = tmp_path_factory.mktemp("compiled")
    load_or_compile(config_of(folder, checkpoints[0]))
    return folder


@pytest.fixture
def cache(compiled, tmp_path) -> Path:
    """A copy of it: a test may compile more beside it."""
    return Path(shutil.copytree(compiled, tmp_path / "cache"))


def change(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if "embed" in name)
    tensors[name] = tensors[name].flip(0).contiguous()
    save_file(tensors, path, metadata={"format": "pt"})


def config_of(cache: Path, model: Path, **sections):
    return tiny_config(cache, compile=EAGER, model={"path": str(model)}, **sections)


def tokens(source) -> list[int]:
    with Engine(source) as engine:
        return engine.generate(PROMPT, GREEDY)[0].token_ids


def test_each_packed_runtime_holds_its_own_checkpoint(cache, checkpoints):
    first, second = (config_of(cache, model) for model in checkpoints)
    expected = [tokens(first), tokens(second)]
    assert expected[0] != expected[1]
    packed = [load_or_compile(config, None, PACKED) for config in (first, second)]
    assert not packed[0].was_cached and not packed[1].was_cached
    assert [tokens(runtime.folder) for runtime in packed] == expected
    assert [tokens(config) for config in (first, second)] == expected, "they are found for the configs too"
    for config, runtime in zip((first, second), packed, strict=True):
        again = load_or_compile(config, None, PACKED)
        assert again.was_cached and again.serves_same and again.folder == runtime.folder
        assert load_or_compile(config).folder == runtime.folder


def test_a_checkpoint_that_is_written_anew_is_packed_anew(tmp_path, cache, checkpoints):
    model = tmp_path / "model"
    shutil.copytree(checkpoints[0], model)
    config, options = config_of(cache, model), CompileOptions(tmp_path / "out", pack_weights=True)
    before = tokens(load_or_compile(config, None, options).folder)
    assert load_or_compile(config, None, options).was_cached
    change(model)
    os.utime(model / "model.safetensors", ns=(1, 1))
    runtime = load_or_compile(config, None, options)
    assert not runtime.was_cached
    assert tokens(runtime.folder) == tokens(config_of(cache, checkpoints[1])) != before


def test_a_folder_that_was_asked_for_serves_what_it_was_asked_for_last(tmp_path, cache, checkpoints):
    options = CompileOptions(tmp_path / "out")
    first = config_of(cache, checkpoints[0])
    second = config_of(cache, checkpoints[1], runtime={"max_model_len": 64, "seed": 5})
    load_or_compile(first, None, options)
    found = load_or_compile(second, None, options)
    assert found.was_cached and found.serves_same
    with Engine(tmp_path / "out") as engine:
        assert (engine.config.runtime.max_model_len, engine.config.runtime.seed) == (64, 5)
        assert engine.generate(PROMPT, GREEDY)[0].token_ids == tokens(second)


def test_a_folder_of_the_cache_serves_as_it_was_compiled_and_a_hit_says_so(compiled, checkpoints):
    first, second = (config_of(compiled, model) for model in checkpoints)
    made, found = load_or_compile(first), load_or_compile(second)
    assert found.was_cached and found.folder == made.folder
    assert made.serves_same and not found.serves_same
    assert tokens(found.folder) == tokens(first)


def test_data_is_verified_of_the_checkpoint_whose_data_is_remembered(tmp_path, cache, checkpoints):
    verify = CompileOptions(verify_weights=True)
    first, second = (config_of(cache, model) for model in checkpoints)
    said = rf"{re.escape(str(checkpoints[1]))}: its data differs from .*first, which .* remembers"
    for _ in range(2):
        load_or_compile(first, None, verify)
    with pytest.raises(CheckpointError, match=said):
        load_or_compile(second, None, verify)
    load_or_compile(second, None, CompileOptions(tmp_path / "own", verify_weights=True))
