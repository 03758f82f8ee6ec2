"""Loads CPU libraries from the bytes that were checked, once a process."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from contextlib import ExitStack

from mllm_compile.runtime.cpu.library import CpuLibrary
from mllm_compile.runtime.errors import ArtifactError
from mllm_compile.runtime.files.memory_file import as_file

_lock = threading.Lock()
_loaded: dict[bytes, ctypes.CDLL] = {}
_held = ExitStack()  # their files, never closed: the loader knows libraries by their paths, which must not come again


def load_library(library: CpuLibrary, binaries: Mapping[str, bytes]) -> ctypes.CDLL:
    """The library, ready to be called; engines of a process share it, and it stays.

    Args:
        binaries: binaries by the library's name; checked by the caller: they are executed.

    Raises:
        ArtifactError: it is missing, or cannot be loaded on this machine.
    """
    binary = binaries.get(library.name)
    if binary is None:
        raise ArtifactError(f"the runtime lacks the library {library.name} that its program calls: compile it again")
    with _lock:
        if binary not in _loaded:
            path = _held.enter_context(as_file(library.name, binary))
            try:
                _loaded[binary] = ctypes.CDLL(path)
            except OSError as error:
                raise ArtifactError(
                    f"the library {library.name} of the runtime cannot be loaded ({error}): compile it again, or set "
                    f"{library.switch}"
                ) from error
        return _loaded[binary]
