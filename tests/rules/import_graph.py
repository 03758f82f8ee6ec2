"""The imports between modules, read from the sources: `python -m tests.rules.import_graph` prints it.

FLOORS lists the rooms from the top down. A file may import its own room and those below; what may not be is in
`upward`, and `circles` are modules that import each other. test_floors.py holds both. Every import counts, also inside
of functions and for types alone: a reader of a file has to know what they name.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

# Folders, and single files that are on a floor of their own.
FLOORS = (
    "mllm_compile/__main__",
    "mllm_compile/__init__",
    "mllm_compile/cli",
    "mllm_compile/report",
    "mllm_compile/bench",
    "mllm_compile/serve_ray",
    "mllm_compile/server",
    "mllm_compile/train",
    "mllm_compile/transfer",
    "mllm_compile/engine",
    "mllm_compile/ranks",
    "mllm_compile/kv_connectors",
    "mllm_compile/kv_events",
    "mllm_compile/structured",
    "mllm_compile/compiler",
    "mllm_compile/check",
    "mllm_compile/compiler/lowered",
    "mllm_compile/kernels",
    "mllm_compile/inductor",
    "mllm_compile/store",
    "mllm_compile/model",
    "mllm_compile/checkpoint",
    "mllm_compile/adapters",
    "mllm_compile/config",
    "mllm_compile/media",
    "mllm_compile/text/calls",
    "mllm_compile/text",
    "mllm_compile/gguf",
    "mllm_compile/process",
    "mllm_compile/files",
    "mllm_compile/errors",
    "mllm_compile/version",
    "passes",
    "runtime/tiers",
    "runtime/step",
    "runtime/ranks",
    "runtime/model_runner",
    "runtime/memory_profile",
    "runtime/ubatch",
    "runtime/pooling/runner",
    "runtime/pooling/graphs",
    "runtime/cuda_graph",
    "runtime/program",
    "runtime/updates",
    "runtime/ops",
    "runtime/forward_context",
    "runtime/state",
    "runtime/attention",
    "runtime/forward_batch",
    "runtime/graph_mode",
    "runtime/memory_pool",
    "runtime/schedule",
    "runtime/speculation",
    "runtime/sampling",
    "runtime/lora",
    "runtime/weights",
    "runtime/quantised",
    "runtime/device",
    "runtime/collectives",
    "runtime/cpu",
    "runtime/cuda",
    "runtime/sources",
    "runtime/media",
    "runtime",
)


class Import(NamedTuple):
    source: str  # a module as its path without .py: runtime/ops/tokens/draw, mllm_compile/engine/__init__
    target: str
    line: int
    at_once: bool  # when the module is imported: neither in a function nor for types alone


def module_of(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").as_posix()


@cache
def modules() -> dict[str, Path]:
    """All modules of the three packages. (rglob does not follow the links mllm_compile/passes and runtime.)"""
    files = (path for folder in ("mllm_compile", "passes", "runtime") for path in (ROOT / folder).rglob("*.py"))
    return {module_of(path): path for path in sorted(files) if not _is_linked(path)}


def _is_linked(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(ROOT))


def floor_of(module: str) -> int | None:
    """The index of the room that a module is in; of several that fit the longest. None: it is in no room."""
    fits = [room for room in FLOORS if module == room or module.startswith(room + "/")]
    return FLOORS.index(max(fits, key=len)) if fits else None


@cache
def imports() -> tuple[Import, ...]:
    """Every import of one of our modules by another."""
    found = []
    for module, path in modules().items():
        for names, line, at_once in _imported(ast.parse(path.read_text(encoding="utf-8"))):
            targets = {_resolved(name) for name in names} - {None, module}
            found += [Import(module, target, line, at_once) for target in sorted(filter(None, targets))]
    return tuple(found)


def _imported(node: ast.AST, at_once: bool = True) -> Iterator[tuple[list[str], int, bool]]:
    for child in ast.iter_child_nodes(node):
        inside = at_once and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            inside = False
        if isinstance(child, ast.Import):
            yield [alias.name for alias in child.names], child.lineno, at_once
        elif isinstance(child, ast.ImportFrom) and child.level == 0:
            yield [f"{child.module}.{alias.name}" for alias in child.names], child.lineno, at_once
        elif isinstance(child, ast.Constant) and "." in str(child.value) and _resolved(str(child.value), exactly=True):
            yield [child.value], child.lineno, False  # for import_module, or python -m
        yield from _imported(child, inside)


def _resolved(dotted: str, exactly: bool = False) -> str | None:
    """The module that a full name is, or is in; None if it is not ours."""
    if not re.match(r"mllm_compile(\.|$)", dotted):
        return None
    path = dotted.replace(".", "/")
    path = re.sub(r"^mllm_compile/(?=(passes|runtime)(/|$))", "", path)
    while path:
        for module in (path, f"{path}/__init__"):
            if module in modules():
                return module
        path = "" if exactly else path.rpartition("/")[0]
    return None


def upward() -> list[Import]:
    """Imports of a room above the importer's."""
    floors = {module: floor_of(module) for module in modules()}
    return [
        found
        for found in imports()
        if None not in (floors[found.source], floors[found.target]) and floors[found.target] < floors[found.source]
    ]


def circles(edges: Mapping[str, set[str]]) -> list[list[str]]:
    """Sets of nodes that reach each other (Tarjan's strongly connected components, of more than one node)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(edges.get(node, ())):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            circle = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(circle) > 1:
                found.append(sorted(circle))

    for node in sorted(edges):
        if node not in index:
            visit(node)
    return found


def module_edges() -> dict[str, set[str]]:
    edges: dict[str, set[str]] = {}
    for found in imports():
        edges.setdefault(found.source, set()).add(found.target)
    return edges


def room_edges() -> dict[str, set[str]]:
    """The rooms that each room imports."""
    edges: dict[str, set[str]] = {room: set() for room in FLOORS}
    for found in imports():
        source, target = floor_of(found.source), floor_of(found.target)
        if source is not None and target is not None and source != target:
            edges[FLOORS[source]].add(FLOORS[target])
    return edges


def folder_sizes() -> Counter[str]:
    """Modules in each folder itself, but for its __init__.py."""
    return Counter(str(Path(module).parent) for module in modules() if Path(module).name != "__init__")


def main() -> int:
    for room, below in room_edges().items():
        print(f"{room:24} → {' '.join(sorted(below, key=FLOORS.index)) or '-'}")
    print("\nlargest folders: " + ", ".join(f"{folder} {count}" for folder, count in folder_sizes().most_common(12)))
    for found in upward():
        print(f"upward: {found.source}:{found.line} imports {found.target}")
    for circle in circles(module_edges()):
        print(f"circle: {' '.join(circle)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
