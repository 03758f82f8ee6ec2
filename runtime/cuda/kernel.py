"""The parameters that a kernel is compiled for, as stored with its binary; free of torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

_RUNTIME = Path(__file__).parent.parent
MULTIPROCESSORS = 132  # of an H100 SXM or H200, which kernels are divided for


class CudaKernel(ABC):
    """The base of kernels: a dataclass of what source and launch need; launched as it was compiled.

    Attributes:
        source: its file, seen from the folder runtime/.
        headers: files in front of it.
        function: its name in the binary, which profilers show.
        switch: the setting that does without it.
    """

    source: ClassVar[str]
    headers: ClassVar[tuple[str, ...]] = ()
    function: ClassVar[str]
    switch: ClassVar[str]

    @property
    @abstractmethod
    def name(self) -> str:
        """The binary's file name, without its suffix."""

    @property
    @abstractmethod
    def num_threads(self) -> int:
        """Threads of a block."""

    @property
    @abstractmethod
    def shared_bytes(self) -> int:
        """Bytes of dynamic shared memory of a block."""

    @abstractmethod
    def constants(self) -> dict[str, int]:
        """The constants of its source, by name."""

    def preamble(self) -> str:
        """Source in front of the file's, beside the constants."""
        return ""

    def to_json(self) -> dict[str, Any]:
        return {"source": self.source, **asdict(self)}  # type: ignore[call-overload]


def kernel_source(kernel: CudaKernel) -> str:
    """The source that is compiled for `kernel`."""
    defined = "".join(f"#define {name} {value}\n" for name, value in kernel.constants().items())
    files = (_RUNTIME / name for name in ("cuda/common.cuh", *kernel.headers, kernel.source))
    return "".join([defined, kernel.preamble(), *(file.read_text(encoding="utf-8") for file in files)])
