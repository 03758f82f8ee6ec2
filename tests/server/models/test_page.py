"""docs/many-models.md says of each path what becomes of it, and of each option that it is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mllm_compile.cli import run
from mllm_compile.errors import ConfigError
from mllm_compile.runtime.config_sections import KVEventsSection
from mllm_compile.server.app import paths_of
from mllm_compile.server.models.paths import OF_SERVER
from mllm_compile.server.options import ModelsOptions, ServeOptions

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "many-models.md").read_text(encoding="utf-8")
ROWS = [line.strip("| ").split(" | ", 1) for line in PAGE.splitlines() if line.startswith("| `")]
TINY = str(ROOT / "mllm_compile" / "model" / "tiny")


def told() -> dict[str, str]:
    """Path → where its model is named: body, query, or that it is of the server."""
    found = {}
    for paths, what in ROWS:
        for path in re.findall(r"`(/[^`]*)`", paths):
            found[path] = next((place for place in ("body", "query") if f"`model` in the {place}" in what), "server")
    return found


def test_the_page_has_every_path_and_where_its_model_is_named():
    options = ServeOptions(model="m")
    served = {}
    for method, path in paths_of(options):
        place = "server" if path in OF_SERVER else "body" if method == "POST" else "query"
        served[path.replace(":path", "")] = place
    assert told() == served


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"served_names": ("x",)}, "--served-model-name"),
        ({"speculative": "{}"}, "--speculative-config"),
        ({"lora": {"adapters": {"x": "/x"}}}, "--lora-modules"),
        ({"sleep_after_s": 9.0}, "--sleep-after"),
        ({"enable_rl": True}, "--enable-rl"),
        ({"kv_events": KVEventsSection()}, "--kv-events-config"),
    ],
)
def test_what_the_page_calls_refused_is_refused(given, options):
    assert any(f"`{options}`" in paths and what.startswith("refused") for paths, what in ROWS)
    with pytest.raises(ConfigError, match=f"^{options}: expected one model, got 2"):
        ModelsOptions.of(ServeOptions(model="", **given), {"a": "a", "b": "b"}, {}, {})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([TINY, TINY], "are both named tiny, which requests could not tell apart. Give one another name, as in other="),
        ([TINY, "nowhere/model.yaml"], "nowhere/model.yaml"),
        ([TINY, f"b={TINY}", "--max-awake", "0"], "--max-awake"),
        ([TINY, f"b={TINY}", "--turn", "0s"], "--turn: expected more than 0 s"),
        ([TINY, "--max-awake", "1"], "--max-awake, --turn: expected several models, which take turns"),
        ([TINY, f"b={TINY}", "--enable-rl"], "--enable-rl: expected one model, got 2. Serve the model that is trained"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(arguments, message, capsys):
    assert run(["serve", *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_pinned_models_leave_the_others_a_place(tmp_path, capsys):
    for name in "ab":
        pinned = "true" if name == "a" else "false"
        (tmp_path / f"{name}.yaml").write_text(f"model: {{path: {TINY}}}\nruntime: {{pinned: {pinned}}}\n")
    assert run(["serve", str(tmp_path), "--max-awake", "1"]) == 2
    assert "--max-awake 1: a pinned (runtime.pinned) leaves no place for the others" in capsys.readouterr().err
