"""The values that vary per batch, for ops inside compiled pieces, which get only tensors and a layer's name.

`set_forward_context` surrounds a run of the program, and a capture; ops between pieces and the wrappers of pieces call
`get_forward_context`. The replay of a full graph has none: it runs no Python.
"""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.runtime.graph_mode import BatchDescriptor, CUDAGraphMode, DPMetadata

if TYPE_CHECKING:
    from mllm_compile.runtime.memory_pool import RoutePool

    # A layer between pieces, an AttentionLayer or a StateLayer, and the batch as its op reads it, an AttentionMetadata
    # or a StateMetadata.
    Layer = Any
    LayerMetadata = Any

__all__ = [
    "BatchDescriptor",
    "DPMetadata",
    "ForwardContext",
    "ForwardTimes",
    "get_forward_context",
    "override_forward_context",
    "set_forward_context",
]

logger = logging.getLogger(__name__)
_KEPT_FORWARDS = 1000


@dataclass
class ForwardContext:
    """One batch, as ops see it."""

    no_compile_layers: Mapping[str, Layer]
    attn_metadata: Mapping[str, LayerMetadata]
    slot_mapping: Mapping[str, torch.Tensor]  # layer name → [T] int64: the KV slot that each token is written to
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE
    batch_descriptor: BatchDescriptor | None = None
    dp_metadata: DPMetadata | None = None  # of ranks with requests of their own; None without such ranks
    deterministic: bool = False  # no row's numbers may depend on other rows
    # Names of the layers of experts, and whose turn it is; handed out in order, so that none is in a graph.
    all_moe_layers: Sequence[str] | None = None
    moe_layer_index: int = 0
    expert_counts: Mapping[str, torch.Tensor] | None = None  # layer of experts → [E] int64, how often each was chosen
    expert_routes: RoutePool | None = None
    additional_kwargs: dict[str, Any] = field(default_factory=dict)  # what the eager model's attention is told

    def next_moe_layer(self) -> str | None:
        """The layer of experts whose turn it is, which is then the next one's; None: nobody looks at them."""
        if self.all_moe_layers is None:
            return None
        name = self.all_moe_layers[self.moe_layer_index]
        self.moe_layer_index += 1
        return name

    def __post_init__(self) -> None:
        if not self.cudagraph_runtime_mode.is_runtime_mode:
            raise RuntimeError(
                f"a batch runs in NONE, PIECEWISE or FULL, got {self.cudagraph_runtime_mode.name}: "
                "resolve the pair with decode_mode() or mixed_mode() first"
            )


class ForwardTimes:
    """Times of the last thousand forwards of each number of tokens; logs their medians every `interval_s` seconds.

    Measuring waits for the device before and after each forward, so it is for looking, not for serving.
    """

    def __init__(self, interval_s: float, device: torch.device) -> None:
        self.interval_s = interval_s
        self._device = device
        self._ms_by_tokens: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_KEPT_FORWARDS))
        self._counts: Counter[int] = Counter()
        self._last_log = time.perf_counter()

    @contextmanager
    def measure(self, num_tokens: int) -> Iterator[None]:
        start = self._now()
        yield
        end = self._now()
        self._ms_by_tokens[num_tokens].append((end - start) * 1e3)
        self._counts[num_tokens] += 1
        if end - self._last_log >= self.interval_s:
            self._last_log = end
            for tokens, count, median_ms in self.medians():
                logger.info("forward of %d tokens: median %.2f ms over %d batches", tokens, median_ms, count)

    def medians(self) -> list[tuple[int, int, float]]:
        """(num_tokens, batches, median in ms), most frequent batch size first."""
        rows = [(tokens, self._counts[tokens], statistics.median(ms)) for tokens, ms in self._ms_by_tokens.items()]
        return sorted(rows, key=lambda row: -row[1])

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class _Current(threading.local):
    """The calling thread's: ranks may run beside each other in one process, and engines do."""

    context: ForwardContext | None = None


_current = _Current()


def get_forward_context() -> ForwardContext:
    """The context of the batch that is running.

    Raises:
        RuntimeError: no batch is running.
    """
    context = _current.context
    if context is None:
        raise RuntimeError(
            "no forward context is set: run the model inside `with set_forward_context(attn_metadata, "
            "no_compile_layers=…, slot_mapping=…, num_tokens=…)`; ModelRunner.forward does so for every batch"
        )
    return context


def is_forward_context_available() -> bool:
    """True if a batch is running."""
    return _current.context is not None


@contextmanager
def override_forward_context(context: ForwardContext | None) -> Iterator[None]:
    """Make `context` the current one; the previous one is back on the way out, even after an exception."""
    previous = _current.context
    _current.context = context
    try:
        yield
    finally:
        _current.context = previous


@contextmanager
def set_forward_context(
    attn_metadata: Mapping[str, LayerMetadata],
    *,
    no_compile_layers: Mapping[str, Layer],
    slot_mapping: Mapping[str, torch.Tensor],
    num_tokens: int,
    cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    batch_descriptor: BatchDescriptor | None = None,
    dp_metadata: DPMetadata | None = None,
    deterministic: bool = False,
    expert_counts: Mapping[str, torch.Tensor] | None = None,
    expert_routes: RoutePool | None = None,
    forward_times: ForwardTimes | None = None,
) -> Iterator[ForwardContext]:
    """Run the body as one batch.

    Args:
        expert_counts: counts of each layer of experts, in the order of the layers; None: nobody counts.
        expert_routes: keeps the choices of these layers; None: nobody asks for them.
        num_tokens: padded token count, under which forward_times keeps the time.
        forward_times: where to keep this forward's time, or None.

    Raises:
        RuntimeError: cudagraph_runtime_mode is a pair of modes.
    """
    context = ForwardContext(
        no_compile_layers=no_compile_layers,
        attn_metadata=attn_metadata,
        slot_mapping=slot_mapping,
        cudagraph_runtime_mode=cudagraph_runtime_mode,
        batch_descriptor=batch_descriptor,
        dp_metadata=dp_metadata,
        deterministic=deterministic,
        all_moe_layers=_moe_layers(expert_counts, expert_routes),
        expert_counts=expert_counts,
        expert_routes=expert_routes,
    )
    with override_forward_context(context):
        if forward_times is None:
            yield context
        else:
            with forward_times.measure(num_tokens):
                yield context


def _moe_layers(counts: Mapping[str, torch.Tensor] | None, routes: RoutePool | None) -> tuple[str, ...] | None:
    if counts is not None:
        return tuple(counts)
    return None if routes is None else routes.layers
