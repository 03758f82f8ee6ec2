"""The interface of attention backends.

A layer is data (layer.py); a backend holds the plan of the current step and turns q, k, v of that step into the
attention's output over the paged cache. Captures in CUDA graphs and further kernels have contracts of their own
(capture.py). The metadata of a step is built in metadata.py; the op that calls a backend is in
ops/attention/layer_op.py.

Shape legend: T tokens, R requests, H query heads, Hk kv heads, D query/key head dim, Dv value head dim.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mllm_compile.runtime.attention.capture import (
    CapturesCascades,
    CapturesDecodes,
    CapturesMixed,
    CapturesPrompts,
    CapturesVerify,
    Cascades,
    FusesRope,
)
from mllm_compile.runtime.attention.index import Index
from mllm_compile.runtime.attention.layer import AttentionLayer

if TYPE_CHECKING:
    from mllm_compile.runtime.forward_batch import ForwardBatch


# Not frozen, though it does not change: each layer of a step has one, and a frozen one takes 3 times as long to make
# (1.1 µs in place of 0.4).
@dataclass(slots=True, eq=False)
class AttentionInputs:
    """One layer's attention in a step.

    Attributes:
        q: [T, H, D]; k: [T, Hk, D]; v: [T, Hk, Dv].
        out: [T, H, Dv], written.
        batch: the one that was planned.
        slots: [T] int64 where k and v are to be written first; None: they are in the cache already.
        bias: [H, 2R + 1], of a layer whose logits follow distances: from -R to R, from a query to a key.
        index: of a layer that sees chosen keys alone (LayerSpec.top_k).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    layer: AttentionLayer
    batch: ForwardBatch
    slots: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    index: Index | None = None


class AttentionBackend(ABC):
    """Attends over the paged cache. One instance serves every layer; init_forward_metadata runs once per batch.

    All is abstract but `forward`: a backend says of each thing what it does, and one that hands on to another forgets
    none.
    """

    @abstractmethod
    def init_forward_metadata(self, batch: ForwardBatch) -> None:
        """Plan `batch`: everything that its layers share. Must not wait for the device."""

    @abstractmethod
    def forward_extend(self, inputs: AttentionInputs) -> None:
        """EXTEND and MIXED: causal over each request's prefix and new tokens."""

    @abstractmethod
    def forward_decode(self, inputs: AttentionInputs) -> None:
        """DECODE: like forward_extend with one token a request, T == R."""

    def forward(self, inputs: AttentionInputs) -> None:
        """Dispatches by the batch's mode."""
        run = self.forward_decode if inputs.batch.forward_mode.is_decode_or_idle() else self.forward_extend
        run(inputs)

    @abstractmethod
    def reads_pages(self, batch: ForwardBatch) -> bool:
        """False: no layer reads keys or values of `batch` where the table of slots says that they are."""

    @abstractmethod
    def writes_kv(self, layer: AttentionLayer) -> bool:
        """True: `forward` writes the layer's new keys and values too, where its inputs say where."""

    @property
    @abstractmethod
    def query_blocks(self) -> float:
        """Blocks of 128 queries of one prompt that the device attends for side by side; 0: not known."""

    # What it has beyond that; None: it does not serve such steps. ----------------------------------------------------

    @property
    @abstractmethod
    def rope(self) -> FusesRope | None:
        """Decodes that take q and k as they are before their rotation."""

    @property
    @abstractmethod
    def cascades(self) -> Cascades | None:
        """Decodes that read a shared prefix once."""

    @property
    @abstractmethod
    def decodes(self) -> CapturesDecodes | None:
        """Captured decodes."""

    @property
    @abstractmethod
    def captured_cascades(self) -> CapturesCascades | None:
        """Captured decodes that read a shared prefix once."""

    @property
    @abstractmethod
    def verifies(self) -> CapturesVerify | None:
        """Captured verify steps."""

    @property
    @abstractmethod
    def mixed(self) -> CapturesMixed | None:
        """Captured steps with prompts."""

    @property
    @abstractmethod
    def mixed_obstacle(self) -> str | None:
        """Why there is no `mixed`; None: there is."""

    @property
    @abstractmethod
    def prompts(self) -> CapturesPrompts | None:
        """Captured steps of prompts alone."""
