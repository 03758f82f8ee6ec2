"""`auto` becomes a value, once: the config, the model's folder and the device make a ResolvedConfig.

Nothing changes a value after this, and everything below reads this and never an `auto`. Each choice is kept with its
reason, to be printed. The numbers behind `auto` are the tables at the top.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from mllm_compile.cache_folders import auto_cache_dir
from mllm_compile.config import CompileConfig, CudaGraphConfig, DtypeName, EngineConfig, GraphMode, RuntimeConfig
from mllm_compile.device_info import DeviceInfo
from mllm_compile.errors import CaptureSizeError, ConfigError, DeviceError
from mllm_compile.model_folder import ModelFolder
from mllm_compile.progress import Reporter
from mllm_compile.rope import rope_limit

# Attention is as fast with pages of 64 as with 16, and the page table is a quarter of it. A CPU gains nothing from
# large pages, and small ones share more of a prefix.
PAGE_SIZE = {"flashinfer": 64, "torch": 16}
# A CPU computes a few hundred tokens a second: more in flight would only make each of them later.
MAX_RUNNING_REQUESTS = {"cuda": 256, "cpu": 64}
MAX_NUM_BATCHED_TOKENS = {"cuda": 8192, "cpu": 2048}
# deterministic: tokens of every step, padding included. A GPU multiplies 128 rows about as fast as one. 512 rows times
# KV heads are more blocks than twice a GPU's processors, from which on FlashInfer's captured attention never splits a
# request's keys (see FlashInferAttnBackend.init_cuda_graph_state). Which layers it decodes is known after the trace.
DETERMINISTIC_TOKENS = {"cuda": 128, "cpu": 32}
DETERMINISTIC_ATTENTION_BLOCKS = 512
# The table of slots takes max_running_requests × max_model_len × 4 bytes: 64 MiB at 256 × 65536.
MAX_MODEL_LEN = {"cuda": 65536, "cpu": 8192}
# A captured size costs a start 10 to 35 ms. Up to 64 tokens a step takes about as long with twice as many.
PIECEWISE_TOKENS = (1, 4, 8, 16, 32, *range(64, 513, 64))
# Above these a step is long enough that launching its kernels one by one costs nothing, but not of small models. Sizes
# of which tokens times the square of the width are no more than this are captured too: a step of Qwen3-0.6B with 2000
# tokens takes 7 ms on an H200 and 14 without a graph, with 4096 11, and 10 to 17 without.
PIECEWISE_TOKENS_OF_SMALL = (1024, 2048, 4096)
_MOST_PIECEWISE_WORK = 4096 * 1024**2
DECODE_REQUESTS = (1, 2, 4, *range(8, 65, 8), *range(80, 257, 16))
# Whole steps with prompts, of models whose layers run faster than the host launches their pieces and attentions. On an
# H200 one prompt of 100 tokens after another joins 64 requests 1.8 times as fast at width 1024, 1.25 at 2048, and as
# fast as without at 2560.
MIXED_TOKENS = (64, 128, 192, 256, 384, 512)
_WIDEST_MIXED = 2048

BackendName = Literal["flashinfer", "torch"]
# In torch's names.
KVDtypeName = Literal[DtypeName, "float8_e4m3fn"]

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "n_ctx", "seq_length")
_PIECEWISE_MODES = ("piecewise", "full_and_piecewise")
_FULL_MODES = ("full", "full_decode_only", "full_and_piecewise")
_MIXED_MODES = ("full", "full_and_piecewise")


class AutoChoice(NamedTuple):
    """What one `auto` became, and why."""

    key: str
    value: str
    why: str


class _Resolved(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ResolvedModel(_Resolved):
    """`source` is model.path as it was asked for, `folder` the local folder that it was found in."""

    source: str
    folder: str
    revision: str | None
    dtype: DtypeName
    load_format: Literal["safetensors", "dummy"]
    trust_remote_code: bool


class ResolvedCompile(_Resolved):
    backend: Literal["inductor", "eager"]
    disable_passes: tuple[str, ...]
    split_decode: bool
    hopper_decode: bool


class ResolvedCudaGraph(_Resolved):
    """Sizes ascend; they are empty where the mode captures none of that kind.

    `mixed_tokens` that nobody asked for are left out where a model's attention cannot be captured with prompts.
    """

    mode: GraphMode
    piecewise_tokens: tuple[int, ...]
    decode_requests: tuple[int, ...]
    mixed_tokens: tuple[int, ...] = ()
    mixed_tokens_asked: bool = False


class ResolvedRuntime(_Resolved):
    """`device` is `cpu` or `cuda:N`."""

    device: str
    attention_backend: BackendName
    page_size: int
    kv_cache_dtype: KVDtypeName
    mem_fraction_static: float
    max_model_len: int
    max_running_requests: int
    max_num_batched_tokens: int
    enable_prefix_cache: bool
    deterministic: bool
    skip_compiled: bool
    seed: int


class ResolvedCache(_Resolved):
    """`dir` is absolute."""

    dir: str


class ResolvedConfig(_Resolved):
    """EngineConfig without any `auto`; `model_dump(mode="json")` and `model_validate` take it to JSON and back."""

    model: ResolvedModel
    compile: ResolvedCompile
    cudagraph: ResolvedCudaGraph
    runtime: ResolvedRuntime
    cache: ResolvedCache
    choices: tuple[AutoChoice, ...] = Field(default=(), exclude=True, repr=False)

    def report(self, reporter: Reporter) -> None:
        """Shows what every `auto` became."""
        if self.choices:
            reporter.table("auto values", ("key", "value", "why"), self.choices)


def resolve(config: EngineConfig, model: ModelFolder, device: DeviceInfo) -> ResolvedConfig:
    """Replaces every `auto` and checks what only shows when the parts meet.

    Args:
        config: what the user asked for.
        model: the checked folder of config.model.
        device: `detect_device(config.runtime.device)`.

    Raises:
        ConfigError: values that contradict each other, the model or the device.
        CaptureSizeError: a CUDA graph size that no batch can have.
        DeviceError: the device lacks the attention library.
    """
    choices = _Choices()
    dtype = choices.settle("model.dtype", config.model.dtype, lambda: _auto_dtype(model, device))
    backend = _attention_backend(config.runtime, dtype, device, choices)
    runtime = _runtime(config.runtime, dtype, backend, model, device, choices)
    split_decode = _split_decode(config.compile, runtime, dtype, choices)
    return ResolvedConfig(
        model=ResolvedModel(
            source=config.model.path,
            folder=str(model.path),
            revision=config.model.revision,
            dtype=dtype,
            load_format=choices.settle(
                "model.load_format", config.model.load_format, lambda: ("safetensors", "the checkpoint's format")
            ),
            trust_remote_code=config.model.trust_remote_code,
        ),
        compile=ResolvedCompile(
            backend=config.compile.backend,
            disable_passes=config.compile.disable_passes,
            split_decode=split_decode,
            hopper_decode=_hopper_decode(config.compile, split_decode, runtime, dtype, device),
        ),
        cudagraph=_cudagraph(config.cudagraph, runtime, split_decode, device, model, choices),
        runtime=runtime,
        cache=ResolvedCache(
            dir=os.path.abspath(os.path.expanduser(choices.settle("cache.dir", config.cache.dir, auto_cache_dir)))
        ),
        choices=tuple(choices.made),
    )


class _Choices:
    """Collects what each `auto` became."""

    def __init__(self) -> None:
        self.made: list[AutoChoice] = []

    def settle(self, key: str, asked: Any, choose: Callable[[], tuple[Any, str]]) -> Any:
        """`asked`, or when that is auto what `choose() -> (value, why)` says."""
        if asked != "auto":
            return asked
        value, why = choose()
        self.made.append(AutoChoice(key, _show(value), why))
        return value


def _show(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{value[0]} … {value[-1]} ({len(value)} sizes)" if len(value) > 4 else ", ".join(map(str, value)) or "-"
    return str(value)


def _auto_dtype(model: ModelFolder, device: DeviceInfo) -> tuple[str, str]:
    if not device.is_cuda:
        return "float32", "a CPU computes it fastest and exactly"
    dtype = model.checkpoint_dtype()
    if dtype is None:
        return "bfloat16", "the checkpoint names no type"
    if dtype == "float32":
        return "bfloat16", "the checkpoint's float32 is a training type; set model.dtype: float32 to keep it"
    return dtype, "the checkpoint's"


def _attention_backend(asked: RuntimeConfig, dtype: str, device: DeviceInfo, choices: _Choices) -> BackendName:
    def choose() -> tuple[str, str]:
        if not device.is_cuda:
            return "torch", "a CPU"
        if dtype == "float32":
            return "torch", "FlashInfer has no float32 kernels"
        return "flashinfer", "a GPU"

    backend = choices.settle("runtime.attention_backend", asked.attention_backend, choose)
    if backend == "flashinfer":
        _require_flashinfer(dtype, device)
    return backend


def _require_flashinfer(dtype: str, device: DeviceInfo) -> None:
    if not device.is_cuda:
        raise ConfigError(
            "runtime.attention_backend is flashinfer, but the device is a CPU. Set runtime.attention_backend: torch."
        )
    if dtype == "float32":
        raise ConfigError(
            "runtime.attention_backend is flashinfer, which has no float32 kernels. Set model.dtype: bfloat16, or "
            "runtime.attention_backend: torch."
        )
    if not device.has_flashinfer:
        raise DeviceError(
            "FlashInfer is not installed, which serves attention on a GPU. Install the extra: "
            "pip install 'mllm-compile[cuda]'; or set runtime.attention_backend: torch (much slower)."
        )


def _runtime(
    asked: RuntimeConfig, dtype: str, backend: BackendName, model: ModelFolder, device: DeviceInfo, choices: _Choices
) -> ResolvedRuntime:
    kind = "cuda" if device.is_cuda else "cpu"
    choices.settle("runtime.device", asked.device, lambda: (device.device, device.name))
    requests, tokens = _batch_limits(asked, kind, model, choices)
    return ResolvedRuntime(
        device=device.device,
        attention_backend=backend,
        page_size=choices.settle("runtime.page_size", asked.page_size, lambda: (PAGE_SIZE[backend], f"for {backend}")),
        kv_cache_dtype=_kv_cache_dtype(asked, dtype, choices),
        mem_fraction_static=asked.mem_fraction_static,
        max_model_len=_max_model_len(asked, kind, model, choices),
        max_running_requests=requests,
        max_num_batched_tokens=tokens,
        enable_prefix_cache=asked.enable_prefix_cache,
        deterministic=asked.deterministic,
        skip_compiled=asked.skip_compiled,
        seed=asked.seed,
    )


def _kv_cache_dtype(asked: RuntimeConfig, dtype: str, choices: _Choices) -> KVDtypeName:
    if asked.kv_cache_dtype == "fp8_e4m3":
        return "float8_e4m3fn"
    kv_dtype = choices.settle("runtime.kv_cache_dtype", asked.kv_cache_dtype, lambda: (dtype, "the model's"))
    if kv_dtype != dtype:
        raise ConfigError(
            f"runtime.kv_cache_dtype is {kv_dtype}, the model's dtype {dtype}; a KV cache has the model's own type or "
            "fp8_e4m3. Set runtime.kv_cache_dtype: auto."
        )
    return kv_dtype


def _split_decode(asked: CompileConfig, runtime: ResolvedRuntime, dtype: str, choices: _Choices) -> bool:
    """Whether decodes are computed by the kernel that is compiled with the model (decode_attention.py)."""
    obstacle = None
    if runtime.attention_backend != "flashinfer":
        obstacle = (
            f"runtime.attention_backend is {runtime.attention_backend}, and the kernel stands beside FlashInfer's"
        )
    elif asked.backend == "eager":
        obstacle = "compile.backend is eager, which compiles no kernels"
    elif runtime.kv_cache_dtype != dtype:
        obstacle = f"the KV cache is {runtime.kv_cache_dtype}, and the kernel reads the model's dtype, {dtype}"
    if obstacle is None:
        return choices.settle("compile.split_decode", asked.split_decode, lambda: (True, "faster than FlashInfer's"))
    if asked.split_decode is True:
        raise ConfigError(f"compile.split_decode is true, but {obstacle}. Set it to auto or false.")
    return False


def _hopper_decode(
    asked: CompileConfig, split_decode: bool, runtime: ResolvedRuntime, dtype: str, device: DeviceInfo
) -> bool:
    """Whether decodes may be computed by runtime/hopper_decode/."""
    obstacle = None
    if not split_decode:
        obstacle = (
            "decodes are FlashInfer's or torch's (compile.split_decode), and the kernels stand for pieces of ours"
        )
    elif not device.is_hopper:
        obstacle = f"the GPU is {device.name}, and the kernels are for an H100 SXM or H200"
    elif runtime.deterministic:
        obstacle = "runtime.deterministic is set, and how the kernels divide a request depends on the others"
    elif dtype != "bfloat16":
        obstacle = f"model.dtype is {dtype}, and the kernels compute in bfloat16"
    if asked.hopper_decode is True and obstacle is not None:
        raise ConfigError(f"compile.hopper_decode is true, but {obstacle}. Set it to auto or false.")
    return asked.hopper_decode is not False and obstacle is None


def _batch_limits(asked: RuntimeConfig, kind: str, model: ModelFolder, choices: _Choices) -> tuple[int, int]:
    """(max_running_requests, max_num_batched_tokens): every running request needs a token of a step's budget."""
    auto_tokens, why = MAX_NUM_BATCHED_TOKENS[kind], f"for {kind}"
    if asked.deterministic:
        auto_tokens, why = _deterministic_tokens(kind, model), f"deterministic: every step on {kind} has so many"
    budget = asked.max_num_batched_tokens
    step = auto_tokens if budget == "auto" else budget
    most_requests, why_requests = min(MAX_RUNNING_REQUESTS[kind], step), f"for {kind}"
    if asked.deterministic and 1 < step < 2 * most_requests:
        most_requests, why_requests = step // 2, "deterministic: half of a step, so that prompts get on"
    requests = choices.settle(
        "runtime.max_running_requests",
        asked.max_running_requests,
        lambda: (most_requests, why_requests),
    )
    tokens = choices.settle("runtime.max_num_batched_tokens", budget, lambda: (max(auto_tokens, requests), why))
    if requests > tokens:
        raise ConfigError(
            f"runtime.max_running_requests is {requests}, more than runtime.max_num_batched_tokens {tokens}: each "
            f"running request takes a token of every step. Raise the second or lower the first."
        )
    return requests, tokens


