"""The interface of a kernel family: the kernels that NVRTC compiles into a runtime for ops which pieces call.

runtime/ops lists the families. Program, artifact, compiler and checks know them by that list alone. Free of torch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mllm_compile.runtime.cuda.kernel import CudaKernel

if TYPE_CHECKING:
    import torch
    from torch import fx

    CalledPieces = Sequence[
        tuple[fx.GraphModule, int | None]
    ]  # a piece or variant, and its most tokens; None: any number


class KernelFamily(ABC):
    """Kernels of one kind. The setting that does without one is the kernel's `switch`."""

    @abstractmethod
    def wanted(self, pieces: CalledPieces) -> tuple[CudaKernel, ...]:
        """Returns the kernels that these pieces of a program call."""

    @abstractmethod
    def from_json(self, data: Mapping[str, Any]) -> CudaKernel:
        """Reads what the kernel's `to_json` wrote. Raises KeyError, TypeError or ValueError for anything else."""

    @abstractmethod
    def load(self, kernels: Sequence[CudaKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
        """Makes these kernels those that the ops launch on `device`.

        Args:
            binaries: binaries by the kernel's name; checked by the caller: they are executed.

        Raises:
            ArtifactError: one is missing.
            DeviceError: one cannot be loaded.
        """

    def step_sizes(self, kernels: Sequence[CudaKernel]) -> Sequence[int]:
        """Returns the most tokens of each range that has kernels of its own: the self-check runs a batch for each."""
        return ()

    def faults(self, kernels: Sequence[CudaKernel], device: torch.device) -> Iterator[str]:
        """Runs what no batch of the self-check reaches; yields what is wrong, for the user, with the switch."""
        return iter(())
