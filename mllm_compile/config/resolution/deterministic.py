"""Chooses the steps of the deterministic mode: how many tokens they have, and whether they may differ in that."""

from __future__ import annotations

from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.resolution.device import DeviceInfo
from mllm_compile.config.resolved import AutoChoices
from mllm_compile.config.schema import EngineConfig
from mllm_compile.config.schema_runtime import RuntimeConfig
from mllm_compile.errors import ConfigError
from mllm_compile.runtime.config_sections import LEAST_ROWS, BackendName, MaxStepMs

# Tokens of every step, padding included. A GPU multiplies 128 rows about as fast as one. 512 rows times
# KV heads are more blocks than twice a GPU's processors. From there on FlashInfer's captured attention never splits a
# request's keys (see FlashInferAttnBackend.init_cuda_graph_state). Which layers it decodes is known after the trace.
DETERMINISTIC_TOKENS = {"cuda": 128, "cpu": 32}
# Steps of any number of rows: a prompt's tokens read keys in tiles, and linears are as fast as they get.
DETERMINISTIC_ANY_TOKENS = 2048
DETERMINISTIC_ATTENTION_BLOCKS = 512
# Beginnings of names in config.json of models with images, latents, products that are no linears, or linears that the
# library adds up in several orders: routers in float32, and gates of one row (docs/lab/serving.md).
_OF_OTHER_LAYERS = (
    *("vision", "image", "audio", "kv_lora", "q_lora", "compress", "altup", "rwkv"),
    *("n_routed_experts", "shared_expert"),
)


def has_any_rows(
    config: EngineConfig, dtype: str, backend: BackendName, model: ModelFolder, device: DeviceInfo
) -> bool:
    """True if steps of the deterministic mode may have any number of rows (docs/serving.md, its conditions).

    layer_checks.py has the layers, which are known after the trace.
    """
    runtime = config.runtime
    has_kernels = device.is_hopper and dtype == "bfloat16" and backend == "flashinfer"
    takes_own = config.compile.backend != "eager" and "split_decode" not in runtime.without
    of_model = runtime.kv_cache_dtype != "fp8_e4m3" and not runtime.skip_compiled and _has_alike_products(config, model)
    budget = runtime.max_num_batched_tokens
    has_room = budget == "auto" or budget >= LEAST_ROWS
    wanted = runtime.deterministic and "any_rows" not in runtime.without and has_room
    return wanted and has_kernels and takes_own and of_model


def _has_alike_products(config: EngineConfig, model: ModelFolder) -> bool:
    """True if weights are in 16 bits, or in fp8 with scales of rows, and the head as the checkpoint has it; and there
    are no adapters, images or latents."""
    quantization, scheme = config.model.quantization, model.scheme
    if scheme is None or scheme.is_plain or quantization == "dequantize":
        has_weights = quantization in ("auto", "none", "dequantize", "fp8")
    else:
        has_weights = scheme.has_fp8_rows
    sections = (model.config, model.config.get("text_config") or {})
    names = {str(name) for section in sections for name in section}
    has_weights &= config.model.lm_head_quantization == "none"
    return has_weights and not config.lora.max_adapters and not any(name.startswith(_OF_OTHER_LAYERS) for name in names)


def deterministic_tokens(kind: str, model: ModelFolder) -> int:
    """Tokens of every step, where all have as many."""
    if kind == "cpu":
        return DETERMINISTIC_TOKENS["cpu"]
    num_kv_heads = model.text_config_value("num_key_value_heads", "num_attention_heads", "n_head")
    if not isinstance(num_kv_heads, int) or num_kv_heads < 1:
        num_kv_heads = 1
    return max(DETERMINISTIC_TOKENS["cuda"], DETERMINISTIC_ATTENTION_BLOCKS // num_kv_heads)


def resolve_max_step_ms(asked: RuntimeConfig, any_rows: bool, choices: AutoChoices) -> MaxStepMs:
    """The bound of a step with decodes and prompts; none, where all steps take the same time.

    Raises:
        ConfigError: a time is asked for there.
    """
    chosen: MaxStepMs
    if not asked.deterministic or any_rows:
        why = "what running answers take alone, so prompts lose about a tenth"
        chosen = choices.resolve("runtime.max_step_ms", asked.max_step_ms, lambda: ("tenfold", why))
        return chosen
    if not isinstance(asked.max_step_ms, str):
        raise ConfigError(
            f"runtime.max_step_ms is {asked.max_step_ms:g}, but with runtime.deterministic all steps take the same "
            "time. Set it to auto or none, and lower runtime.max_num_batched_tokens for shorter steps."
        )
    why = "deterministic: steps are alike"
    chosen = choices.resolve("runtime.max_step_ms", asked.max_step_ms, lambda: ("none", why))
    return chosen
