"""Loads compiled pieces as functions of a list of tensors, without any Python compiler.

Two forms: an AOTInductor package (`.pt2`: machine code with its kernels; milliseconds to load) and the piece's own
graph as Python source (`.py`, compile.backend: eager). Both are executed, so they come as the bytes that were checked,
not as the name of a file that may have changed since.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch
from torch.torch_version import TorchVersion

from mllm_compile.runtime import ops
from mllm_compile.runtime.errors import ArtifactError
from mllm_compile.runtime.files.memory_file import as_file
from mllm_compile.runtime.program.unpacked import Unpacked, check_room

PieceSuffix = Literal[".pt2", ".py"]
PACKAGE_SUFFIX: PieceSuffix = ".pt2"
SOURCE_SUFFIX: PieceSuffix = ".py"
# Members that AOTInductor packs; anything else (a pickled constant, a weight) is not of our making.
_MEMBER_SUFFIXES = frozenset({".so", ".cubin", ".cpp", ".json"})
_MEMBER_NAMES = frozenset({"version", "archive_format", "archive_version", "byteorder", "serialization_id"})
_MAX_UNPACKED_BYTES = 1 << 30


class PackagedPiece:
    """One AOTInductor package. Its kernels are launched on the current stream; safe inside a CUDA graph capture.

    Raises:
        ArtifactError: it cannot be loaded on this machine, or holds something that no package of ours does.
    """

    def __init__(self, name: str, package: bytes) -> None:
        check_members(name, package)
        ops.define(calls_by_name(package))
        # run_single_threaded: the threaded runner queries an event, which fails while a CUDA graph is captured.
        run_single_threaded, num_runners, device_index = True, 1, -1
        with _as_path(name, package) as (path, self._files):
            try:
                self._loader = torch._C._aoti.AOTIModelPackageLoader(
                    path, "model", run_single_threaded, num_runners, device_index
                )
            except RuntimeError as error:
                raise ArtifactError(f"piece {name} cannot be loaded: {str(error).splitlines()[0]}") from error

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self._loader.boxed_run(inputs)


class SourcePiece:
    """A piece run as it was traced, one torch operator at a time."""

    def __init__(self, name: str, source: str) -> None:
        ops.define(source)
        self._module = piece_class(source, Path(name))()

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            outputs: Sequence[torch.Tensor] = self._module(*inputs)
            return outputs


def piece_class(source: str, path: Path) -> type[torch.nn.Module]:
    """The class `Piece` that a piece's source defines."""
    namespace: dict[str, Any] = {"__name__": f"mllm_piece_{path.stem}"}
    exec(compile(source, str(path), "exec"), namespace)
    kind: type[torch.nn.Module] = namespace["Piece"]
    return kind


def load_piece(name: str, data: bytes) -> PackagedPiece | SourcePiece:
    """Loads a piece by the suffix of its file's name.

    Raises:
        ArtifactError: the package cannot be loaded on this machine.
    """
    return PackagedPiece(name, data) if name.endswith(PACKAGE_SUFFIX) else SourcePiece(name, data.decode())


def check_members(name: str, package: bytes) -> None:
    """Refuses a package with a member that AOTInductor does not write, or that would unpack outside of its folder.

    Raises:
        ArtifactError: naming the member.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(package)) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise ArtifactError(f"piece {name} is no package ({error}); compile the model again") from error
    for member in members:
        path = PurePosixPath(member.filename)
        is_known = path.suffix in _MEMBER_SUFFIXES or path.name in _MEMBER_NAMES
        if not is_known or path.is_absolute() or ".." in path.parts or "\\" in member.filename:
            raise ArtifactError(f"piece {name} holds {member.filename!r}, which no package of ours does: not loaded")
    if sum(member.file_size for member in members) > _MAX_UNPACKED_BYTES:
        raise ArtifactError(f"piece {name} unpacks to more than {_MAX_UNPACKED_BYTES >> 20} MiB: not loaded")


def calls_by_name(package: bytes) -> str:
    """The lists of ops that a package calls by name, as AOTInductor writes them ("mllm::quantised_linear")."""
    with zipfile.ZipFile(io.BytesIO(package)) as archive:
        lists = (member for member in archive.infolist() if member.filename.endswith(".json"))
        return "\n".join(archive.read(member).decode() for member in lists)


# Before torch 2.13 the loader takes no folder: it unpacks a package itself into one in /tmp, which stays where the
# process is killed. Can go with them.
_TAKES_FOLDERS = TorchVersion(torch.__version__) >= "2.13"


@contextmanager
def _as_path(name: str, package: bytes) -> Iterator[tuple[str, Unpacked | None]]:
    """The loader's argument: the folder of the unpacked package, which only this user can open and which must outlive
    the loader; or the package itself.

    Raises:
        ConfigError: there is no room to unpack it.
    """
    if _TAKES_FOLDERS:
        files = Unpacked(package)
        yield str(files.path), files
        return
    check_room(package)
    with as_file(name, package) as path:
        yield path, None
