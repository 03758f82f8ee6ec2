"""The base of the decode kernels: what they are compiled for. Free of torch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from mllm_compile.runtime.cuda.kernel import CudaKernel

HEAD_DIM = 128
MISSING = -1  # what a word that a block leaves to another is until it is left: all bits set


@dataclass(frozen=True)
class DecodeKernel(CudaKernel):
    """
    Attributes:
        kv_heads: KV heads of the cache.
        group: query heads that share one.
        page_size: tokens of a page.
        sinks: query heads have sinks.
    """

    headers: ClassVar[tuple[str, ...]] = (
        "attention/hopper/rotation.cuh",
        "attention/hopper/sinks.cuh",
        "attention/hopper/parts.cuh",
    )
    switch: ClassVar[str] = "compile.hopper_decode: false"

    kv_heads: int
    group: int
    page_size: int
    sinks: bool = field(default=False, kw_only=True)

    @property
    def heads_name(self) -> str:
        return f"{self.kv_heads}x{self.group}_page{self.page_size}" + ("_sinks" if self.sinks else "")

    @abstractmethod
    def constants(self) -> dict[str, int]:
        return {
            "KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "PAGE": self.page_size,
            "SHARED_BYTES": self.shared_bytes,
            "SINKS": int(self.sinks),
            "MISSING": MISSING & 0xFFFFFFFF,
        }
