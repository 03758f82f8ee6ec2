"""Decides which CUDA graphs are captured: mode and sizes, where a config says `auto`, and what contradicts it.

A part of resolve.py. The numbers behind `auto` are the tables at the top.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.resolution.device import DeviceInfo
from mllm_compile.config.resolved import AutoChoices
from mllm_compile.config.schema import CudaGraphConfig
from mllm_compile.errors import CaptureSizeError, ConfigError
from mllm_compile.runtime.config_sections import LEAST_ROWS, CudaGraphSection, GraphMode, RuntimeSection

# A captured size costs a start 10 to 35 ms. Up to 64 tokens a step takes about as long with twice as many.
PIECEWISE_TOKENS = (1, 4, 8, 16, 32, *range(64, 513, 64))
# Above these a step is long enough that launching its kernels one by one costs nothing, but not of small models. A size
# is captured too if tokens times the square of the width are no more than this. On an H200 a step of Qwen3-0.6B with
# 2000 tokens takes 7 ms, and 14 without a graph; with 4096 tokens 11, and 10 to 17 without.
PIECEWISE_TOKENS_OF_SMALL = (1024, 2048, 4096)
_MOST_PIECEWISE_WORK = 4096 * 1024**2
# With a bound in ms a step beside decodes fills its time (runtime/schedule/pace.py), and the host may take no longer.
# Launching 28 layers one by one took 10 ms, their graphs 4 (docs/lab/performance.md). Others than multiples of 128
# would be of no use: on an H100 a step of 8B took 21.0 ms with 544 tokens, about 18.5 with 512.
_SIZES_OF_BOUND = (640, 768, 896, 1024, 1280, 1536)
_SIZES_OF_BOUND_OF_SMALL = (2048, 3072, 4096)
# Whole steps of models that pool: padding is at most a quarter, and behind 1024 tokens 512. On an H200 a step of
# bert-base with 8192 tokens takes 3.9 to 4.1 ms, and 4.1 to 4.6 without a graph (docs/lab/encoders.md).
_MOST_TEXTS_WORK = 8192 * 768**2
TEXTS_TOKENS = (
    *(16, 32, 48, *range(64, 129, 16), *range(160, 257, 32), *range(320, 513, 64)),
    *(*range(640, 1025, 128), *range(1280, 2049, 256), *range(2560, 8193, 512)),
)
DECODE_REQUESTS = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16))
# Whole steps with prompts, of models whose layers run faster than the host launches their pieces and attentions. On an
# H200 one prompt of 100 tokens after another joins 64 requests 1.8 times as fast at width 1024, 1.25 at 2048, and as
# fast as without at 2560.
MIXED_TOKENS = (64, 128, 192, 256, 384, 512)
_WIDEST_MIXED = 2048

_PIECEWISE_MODES = ("piecewise", "full_and_piecewise")
_FULL_MODES = ("full", "full_decode_only", "full_and_piecewise")
_MIXED_MODES = ("full", "full_and_piecewise")


def resolve_graphs(
    asked: CudaGraphConfig,
    runtime: RuntimeSection,
    split_decode: bool,
    device: DeviceInfo,
    model: ModelFolder,
    choices: AutoChoices,
    pools: bool = False,
) -> CudaGraphSection:
    """Does resolve()'s work for the section `cudagraph`; the same errors.

    Args:
        pools: the model answers with no text.
        split_decode: decodes are by kernels of the program, as far as is known before the trace.
    """
    mode = _graph_mode(asked, runtime, device, choices)
    if not device.is_cuda:  # sizes in a YAML that also serves on a GPU mean nothing here
        return CudaGraphSection(mode=mode, piecewise_tokens=(), decode_requests=())
    if runtime.deterministic and not runtime.any_rows:
        return _deterministic_cudagraph(asked, mode, runtime.max_num_batched_tokens)
    least = LEAST_ROWS if runtime.any_rows else 1
    takes_whole = mode in _MIXED_MODES and _mixed_obstacle(runtime, split_decode, device, model) is None
    return CudaGraphSection(
        mode=mode,
        piecewise_tokens=_graph_sizes(
            "piecewise_tokens",
            asked.piecewise_tokens,
            _texts_tokens(model) if pools else [size for size in _piecewise_tokens(model, runtime) if size >= least],
            ("runtime.max_num_batched_tokens", runtime.max_num_batched_tokens),
            mode if mode in _PIECEWISE_MODES else None,
            choices,
        ),
        decode_requests=_graph_sizes(
            "decode_requests",
            asked.decode_requests,
            _decode_requests(runtime.max_running_requests, least),
            ("runtime.max_running_requests", max(least, runtime.max_running_requests)),
            mode if mode in _FULL_MODES else None,
            choices,
        ),
        mixed_tokens=_mixed_tokens(asked, mode, runtime, split_decode, device, model, choices),
        mixed_tokens_asked=asked.mixed_tokens != "auto",
        sample_in_graph=split_decode and mode in _FULL_MODES and runtime.takes("sample_in_graph"),
        whole_prompts=takes_whole and runtime.takes("whole_prompts"),
    )


def _decode_requests(most: int, least: int) -> list[int]:
    """The sizes of decodes; the largest possible batch has a graph of its own, and steps by tensors have `least`."""
    return [least, *(size for size in DECODE_REQUESTS if size <= most), most]


def _mixed_tokens(
    asked: CudaGraphConfig,
    mode: GraphMode,
    runtime: RuntimeSection,
    split_decode: bool,
    device: DeviceInfo,
    model: ModelFolder,
    choices: AutoChoices,
) -> tuple[int, ...]:
    """The sizes; whether the model's layers allow them is known when it is loaded."""
    obstacle = _mixed_obstacle(runtime, split_decode, device, model)
    sizes, largest = asked.mixed_tokens, runtime.max_num_batched_tokens
    if sizes == "auto":
        is_small = 0 < _width(model) <= _WIDEST_MIXED
        if obstacle or mode not in _MIXED_MODES or not is_small or largest < MIXED_TOKENS[0]:
            return ()
    elif not sizes:
        return ()
    elif obstacle:
        raise ConfigError(f"cudagraph.mixed_tokens is {list(sizes)}, but {obstacle}. Set it to auto or [].")
    limit = ("runtime.max_num_batched_tokens", largest)
    return _graph_sizes("mixed_tokens", sizes, MIXED_TOKENS, limit, mode if mode in _MIXED_MODES else None, choices)


