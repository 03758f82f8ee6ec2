"""The kernels of a runtime that ops launch, loaded once for all engines of a process."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Generic, Self, TypeVar

from mllm_compile.runtime.cuda.driver import load_kernel
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.cuda.tensor_maps import TensorMaps

Key = TypeVar("Key")
Parameters = TypeVar("Parameters", bound=CudaKernel)


class LoadedKernel(Generic[Parameters]):
    """The base of an op's kernels: one of them on a device. A subclass is called with the op's operands, describes them
    to the kernel, if need be by `_maps`, and launches `_loaded`.

    Attributes:
        kernel: what it was compiled for.
        binary: its code.
    """

    def __init__(self, kernel: Parameters, binaries: Mapping[str, bytes]) -> None:
        """Loads it on the current device; arguments and errors: as load_kernel."""
        self.kernel = kernel
        self._loaded = load_kernel(kernel, binaries)
        self.binary = binaries[kernel.name]
        self._maps = TensorMaps()

    @classmethod
    def load_once(
        cls, loaded: MutableMapping[Key, Self], key: Key, kernel: Parameters, binaries: Mapping[str, bytes]
    ) -> bool:
        """Loads a kernel on the current device, unless it is there with the same binary: engines of a process share it.

        Args:
            loaded: where it is kept, by `key`.

        Returns:
            True if it was loaded.

        Raises:
            ArtifactError, DeviceError: as load_kernel.
        """
        before = loaded.get(key)
        if before is not None and (before.kernel, before.binary) == (kernel, binaries.get(kernel.name)):
            return False
        loaded[key] = cls(kernel, binaries)
        return True
