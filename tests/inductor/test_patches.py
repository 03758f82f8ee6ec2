"""The list of what is replaced inside torch: each name is there, each file has its entry, and any can be left out."""

from __future__ import annotations

import ast
import importlib.metadata
import io
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mllm_compile.cli import key_text
from mllm_compile.errors import CompileError, ConfigError
from mllm_compile.inductor import compile_piece, patches
from mllm_compile.inductor.patches import PATCHES, SWITCH, applies, find, left_out

OPTIONAL = [patch.name for patch in PATCHES if patch.can_be_left_out]
FOLDER = Path(patches.__file__).parent


@pytest.mark.parametrize("name", [name for patch in PATCHES for name in patch.replaces])
def test_torch_has_what_is_replaced(name):
    assert any(find(either) is not None for either in name.split("|")), "torch has changed: look at the patch"


def test_each_file_is_a_patch_of_the_list():
    assert {path.stem for path in FOLDER.glob("*.py")} - {"__init__"} == {patch.name for patch in PATCHES}


def test_nothing_else_replaces_names_of_inductor():
    """`module.name = …` of what is imported of torch is in patches/ alone."""
    for path in FOLDER.parent.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        of_torch = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch")
            for alias in node.names
        } | {"torch"}
        for node in ast.walk(tree):
            for target in node.targets if isinstance(node, ast.Assign) else []:
                if isinstance(target, ast.Attribute):
                    assert ast.unparse(target).split(".")[0] not in of_torch, f"{path.name}:{node.lineno}"


def test_a_patch_can_be_left_out(monkeypatch):
    monkeypatch.delenv(SWITCH, raising=False)
    assert left_out() == frozenset()
    monkeypatch.setenv(SWITCH, "unload_packages, early_launch")
    assert left_out() == {"unload_packages", "early_launch"}


@pytest.mark.parametrize("name", ["no_such_patch", "hidden_waits"])
def test_a_patch_that_is_not_known_or_not_optional_is_refused(monkeypatch, name):
    monkeypatch.setenv(SWITCH, f"unload_packages,{name}")
    with pytest.raises(ConfigError, match=f"has '{name}'; expected names of shared_host_code, "):
        left_out()


def test_what_is_left_out_is_not_replaced(monkeypatch, tmp_path):
    called = []
    for name in ("mark_nothing_unique", "share_interface", "share_header", "skip_attention_patterns"):
        monkeypatch.setattr(compile_piece, name, lambda *_, name=name: called.append(name))
    monkeypatch.setattr(compile_piece, "pays", lambda device: True)
    monkeypatch.setattr(compile_piece, "importlib", SimpleNamespace(import_module=lambda name: None))
    monkeypatch.setenv(SWITCH, "shared_host_code,unload_packages")
    compile_piece.prepare_compiler("cpu", tmp_path)
    assert called == ["share_header", "skip_attention_patterns"]
    called.clear()
    monkeypatch.setenv(SWITCH, "precompiled_header,quick_start")
    compile_piece.prepare_compiler("cpu", tmp_path)
    assert called == ["mark_nothing_unique", "share_interface"]


@pytest.fixture
def version(monkeypatch):
    """Makes this process's torch one of another version, as far as patches ask."""
    patches._fits.cache_clear()
    yield lambda name: monkeypatch.setattr(torch, "__version__", name)
    patches._fits.cache_clear()


def test_patches_fit_the_torch_that_tests_run_with():
    assert {patch.name: patch.obstacle(torch.__version__) for patch in PATCHES} == dict.fromkeys(
        patch.name for patch in PATCHES
    )


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_patch_is_left_out_for_a_torch_that_it_is_not_for_and_the_log_says_so(version, caplog, name):
    version("2.99.1+cu140")
    assert not applies(name)
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(f"{name} is left out, as it is for torch 2.11 to 2.1") and "this is 2.99.1+cu140: " in line
    assert not applies(name) and len(caplog.records) == 1, "once a process"


def test_without_a_patch_that_pieces_need_a_compile_says_which_torch_to_install(version):
    version("2.99.1")
    with pytest.raises(CompileError, match=r"hidden_waits: it is for torch 2.11 to 2.15.*Install torch 2.11 to 2.15"):
        applies("hidden_waits")


@pytest.mark.parametrize("name", OPTIONAL)
def test_a_patch_is_left_out_where_torch_lacks_a_name_that_it_replaces(version, monkeypatch, caplog, name):
    (patch,) = (patch for patch in PATCHES if patch.name == name)
    monkeypatch.setattr(patches, "PATCHES", (replace(patch, replaces=(*patch.replaces, "torch._inductor.no.name")),))
    assert not applies(name)
    assert f"{name} is left out, as torch {torch.__version__} has no torch._inductor.no.name" in caplog.text


def test_explain_says_which_patches_are_left_out(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "2.99.1")
    stream = io.StringIO()
    key_text.print_patches(stream)
    assert " ".join(stream.getvalue().split()).count("left out, as it is for torch") == len(PATCHES)