def _mixed_obstacle(runtime: RuntimeSection, split_decode: bool, device: DeviceInfo, model: ModelFolder) -> str | None:
    """Why no whole step with prompts is captured, as far as is known before the trace; None: some may be."""
    if runtime.deterministic:
        return "with runtime.deterministic each token of a prompt is a decode"
    if not device.is_hopper:
        return f"the GPU is {device.name}, and attention over prompts is captured on an H100 SXM or H200 alone"
    if not split_decode and _has_attention(model):
        return "decodes are not by kernels of the program (split_decode)"
    if runtime.kv_cache_dtype == "float8_e4m3fn":
        return "the KV cache is fp8_e4m3, and attention over prompts that is captured reads none"
    return None


def _has_attention(model: ModelFolder) -> bool:
    """False if the config names a size of states and no heads: such a model has no decode attention to split."""
    has_heads = model.text_config_value("num_attention_heads", "n_head") is not None
    return has_heads or model.text_config_value("state_size") is None


def _width(model: ModelFolder) -> int:
    """Width of the hidden states; 0: the model does not say."""
    width = model.text_config_value("hidden_size", "n_embd", "d_model")
    return width if isinstance(width, int) and width > 0 else 0


def _piecewise_tokens(model: ModelFolder, runtime: RuntimeSection) -> tuple[int, ...]:
    width = _width(model)
    if runtime.attention_backend != "flashinfer" or not width:
        return PIECEWISE_TOKENS  # a capture runs attention of its prompts, which by torch takes their square in memory
    most = max(runtime.max_running_requests * runtime.max_model_len, PIECEWISE_TOKENS[-1])
    is_bound = runtime.max_step_ms not in ("tenfold", "none")
    of_small = _SIZES_OF_BOUND_OF_SMALL if is_bound else PIECEWISE_TOKENS_OF_SMALL
    sizes = [*PIECEWISE_TOKENS, *(_SIZES_OF_BOUND if is_bound else ())]
    sizes += [tokens for tokens in of_small if tokens <= _MOST_PIECEWISE_WORK // width**2]
    return tuple(tokens for tokens in sizes if tokens <= most)


def _texts_tokens(model: ModelFolder) -> tuple[int, ...]:
    """The sizes of whole steps of a model that pools."""
    width = max(1, _width(model))
    return tuple(size for size in TEXTS_TOKENS if size <= max(PIECEWISE_TOKENS[-1], _MOST_TEXTS_WORK // width**2))


def _deterministic_cudagraph(asked: CudaGraphConfig, mode: GraphMode, num_tokens: int) -> CudaGraphSection:
    """The graphs of deterministic mode: every step is a decode of `num_tokens` rows, so there is one shape."""
    if mode not in ("none", "piecewise", "full_decode_only"):
        raise ConfigError(
            f"cudagraph.mode is {mode}, but with runtime.deterministic every step has the shape of one decode. Set it "
            "to auto, full_decode_only, piecewise or none."
        )
    piecewise_tokens = (num_tokens,) if mode == "piecewise" else ()
    decode_requests = (num_tokens,) if mode == "full_decode_only" else ()
    if asked.mixed_tokens not in ("auto", ()):
        raise ConfigError(
            f"cudagraph.mixed_tokens is {list(asked.mixed_tokens)}, but with runtime.deterministic no step has a "
            "prompt's shape. Set it to auto or []."
        )
    sizes = {"piecewise_tokens": piecewise_tokens, "decode_requests": decode_requests}
    for key, only in sizes.items():
        given = getattr(asked, key)
        if given not in ("auto", only):
            raise CaptureSizeError(
                f"cudagraph.{key} is {list(given)}, but with runtime.deterministic every step has {num_tokens} tokens "
                f"(runtime.max_num_batched_tokens). Set it to auto."
            )
    return CudaGraphSection(mode=mode, piecewise_tokens=piecewise_tokens, decode_requests=decode_requests)


def _graph_mode(asked: CudaGraphConfig, runtime: RuntimeSection, device: DeviceInfo, choices: AutoChoices) -> GraphMode:
    def choose() -> tuple[str, str]:
        if not device.is_cuda:
            return "none", "a CPU has no CUDA graphs"
        if runtime.skip_compiled:
            return "none", "runtime.skip_compiled"
        if runtime.pipeline_parallel_size > 1:
            return "piecewise", "a stage waits for the one before it outside of graphs"
        if runtime.attention_backend == "torch":
            return "piecewise", "the torch attention backend cannot be captured"
        if runtime.deterministic and not runtime.any_rows:
            return "full_decode_only", "deterministic: every step has a decode's shape"
        return "full_and_piecewise", "full for decode steps, piecewise for the rest"

    mode: GraphMode = choices.resolve("cudagraph.mode", asked.mode, choose)
    if mode != "none" and not device.is_cuda:
        raise ConfigError(
            f"cudagraph.mode is {mode}, but the device is a CPU, which has no CUDA graphs. Set it to auto."
        )
    if mode != "none" and runtime.skip_compiled:
        raise ConfigError(
            f"cudagraph.mode is {mode}, but with runtime.skip_compiled there are no pieces to capture. Set it to none."
        )
    if mode in _FULL_MODES and runtime.pipeline_parallel_size > 1:
        raise ConfigError(
            f"cudagraph.mode is {mode}, and runtime.pipeline_parallel_size {runtime.pipeline_parallel_size}: a step of "
            "stages is not captured whole. Set it to auto, piecewise or none."
        )
    if mode in _FULL_MODES and runtime.attention_backend == "torch":
        raise ConfigError(
            f"cudagraph.mode is {mode}, but the torch attention backend cannot be captured. Set it to piecewise, or "
            f"runtime.attention_backend: flashinfer."
        )
    return mode


def _graph_sizes(
    key: str,
    asked: Any,
    table: Iterable[int],
    limit: tuple[str, int],
    mode: str | None,
    choices: AutoChoices,
) -> tuple[int, ...]:
    """Sizes to capture; `limit` is (its key, the largest batch there can be), `mode` None if none are captured."""
    limit_key, largest = limit
    if mode is None:
        if asked != "auto":
            raise ConfigError(
                f"cudagraph.{key} lists sizes, but the mode captures none of that kind. Set cudagraph.mode: "
                f"full_and_piecewise, or cudagraph.{key}: auto."
            )
        return ()
    usable = tuple(sorted({size for size in table if size <= largest}))
    sizes: tuple[int, ...] = choices.resolve(f"cudagraph.{key}", asked, lambda: (usable, f"up to {usable[-1]}"))
    if sizes[-1] > largest:
        raise CaptureSizeError(
            f"cudagraph.{key} holds {sizes[-1]}, but no batch is larger than {limit_key}: {largest}. Remove the size "
            f"or raise {limit_key}."
        )
    return sizes
