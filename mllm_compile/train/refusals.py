"""Refusals of models that cannot be trained, by name."""

from __future__ import annotations

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import ConfigError, UnsupportedModelError
from mllm_compile.store.artifact import Artifact


def check_config(config: EngineConfig | ResolvedConfig) -> None:
    """
    Raises:
        ConfigError: the config asks for what cannot be trained.
    """
    runtime, method, quantization = config.runtime, config.speculative.method, config.model.quantization
    num_ranks = runtime.num_ranks
    if not runtime.deterministic:
        raise ConfigError(
            "trainable: runtime.deterministic is false, and log-probabilities then depend on the rest of a batch. Set "
            "it to true, here and in the engine of the rollouts."
        )
    if num_ranks > 1:
        raise ConfigError(
            f"trainable: the config is of {num_ranks} ranks; expected one. Set "
            "runtime.tensor_parallel_size, pipeline_parallel_size and expert_parallel_size to 1."
        )
    if method != "none":
        raise ConfigError(f"trainable: speculative.method is {method}; expected none. Leave it out.")
    if isinstance(config, ResolvedConfig) and config.lora.of_sounds:
        raise ConfigError("trainable: the model brings an adapter for its sounds; expected a model of text alone")
    if config.lora.adapters or config.lora.max_adapters:
        raise ConfigError("trainable: the section lora has adapters; expected none. Leave it out.")
    if runtime.skip_compiled:
        raise ConfigError("trainable: runtime.skip_compiled is true; expected false, as the compiled model is trained.")
    if quantization not in ("auto", "none", "dequantize"):
        raise ConfigError(
            f"trainable: model.quantization is {quantization}; expected none, as rounded weights have no gradients"
        )
    if (of_head := config.model.lm_head_quantization) != "none":
        raise ConfigError(
            f"trainable: model.lm_head_quantization is {of_head}; expected none, as rounded weights have no gradients"
        )


def check_artifact(artifact: Artifact) -> None:
    """
    Raises:
        UnsupportedModelError: gradients cannot follow the runtime's program.
    """
    program = artifact.program
    parts = [part for spec in artifact.weights for part in spec.parts]
    if any(part.quantised or part.kept or part.factor for part in parts):
        raise UnsupportedModelError(
            "trainable: the checkpoint's weights are quantised; expected weights in 16 or 32 bits, which an optimiser "
            "can change by little. Train the checkpoint that was quantised."
        )
    if artifact.manifest.weights.is_packed:
        raise UnsupportedModelError(
            "trainable: the runtime holds its weights packed (--pack-weights), without the names of parameters. Give "
            "the model's config instead."
        )
    if any(layer.top_k for layer in program.layers):
        raise UnsupportedModelError(
            "trainable: an indexer chooses the keys of its attention; expected texts of which it chooses all. Set "
            "runtime.max_model_len to its index_topk."
        )
    if program.media is not None:
        raise UnsupportedModelError("trainable: the model takes images; expected a model of text alone")
    if program.inputs or program.rope is not None:
        raise UnsupportedModelError(
            "trainable: the model's positions follow more than the place of a token (its RoPE changes with the length "
            "of a text); expected one whose RoPE does not"
        )
