"""The runtime and the weights of a rank's node: those that are there, else rank 0's, fetched once through Ray.

A node has them at rank 0's paths (a shared file system, or the same folders), or in its own cache. Of files at rank
0's path size and time of change count, else the contents are compared. What is fetched comes in parts with their
sha256, and gets its name when it is whole; a runtime's own hashes are checked ahead of each use.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mllm_compile.errors import ArtifactError
from mllm_compile.files.cache_folders import CHECKPOINTS, FETCHED, RUNTIMES, auto_cache_dir, make_private
from mllm_compile.files.writable_place import cache_place
from mllm_compile.runtime.files.json_data import from_json, parse_json
from mllm_compile.store.artifact import MANIFEST, is_runtime
from mllm_compile.store.measurements import MEASURED
from mllm_compile.store.opened import CompiledRuntime
from mllm_compile.store.publish import mark_used, new_artifact_folder, runtimes_folder, scratch_folder, sweep

PART_S = 60.0  # a part comes within this time
_PART_BYTES = 8 << 20
_AHEAD = 4  # parts that are asked for ahead


@dataclass(frozen=True)
class FileThere:
    """A file of rank 0's host.

    Attributes:
        name: relative to its folder.
        size: bytes.
        changed_ns: when it was changed last.
    """

    name: str
    size: int
    changed_ns: int


@dataclass(frozen=True)
class Wanted:
    """The files that ranks read on rank 0's host.

    Attributes:
        folder: the runtime's.
        manifest: sha256 of its manifest, which has those of its files.
        runtime: its files.
        weights_root: the folder of the weights' files, where the runtime does not have them.
        weights: these files.
    """

    folder: str
    manifest: str
    runtime: tuple[FileThere, ...]
    weights_root: str
    weights: tuple[FileThere, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def wanted_of(compiled: CompiledRuntime) -> tuple[Wanted, list[str]]:
    """The files of a runtime that is open here, and where they are, in their order."""
    folder, weights = compiled.folder.absolute(), compiled.artifact.manifest.weights
    names = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file())
    runtime = [name for name in names if not name.startswith(MEASURED + "/")]
    outside = () if weights.is_packed else tuple(weights.files)
    root = str(Path(compiled.weights_root).absolute()) if outside else ""
    manifest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()
    wanted = Wanted(str(folder), manifest, _files(str(folder), runtime), root, _files(root, outside))
    groups = ((str(folder), wanted.runtime), (root, wanted.weights))
    return wanted, [os.path.realpath(os.path.join(place, file.name)) for place, files in groups for file in files]


def _files(root: str, names: list[str] | tuple[str, ...]) -> tuple[FileThere, ...]:
    found = ((name, os.stat(os.path.join(root, name))) for name in names)
    return tuple(FileThere(name, status.st_size, status.st_mtime_ns) for name, status in found)


def take_files(wanted: str, server: Any) -> list[str]:
    """The runtime and the folder of its weights on this node.

    Args:
        wanted: as Wanted.to_json.
        server: the actor that reads the files there (worker.py).

    Raises:
        ArtifactError: something else came than was told.
        ConfigError: the cache cannot be written.
        TimeoutError: rank 0's node did not send a part in time.
    """
    told = from_json(Wanted, parse_json(wanted.encode()))
    cache = Path(auto_cache_dir()[0])
    return [str(_runtime(told, cache, server)), _weights(told, cache, server)]


def _runtime(told: Wanted, cache: Path, server: Any) -> Path:
    theirs = Path(told.folder)
    has_key = theirs.parent.name == RUNTIMES
    own = runtimes_folder(cache) / (theirs.name if has_key else told.manifest[:32])
    for folder in (theirs, own):
        if _sha256(folder / MANIFEST) == told.manifest:
            return folder
    if has_key and is_runtime(own):  # compiled here of the same: rank 0 compares programs
        return own
    sweep(own.parent)
    with new_artifact_folder(own) as scratch:
        _fetch(told.runtime, scratch, 0, server)
        if _sha256(scratch / MANIFEST) != told.manifest:
            raise ArtifactError(f"{told.folder} has changed on node 0 while it was fetched. Start again.")
    return own


def _sha256(path: Path) -> str | None:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _weights(told: Wanted, cache: Path, server: Any) -> str:
    first = len(told.runtime)
    if not told.weights or _are_same(told, first, server):
        return told.weights_root
    name = hashlib.sha256(json.dumps([told.weights_root, [asdict(one) for one in told.weights]]).encode()).hexdigest()
    own = cache / CHECKPOINTS / f"{FETCHED}{name[:32]}"
    if own.is_dir():  # it got its name when it was whole
        mark_used(own)
        return str(own)
    make_private(own.parent)
    sweep(own.parent)
    place = cache_place(cache)
    with scratch_folder(own, place) as scratch:
        with place.filling(scratch):
            _fetch(told.weights, scratch, first, server)
        with place.writing():
            try:
                os.rename(scratch, own)
            except OSError:
                if not own.is_dir():  # else another start of this node was first
                    raise
    return str(own)


def _are_same(told: Wanted, first: int, server: Any) -> bool:
    """True if rank 0's files of weights are at the same path here."""
    root = Path(told.weights_root)
    try:
        here = _files(told.weights_root, [file.name for file in told.weights])
    except OSError:
        return False
    if here == told.weights:
        return True
    if [one.size for one in here] != [one.size for one in told.weights]:
        return False
    return all(
        hashlib.sha256(_part(root / told.weights[number].name, offset, size)).hexdigest() == digest
        for number, offset, size, digest in _answers(told.weights, first, server.digest)
    )


def _part(path: Path, offset: int, size: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(offset)
        return file.read(size)


def _fetch(files: tuple[FileThere, ...], into: Path, first: int, server: Any) -> None:
    """Fetches files of rank 0's host; `first` is the place of the first of them in the server's list."""
    for file in files:
        path = into / file.name
        if not path.resolve().is_relative_to(into.resolve()):
            raise ArtifactError(f"{file.name!r} on node 0 is no name of a file below its folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    for number, offset, size, (digest, data) in _answers(files, first, server.read):
        if len(data) != size or hashlib.sha256(data).hexdigest() != digest:
            raise ArtifactError(f"{files[number].name} came damaged from node 0, or changed there. Start again.")
        with open(into / files[number].name, "r+b") as opened:
            opened.seek(offset)
            opened.write(data)


def _answers(files: tuple[FileThere, ...], first: int, call: Any) -> Iterator[tuple[int, int, int, Any]]:
    """The server's answer for each part of each file, behind its file, place and size."""
    import ray

    parts = [
        (number, offset, min(_PART_BYTES, file.size - offset))
        for number, file in enumerate(files)
        for offset in range(0, file.size, _PART_BYTES)
    ]
    asked: deque[Any] = deque()
    for place, part in enumerate(parts):
        while len(asked) < _AHEAD and place + len(asked) < len(parts):
            number, offset, size = parts[place + len(asked)]
            asked.append(call.remote(first + number, offset, size))
        try:
            answer = ray.get(asked.popleft(), timeout=PART_S)
        except ray.exceptions.GetTimeoutError:
            raise TimeoutError(f"node 0 did not send a part of {files[part[0]].name} within {PART_S:.0f} s") from None
        yield (*part, answer)
