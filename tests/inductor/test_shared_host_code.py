"""The C++ that all packages have in common: compiled once and linked, and part of each package where that fails."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from mllm_compile.inductor import build_in_fork
from mllm_compile.inductor.patches import shared_host_code
from mllm_compile.inductor.patches.shared_host_code import MODEL_HEADER, _Parted, without_interface

PACKAGE = "#include <cpu.h>\n{interface}\nvoid run_impl() {{}}\n"


@pytest.fixture
def package() -> str:
    return PACKAGE.format(interface=shared_host_code._interface())


def test_a_package_keeps_what_is_its_own(package):
    own = without_interface(package)
    assert own is not None and "AOTInductorModelContainerCreate" not in own
    assert own.startswith("#include <cpu.h>\n") and own.endswith("void run_impl() {}\n")
    assert f"#include <{MODEL_HEADER}>" in own and "model_container.h" not in own
    assert "extern template class torch::aot_inductor::AOTInductorModelBase<" in own


def test_source_of_another_shape_is_left_alone(package):
    assert without_interface(package.replace("AOTInductorGetLastError", "another")) is None
    assert without_interface(package + package) is None


class Inductor:
    """Its two functions, and what they were given."""

    def __init__(self) -> None:
        self.code, self.linked = "", []

    def compile(self, graph, wrapper_code, kernel_code, **options) -> str:
        self.code = wrapper_code
        return "made"

    def builder(self, name, sources, BuildOption) -> None:
        self.linked.append(sources)


@pytest.mark.parametrize("there", [True, False])
def test_it_is_linked_where_the_object_is_there(package, tmp_path, there):
    build_in_fork.start(tmp_path, "interface", lambda: shared_host_code._object(tmp_path).touch() if there else None)
    inductor = Inductor()
    parted = _Parted(tmp_path, inductor.compile, inductor.builder)
    assert parted.compile(None, package, "", device_type="cpu") == "made"
    for sources in ("p.wrapper.cpp", ["p.wrapper.o", "p.weights.o"], ["a.o", "b.o"]):
        parted.builder("p", sources, BuildOption=None)
    added = [str(shared_host_code._object(tmp_path))] if there else []
    assert inductor.linked == ["p.wrapper.cpp", ["p.wrapper.o", "p.weights.o", *added], ["a.o", "b.o"]]
    assert inductor.code == (without_interface(package) if there else package)


# A process that compiles a piece, loads the package and runs it.
COMPILES = """
import sys
from pathlib import Path
import torch
from mllm_compile.inductor.compile_piece import PieceInput, compile_piece
from mllm_compile.inductor.patches.shared_host_code import share_interface
folder = Path(sys.argv[1])
share_interface(folder, "cpu")
T = PieceInput.contiguous(("T", 8), "float32")
compile_piece(folder / "piece.py", [T, PieceInput.contiguous((4, 8), "float32")], "cpu", {"T": 64}, folder / "p.pt2",
              folder)
loader = torch._C._aoti.AOTIModelPackageLoader(str(folder / "p.pt2"), "model", True, 1, -1)
x, w = torch.randn(5, 8), torch.randn(4, 8)
torch.testing.assert_close(loader.run([x, w])[0], torch.nn.functional.silu(x @ w.T))
"""
PIECE = """
import torch
class Piece(torch.nn.Module):
    def forward(self, x, w):
        return (torch.nn.functional.silu(torch.nn.functional.linear(x, w)),)
"""


@pytest.mark.slow  # a first compile; tests/e2e/test_end_to_end.py looks at the packages of one in every run
def test_packages_run_with_it(tmp_path):
    (tmp_path / "piece.py").write_text(PIECE)
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", COMPILES, str(tmp_path)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], env=environment)
    # Others may compile the same piece with the same cache at the same time.
    assert not [*(tmp_path / "cache").rglob("*wrapper*"), *(tmp_path / "cache").rglob("*kernel*")]
    assert not list(tmp_path.rglob("package-*"))
    with zipfile.ZipFile(tmp_path / "p.pt2") as package:
        (wrapper,) = (name for name in package.namelist() if name.endswith(".wrapper.cpp"))
        assert b"AOTInductorModelContainerCreate" not in package.read(wrapper)
