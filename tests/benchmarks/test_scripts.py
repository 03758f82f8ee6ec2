"""Every script that measures can be imported, explains itself, and says in one line that it needs a GPU."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
import torch

from tests.benchmarks.test_mistakes import run

ROOT = Path(__file__).parents[2] / "benchmarks"
FOLDERS = ("kernels", "steps", "server")
SCRIPTS = {
    f"{folder}.{path.stem}": path.read_text(encoding="utf-8")
    for folder in FOLDERS
    for path in sorted((ROOT / folder).glob("*.py"))
    if path.name != "__init__.py"
}
CHECKS = {"need_gpu()": "needs an NVIDIA GPU", "need_hopper(": "needs (an|2) NVIDIA Hopper GPUs? and NVRTC"}
FOR_A_GPU = [(name, said) for name, text in SCRIPTS.items() for check, said in CHECKS.items() if check in text]


def docstring(name: str) -> str:
    return ast.get_docstring(ast.parse(SCRIPTS[name])) or ""


def test_scripts_are_found():
    assert len(SCRIPTS) > 40
    assert len(FOR_A_GPU) > 20


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_explains_itself_on_a_machine_without_a_gpu(name, monkeypatch, capsys):
    for package in ("flashinfer", "triton"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as ended:
        run(name, monkeypatch, "--help")
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    assert " ".join(docstring(name).partition("\n")[0].split()) in said


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_shows_its_own_command(name):
    assert f"python -m benchmarks.{name}" in docstring(name)


@pytest.mark.parametrize(("name", "said"), FOR_A_GPU)
def test_a_script_for_a_gpu_ends_with_one_line_on_a_machine_without(name, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for package in ("flashinfer", "triton"):
        monkeypatch.setitem(sys.modules, package, None)
    arguments = ["configs/tiny.yaml"] if "config" in docstring(name).lower() else []
    with pytest.raises(SystemExit, match=f"^{said}$"):
        run(name, monkeypatch, *arguments)
    assert "Needs " in docstring(name)
