"""Errors of compiling the kernels of linears."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mllm_compile.errors import CompileError
from mllm_compile.kernels import cuda, nvrtc
from mllm_compile.kernels.cuda import KernelCompiler, can_compile_kernels
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.ops.stream_linear.linear import LinearKind
from mllm_compile.runtime.ops.stream_linear.shapes import choose_tiling


def test_a_cpu_has_no_such_kernels():
    assert not can_compile_kernels("cpu")


@pytest.mark.parametrize(
    ("capability", "multiprocessors", "can"),
    [((9, 0), 132, True), ((9, 0), 114, False), ((8, 0), 108, False), ((10, 0), 148, False)],
    ids=["H200", "H100 PCIe", "A100", "B200"],
)
def test_kernels_are_for_hopper_with_all_its_multiprocessors(monkeypatch, capability, multiprocessors, can):
    major, minor = capability
    facts = SimpleNamespace(major=major, minor=minor, multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(cuda, "find_nvrtc", lambda: object())
    can_compile_kernels.cache_clear()
    assert can_compile_kernels("cuda:0") is can
    can_compile_kernels.cache_clear()


def test_without_the_library_the_package_is_named(monkeypatch):
    monkeypatch.setattr(nvrtc, "find_nvrtc", lambda: None)
    with pytest.raises(CompileError, match="pip install nvidia-cuda-nvrtc"):
        nvrtc.compile_cuda("", "nothing", "sm_90a")


def test_an_error_of_compiling_a_linear_says_how_to_do_without(monkeypatch, tmp_path):
    monkeypatch.setattr(nvrtc, "find_nvrtc", lambda: None)
    with KernelCompiler() as compiler, pytest.raises(CompileError, match=r"disable_passes: \[stream_linears\]"):
        compiler.write([choose_tiling(LinearKind(64, 256), 8)], tmp_path, NullReporter())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.version.cuda is not None, reason="a torch with CUDA has the library")
def test_a_torch_without_cuda_looks_for_none():
    assert nvrtc.find_nvrtc() is None


@pytest.mark.skipif(nvrtc.find_nvrtc() is None, reason="needs NVRTC")
def test_an_error_is_the_compilers_first():
    with pytest.raises(CompileError, match=r"NVRTC refuses the kernel bad: .*error"):
        nvrtc.compile_cuda("int f() { return nothing; }", "bad", "sm_90a")


def test_what_was_begun_early_is_compiled_once(monkeypatch, tmp_path):
    compiled = []
    monkeypatch.setattr(cuda, "compile_cuda", lambda source, name, arch: compiled.append(name) or name.encode())
    early, late, dropped = (choose_tiling(LinearKind(rows, 256), 8) for rows in (64, 128, 192))
    with KernelCompiler() as compiler:
        compiler.start([early, dropped])
        compiler.write([early, late], tmp_path, NullReporter())
    assert sorted(compiled) == sorted(set(compiled))
    assert {path.name for path in tmp_path.iterdir()} == {early.name + ".cubin", late.name + ".cubin"}
    assert all(path.read_bytes() == path.stem.encode() for path in tmp_path.iterdir())
