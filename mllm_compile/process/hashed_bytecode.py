"""Bytecode of this project's modules that holds as long as their sources have the same hash (PEP 552).

By time and size, as Python has it, a module of another checkout or image at the same place could pass for this one: all
files of an image may have one time. bytecode.py says where it is kept. A helper process imports this file alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import marshal
import os
import sys
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from types import CodeType

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_HEAD = importlib.util.MAGIC_NUMBER + (0b11).to_bytes(4, "little")


class HashedLoader(SourceFileLoader):
    """Loads a module with the bytecode that is kept of its source's hash, and keeps it."""

    def folder(self) -> str | None:
        """The folder that it is kept in; None: this module's is where Python has it."""
        return sys.pycache_prefix

    def get_code(self, fullname: str) -> CodeType | None:
        folder = self.folder()
        if folder is None:
            return super().get_code(fullname)
        name = os.path.basename(importlib.util.cache_from_source(self.path))
        kept = os.path.join(folder, os.path.dirname(self.path).lstrip(os.sep), name)
        source = self.get_data(self.path)
        head = _HEAD + importlib.util.source_hash(source)
        with contextlib.suppress(OSError, EOFError, ValueError, TypeError):  # none is kept, or a damaged file
            data = self.get_data(kept)
            if data.startswith(head) and isinstance(code := marshal.loads(memoryview(data)[len(head) :]), CodeType):
                return code
        code = self.source_to_code(source, self.path)
        self.set_data(kept, head + marshal.dumps(code))
        return code


def load_ours(loader: type[HashedLoader] = HashedLoader) -> None:
    """Has this project's modules loaded so from now on; the bytecode of those that are loaded already goes by hash."""

    def find_ours(path: str) -> FileFinder:
        if path != ROOT and not path.startswith(ROOT + os.sep):
            raise ImportError(f"{path} is another's")
        return FileFinder(path, (loader, SOURCE_SUFFIXES))

    sys.path_hooks.insert(0, find_ours)
    for path in [path for path in sys.path_importer_cache if path.startswith(ROOT)]:
        del sys.path_importer_cache[path]
    if sys.pycache_prefix is not None and not sys.dont_write_bytecode:
        for module in list(sys.modules.values()):
            spec = getattr(module, "__spec__", None)
            if spec is not None and spec.cached and (spec.origin or "").startswith(ROOT + os.sep):
                with contextlib.suppress(OSError):
                    _go_by_hash(spec.name, spec.origin, spec.cached)


def _go_by_hash(name: str, source: str, kept: str) -> None:
    """Has bytecode that Python has written by its source's time and size go by its hash."""
    loader = SourceFileLoader(name, source)
    data, now = loader.get_data(kept), os.stat(source)
    by_time = importlib.util.MAGIC_NUMBER + b"".join(
        (number & 0xFFFFFFFF).to_bytes(4, "little") for number in (0, int(now.st_mtime), now.st_size)
    )
    if data.startswith(by_time):
        loader.set_data(kept, _HEAD + importlib.util.source_hash(loader.get_data(source)) + data[len(by_time) :])
