"""`mllm-compile explain`: the factors, and what changed since the nearest runtime of the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mllm_compile.cli import run
from mllm_compile.store.explain import nearest_runtime
from mllm_compile.store.publish import runtimes_folder
from tests.tiny_model import tiny_config


@pytest.fixture
def explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def ask(cache: Path, **sections: dict) -> list[str]:
        path = tmp_path / "model.yaml"
        path.write_text(yaml.safe_dump(tiny_config(cache, **sections).model_dump(mode="json")))
        assert run(["explain", str(path)]) == 0
        return capsys.readouterr().out.splitlines()

    return ask


def test_a_hit_is_told_with_its_place(explain, eager_cache):
    lines = explain(eager_cache, compile={"backend": "eager"})
    (folder,) = runtimes_folder(eager_cache).iterdir()
    assert lines[0] == f"compiled: {folder}"
    assert lines[1] == f"key {folder.name.partition('-')[2]}"
    assert [line.split()[0] for line in lines[2:5]] == ["factor", "format", "mllm_compile"]


def test_a_miss_tells_what_changed_from_what_to_what(explain, eager_cache):
    lines = explain(eager_cache, compile={"backend": "inductor"}, runtime={"max_num_batched_tokens": 9999})
    assert lines[0].startswith("not compiled: ")
    key = next(i for i, line in enumerate(lines) if line.startswith("key "))
    table = lines[lines.index("changed since the nearest runtime") + 1 : key]
    assert [line.split() for line in table[1:]] == [
        ["backend", "eager", "inductor"],
        ["max", "traced", "tokens", "8192", "9999"],
    ]


def test_where_nothing_of_the_model_was_compiled_it_says_so(explain, eager_cache, tmp_path):
    assert explain(tmp_path / "empty")[1] == "no runtime of this model was compiled yet"
    stranger = {"model config": "another", "weights": "random"}
    assert nearest_runtime(stranger, eager_cache) is None
