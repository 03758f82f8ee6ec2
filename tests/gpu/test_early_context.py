"""The context that a start makes ahead of torch is the one that torch uses."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
_CODE = """
import ctypes, sys
from mllm_compile.config.schema import EngineConfig
from mllm_compile.engine.start.early_context import early_context
from mllm_compile.process.timeline import Timeline

timeline = Timeline()
with early_context(EngineConfig.from_dict({"model": {"path": "a/b"}}), timeline):
    pass
assert "torch" not in sys.modules
driver, flags, is_active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(is_active)) == 0
assert is_active.value == 1, [span.name for span in timeline.spans]
import torch
own, current = ctypes.c_void_p(), ctypes.c_void_p()
assert torch.ones(3, device="cuda").sum().item() == 3
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(own), 0) == 0
assert driver.cuCtxGetCurrent(ctypes.byref(current)) == 0
assert own.value == current.value
"""


_FAILED = """
import ctypes
from mllm_compile import Engine, MllmError

try:
    Engine({"model": {"path": "/nowhere"}, "runtime": {"device": "cuda"}})
except MllmError as error:
    print(error)
driver, flags, is_active = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint(), ctypes.c_int()
assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(is_active)) == 0
assert is_active.value == 0
"""


def test_a_start_that_fails_ahead_of_torchs_use_leaves_no_context():
    done = subprocess.run([sys.executable, "-c", _FAILED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "there is no such" in done.stdout


def test_torch_finds_the_context_that_was_made_ahead():
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
