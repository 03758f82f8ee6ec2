"""What compiling the kernels of linears says where it cannot be done."""

from __future__ import annotations

import pytest
import torch

from mllm_compile import nvrtc
from mllm_compile.errors import CompileError
from mllm_compile.linear_kernels import can_compile_linears


def test_a_cpu_has_no_such_kernels():
    assert not can_compile_linears("cpu")


def test_without_the_library_the_package_is_named(monkeypatch):
    monkeypatch.setattr(nvrtc, "find_nvrtc", lambda: None)
    with pytest.raises(CompileError, match="pip install nvidia-cuda-nvrtc"):
        nvrtc.compile_cuda("", "nothing", "sm_90a")


@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch with CUDA has the library")
def test_a_torch_without_cuda_looks_for_none():
    assert nvrtc.find_nvrtc() is None


@pytest.mark.skipif(nvrtc.find_nvrtc() is None, reason="needs NVRTC")
def test_an_error_is_the_compilers_first():
    with pytest.raises(CompileError, match=r"NVRTC refuses the kernel bad: .*error"):
        nvrtc.compile_cuda("int f() { return nothing; }", "bad", "sm_90a")
