"""Tests of Triton's kernels on a CPU, through its interpreter.

The interpreter is for a whole process. So a file of such tests marks them `interpreted`, and has one test that runs the
file in a process with the interpreter.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
interpreted = pytest.mark.skipif(not IS_INTERPRETED, reason="runs in the process that has Triton's interpreter")
starts_the_interpreter = pytest.mark.skipif(
    IS_INTERPRETED or importlib.util.find_spec("triton") is None, reason="needs Triton, and is not for its process"
)


def run_interpreted(path: str) -> None:
    """Runs a file of tests with the interpreter; fails where one of them does."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", path]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]


def take_loop_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton 3.6 makes a loop's bounds of arrays of one number, which numpy 2.4 refuses: they become numbers."""
    from triton.runtime import interpreter

    plain = interpreter._patch_lang_tensor

    def with_bounds(tensor, scope):
        plain(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", with_bounds)
