"""Pointing FlashInfer at a runtime's kernels; FlashInfer itself is a stand-in here, tests/gpu has the real one."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from mllm_compile.runtime.attention.flashinfer.library import use_kernels_from


def test_flashinfer_is_told_where_the_kernels_are(monkeypatch, tmp_path):
    env = ModuleType("flashinfer.jit.env")
    env.FLASHINFER_AOT_DIR = Path("/elsewhere")  # type: ignore[attr-defined]
    jit = ModuleType("flashinfer.jit")
    jit.env = env  # type: ignore[attr-defined]
    for module in (ModuleType("flashinfer"), jit, env):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "kernels").mkdir()
    use_kernels_from(tmp_path / "kernels")
    (tmp_path / "kernels").rename(tmp_path / "moved")
    (tmp_path / "moved" / "sampling.so").touch()
    assert [path.name for path in vars(env)["FLASHINFER_AOT_DIR"].iterdir()] == ["sampling.so"], "also when it moves"


def test_without_flashinfer_nothing_happens(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    use_kernels_from(tmp_path)
