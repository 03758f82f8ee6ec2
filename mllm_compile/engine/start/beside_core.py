"""Makes what works beside an engine's core: updates and sleep, adapters by name, events of the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mllm_compile.engine.core.loop import EngineCore
from mllm_compile.engine.start.parts import EngineParts

if TYPE_CHECKING:
    from mllm_compile.adapters.peft_folder import Matrices
    from mllm_compile.adapters.registry import Adapter, AdapterRegistry
    from mllm_compile.config.resolved import ResolvedConfig
    from mllm_compile.engine.core.adapter_queue import AdapterParts
    from mllm_compile.engine.rollouts.sleep import EngineSleep
    from mllm_compile.engine.rollouts.weight_updates import WeightUpdates
    from mllm_compile.kv_events.publisher import KVEventPublisher


def event_publisher(config: ResolvedConfig | None) -> KVEventPublisher | None:
    """Makes the publisher of the KV events that a config asks for."""
    if config is None or not config.runtime.kv_events_config.is_on:
        return None
    from mllm_compile.kv_events.installed import make_publisher

    return make_publisher(config.runtime.kv_events_config, config.runtime.expert_parallel_size)


def in_order(*functions: Callable[[], None]) -> Callable[[], None]:
    """Calls all of them."""

    def call() -> None:
        for function in functions:
            function()

    return call


def weight_updates(core: EngineCore, parts: EngineParts) -> WeightUpdates:
    from mllm_compile.engine.rollouts.weight_updates import WeightUpdates  # torch

    return WeightUpdates(core, parts.live, parts.tell_ranks, parts.ask_ranks)


def engine_sleep(core: EngineCore, weights: WeightUpdates, parts: EngineParts) -> EngineSleep:
    from mllm_compile.engine.rollouts.sleep import EngineSleep  # torch

    ranks = parts.num_local, parts.tell_ranks, parts.ask_ranks, parts.wait_ranks
    return EngineSleep(core, weights, parts.memory, *ranks)


def adapter_registry(parts: AdapterParts, core: EngineCore) -> AdapterRegistry:
    """The adapters of an engine; they hold its core, and not the engine, which ends when nobody holds it."""
    from mllm_compile.adapters.registry import AdapterRegistry

    queue = core.adapters

    def place(adapter: Adapter, matrices: Matrices) -> None:
        prepared = parts.writer.prepared(matrices)
        reserved = core.between_steps(lambda: queue.reserve(adapter))
        if reserved is None:
            return
        slot, behind = reserved
        try:
            parts.writer.write(slot, prepared, behind)
        except BaseException:
            core.between_steps(lambda: queue.give_up(slot))
            raise
        core.between_steps(lambda: queue.finish(slot, prepared))

    return AdapterRegistry(parts.base, place, lambda adapter: core.post(lambda: queue.retire(adapter)))
