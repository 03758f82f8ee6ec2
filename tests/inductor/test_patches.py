"""The list of what is replaced inside torch: each name is there, each file has its entry, and any can be left out."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mllm_compile.errors import ConfigError
from mllm_compile.inductor import compile_piece, patches
from mllm_compile.inductor.patches import PATCHES, SWITCH, left_out

FOLDER = Path(patches.__file__).parent


def found(full_name: str) -> Any:
    """The object of a full name, or None."""
    parts = full_name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            at: Any = import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for part in parts[count:]:
            at = getattr(at, part, None)
        return at
    return None


@pytest.mark.parametrize("name", [name for patch in PATCHES for name in patch.replaces])
def test_torch_has_what_is_replaced(name):
    assert any(found(either) is not None for either in name.split("|")), "torch has changed: look at the patch"


def test_each_file_is_a_patch_of_the_list():
    assert {path.stem for path in FOLDER.glob("*.py")} - {"__init__"} == {patch.name for patch in PATCHES}


def test_nothing_else_replaces_names_of_inductor():
    """`module.name = …` of what is imported of torch stands in patches/ alone."""
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
