"""Who may import whom, read from the sources; and that no model is treated by its name outside of models/."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mllm_compile.runtime.ops import OPS as OPS_BY_NAME

ROOT = Path(__file__).parents[2]
# What the runtime leaves to whom compiles. pydantic: of the config, which the runtime never sees.
NOT_IN_RUNTIME = ("transformers", "torch._dynamo", "torch._inductor", "pydantic")
# The ops, what an attention is, and which shapes its kernels take.
OPS = re.compile(r"mllm_compile\.runtime\.(ops|attention\.layer|attention\.hopper\.shapes)(\.|$)")
RUNTIME = sorted((ROOT / "runtime").rglob("*.py"))
PASSES = sorted((ROOT / "passes").rglob("*.py"))
# rglob does not follow the links mllm_compile/runtime and mllm_compile/passes.
PACKAGE = sorted(path for path in (ROOT / "mllm_compile").rglob("*.py") if path not in {*RUNTIME, *PASSES})
ALL = [*RUNTIME, *PASSES, *PACKAGE, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "examples").rglob("*.py"))]


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


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


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


@pytest.mark.parametrize("path", RUNTIME, ids=name_of)
def test_the_runtime_imports_nothing_above_it_and_no_compiler(path):
    for module in imported(parse(path)):
        assert not is_inside(module, *NOT_IN_RUNTIME), f"{path} imports {module}"
        if is_inside(module, "mllm_compile"):
            assert is_inside(module, "mllm_compile.runtime"), f"{path} imports {module}"


@pytest.mark.parametrize("path", PASSES, ids=name_of)
def test_passes_import_passes_and_the_schemas_of_ops(path):
    for module in imported(parse(path)):
        if is_inside(module, "mllm_compile"):
            assert is_inside(module, "mllm_compile.passes") or OPS.match(module), f"{path} imports {module}"


def test_nobody_imports_the_folders_by_their_bare_names():
    for path in ALL:
        for module in imported(parse(path)):
            assert not is_inside(module, "runtime", "passes"), f"{name_of(path)} imports {module}"


def test_flashinfer_is_imported_where_it_is_used_and_not_before():
    for path in (*RUNTIME, *PACKAGE):
        for node in parse(path).body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                assert not any(is_inside(module, "flashinfer") for module in imported(node)), name_of(path)


def test_importing_all_of_the_runtime_imports_no_compiler():
    modules = [".".join(("mllm_compile", *path.relative_to(ROOT).with_suffix("").parts)) for path in RUNTIME]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *modules], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not set(done.stdout.split()) & set(NOT_IN_RUNTIME)


def names_a_model(comparison: ast.Compare) -> bool:
    """`x.model_type == "qwen3"`, `type(model).__name__ in ("A", "B")`."""
    sides = [comparison.left, *comparison.comparators]
    nodes = [node for side in sides for node in ast.walk(side)]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name)} - {"__name__"}
    has_text = any(isinstance(node, ast.Constant) and isinstance(node.value, str) for node in nodes)
    return has_text and bool(names & {"model_type", "architectures", "__name__"})


def test_no_model_is_treated_by_its_name_outside_of_models():
    for path in (*RUNTIME, *PASSES, *PACKAGE):
        if is_inside(name_of(path).replace("/", "."), "mllm_compile.model"):
            continue
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Compare) and names_a_model(node):
                pytest.fail(f"{name_of(path)}:{node.lineno} branches on a model's name: {ast.unparse(node)}")


def defined_ops(path: Path) -> Iterator[str]:
    """Names of the ops that a file defines, by Triton or by a schema."""
    text = path.read_text(encoding="utf-8")
    yield from re.findall(r'@triton_op\(\s*"mllm::(\w+)"', text)
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
