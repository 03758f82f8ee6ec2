"""Imports between rooms follow their order (import_graph.FLOORS), and some modules must not be imported at all."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from mllm_compile.runtime.ops import OPS as OPS_BY_NAME
from tests.rules import import_graph
from tests.rules.import_graph import ROOT, modules

# Left to the compiler by the runtime. pydantic: of the config, which the runtime never sees.
NOT_IN_RUNTIME = ("transformers", "torch._dynamo", "torch._inductor", "pydantic")
# Folders whose every module can be imported without these.
WITHOUT = {
    "runtime": NOT_IN_RUNTIME,
    "runtime/schedule": ("torch",),
    "mllm_compile/config": ("torch", "transformers"),
    "mllm_compile/server": ("torch", "transformers"),
    "mllm_compile/text/calls": ("torch", "transformers", "jinja2"),
}
# Parts of the runtime that passes import: the ops, the layers between pieces, shapes that attention kernels take,
# places of adapters, and quantised schemes.
OPS = re.compile(r"runtime/(ops/.*|attention/(layer|hopper/shapes)|state/layer|lora/target|quantised/scheme)")
RUNTIME = [path for name, path in modules().items() if name.startswith("runtime/")]
ALL = [*modules().values(), *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "examples").rglob("*.py"))]


# Prints what is imported after all modules named in the arguments are; Triton is only where torch has CUDA.
IMPORT_ALL = """
import importlib, sys
for module in sys.argv[1:]:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
print(*sys.modules)
"""


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Full names of what a file imports anywhere."""
    return frozenset(imported(parse(path)))


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of what is imported anywhere: `from a import b` is a.b, which may be a module or a name in one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_inside(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def test_every_module_is_in_a_room():
    assert not [module for module in modules() if import_graph.floor_of(module) is None]


def test_a_file_imports_its_own_room_and_those_below():
    assert len(import_graph.imports()) > 500
    wrong = [f"{found.source}:{found.line} imports {found.target}" for found in import_graph.upward()]
    assert not wrong, "a room of import_graph.FLOORS is imported from below"


def test_no_modules_import_each_other():
    assert not import_graph.circles(import_graph.module_edges())


def test_circles_are_found():
    edges = {"a": {"b", "x"}, "b": {"c"}, "c": {"a"}, "x": {"y"}, "y": set()}
    assert import_graph.circles(edges) == [["a", "b", "c"]]


def test_no_folder_has_one_module():
    """One is no folder: it is beside its neighbours, or its package's __init__.py has it."""
    assert not [folder for folder, count in import_graph.folder_sizes().items() if count == 1]


def test_the_runtime_names_no_compiler():
    for path in RUNTIME:
        for module in imports_of(path):
            assert not is_inside(module, *NOT_IN_RUNTIME), f"{path} imports {module}"


def test_passes_import_passes_and_the_schemas_of_ops():
    for found in import_graph.imports():
        if found.source.startswith("passes/") and not found.target.startswith("passes/"):
            assert OPS.fullmatch(found.target), f"{found.source}:{found.line} imports {found.target}"


def test_nobody_but_its_room_knows_inductor():
    for name, path in modules().items():
        if not name.startswith("mllm_compile/inductor/"):
            assert not any(is_inside(module, "torch._inductor") for module in imports_of(path)), name


def test_nobody_imports_the_folders_by_their_bare_names():
    for path in ALL:
        for module in imports_of(path):
            assert not is_inside(module, "runtime", "passes"), f"{path} imports {module}"


def test_flashinfer_is_imported_where_it_is_used_and_not_before():
    for path in modules().values():
        for node in parse(path).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not any(is_inside(module, "flashinfer") for module in imported(node)), path


@pytest.mark.parametrize("folder", WITHOUT)
def test_importing_all_of_a_folder_imports_nothing_heavy(folder):
    """In a process of its own, as this one has imported everything."""
    names = [name.removesuffix("/__init__") for name in modules() if name.startswith(folder + "/")]
    dotted = [("" if name.startswith("mllm_compile") else "mllm_compile.") + name.replace("/", ".") for name in names]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *dotted], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not set(done.stdout.split()) & set(WITHOUT[folder])


def defined_ops(path: Path) -> Iterator[str]:
    """Names of the ops that a file defines, by Triton, by a schema or as ops of streamed linears."""
    text = path.read_text(encoding="utf-8")
    yield from re.findall(r'@triton_op\(\s*"mllm::(\w+)"', text)
    for prefix in re.findall(r'StreamedOps\(\s*"(\w+)"', text):
        yield from (prefix, f"{prefix}_residual", f"{prefix}_residual_norm")
    if 'Library("mllm"' in text:
        yield from re.findall(r'\.define\(\s*"(\w+)\(', text)


def test_the_list_of_ops_is_what_the_files_define():
    """Passes put ops into pieces by this list, and processes that no pass has run in define theirs by it."""
    folder = ROOT / "runtime" / "ops"
    found = {
        name: path.relative_to(folder).with_suffix("").as_posix().replace("/", ".")
        for path in RUNTIME
        for name in defined_ops(path)
    }
    assert found == OPS_BY_NAME
    assert list(OPS_BY_NAME) == sorted(OPS_BY_NAME), "a new op has one place"
