"""The base of the decode kernels: what they are compiled for. Free of torch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar

from mllm_compile.runtime.cuda.kernel import CudaKernel

HEAD_DIM = 128  # of most models
MISSING = -1  # what a word that a block leaves to another is until it is left: all bits set


@dataclass(frozen=True)
class DecodeKernel(CudaKernel):
    """
    Attributes:
        kv_heads: KV heads of the cache; or pairs of them.
        group: query heads that share one.
        page_size: tokens of a page.
        sinks: query heads have sinks.
        fp8: the cache is e4m3; else bfloat16.
        head_dim: columns of a head.
        together: heads of the cache that are one here: two of 64 as one of 128.
        tokens: new tokens of a request, at most.
    """

    headers: ClassVar[tuple[str, ...]] = (
        "attention/hopper/fp8_keys.cuh",
        "attention/hopper/rotation.cuh",
        "attention/hopper/sums.cuh",
        "attention/hopper/sinks.cuh",
        "attention/hopper/cluster_parts.cuh",
    )
    switch: ClassVar[str] = "runtime.without: [hopper_decode]"

    kv_heads: int
    group: int
    page_size: int
    sinks: bool = field(default=False, kw_only=True)
    fp8: bool = field(default=False, kw_only=True)
    head_dim: int = field(default=HEAD_DIM, kw_only=True)
    together: int = field(default=1, kw_only=True)
    tokens: int = field(default=1, kw_only=True)

    @property
    def heads_name(self) -> str:
        features = ("_sinks" if self.sinks else "") + ("_fp8" if self.fp8 else "")
        width = "" if self.head_dim // self.together == HEAD_DIM else f"x{self.head_dim // self.together}"
        width += f"_by{self.together}" if self.together > 1 else ""
        tokens = f"_tokens{self.tokens}" if self.tokens > 1 else ""
        return f"{self.kv_heads}x{self.group}{width}_page{self.page_size}{features}{tokens}"

    @property
    def rows(self) -> int:
        """Queries of a request and a KV head."""
        return self.tokens * self.group

    @property
    def head_bytes(self) -> int:
        """Bytes of a key of one head."""
        return self.head_dim * (1 if self.fp8 else 2)

    @abstractmethod
    def constants(self) -> dict[str, int]:
        return {
            "KV_HEADS": self.kv_heads,
            "GROUP": self.group,
            "TOGETHER": self.together,
            "TOKENS": self.tokens,
            "ROWS": self.rows,
            "HEAD_DIM": self.head_dim,
            "PAGE": self.page_size,
            "SHARED_BYTES": self.shared_bytes,
            "SINKS": int(self.sinks),
            "MISSING": MISSING & 0xFFFFFFFF,
            "FP8": int(self.fp8),
        }
