"""Dependencies: bounds in pyproject.toml, and within them the tests' versions (constraints.txt)."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
DEPENDENCIES = [Requirement(line) for line in PROJECT["dependencies"]]
SERVE = [Requirement(line) for line in PROJECT["optional-dependencies"]["serve"]]
DEV = [Requirement(line) for line in PROJECT["optional-dependencies"]["dev"]]
CONSTRAINTS = dict(
    re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
)
VERSIONS = {canonicalize_name(name): version for name, version in CONSTRAINTS.items()}


@pytest.mark.parametrize("dependency", [*DEPENDENCIES, *SERVE], ids=lambda one: one.name)
def test_a_dependency_has_a_lowest_and_a_first_version_too_new(dependency):
    operators = {specifier.operator for specifier in dependency.specifier}
    assert operators >= {">=", "<"}


@pytest.mark.parametrize("dependency", [*DEPENDENCIES, *SERVE, *DEV], ids=lambda one: one.name)
def test_the_version_that_tests_are_run_with_is_one_that_is_allowed(dependency):
    version = VERSIONS[canonicalize_name(dependency.name)]
    assert dependency.specifier.contains(version), f"{version}; make constraints"


def test_make_installs_the_torch_of_the_constraints():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"TORCH ?= torch=={VERSIONS['torch']}\n" in makefile
    assert not any("+" in version for version in VERSIONS.values()), "a build of one kind of machine"


def test_what_is_imported_is_declared():
    declared = {canonicalize_name(one.name) for one in DEPENDENCIES}
    for extra in ("cuda", "bench", "serve", "structured", "images", "audio", "ray", "otel", "events", "nixl"):
        declared |= {canonicalize_name(Requirement(line).name) for line in PROJECT["optional-dependencies"][extra]}
    # With torch: Triton where it has CUDA, SymPy for sizes.
    own = set(sys.stdlib_module_names) | {"mllm_compile", "triton", "sympy", "cuda"}
    distributions = {"flashinfer": ["flashinfer-python"], "tvm_ffi": ["apache-tvm-ffi"]}  # where there is a GPU alone
    distributions |= {"PIL": ["pillow"], "pynvml": ["nvidia-ml-py"], "zmq": ["pyzmq"]}
    distributions |= packages_distributions()
    for folder in ("mllm_compile", "passes", "runtime"):
        for path in (ROOT / folder).rglob("*.py"):
            if "adapters" in path.parts and "bench" in path.parts:  # other engines, to compare with
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for name in {name.partition(".")[0] for name in names} - own:
                    known = {canonicalize_name(one) for one in distributions.get(name, [name])}
                    assert known & declared, f"{path.relative_to(ROOT)} imports {name}"


def imported(path: Path) -> set[str]:
    """The modules that a file imports whenever it is imported."""
    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


def skipped_without(path: Path) -> set[str]:
    """The packages without which a file of tests skips itself."""
    found = re.findall(r'^(?:\w+ = )?pytest\.importorskip\("(\w+)', path.read_text(encoding="utf-8"), re.MULTILINE)
    return {name for name in found if name != "mllm_compile"}


OF_AN_EXTRA = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if skipped_without(path)]


@pytest.mark.parametrize("path", OF_AN_EXTRA, ids=lambda path: path.relative_to(ROOT / "tests").as_posix())
def test_tests_that_skip_themselves_without_a_package_do_not_import_it_ahead_of_that(path):
    names = imported(path)
    files = [ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith(("mllm_compile", "tests"))]
    taken = names.union(*(imported(file) for file in files if file.is_file()))
    assert skipped_without(path).isdisjoint({name.partition(".")[0] for name in taken})
