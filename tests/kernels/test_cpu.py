"""Our own C++ for CPUs: compiled once, refused with the setting that does without it, and loaded as it was checked."""

from __future__ import annotations

import ctypes
import platform
from dataclasses import replace

import pytest
import torch

from mllm_compile.config.resolution.device import has_libraries
from mllm_compile.errors import CompileError
from mllm_compile.kernels import cpu
from mllm_compile.kernels.paged_attention import add_paged_attention
from mllm_compile.process import cpp_compiler
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.cpu.library import CpuLibrary
from mllm_compile.runtime.cpu.load import load_library
from mllm_compile.runtime.errors import ArtifactError
from mllm_compile.runtime.program.link import link
from mllm_compile.runtime.program.spec import Program
from tests.config.resolving import CPU, resolved

SMALL = CpuLibrary("seven", "attention/paged/seven.cpp", "runtime.without: [seven]")


@pytest.fixture
def source(monkeypatch):
    """Stands for the text of SMALL's file."""
    monkeypatch.setattr(cpu, "_binaries", {})
    texts = {"now": 'extern "C" int seven() { return 7; }'}
    monkeypatch.setattr(CpuLibrary, "text", lambda self: texts["now"])
    return texts


def compiled(tmp_path, source, monkeypatch) -> bytes:
    (tmp_path / "seven.cpp").write_text(source["now"])
    monkeypatch.setattr(CpuLibrary, "path", property(lambda self: tmp_path / "seven.cpp"))
    return cpu.compiled(SMALL, tmp_path / "kept")


def test_a_library_is_compiled_once_kept_and_loaded_from_its_bytes(tmp_path, source, monkeypatch):
    binary = compiled(tmp_path, source, monkeypatch)
    (kept,) = (tmp_path / "kept").iterdir()
    assert kept.read_bytes() == binary
    assert (kept.stat().st_mode | (tmp_path / "kept").stat().st_mode) & 0o022 == 0
    cpu._binaries.clear()
    monkeypatch.setattr(cpu, "_compile", None)
    assert compiled(tmp_path, source, monkeypatch) == binary
    loaded = load_library(SMALL, {"seven": binary})
    assert loaded.seven() == 7
    assert load_library(SMALL, {"seven": bytes(bytearray(binary))}) is loaded


def test_other_source_is_compiled_anew(tmp_path, source, monkeypatch):
    compiled(tmp_path, source, monkeypatch)
    source["now"] = source["now"].replace("7;", "8;")
    assert load_library(SMALL, {"seven": compiled(tmp_path, source, monkeypatch)}).seven() == 8
    assert len(list((tmp_path / "kept").iterdir())) == 2


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names an instruction set of x86")
def test_machines_that_share_a_cache_have_a_library_each(tmp_path, source, monkeypatch):
    compiled(tmp_path, source, monkeypatch)
    there = tmp_path / "g++"
    there.write_text(f'#!/bin/sh\nexec {cpp_compiler.SYSTEM_CXX} "$@" -march=x86-64-v2\n')
    there.chmod(0o755)
    monkeypatch.setattr(cpp_compiler, "SYSTEM_CXX", str(there))
    cpu._binaries.clear()
    compiled(tmp_path, source, monkeypatch)
    assert len(list((tmp_path / "kept").iterdir())) == 2


@pytest.mark.parametrize("left", [0, 1000])
def test_a_kept_library_that_a_crash_has_cut_is_compiled_again(left, tmp_path, source, monkeypatch):
    binary = compiled(tmp_path, source, monkeypatch)
    (kept,) = (tmp_path / "kept").iterdir()
    kept.write_bytes(binary[:left])
    cpu._binaries.clear()
    assert compiled(tmp_path, source, monkeypatch) == binary == kept.read_bytes()


def test_what_the_compiler_refuses_is_told_with_its_first_error(tmp_path, source, monkeypatch):
    source["now"] = "int seven() { return nothing; }"
    with pytest.raises(CompileError, match=r"refuses attention/paged/seven\.cpp: .*nothing.*without: \[seven\]"):
        compiled(tmp_path, source, monkeypatch)


def test_a_library_that_is_missing_or_broken_is_refused_when_it_is_loaded():
    with pytest.raises(ArtifactError, match="lacks the library seven"):
        load_library(SMALL, {})
    with pytest.raises(ArtifactError, match=r"library seven of the runtime cannot be loaded .*without: \[seven\]"):
        load_library(SMALL, {"seven": b"no library"})


def test_a_process_keeps_how_it_rounds(tmp_path, source, monkeypatch):
    load_library(SMALL, {"seven": compiled(tmp_path, source, monkeypatch)})
    assert (torch.tensor(1e-40) * 1.0).item() > 0
    assert ctypes.c_float(1e-40).value > 0


def test_packages_need_a_compiler_anyway_and_pieces_as_traced_do_without(tmp_path, monkeypatch):
    assert has_libraries("cpu", "inductor")
    assert not has_libraries("cuda:0", "inductor")
    monkeypatch.setattr(cpp_compiler, "SYSTEM_CXX", str(tmp_path / "g++"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert has_libraries("cpu", "inductor")
    assert not has_libraries("cpu", "eager")


PLAIN = LayerSpec("plain", 0, 4, 2, 16, 16, 0.25, 0.0, -1, None)
OTHERS = (
    replace(PLAIN, name="narrow", head_dim=24),
    replace(PLAIN, name="narrow values", v_head_dim=8),
    replace(PLAIN, name="latents", is_latent=True, up_projection="up"),
)


def test_layers_are_the_librarys_or_torchs_by_their_heads():
    program, pieces = add_paged_attention(resolved(CPU), Program((), (PLAIN, *OTHERS), (), "logits"))
    assert pieces == ()
    assert [name for name, kernels in program.layer_kernels.items() if kernels.paged] == ["plain"]
    assert Program.from_json(program.to_json()).libraries() == program.every_library() != ()
    with pytest.raises(ArtifactError, match="lacks the library paged_attention"):
        link(program, {}, {}, torch.device("cpu"))


@pytest.mark.parametrize(
    "sections",
    [{"model": {"path": "m", "dtype": "float16"}}, {"runtime": {"kv_cache_dtype": "fp8_e4m3"}}],
    ids=["float16", "fp8"],
)
def test_other_types_are_torchs(sections):
    program, _ = add_paged_attention(resolved(CPU, **sections), Program((), (PLAIN,), (), "logits"))
    assert program.libraries() == ()
