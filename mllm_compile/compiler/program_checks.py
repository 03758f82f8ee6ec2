"""Checks of what a config asks of a model, once its graph and its program say which layers it has."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mllm_compile.config.resolution.layer_checks import check_cascade_layers, check_state_dtype
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import ConfigError

if TYPE_CHECKING:
    from torch import fx

    from mllm_compile.model.hf_model import HFModel
    from mllm_compile.runtime.config_sections import RuntimeSection
    from mllm_compile.runtime.program.spec import Program


def check_program(graph: fx.GraphModule, program: Program, runtime: RuntimeSection) -> None:
    """Refuses ranks, stages and counters that the model cannot have.

    Args:
        graph: what the passes left; `program` was read from it.

    Raises:
        ConfigError: naming the key.
    """
    from mllm_compile.runtime.ubatch.slices import check_divides

    _check_stages(program, runtime)
    _check_counted(graph, program, runtime)
    if runtime.enable_dbo:
        check_divides(program.state_layers)


def check_layers(program: Program, config: ResolvedConfig) -> None:
    """Refuses what is asked of layers that the model does not have; its first ones alone may not have them yet."""
    check_cascade_layers(config, program.layers)
    check_state_dtype(config, program.state_layers)
    if config.runtime.routed_experts and not program.counted_experts:
        raise ConfigError("runtime.routed_experts is set, and this model has no experts. Set it to false.")
    if config.runtime.expert_stats and not program.counted_experts:
        raise ConfigError(
            "runtime.expert_stats is set, and this model has no experts, whose choices it counts. Set it to false."
        )
    if config.runtime.kv_cache_dtype != config.model.dtype and not program.layers:
        raise ConfigError(
            "runtime.kv_cache_dtype is fp8_e4m3, and this model has no attention, so no KV cache. Set it to auto."
        )


def check_cut(graph: fx.GraphModule, runtime: RuntimeSection) -> None:
    """Refuses a model that every rank would compute whole."""
    from mllm_compile.passes.base import WEIGHT_CUTS

    is_cut, size = bool(graph.meta.get(WEIGHT_CUTS)), runtime.expert_parallel_size
    if runtime.tensor_parallel_size > 1 and not is_cut:
        raise ConfigError(
            f"runtime.tensor_parallel_size is {runtime.tensor_parallel_size}, and nothing of this model can be cut "
            "into as many parts: expected heads, features or a vocabulary that divide by it. Set a smaller one, or 1."
        )
    if size > 1 and not is_cut:
        raise ConfigError(
            f"runtime.expert_parallel_size is {size}, and this model has no experts that can be dealt to as many "
            "ranks: expected a mixture whose number of experts divides by it. Set another, or "
            "runtime.tensor_parallel_size, which cuts any model."
        )


def check_head(graph: fx.GraphModule, config: ResolvedConfig, hf_model: HFModel) -> None:
    """Refuses a model whose head is to be quantised, and is no linear that alone makes logits."""
    from mllm_compile.model.hf_model import head_key
    from mllm_compile.passes.base import QUANTISED_TENSORS

    asked, told = config.model.lm_head_quantization, graph.meta.get(QUANTISED_TENSORS, {})
    if asked != "none" and head_key(hf_model.model) not in {one.weight_name for one in told.values()}:
        raise ConfigError(
            f"model.lm_head_quantization is {asked}, but this model's head is no linear whose outputs are logits, or "
            "something else than the embedding reads its weight too. Leave it out."
        )


def _check_stages(program: Program, runtime: RuntimeSection) -> None:
    """Refuses more stages than the model has."""
    if len(program.stages) + 1 != runtime.pipeline_parallel_size:
        raise ConfigError(
            f"runtime.pipeline_parallel_size is {runtime.pipeline_parallel_size}, and this model has "
            f"{len(program.layers) + len(program.state_layers)} layers that attend or have a state, between which it "
            "cannot be cut as often. Set a smaller one, or runtime.tensor_parallel_size."
        )


def _check_counted(graph: fx.GraphModule, program: Program, runtime: RuntimeSection) -> None:
    """Refuses to count the choices of layers that are computed for one rank's tokens alone."""
    from mllm_compile.passes.base import WEIGHT_CUTS

    whole = [name for name in program.counted_experts if name not in graph.meta.get(WEIGHT_CUTS, {})]
    if runtime.expert_parallel_size > 1 and whole:
        raise ConfigError(
            f"runtime.expert_stats is set, and {whole[0]} is not spread over {runtime.expert_parallel_size} ranks: "
            "each would count its own tokens there. Set runtime.expert_stats: false, or another "
            "runtime.expert_parallel_size."
        )