def _deterministic_tokens(kind: str, model: ModelFolder) -> int:
    if kind == "cpu":
        return DETERMINISTIC_TOKENS["cpu"]
    num_kv_heads = model.text_config_value("num_key_value_heads", "num_attention_heads", "n_head")
    if not isinstance(num_kv_heads, int) or num_kv_heads < 1:
        num_kv_heads = 1
    return max(DETERMINISTIC_TOKENS["cuda"], DETERMINISTIC_ATTENTION_BLOCKS // num_kv_heads)


def _max_model_len(asked: RuntimeConfig, kind: str, model: ModelFolder, choices: _Choices) -> int:
    limit = model.text_config_value(*_LENGTH_KEYS)
    if not isinstance(limit, int) or limit < 1:
        limit = None
    why, bound = "the model's own limit", "the model was made for at most {} tokens"
    rope = rope_limit(model.text_config_value)
    if rope is not None and (limit is None or rope.max_positions < limit):
        limit = rope.max_positions
        why = f"beyond it, rope_type {rope.rope_type} would let one request change the others"
        bound = f"beyond {{}} tokens rope_type {rope.rope_type} would let one request change the others"

    def choose() -> tuple[int, str]:
        if limit is not None and limit <= MAX_MODEL_LEN[kind]:
            return limit, why
        return MAX_MODEL_LEN[kind], f"for {kind}; the model takes {limit or 'any length'}"

    length = choices.settle("runtime.max_model_len", asked.max_model_len, choose)
    if limit is not None and length > limit:
        raise ConfigError(f"runtime.max_model_len is {length}, but {bound.format(limit)}. Set it to {limit} or less.")
    return length


def _cudagraph(
    asked: CudaGraphConfig,
    runtime: ResolvedRuntime,
    split_decode: bool,
    device: DeviceInfo,
    model: ModelFolder,
    choices: _Choices,
) -> ResolvedCudaGraph:
    mode = _graph_mode(asked, runtime, device, choices)
    if not device.is_cuda:  # sizes in a YAML that also serves on a GPU mean nothing here
        return ResolvedCudaGraph(mode=mode, piecewise_tokens=(), decode_requests=())
    if runtime.deterministic:
        return _deterministic_cudagraph(asked, mode, runtime.max_num_batched_tokens)
    return ResolvedCudaGraph(
        mode=mode,
        piecewise_tokens=_graph_sizes(
            "piecewise_tokens",
            asked.piecewise_tokens,
            _piecewise_tokens(model, runtime),
            ("runtime.max_num_batched_tokens", runtime.max_num_batched_tokens),
            mode if mode in _PIECEWISE_MODES else None,
            choices,
        ),
        decode_requests=_graph_sizes(
            "decode_requests",
            asked.decode_requests,
            # The largest possible batch has a graph of its own size.
            (*DECODE_REQUESTS, runtime.max_running_requests),
            ("runtime.max_running_requests", runtime.max_running_requests),
            mode if mode in _FULL_MODES else None,
            choices,
        ),
        mixed_tokens=_mixed_tokens(asked, mode, runtime, split_decode, device, model, choices),
        mixed_tokens_asked=asked.mixed_tokens != "auto",
    )


def _mixed_tokens(
    asked: CudaGraphConfig,
    mode: GraphMode,
    runtime: ResolvedRuntime,
    split_decode: bool,
    device: DeviceInfo,
    model: ModelFolder,
    choices: _Choices,
) -> tuple[int, ...]:
    """Sizes; whether the model's layers allow it is known when it is loaded."""
    obstacle = None
    if not device.is_hopper:
        obstacle = f"the GPU is {device.name}, and attention over prompts is captured on an H100 SXM or H200 alone"
    elif not split_decode:
        obstacle = "decodes are not by kernels of the program (compile.split_decode)"
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


def _width(model: ModelFolder) -> int:
    """Of the hidden states; 0: the model does not say."""
    width = model.text_config_value("hidden_size", "n_embd", "d_model")
    return width if isinstance(width, int) and width > 0 else 0


def _piecewise_tokens(model: ModelFolder, runtime: ResolvedRuntime) -> tuple[int, ...]:
    width = _width(model)
    if runtime.attention_backend != "flashinfer" or not width:
        return PIECEWISE_TOKENS  # a capture runs attention of its prompts, which by torch takes their square in memory
    largest = min(_MOST_PIECEWISE_WORK // width**2, runtime.max_running_requests * runtime.max_model_len)
    return (*PIECEWISE_TOKENS, *(tokens for tokens in PIECEWISE_TOKENS_OF_SMALL if tokens <= largest))


def _deterministic_cudagraph(asked: CudaGraphConfig, mode: GraphMode, num_tokens: int) -> ResolvedCudaGraph:
    """Every step is a decode of `num_tokens` rows, so there is one shape to capture."""
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
    return ResolvedCudaGraph(mode=mode, piecewise_tokens=piecewise_tokens, decode_requests=decode_requests)


def _graph_mode(asked: CudaGraphConfig, runtime: ResolvedRuntime, device: DeviceInfo, choices: _Choices) -> GraphMode:
    def choose() -> tuple[str, str]:
        if not device.is_cuda:
            return "none", "a CPU has no CUDA graphs"
        if runtime.skip_compiled:
            return "none", "runtime.skip_compiled"
        if runtime.attention_backend == "torch":
            return "piecewise", "the torch attention backend cannot be captured"
        if runtime.deterministic:
            return "full_decode_only", "deterministic: every step has a decode's shape"
        return "full_and_piecewise", "full for decode steps, piecewise for the rest"

    mode = choices.settle("cudagraph.mode", asked.mode, choose)
    if mode != "none" and not device.is_cuda:
        raise ConfigError(
            f"cudagraph.mode is {mode}, but the device is a CPU, which has no CUDA graphs. Set it to auto."
        )
    if mode != "none" and runtime.skip_compiled:
        raise ConfigError(
            f"cudagraph.mode is {mode}, but with runtime.skip_compiled there are no pieces to capture. Set it to none."
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
    choices: _Choices,
) -> tuple[int, ...]:
    """Sizes to capture; `limit` is (its key, the largest batch there can be), `mode` None where none are captured."""
    limit_key, largest = limit
    if mode is None:
        if asked != "auto":
            raise ConfigError(
                f"cudagraph.{key} lists sizes, but the mode captures none of that kind. Set cudagraph.mode: "
                f"full_and_piecewise, or cudagraph.{key}: auto."
            )
        return ()
    usable = tuple(sorted({size for size in table if size <= largest}))
    sizes = choices.settle(f"cudagraph.{key}", asked, lambda: (usable, f"up to {usable[-1]}"))
    if sizes[-1] > largest:
        raise CaptureSizeError(
            f"cudagraph.{key} holds {sizes[-1]}, but no batch is larger than {limit_key}: {largest}. Remove the size "
            f"or raise {limit_key}."
        )
    return sizes
