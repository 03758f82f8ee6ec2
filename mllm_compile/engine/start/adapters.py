"""Makes an engine's parts for adapters: the model that they change, and the pool on the device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from mllm_compile.adapters.base_model import BaseModel, RowsOf, StackedExperts, pageable_bytes
from mllm_compile.adapters.peft_folder import Matrices
from mllm_compile.adapters.stored_weights import StoredWeights
from mllm_compile.engine.core.adapter_queue import AdapterParts
from mllm_compile.engine.core.end_errors import closed
from mllm_compile.runtime.device.cpu_threads import one_thread
from mllm_compile.runtime.lora.pool import LoraPool
from mllm_compile.runtime.lora.target import LoraTarget, TargetKind
from mllm_compile.runtime.lora.wire import pack
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.weights.spec import WeightSpec
from mllm_compile.store.opened import CompiledRuntime

Tell = Callable[[Iterable[memoryview]], None]
Moment = torch.cuda.Event | None  # none on a CPU

_PARAMETER = ".weight"


class PoolWriter:
    """Writes adapters into the pool of a runner's device. The pool's memory is the runner's, which gives it back.

    Args:
        device: the runner's.
        tell: sends other ranks a message, which they take in the order of steps; None without other ranks.

    Attributes:
        num_slots: how many adapters the pool holds.
    """

    def __init__(self, pool: LoraPool, device: torch.device, tell: Tell | None = None) -> None:
        self._pool, self._tell = weakref.ref(pool), tell
        self._dtype = pool.dtype
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.num_slots = pool.num_slots

    def new_bytes(self, count: int) -> torch.Tensor:
        """[count] uint8 of the host's memory, which the device copies from quickly."""
        return pageable_bytes(count) if self._stream is None else torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def prepared(self, matrices: Matrices) -> Matrices:
        """The matrices in pinned memory, for a GPU: in one block if some are elsewhere."""
        every = [one for pair in matrices.values() for one in pair]
        if self._stream is None or all(one.dtype == self._dtype and one.is_pinned() for one in every):
            return matrices
        sizes = [one.numel() for one in every]
        parts = torch.empty(sum(sizes), dtype=self._dtype, pin_memory=True).split(sizes)
        places = [part.view(one.shape) for part, one in zip(parts, every, strict=True)]
        with one_thread():
            torch._foreach_copy_(places, every)  # at once: Python's lock goes to another thread at each operation
        left = iter(places)
        return {weight: tuple(next(left) for _ in pair) for weight, pair in matrices.items()}

    def moment(self) -> Moment:
        """Behind the steps that were submitted, and ahead of later ones; on the thread that submits them."""
        if self._stream is None:
            return None
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    def write(self, slot: int, matrices: Matrices, behind: Moment) -> None:
        """Replaces what is in a slot that no step behind that moment reads, and waits until it is there.

        By a stream of its own: steps neither wait for it nor are kept from their thread.
        """
        pool = self._pool()
        if pool is None:
            raise closed()
        if self._stream is None or behind is None:
            pool.write(slot, matrices)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(behind)
            pool.write(slot, matrices)
            written = torch.cuda.Event(blocking=True)
            written.record()
        written.synchronize()

    def tell(self, slot: int, matrices: Matrices) -> None:
        """Has other ranks replace what is in a slot; on the thread that submits steps, behind `write`."""
        if self._tell is not None:
            self._tell(pack(slot, matrices))


def adapter_parts(compiled: CompiledRuntime, runner: ModelRunner, tell: Tell | None) -> AdapterParts | None:
    """The parts; None: the program has no places for adapters.

    Args:
        tell: as PoolWriter's.
    """
    if runner.model.lora is None:
        return None
    config, pool, artifact = compiled.config, runner.model.lora.pool, compiled.artifact
    specs, arena = (artifact.weights, *artifact.further_weights), runner.model.arena
    staying = {} if arena is None else {"staying": arena.staying}
    live = _never if runner.model.live is None else weakref.ref(runner.model.live)  # a closed engine has none
    stored = StoredWeights(specs, compiled.weights_root, pool.targets, live, **staying)
    writer = PoolWriter(pool, runner.device, tell)
    base = BaseModel(
        source=config.model.source,
        targets={name: (target.outputs, target.inputs) for name, target in pool.targets.items()},
        modules=frozenset(_modules(artifact.weights)),
        elsewhere=_elsewhere(pool.targets.values()),
        max_rank=pool.max_rank,
        takes_dora=bool(pool.scaled),
        unread=pool.unread,
        dtype=pool.dtype,
        embedding=_weight_of_kind(pool, "embedding"),
        head=_weight_of_kind(pool, "head"),
        experts={
            name: StackedExperts(target.num_experts, target.siblings)
            for name, target in pool.targets.items()
            if target.kind == "experts"
        },
        read=stored.read,
        new_bytes=writer.new_bytes,
        folder=Path(config.model.folder),
    )
    return AdapterParts(base, writer)


def _never() -> None:
    """Weights that no update writes."""


def _weight_of_kind(pool: LoraPool, kind: TargetKind) -> str:
    return next((name for name, target in pool.targets.items() if target.kind == kind), "")


def _elsewhere(targets: Iterable[LoraTarget]) -> dict[str, tuple[RowsOf, ...]]:
    """The rows of weights that a module of the checkpoint is."""
    found: dict[str, tuple[RowsOf, ...]] = {}
    for target in targets:
        for one in target.sources:
            rows = RowsOf(target.weight, one.start, one.source_start, one.rows)
            found[one.module] = (*found.get(one.module, ()), rows)
    return found


def _modules(weights: Iterable[WeightSpec]) -> Iterable[str]:
    """Names of the modules whose weights these are, as the checkpoint has them."""
    for spec in weights:
        for part in spec.parts:
            yield part.tensor.removesuffix(_PARAMETER)
