"""Says what of a config goes with text alone in models whose layers attend to images."""

from __future__ import annotations

from mllm_compile.config.resolved import ResolvedConfig

_RANKS = ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size")
_SWITCHES = ("enable_dbo", "deterministic", "skip_compiled")


def compile_obstacle(config: ResolvedConfig) -> str | None:
    """The reason why no programs for such images are compiled; None: some are."""
    return next((f"runtime.{key} is set" for key in _RANKS if getattr(config.runtime, key) > 1), None)


def images_obstacle(config: ResolvedConfig) -> str | None:
    """The reason why such images are refused, of a runtime that has the programs or not; None: they are served."""
    runtime = config.runtime
    set_here = {
        "speculative.method": config.speculative.method != "none",
        "lora.max_adapters": config.lora.max_adapters > 0,
        "runtime.kv_events_config": runtime.kv_events_config.enable_kv_cache_events,
        "runtime.kv_transfer_config": bool(runtime.kv_transfer_config.kv_connector),
        **{f"runtime.{key}": getattr(runtime, key) for key in _SWITCHES},
    }
    return compile_obstacle(config) or next((f"{key} is set" for key, is_set in set_here.items() if is_set), None)
