"""Loads compiled pieces as functions of a list of tensors, without any Python compiler.

Two forms: an AOTInductor package (`.pt2`: machine code with its kernels; milliseconds to load) and the piece's own graph
as Python source (`.py`, compile.backend: eager). Both are executed, so whoever calls this has checked their hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from mllm_compile.runtime.errors import ArtifactError

PACKAGE_SUFFIX = ".pt2"
SOURCE_SUFFIX = ".py"


class PackagedPiece:
    """One AOTInductor package. Its kernels are launched on the current stream; safe inside a CUDA graph capture."""

    def __init__(self, path: Path) -> None:
        # run_single_threaded: the threaded runner queries an event, which fails while a CUDA graph is captured.
        run_single_threaded, num_runners, device_index = True, 1, -1
        try:
            self._loader = torch._C._aoti.AOTIModelPackageLoader(
                str(path), "model", run_single_threaded, num_runners, device_index
            )
        except RuntimeError as error:
            raise ArtifactError(f"{path} cannot be loaded: {str(error).splitlines()[0]}") from error

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        return self._loader.boxed_run(inputs)


class SourcePiece:
    """A piece run as it was traced, one torch operator at a time."""

    def __init__(self, path: Path) -> None:
        self._module = piece_class(path.read_text(encoding="utf-8"), path)()

    def __call__(self, inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        with torch.no_grad():
            return self._module(*inputs)


def piece_class(source: str, path: Path) -> type[torch.nn.Module]:
    """The class `Piece` that a piece's source defines."""
    namespace: dict[str, Any] = {"__name__": f"mllm_piece_{path.stem}"}
    exec(compile(source, str(path), "exec"), namespace)
    return namespace["Piece"]


def load_piece(path: Path) -> PackagedPiece | SourcePiece:
    """Loads a piece by its suffix.

    Raises:
        ArtifactError: the package cannot be loaded on this machine.
    """
    return PackagedPiece(path) if path.suffix == PACKAGE_SUFFIX else SourcePiece(path)
