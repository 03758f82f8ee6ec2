"""The cached runtime on disk: a folder that is complete or absent, and is checked before anything in it is executed.

    manifest.json          format, key and its factors, model sizes, sha256 and size of every other file
    program.json           steps, layers, and where each weight comes from
    constants.safetensors  buffers that no checkpoint holds
    pieces/                one file for each distinct piece: <hash>.pt2 to run, <hash>.py to read (or to run: eager)
    tokenizer/             tokenizer.json and what belongs to it; absent where the model folder has none
    graphs/                the graph after each pass, as text

Written beside its final place and renamed there, so a killed compile leaves nothing that is taken for whole and two
compiles of one key cannot hurt each other. No pickle anywhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mllm_compile.cache_key import FORMAT_VERSION
from mllm_compile.errors import ArtifactError
from mllm_compile.hf_model import ModelSizes
from mllm_compile.runtime.program import Program
from mllm_compile.runtime.weight_loader import WeightPart, WeightSpec

MANIFEST = "manifest.json"
PROGRAM = "program.json"
CONSTANTS = "constants.safetensors"
PIECES = "pieces"
TOKENIZER = "tokenizer"
GRAPHS = "graphs"
_MAX_JSON_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class Artifact:
    """An opened runtime folder: every file that is named here has the hash that the manifest says.

    Attributes:
        folder: where it lies.
        factors: the key's factors by name.
        sizes: the model's figures.
        program: the steps.
        weights: where each weight comes from.
        constants: names of the program's weights that are in constants.safetensors.
        piece_suffix: which of a piece's two files runs.
    """

    folder: Path
    factors: Mapping[str, str]
    sizes: ModelSizes
    program: Program
    weights: tuple[WeightSpec, ...]
    constants: tuple[str, ...]
    piece_suffix: str

    def piece_path(self, piece: str) -> Path:
        return self.folder / PIECES / (piece + self.piece_suffix)

    @property
    def tokenizer_folder(self) -> Path | None:
        folder = self.folder / TOKENIZER
        return folder if folder.is_dir() else None


@contextmanager
def new_artifact_folder(final: Path) -> Iterator[Path]:
    """A private folder to write into; it is renamed to `final` when the body ends well, and removed otherwise."""
    final.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))  # mode 0700
    try:
        yield scratch
        _publish(scratch, final)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _publish(scratch: Path, final: Path) -> None:
    """Rename is atomic; where another process was first, its folder is as good as ours."""
    try:
        os.rename(scratch, final)
    except OSError:
        if (final / MANIFEST).is_file():
            return
        shutil.rmtree(final, ignore_errors=True)
        os.rename(scratch, final)


def write_program(
    folder: Path, program: Program, weights: tuple[WeightSpec, ...], constants: Mapping[str, torch.Tensor]
) -> None:
    """Writes program.json and constants.safetensors."""
    from safetensors.torch import save_file

    data = {
        "program": program.to_json(),
        "weights": [_weight_to_json(spec) for spec in weights],
        "constants": sorted(constants),
    }
    (folder / PROGRAM).write_text(json.dumps(data, indent=1), encoding="utf-8")
    save_file({name: value.contiguous() for name, value in constants.items()}, folder / CONSTANTS)


def write_manifest(
    folder: Path, factors: Mapping[str, str], sizes: ModelSizes, piece_suffix: str, about: Mapping[str, Any]
) -> None:
    """Writes manifest.json, last of all: it holds the hashes of everything else.

    Args:
        folder: the complete folder.
        factors: the key's factors.
        sizes: the model's figures.
        piece_suffix: which of a piece's files runs.
        about: what was measured while compiling, for people.
    """
    files = {
        path.relative_to(folder).as_posix(): {"sha256": _sha256(path), "bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {
        "format": FORMAT_VERSION,
        "factors": dict(factors),
        "sizes": asdict(sizes),
        "piece_suffix": piece_suffix,
        "about": dict(about),
        "files": files,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def open_artifact(folder: Path) -> Artifact:
    """Checks a runtime folder and reads its program.

    Raises:
        ArtifactError: it is incomplete, changed, foreign, writable by others, or of another format.
    """
    _check_owner(folder)
    manifest = _read_json(folder / MANIFEST)
    if manifest.get("format") != FORMAT_VERSION:
        raise ArtifactError(
            f"{folder} has format {manifest.get('format')!r}, this version reads {FORMAT_VERSION}; compile the model again"
        )
    _check_files(folder, manifest.get("files"))
    data = _read_json(folder / PROGRAM)
    try:
        return Artifact(
            folder=folder,
            factors=manifest["factors"],
            sizes=ModelSizes(**manifest["sizes"]),
            program=Program.from_json(data["program"]),
            weights=tuple(_weight_from_json(spec) for spec in data["weights"]),
            constants=tuple(data["constants"]),
            piece_suffix=manifest["piece_suffix"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{folder} is not a runtime that this version writes ({error}); compile the model again"
        ) from error


def _check_owner(folder: Path) -> None:
    """Code in the folder is executed: it must be ours (or root's), and nobody else may write to it."""
    try:
        status = folder.stat()
    except OSError as error:
        raise ArtifactError(f"there is no runtime at {folder}: {error.strerror}") from error
    if status.st_uid not in (os.geteuid(), 0):
        raise ArtifactError(f"{folder} belongs to user id {status.st_uid}, not to you: its code is not executed")
    if status.st_mode & 0o022:
        raise ArtifactError(
            f"{folder} can be written by others (mode {status.st_mode & 0o777:o}): run chmod go-w on it"
        )


def _check_files(folder: Path, files: Any) -> None:
    if not isinstance(files, dict) or PROGRAM not in files:
        raise ArtifactError(f"{folder}/{MANIFEST} lists no files; compile the model again")
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()} - {MANIFEST}
    if present != set(files):
        odd = sorted(present ^ set(files))[0]
        raise ArtifactError(
            f"{folder}: {odd} is {'unknown to' if odd in present else 'missing, though named in'} the manifest"
        )
    for name, facts in files.items():
        path = folder / name
        if path.is_symlink() or path.stat().st_size != facts.get("bytes") or _sha256(path) != facts.get("sha256"):
            raise ArtifactError(
                f"{path} is not what was compiled (its size or sha256 differs); compile the model again"
            )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_JSON_BYTES:
            raise ArtifactError(f"{path} is larger than any that this version writes")
        data = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}); compile the model again") from error
    if not isinstance(data, dict):
        raise ArtifactError(f"{path} does not hold an object; compile the model again")
    return data


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _weight_to_json(spec: WeightSpec) -> dict[str, Any]:
    return asdict(spec) | {"dtype": str(spec.dtype).removeprefix("torch.")}


def _weight_from_json(data: dict[str, Any]) -> WeightSpec:
    parts = tuple(
        WeightPart(tensor=part["tensor"], file=part["file"], start=part["start"], shape=tuple(part["shape"]))
        for part in data["parts"]
    )
    return WeightSpec(data["name"], tuple(data["shape"]), getattr(torch, data["dtype"]), parts)
