"""`mllm-compile explain`: the factors, and what changed since the nearest runtime of the same model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from mllm_compile.cli import run
from mllm_compile.compiler.target import find_target
from mllm_compile.store.artifact import read_manifest
from mllm_compile.store.explain import Change, change_text, grouped, nearest_runtime
from tests.tiny_model import tiny_config


@pytest.fixture
def explain(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def ask(cache: Path, *options: str, **sections: dict) -> list[str]:
        path = tmp_path / "model.yaml"
        path.write_text(yaml.safe_dump(tiny_config(cache, **sections).model_dump(mode="json")))
        assert run(["explain", str(path), *options]) == 0
        return capsys.readouterr().out.splitlines()

    return ask


def test_a_hit_is_told_with_its_place(explain, eager_cache, eager_folder):
    lines = explain(eager_cache, compile={"backend": "eager"})
    assert lines[0] == f"compiled: {eager_folder}"
    assert lines[1] == f"key {eager_folder.name.partition('-')[2]}"
    groups = [line.strip() for line in lines[2:] if line.startswith("  ") and not line.startswith("    ")]
    assert groups == ["model", "config", "machine", "compiler"]
    assert ["dtype", "float32"] in [line.split() for line in lines]


def test_every_factor_is_in_one_group(eager_folder):
    factors = {**read_manifest(eager_folder).factors, "packed weights": "x", "a new one": "y"}
    groups = grouped(factors)
    assert sorted(name for values in groups.values() for name in values) == sorted(factors)
    assert groups["compiler"]["a new one"] == "y"


def test_what_a_user_sets_is_shown_with_the_config(tmp_path):
    runtime = {"tensor_parallel_size": 2, "expert_stats": True}
    groups = grouped(find_target(tiny_config(tmp_path, runtime=runtime)).factors)
    assert {"expert stats", "attention", "tensor parallel"} <= groups["config"].keys()
    assert set(groups["compiler"]) == {"format", "transformers", "passes", "sources"}


def test_no_line_is_wider_than_the_page_and_all_of_it_can_be_had(explain, eager_cache):
    short, whole = (explain(eager_cache, *options, compile={"backend": "eager"}) for options in ((), ("-v",)))
    assert max(map(len, short[1:])) <= 100 and max(map(len, whole[1:])) <= 100
    assert len(short) < 45 < len(whole)
    factors = json.loads("".join(explain(eager_cache, "--json", compile={"backend": "eager"})))["factors"]
    (sources,) = [line for line in short if line.split()[0] == "sources"]
    assert re.fullmatch(r" +sources +\d+ files, together [0-9a-f]{8}", sources)
    text = "".join("".join(whole).split())
    assert all("".join(value.split()) in text for value in factors.values()), "-v has every value whole"


def test_a_runtimes_folder_is_explained_by_itself(eager_cache, eager_folder, explain, capsys):
    explain(eager_cache, compile={"backend": "eager"})
    capsys.readouterr()
    assert run(["explain", str(eager_folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"compiled: {eager_folder}"
    assert lines[1] == f"key {eager_folder.name.partition('-')[2]}"


def test_a_miss_tells_what_changed_from_what_to_what(explain, eager_cache):
    asked = {"compile": {"backend": "inductor"}, "runtime": {"max_num_batched_tokens": 9999}}
    lines = explain(eager_cache, **asked)
    assert lines[0].startswith("not compiled: there is no runtime of the model as it is asked for now; `mllm-compile ")
    key = next(i for i, line in enumerate(lines) if line.startswith("key "))
    table = lines[lines.index("changed since the nearest runtime") + 1 : key]
    assert [line.split() for line in table] == [
        ["backend", "eager", "->", "inductor"],
        ["max", "traced", "tokens", "8192", "->", "9999"],
    ]
    found = json.loads("".join(explain(eager_cache, "--json", **asked)))
    assert found["compiled"] is False and found["problem"] and found["folder"].endswith(found["key"])
    assert found["changed"][0] == {"factor": "backend", "then": "eager", "now": "inductor"}


def test_of_many_files_that_changed_some_are_named():
    def files(*numbers: int) -> str:
        return ", ".join(f"file{number}.py {number:08x}" for number in numbers)

    assert change_text(Change("sources", files(1), "file1.py 000000ff")) == "file1.py"
    assert change_text(Change("sources", files(1, 2, 3, 4), files(5))) == "file1.py, file2.py, file3.py and 2 more"
    assert change_text(Change("sources", "-", files(7))) == "file7.py"
    assert change_text(Change("model config", "0123456789abcdef", "f" * 16)) == "01234567 -> ffffffff"


def test_where_nothing_of_the_model_was_compiled_it_says_so(explain, eager_cache, tmp_path):
    said = explain(tmp_path / "empty")
    assert said[0].startswith("not compiled: there is no runtime of this model yet; `mllm-compile ")
    assert said[1].startswith("key ")
    stranger = {"model config": "another", "weights": "random"}
    assert nearest_runtime(stranger, eager_cache) is None
