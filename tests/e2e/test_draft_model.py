"""A draft model in a runtime: answers are those without it, its folder serves by itself, and a model that does not fit
is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mllm_compile import Engine, SamplingParams
from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.compiler.target import find_target
from mllm_compile.config.compile_options import CompileOptions
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import ArtifactError, ConfigError, MllmError, ModelNotFoundError, UnsupportedModelError
from mllm_compile.store.artifact import DRAFTER, MANIFEST
from tests.e2e.test_speculation import REPEATS
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as config_of_architecture
from tests.tiny_model import TINY, shallow_tiny, tiny_config

EAGER = {"backend": "eager"}
PARAMS = (SamplingParams(temperature=0, max_tokens=24), SamplingParams(temperature=0.8, seed=3, max_tokens=24))


def config_with(cache: Path, drafter: object, **sections: Any) -> EngineConfig:
    speculative = {"method": "draft_model", "model": str(drafter), "num_speculative_tokens": 4}
    return tiny_config(cache, **({"compile": EAGER, "speculative": speculative} | sections))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shallow_tiny(tmp_path_factory.mktemp("drafter") / "model")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory, drafter: Path) -> Path:
    """A runtime with the weights of both models inside."""
    folder = tmp_path_factory.mktemp("packed")
    options = CompileOptions(output=folder / "runtime", pack_weights=True, verify_weights=True)
    config = config_with(folder / "cache", drafter)
    assert not load_or_compile(config, None, options).was_cached
    assert load_or_compile(config, None, options).was_cached
    return folder / "runtime"


def answers(engine: Engine) -> list[tuple[Any, ...]]:
    """Two rounds of answers, with prefix hits in the second."""
    outputs = [engine.generate(REPEATS, one) for one in PARAMS * 2]
    return [(one.token_ids, one.text, one.finish_reason) for of_round in outputs for one in of_round]


@pytest.mark.slow
def test_a_folder_with_both_models_gives_the_answers_without_drafts(packed, eager_cache, tmp_path):
    shutil.copytree(packed, tmp_path / "moved")
    with Engine(tiny_config(eager_cache, compile=EAGER)) as engine:
        plain = answers(engine)
    with Engine(tmp_path / "moved") as engine:
        assert answers(engine) == plain
        stats = engine.stats()
    assert 1.1 < stats.acceptance_length < 5


@pytest.mark.slow
def test_a_folder_without_its_draft_model_or_with_another_is_refused(packed, tmp_path):
    shutil.copytree(packed, tmp_path / "none")
    shutil.rmtree(tmp_path / "none" / DRAFTER)
    with pytest.raises(ArtifactError, match=r"there is no runtime at .*drafter"):
        Engine(tmp_path / "none")
    shutil.copytree(packed, tmp_path / "changed")
    piece = next((tmp_path / "changed" / DRAFTER / "pieces").iterdir())
    piece.write_text(piece.read_text() + "\n")
    with pytest.raises(ArtifactError, match="what was compiled"):
        Engine(tmp_path / "changed")
    shutil.copytree(packed, tmp_path / "other")
    for path in (tmp_path / "other" / DRAFTER).iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in packed.iterdir():
        if path.name != DRAFTER:
            copy = shutil.copytree if path.is_dir() else shutil.copy2
            copy(path, tmp_path / "other" / DRAFTER / path.name)
    assert (tmp_path / "other" / DRAFTER / MANIFEST).is_file()
    with pytest.raises(ArtifactError, match="was compiled for something else"):
        Engine(tmp_path / "other")


def test_the_key_has_the_draft_models(drafter, tmp_path):
    with_drafts, without = (
        find_target(config).factors for config in (config_with(tmp_path, drafter), tiny_config(tmp_path, compile=EAGER))
    )
    same = find_target(config_with(tmp_path, TINY)).factors
    assert with_drafts.keys() - without.keys() == {"draft model"}
    assert with_drafts["draft model"] != same["draft model"]


def changed(**keys: Any) -> Callable[[Path, Path], Path]:
    """Makes a draft model with other values in its config.json."""

    def make(folder: Path, drafter: Path) -> Path:
        shutil.copytree(drafter, folder / "changed")
        path = folder / "changed" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))
        return folder / "changed"

    return make


def with_other_tokens(folder: Path, drafter: Path) -> Path:
    shutil.copytree(drafter, folder / "changed")
    path = folder / "changed" / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    one, other = list(words)[40:42]
    words[one], words[other] = words[other], words[one]
    path.write_text(json.dumps(tokenizer))
    return folder / "changed"


WRONG: dict[str, tuple[Any, dict[str, Any], type[MllmError], str]] = {
    "vocabulary": (changed(vocab_size=100), {}, ConfigError, r"a vocabulary of 100 tokens, and the model \d+"),
    "positions": (
        changed(max_position_embeddings=64), {}, ConfigError, r"max_model_len is 512, but .* at most 64 tokens",
    ),
    "missing": (lambda *_: "/nowhere/at/all", {}, ModelNotFoundError, "^speculative.model '/nowhere/at/all': there"),
    "ranks": (
        changed(), {"runtime": {"tensor_parallel_size": 2, "device": "cpu"}}, ConfigError, "the model is on 2 ranks",
    ),
    "tokens": (with_other_tokens, {}, ConfigError, r"another tokenizer than the model: 2 of 3072 tokens differ"),
    "kind": (changed(model_type="t5", architectures=["T5Model"]), {}, MllmError, "speculative.model"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_draft_model_that_does_not_fit_is_refused_with_both_sides_figures(name, drafter, tmp_path):
    make, sections, error, text = WRONG[name]
    config = config_with(tmp_path / "cache", make(tmp_path, drafter), **sections)
    with pytest.raises(error, match=text) as raised:
        load_or_compile(config)
    assert "\n" not in str(raised.value)
    assert not list((tmp_path / "cache" / "runtimes").glob("*"))


@pytest.mark.slow
def test_a_draft_model_with_states_is_refused(tmp_path):
    for name, kind in (("model", "qwen3"), ("drafter", "mamba2")):
        save_tiny_model(config_of_architecture(kind, eos_token_id=None, bos_token_id=None), tmp_path / name)
    sections = {"model": {"path": str(tmp_path / "model")}, "runtime": {"max_model_len": 96}}
    config = config_with(tmp_path / "cache", tmp_path / "drafter", **sections)
    with pytest.raises(UnsupportedModelError, match=r"speculative.model .* has \d+ layers with states"):
        load_or_compile(config)
