"""Kernels of ours take floats as constants alone.

A float that is not a constant reaches a packaged kernel as a double, and its sums become doubles. The norms of a step
of one token took a sixth longer that way, and no test of numbers could see it.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

RUNTIME = Path(__file__).resolve().parents[2] / "runtime"
FOLDERS = (RUNTIME / "ops", RUNTIME / "ops" / "attention", RUNTIME / "ops" / "tokens")
OP_FILES = sorted(path for folder in FOLDERS for path in folder.glob("*.py"))


def kernels(path: Path) -> list[ast.FunctionDef]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")]


def is_constant(argument: ast.arg) -> bool:
    return argument.annotation is not None and ast.unparse(argument.annotation) == "tl.constexpr"


def is_pointer_or_count(name: str) -> bool:
    return name.endswith(("_ptr", "_stride")) or name.startswith("num_") or name == "window_left"


@pytest.mark.parametrize("path", OP_FILES, ids=lambda path: path.stem)
def test_arguments_that_are_not_constants_are_pointers_or_whole_numbers(path):
    for kernel in kernels(path):
        names = [argument.arg for argument in kernel.args.args if not is_constant(argument)]
        assert all(is_pointer_or_count(name) for name in names), (kernel.name, names)


def test_there_are_kernels_to_look_at():
    assert sum(len(kernels(path)) for path in OP_FILES) >= 6
