"""Compiles the C++ that AOTInductor writes into every package alike once for all pieces of a compile.

A package's host code is a model class with the piece's launches, and two parts that all packages share. One has the C
functions that load and call it (torch/_inductor/codegen/aoti_runtime/interface.cpp, spliced into the source); the other
is the model's base class, a template. At -O0 these two are nine tenths of g++'s output (std::regex alone, with which
the base class reads "cuda:0", is hundreds of functions). With precompiled headers the wrapper of a piece with two
linears takes 3.0 s, and without the two parts 0.75 (CPU, torch 2.13).

So a fork of the compiler process compiles them into an object (inductor/build_in_fork.py), and packages are linked with
it. Packages are compiled without the first, and declare the second extern. Where there is no such object, or a
package's source is not as it is known, the package is compiled as Inductor does it.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

from mllm_compile.inductor import build_in_fork
from mllm_compile.inductor.patches.unload_packages import with_nothing_to_destroy

MODEL_HEADER = "torch/csrc/inductor/aoti_runtime/model.h"
_CONTAINER_HEADER = "torch/csrc/inductor/aoti_runtime/model_container.h"
_BASE = "template class torch::aot_inductor::AOTInductorModelBase<torch::aot_inductor::AOTInductorModel>;"
_NAME, _SOURCE = "interface", "interface.cpp"
_WRAPPER_OBJECT = ".wrapper.o"


def share_interface(folder: Path, device: str) -> None:
    """Starts to compile it in a fork. The packages that other forks of this process compile wait for it.

    Args:
        folder: theirs alone, and there until they have ended.

    Raises:
        OSError: as build_in_fork.start.
    """
    from torch._inductor import codecache

    build_in_fork.start(folder, _NAME, functools.partial(_compile, folder, device.partition(":")[0]))
    parted = _Parted(folder, codecache.AotCodeCompiler.compile, codecache.CppBuilder)
    codecache.AotCodeCompiler.compile = parted.compile  # type: ignore[method-assign]
    codecache.CppBuilder = parted.builder  # type: ignore[assignment, misc]


class _Parted:
    """Stands before two of Inductor's names, in a process that compiles one package."""

    def __init__(self, folder: Path, plain_compile: Any, plain_builder: Any) -> None:
        self._folder, self._plain_compile, self._plain_builder = folder, plain_compile, plain_builder
        self._object: Path | None = None  # that the package is linked with

    def compile(self, graph: Any, wrapper_code: str, *rest: Any, **options: Any) -> Any:
        """Replaces AotCodeCompiler.compile."""
        build_in_fork.wait(self._folder, _NAME)
        own = without_interface(wrapper_code)
        if own is not None and _object(self._folder).exists():
            wrapper_code, self._object = own, _object(self._folder)
        return self._plain_compile(graph, wrapper_code, *rest, **options)

    def builder(self, name: str, sources: str | list[str], *rest: Any, **options: Any) -> Any:
        """Replaces CppBuilder."""
        is_link = isinstance(sources, list) and any(source.endswith(_WRAPPER_OBJECT) for source in sources)
        if is_link and self._object is not None:
            sources = [*sources, str(self._object)]
        return self._plain_builder(name, sources, *rest, **options)


def without_interface(wrapper_code: str) -> str | None:
    """A package's source without the shared object's part; None if it is not as it is known."""
    interface = _interface()
    if wrapper_code.count(interface) != 1:
        return None
    includes = "\n".join(re.findall(r"^#include .*$", interface, re.MULTILINE))
    return wrapper_code.replace(interface, f"{includes.replace(_CONTAINER_HEADER, MODEL_HEADER)}\nextern {_BASE}\n")


def _interface() -> str:
    """The interface as Inductor writes it into a package."""
    from torch._inductor import codegen

    path = Path(codegen.__path__[0]) / "aoti_runtime" / "interface.cpp"
    return path.read_text(encoding="utf-8").rstrip()


def _object(folder: Path) -> Path:
    return folder / f"{_SOURCE}.o"


def _compile(folder: Path, device: str) -> None:
    """Runs the fork's part."""
    from torch._inductor.codecache import _get_cpp_wrapper_header

    source, header = folder / _SOURCE, _get_cpp_wrapper_header(device, aot_mode=True)
    interface = with_nothing_to_destroy(_interface())
    source.write_text(f"#include <{header}>\n{interface}\n{_BASE}\n", encoding="utf-8")
    build_in_fork.compile_as_a_package(source, device, compile_only=True)
