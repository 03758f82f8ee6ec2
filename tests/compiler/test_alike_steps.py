"""Deterministic steps of any number of rows, of models that a compile finds to allow none: they are alike then."""

from __future__ import annotations

import pytest

from mllm_compile.cli.explain import _of_config, _of_runtime
from mllm_compile.compiler import build, lowering
from mllm_compile.compiler.load_or_compile import load_or_compile, open_runtime
from mllm_compile.config.compile_options import CompileOptions
from mllm_compile.config.resolution import resolve
from mllm_compile.engine.engine import Engine
from mllm_compile.errors import ConfigError, UnlikeRowsError
from mllm_compile.process.progress import NullReporter
from mllm_compile.report.serve_check import serve_check
from mllm_compile.store.key import asks_for_any_rows
from tests.tiny_model import tiny_config

ALIKE = "deterministic steps are alike, 32 tokens each"


class Lines(NullReporter):
    def __init__(self) -> None:
        self.told: list[str] = []

    def announce(self, text: str) -> None:
        self.told += [text] if text.startswith("deterministic") else []

    note = announce


def refuse(*_: object) -> None:
    raise UnlikeRowsError("a product of 80 rows differs")


@pytest.fixture(params=[pytest.param("trace", marks=pytest.mark.slow), "trial"])
def why(request, monkeypatch) -> str:
    """The reason why a CPU's steps are alike; without the patches no config of a CPU asks for others."""
    monkeypatch.setattr(resolve, "has_any_rows", lambda config, *_: "any_rows" not in config.runtime.without)
    if request.param == "trace":
        return r"the model has model.layers.0.self_attn, whose decodes are not by kernels of the program"
    monkeypatch.setattr(lowering, "check_any_rows", lambda *_: None)
    monkeypatch.setattr(build, "check_rows", refuse)
    return "a product of 80 rows differs"


def test_a_model_whose_rows_differ_has_steps_that_are_alike(why, tmp_path):
    config = tiny_config(tmp_path / "cache", compile={"backend": "eager"}, runtime={"deterministic": True})
    told, told_again = Lines(), Lines()
    first = load_or_compile(config, told)
    assert told.told == [f"{ALIKE}: {why}"]
    second = load_or_compile(config, told_again)
    assert second.was_cached and not first.was_cached and second.folder == first.folder
    assert told_again.told == [f"{ALIKE}, as was found when this runtime was compiled"]
    for compiled in (first, second, open_runtime(first.folder)):
        runtime = compiled.config.runtime
        assert (runtime.deterministic, runtime.any_rows, runtime.max_num_batched_tokens) == (True, False, 32)
        assert compiled.serves_same
    with Engine(config) as engine:
        assert engine.config.runtime.max_num_batched_tokens == 32
        assert len(engine.generate([[5, 6]])[0].token_ids) > 0
    for explained in (_of_config(config, "m"), _of_runtime(first.folder)):
        assert asks_for_any_rows(explained.factors), "the key has what was asked for"
        assert explained.steps == f"{ALIKE}, as was found when this runtime was compiled"
    limits = dict(serve_check(config, NullReporter()))
    assert limits["runtime"] == f"compiled: {first.folder}"


def test_a_folder_that_was_asked_for_is_not_compiled_again(why, tmp_path):
    config = tiny_config(tmp_path / "cache", compile={"backend": "eager"}, runtime={"deterministic": True})
    options = CompileOptions(output=tmp_path / "runtime")
    assert not load_or_compile(config, options=options).was_cached
    again = load_or_compile(config, options=options)
    assert again.was_cached and not again.config.runtime.any_rows and again.serves_same


def test_limits_that_steps_alike_cannot_have_are_named(why, tmp_path):
    runtime = {"deterministic": True, "max_step_ms": 20.0}
    with pytest.raises(ConfigError, match=r"with runtime.deterministic all steps take the same time"):
        load_or_compile(tiny_config(tmp_path / "cache", compile={"backend": "eager"}, runtime=runtime))
