"""The list of FlashInfer's private names is what the code uses, and another FlashInfer is refused at the start."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import mllm_compile
from mllm_compile.runtime.attention.flashinfer.library import import_flashinfer
from mllm_compile.runtime.attention.flashinfer.private_names import PRIVATE_NAMES, VERSION
from mllm_compile.runtime.errors import DeviceError

ROOT = Path(mllm_compile.__file__).parents[1]
LISTED = {entry.name for entry in PRIVATE_NAMES}


def sources() -> dict[Path, str]:
    paths = [*(ROOT / "runtime").rglob("*.py"), ROOT / "mllm_compile" / "kernels" / "flashinfer.py"]
    return {path: path.read_text(encoding="utf-8") for path in paths if path.name != "private_names.py"}


def test_every_private_attribute_of_a_wrapper_that_is_used_is_listed_and_no_other():
    used = {
        f"wrapper.{node.attr}"
        for path, source in sources().items()
        if "attention" in path.parts
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if isinstance(node.value, ast.Name) and node.value.id not in ("self", "cls", "backend")
    }
    assert used == {name for name in LISTED if name.startswith("wrapper.")}


def test_what_is_imported_of_flashinfers_inside_is_listed_and_no_other():
    text = "\n".join(sources().values())
    for name in LISTED:
        assert name.rpartition(".")[2] in text, f"{name} is used no more"
    used = {
        f"{node.module}.{alias.name}"
        for source in sources().values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flashinfer")
        for alias in node.names
    }
    interface = {"flashinfer.sampling", "flashinfer.decode.fast_decode_plan"}
    listed = {name.replace(".FLASHINFER_AOT_DIR", "") for name in LISTED if name.startswith("flashinfer.")}
    assert used - interface == listed


@pytest.fixture
def installed(monkeypatch):
    """Puts a FlashInfer of a version in place."""

    def install(version: str) -> ModuleType:
        library = ModuleType("flashinfer")
        library.__version__ = version  # type: ignore[attr-defined]
        library.__path__ = []  # type: ignore[attr-defined]
        for module in (library, ModuleType("flashinfer.decode")):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        return library

    return install


@pytest.mark.parametrize("version", ["0.6.17", "0.6.19", "0.6.180", "0.7.1.post1", "0.0.0+unknown"])
def test_a_flashinfer_whose_names_are_not_known_is_refused_before_a_wrapper_is_made(installed, version):
    installed(version)
    with pytest.raises(DeviceError) as refused:
        import_flashinfer(torch.device("cuda"))
    assert str(refused.value).startswith(f"FlashInfer {version} is installed; expected {VERSION}")
    assert "pip install 'mllm-compile[cuda]'" in str(refused.value)


@pytest.mark.parametrize("version", [VERSION, f"{VERSION}.post1", f"{VERSION}.post2+cu130"])
def test_the_known_one_is_taken_with_its_corrections(installed, version):
    library = installed(version)
    assert import_flashinfer(torch.device("cuda")) is library


def test_the_package_asks_for_the_known_version():
    wanted = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'"flashinfer-python=={VERSION}' in wanted
    assert f"flashinfer-python=={VERSION}" in (ROOT / "constraints-gpu.txt").read_text(encoding="utf-8")
