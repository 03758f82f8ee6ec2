"""Lists a cache's runtimes, usable or not, and the weights that came from other nodes, and removes some for room."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from mllm_compile.errors import ArtifactError, ConfigError
from mllm_compile.files.cache_folders import CHECKPOINTS, FETCHED, bytecode_cache, compiler_cache
from mllm_compile.files.writable_place import place_of
from mllm_compile.store.artifact import Manifest, is_runtime, read_manifest
from mllm_compile.store.publish import folder_bytes, remove_compiler_cache, remove_folder, runtimes_folder, sweep

_RUNTIME_NAME = re.compile(r".+-[0-9a-f]{16}")  # the model's type and a key
_WEIGHTS_NAME = re.compile(FETCHED + r"[0-9a-f]{32}")
_BYTECODE_NAME = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True)
class StoredRuntime:
    """One runtime of the cache.

    Attributes:
        folder: where it is.
        manifest: None when it is unusable.
        problem: why; an OtherFormatError where it is only of another version.
        num_bytes: on the disk.
        last_used: seconds since the epoch: when an engine last opened it.
    """

    folder: Path
    manifest: Manifest | None
    problem: ArtifactError | None
    num_bytes: int
    last_used: float


@dataclass(frozen=True)
class StoredWeights:
    """Weights that a node of Ray has fetched from another.

    Attributes:
        folder, num_bytes, last_used: as StoredRuntime has them.
    """

    folder: Path
    num_bytes: int
    last_used: float


Stored = StoredRuntime | StoredWeights


def stored_weights(cache_dir: str | Path) -> list[StoredWeights]:
    """All fetched weights of the cache, the last used first.

    Raises:
        ConfigError: the cache cannot be read.
    """
    found = []
    for folder in _subfolders(Path(cache_dir) / CHECKPOINTS):
        if _WEIGHTS_NAME.fullmatch(folder.name) is not None:
            with contextlib.suppress(FileNotFoundError):
                found.append(StoredWeights(folder, folder_bytes(folder), folder.stat().st_mtime))
    return sorted(found, key=_last_used_first)


def _last_used_first(stored: Stored) -> tuple[float, str]:
    return -stored.last_used, stored.folder.name


def stored_runtimes(cache_dir: str | Path) -> list[StoredRuntime]:
    """Every runtime of the cache, the last used first.

    Raises:
        ConfigError: the cache cannot be read.
    """
    found = []
    for folder in filter(_is_ours, _subfolders(runtimes_folder(cache_dir))):
        manifest, problem = None, None
        try:
            manifest = read_manifest(folder)
        except ArtifactError as error:
            problem = error
        with contextlib.suppress(FileNotFoundError):  # pruned by another process meanwhile
            found.append(StoredRuntime(folder, manifest, problem, folder_bytes(folder), folder.stat().st_mtime))
    return sorted(found, key=_last_used_first)


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be read ({error.strerror}); set cache.dir, or MLLM_COMPILE_CACHE, to a folder of yours"
        ) from error


def _is_ours(folder: Path) -> bool:
    """True if a compile made it: in a folder that is no cache, `runtimes` may be another program's."""
    if folder.name.startswith("."):  # a compile that is running, or was killed
        return False
    return _RUNTIME_NAME.fullmatch(folder.name) is not None or is_runtime(folder)


def remove_stored(folder: Path) -> int:
    """Removes a runtime or weights of the cache; a process that opens it meanwhile sees it whole or not at all.

    Returns:
        The bytes that are gone, which are not all where files are another user's.

    Raises:
        ConfigError: the cache cannot be written.
    """
    with place_of(folder, is_output=False).writing():
        gone = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".part", dir=folder.parent))
        try:
            with contextlib.suppress(FileNotFoundError):
                # A link to another disk goes, and what it leads to stays.
                os.rename(folder, gone / folder.name if folder.is_symlink() else gone)
        finally:
            freed = remove_folder(gone)
    return freed


@dataclass(frozen=True)
class Pruned:
    """The files and folders that `prune` removed.

    Attributes:
        stored: runtimes and fetched weights in order, each with the bytes that it gave back.
        leftovers: bytes of each folder that a killed compile or fetch had left.
        compiler_bytes: bytes of the compilers' cache; None: a compile may be using it, and it stays.
        bytecode_bytes: bytes of Python's bytecode.
    """

    stored: list[Stored]
    leftovers: list[int]
    compiler_bytes: int | None
    bytecode_bytes: int

    @property
    def num_bytes(self) -> int:
        """All bytes that were freed."""
        kept = (self.compiler_bytes or 0) + self.bytecode_bytes
        return sum(one.num_bytes for one in self.stored) + sum(self.leftovers) + kept


def _bytecode_folders(folder: Path) -> list[Path]:
    """The folders with names that we give; others in a folder of that name are another program's."""
    return [path for path in _subfolders(folder) if _BYTECODE_NAME.fullmatch(path.name)]


def prune(cache_dir: str | Path, max_bytes: int | None = None) -> Pruned:
    """Removes what compilers, Python and killed compiles left, runtimes and fetched weights.

    Args:
        max_bytes: beside the unusable runtimes the least recently used of both go, until this is left; None: no others
            go.

    Raises:
        ConfigError: the cache cannot be written.
    """
    leftovers = [*sweep(runtimes_folder(cache_dir)), *sweep(Path(cache_dir) / CHECKPOINTS)]
    compiler_bytes = remove_compiler_cache(compiler_cache(cache_dir))
    bytecode_bytes = sum(map(remove_folder, _bytecode_folders(bytecode_cache(cache_dir))))
    runtimes = stored_runtimes(cache_dir)
    removed: list[Stored] = [one for one in runtimes if one.manifest is None]
    kept: list[Stored] = [*(one for one in runtimes if one.manifest is not None), *stored_weights(cache_dir)]
    kept.sort(key=_last_used_first)
    while max_bytes is not None and kept and sum(one.num_bytes for one in kept) > max_bytes:
        removed.append(kept.pop())
    gone = [replace(one, num_bytes=remove_stored(one.folder)) for one in removed]
    return Pruned(gone, leftovers, compiler_bytes, bytecode_bytes)
