"""The files that weights are read from: the facts that a runtime stores, and how changes are found.

A header (names, dtypes, shapes, places) is compared at every start. The data, gigabytes of it, is hashed when weights
are packed, and later when a user asks for it with --verify-weights or `cache verify`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from mllm_compile.errors import CheckpointError
from mllm_compile.runtime.files.regular_file import open_regular
from mllm_compile.runtime.weights.file_names import name_from
from mllm_compile.runtime.weights.header import read_header

_HASHERS = 4
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True)
class WeightFileFacts:
    """One safetensors file.

    Attributes:
        num_bytes: the whole file's size.
        header_sha256: its header's hash.
        sha256: the whole file's hash; None until it is asked for.
    """

    num_bytes: int
    header_sha256: str
    sha256: str | None = None


@dataclass(frozen=True)
class WeightFiles:
    """
    Attributes:
        folder: where the checkpoint was when it was compiled; "" when the files are packed or weights are random.
        files: facts by file name: relative to `folder`, or to the runtime's folder when they are packed.
        is_packed: the runtime holds the weights itself.
    """

    folder: str
    files: Mapping[str, WeightFileFacts]
    is_packed: bool = False

    @property
    def packed_names(self) -> set[str]:
        return set(self.files) if self.is_packed else set()

    @property
    def are_random(self) -> bool:
        return not self.files

    @property
    def are_hashed(self) -> bool:
        return all(facts.sha256 for facts in self.files.values())

    def fingerprint(self) -> str:
        """16 hex digits over names and headers, "random" without files."""
        if self.are_random:
            return "random"
        lines = [f"{name} {facts.header_sha256}\n" for name, facts in sorted(self.files.items())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]

    def check_headers(self, root: Path) -> None:
        """Compares sizes and headers of the files below `root` with what was remembered.

        Raises:
            CheckpointError: a file is missing, damaged or another one.
        """
        for name, facts in self.files.items():
            now = _facts(root / name)
            if (now.num_bytes, now.header_sha256) != (facts.num_bytes, facts.header_sha256):
                raise CheckpointError(
                    f"{root / name} is not the file that was compiled for (its size or header differs). Put that one "
                    "back, or compile the model again."
                )

    def hashed(self, root: Path, advance: Callable[[int], None] = lambda num_bytes: None) -> WeightFiles:
        """The same with the sha256 of every file's data; where one is known it must be that.

        Args:
            root: the folder that the names are relative to.
            advance: called with the number of bytes of each part that is hashed.

        Raises:
            CheckpointError: a file's data is not what it was.
        """
        with ThreadPoolExecutor(_HASHERS, thread_name_prefix="hash weights") as threads:
            digests = list(threads.map(lambda name: _sha256(root / name, advance), self.files))
        files = {}
        for (name, facts), digest in zip(self.files.items(), digests, strict=True):
            if facts.sha256 not in (None, digest):
                raise CheckpointError(
                    f"{root / name}: the data has changed (sha256 {digest}, was {facts.sha256}). Download it again, or "
                    "compile the model again if the change is wanted."
                )
            files[name] = replace(facts, sha256=digest)
        return replace(self, files=files)


def weight_files(root: Path, paths: Iterable[Path], *, is_packed: bool = False) -> WeightFiles:
    """The facts of safetensors files, which are named from `root`; their data is not read.

    Raises:
        CheckpointError: a file is missing or no whole safetensors file.
    """
    files = {name_from(root, path): _facts(path) for path in sorted(paths)}
    return WeightFiles("" if is_packed else str(root), files, is_packed)


def data_identity(paths: Iterable[Path]) -> str:
    """16 hex digits over where the files are, their sizes and when they were last changed; "random" without files.

    Headers of two checkpoints of one model are the same; hashing their data would take longer than a start.
    """
    files = [(path, path.stat()) for path in sorted(path.resolve() for path in paths)]
    if not files:
        return "random"
    lines = [f"{path} {facts.st_size} {facts.st_mtime_ns}\n" for path, facts in files]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:16]


def _facts(path: Path) -> WeightFileFacts:
    header = read_header(path)
    return WeightFileFacts(header.file_bytes, hashlib.sha256(header.raw).hexdigest())


def _sha256(path: Path, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    try:
        with open(open_regular(path), "rb", buffering=0) as file:
            while chunk := file.read(_CHUNK_BYTES):
                digest.update(chunk)
                advance(len(chunk))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return digest.hexdigest()
