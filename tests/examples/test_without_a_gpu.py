"""Scripts that measure a GPU say so in one line where there is none, whatever else is not installed."""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples" / "measure"
CHECKS = {"need_gpu()": "needs an NVIDIA GPU", "need_hopper(": "needs (an|2) NVIDIA Hopper GPUs? and NVRTC"}


def that_check() -> list[tuple[str, str]]:
    """Scripts that ask for a GPU, with what they say without one."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(EXAMPLES.glob("*_*.py"))}
    return [(name, said) for name, text in texts.items() for check, said in CHECKS.items() if check in text]


def test_scripts_that_check_are_found():
    assert len(that_check()) > 20


@pytest.mark.parametrize(("name", "said"), that_check())
def test_a_script_for_a_gpu_ends_with_one_line_on_a_machine_without(name, said, monkeypatch):
    told = ast.get_docstring(ast.parse((EXAMPLES / name).read_text(encoding="utf-8"))) or ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for package in ("flashinfer", "triton"):
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(sys, "argv", [name, *(["configs/tiny.yaml"] if "config" in told.lower() else [])])
    monkeypatch.syspath_prepend(EXAMPLES)
    with pytest.raises(SystemExit, match=f"^{said}$"):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert "Needs " in told
