"""The key of a cached runtime: an explicit list of factors with their values, and the hash over them.

A factor is anything that changes a runtime's content: the program, its pieces, its kernels, the places of its weights,
the tokenizer. Nothing else is in the key: no path, no file time, no environment. The batch size counts only by whether
very many requests may decode, as these have a kernel of their own. Values are text that people can compare; if one has
parts (`trace.py 1a2b3c4d, supported.py …`), `changed_parts` tells which of them differ.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from mllm_compile.checkpoint.files import WeightFiles
from mllm_compile.config.folders.hub import CONFIG_FILE
from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.folders.sentence_files import read_sentence_files
from mllm_compile.config.folders.token_map import read_token_map
from mllm_compile.config.resolution.device import has_libraries
from mllm_compile.config.resolution.sparse_keys import chooses_keys
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.errors import CheckpointError
from mllm_compile.files.json_file import read_file, read_json_object
from mllm_compile.files.served_part import served_part
from mllm_compile.media.files import PROCESSOR_FILES
from mllm_compile.runtime.attention.hopper.clusters import LONG_TOKENS
from mllm_compile.runtime.attention.hopper.shares import MOST_REQUESTS
from mllm_compile.text.generation_defaults import GENERATION_CONFIG_FILE
from mllm_compile.text.tokenizer_files import tokenizer_files
from mllm_compile.version import __version__

# Raised with a change that makes older runtimes unreadable or wrong: their files, what a program says, how binaries
# are launched (threads, shared memory, arguments).
FORMAT_VERSION = 40
# Rooms that shape packages, kernels, stored programs or packed weights: a change in any of their sources is a miss.
# passes/ is a factor of its own. config/resolution/device.py says which GPUs have kernels.
_SHAPING_ROOMS = (
    "check",
    "checkpoint",
    "compiler",
    "config/resolution/device",
    "config/folders/sentence_files",
    "gguf",
    "inductor",
    "kernels",
    "model",
    "runtime/attention",
    "runtime/collectives",
    "runtime/cpu",
    "runtime/cuda",
    "runtime/lora",
    "runtime/media",
    "runtime/ops",
    "runtime/pooling",
    "runtime/program",
    "runtime/quantised",
    "runtime/sampling",
    "runtime/sources",
    "runtime/state",
    "runtime/updates",
    "runtime/weights",
)
_SOURCE_SUFFIXES = (".py", ".cu", ".cuh", ".cpp", ".h")  # what Python and editors leave beside them is no source
# Factors of the machine that loads a runtime's binaries.
MACHINE_FACTORS = (
    "mllm_compile",
    "torch",
    "triton",
    "flashinfer",
    "cuda",
    "GPU architecture",
    "CPU",
    "instruction set",
)
# /proc/cpuinfo's names of what a compiler may use; the rest of its flags changes with kernel and hypervisor.
_INSTRUCTION_SETS = (
    "sse",
    "ssse3",
    "avx",
    "fma",
    "bmi",
    "amx",
    "f16c",
    "abm",
    "movbe",
    "popcnt",
    "vaes",
    "gfni",
    "sha",
)
DRAFT_MODEL = "draft model"  # of a runtime that holds one: that one's key
PACKED_WEIGHTS = "packed weights"  # of a runtime that holds them: which checkpoint's
_MIN_TRACED_TOKENS = 8192

ANY_ROWS = "any rows"  # of deterministic steps


def max_traced_tokens(config: ResolvedConfig) -> int:
    """The largest T and S that pieces are compiled for; bounds let Inductor prove that 32-bit indices suffice."""
    is_whole = config.model.pools or config.model.has_encoder  # then a text is never cut
    longest = config.runtime.max_model_len if is_whole else 0
    return max(_MIN_TRACED_TOKENS, config.runtime.max_num_batched_tokens, longest)


def key_factors(config: ResolvedConfig, model: ModelFolder, weights: WeightFiles) -> dict[str, str]:
    """Every factor by name, as text.

    Raises:
        CheckpointError: one of the model's texts cannot be read, or is larger than any.
    """
    return {
        "format": str(FORMAT_VERSION),
        **machine_factors(config),
        "sources": _sources(),
        "passes": _passes(config.compile.disable_passes),
        "transformers": _version("transformers"),
        **_text_factors(config, model),
        "weights": weights.fingerprint(),
        **_weight_index(model),
        "quantisation": _quantisation(config, model),
        **_head(config),
        "dtype": config.model.dtype,
        "backend": config.compile.backend,
        "expert stats": "on" if config.runtime.sees_experts else "off",
        "attention": _attention(config),
        **_states(config),
        **_chosen_keys(config, model),
        **_speculation(config),
        **_adapters(config),
        **_ranks(config),
        **_part(config),
        **_token_map(config),
        "max traced tokens": str(max_traced_tokens(config)),
    }


def _weight_index(model: ModelFolder) -> dict[str, str]:
    """The file that each weight is read from, where an index says so."""
    return {"weight index": _hash(json.dumps(model.weight_map, sort_keys=True).encode())} if model.weight_map else {}


def _ranks(config: ResolvedConfig) -> dict[str, str]:
    """For how many ranks a program is; of one rank this is no factor."""
    runtime = config.runtime
    sizes = {"tensor parallel": runtime.tensor_parallel_size, "expert parallel": runtime.expert_parallel_size}
    stages = runtime.pipeline_parallel_size
    found = {name: f"{size} ranks" for name, size in sizes.items() if size > 1}
    return found | ({"pipeline parallel": f"{stages} stages"} if stages > 1 else {})


def _part(config: ResolvedConfig) -> dict[str, str]:
    """The part of a model that a drafter is; of a whole one no factor."""
    number = config.model.prediction_layer
    return {} if number is None else {"part": f"prediction layer {number}"}


def _token_map(config: ResolvedConfig) -> dict[str, str]:
    """The tokens that a drafter's head is cut to; of a whole one no factor.

    Raises:
        ConfigError: their file cannot be read.
    """
    path = config.model.token_map
    return {} if path is None else {"token map": _hash(json.dumps(read_token_map(path)).encode())}


def _states(config: ResolvedConfig) -> dict[str, str]:
    """The type of states, which kernels are compiled for on CUDA; float32, the default, is no factor."""
    dtype = config.runtime.state_dtype
    return {} if dtype == "float32" or not config.runtime.device.startswith("cuda") else {"states": dtype}


def _chosen_keys(config: ResolvedConfig, model: ModelFolder) -> dict[str, str]:
    """The choice of keys by an indexer; where it chooses all of each text, or there is none, no factor."""
    return {"keys": "chosen"} if chooses_keys(config.runtime.max_model_len, model) else {}


def _speculation(config: ResolvedConfig) -> dict[str, str]:
    """Kernels of captured verify steps, which a runtime on CUDA holds where it is to speculate; else no factor."""
    speculates = config.speculative.method != "none" and config.runtime.device.startswith("cuda")
    return {"speculation": "verify steps"} if speculates else {}


def _adapters(config: ResolvedConfig) -> dict[str, str]:
    """The places for adapters, which a program has beside the model's own; without them no factor."""
    lora = config.lora
    if not lora.max_adapters:
        return {}
    targets, kind = " ".join(lora.targets) or "all targets", ", DoRA" if lora.dora else ""
    return {"lora": f"{lora.max_adapters} adapters, rank {lora.max_rank}, {targets}{kind}"}


def _quantisation(config: ResolvedConfig, model: ModelFolder) -> str:
    """How quantised weights are read: the scheme, its settings, and what becomes of them; or what plain ones become."""
    asked = config.model.quantization
    if model.scheme is None:
        return asked
    settings = _hash(repr(model.scheme).encode())[:8]
    becomes = {
        "keep": "kept in linears",
        "keep_a8": "kept in linears; their inputs in eight bits",
        "dequantize": f"dequantised to {config.model.dtype}",
    }.get(asked, asked)
    return f"{model.scheme.name.replace(', ', '; ')}, {becomes}, settings {settings}"


def _head(config: ResolvedConfig) -> dict[str, str]:
    """The form that the head's weight is quantised to; where it is not, no factor."""
    asked = config.model.lm_head_quantization
    return {} if asked == "none" else {"head": asked}


def _text_factors(config: ResolvedConfig, model: ModelFolder) -> dict[str, str]:
    """The factors of the files of a model that a compile reads again by their names."""
    return {
        "model config": _hash(json.dumps(model.config, sort_keys=True).encode()),
        "model code": _model_code(config, model),
        "text": _text(model),
        **_task(config, model),
    }


def _task(config: ResolvedConfig, model: ModelFolder) -> dict[str, str]:
    """The task of a model that pools, and sentence-transformers' files; of one that generates no factor."""
    if not config.model.pools:
        return {}
    files = read_sentence_files(model.path)
    paths = () if files is None else files.paths
    hashes = [_hash(read_file(path, CheckpointError) or b"") for path in paths]
    tokens, template = " ".join(config.model.classifier_from_token or ()), config.model.score_template
    factors = {"task": f"{config.model.task} {tokens}".strip(), "sentence files": _hash(" ".join(hashes).encode())}
    return factors | ({} if template is None else {"score template": _hash(template.encode())})


def check_unchanged(config: ResolvedConfig, model: ModelFolder, factors: Mapping[str, str]) -> None:
    """Compares the model's texts, which have been compiled, with those that the key was made of.

    Raises:
        CheckpointError: somebody has changed one in between, so that it is not known which of the two was compiled.
    """
    content = served_part(read_json_object(model.path / CONFIG_FILE, CheckpointError) or {})
    for name, now in _text_factors(config, replace(model, config=content)).items():
        if now != factors[name]:
            then, now = changed_parts(factors[name], now)
            raise CheckpointError(
                f"{model.path} has changed while it was compiled ({name}: {then} -> {now}). Compile it again."
            )


def machine_factors(config: ResolvedConfig) -> dict[str, str]:
    """The factors of MACHINE_FACTORS on this machine."""
    is_cuda = config.runtime.device.startswith("cuda")
    uses_flashinfer = config.runtime.attention_backend == "flashinfer"
    return {
        "mllm_compile": __version__,
        "torch": torch.__version__,
        "triton": _version("triton") if is_cuda else "unused",
        "flashinfer": _version("flashinfer-python") if uses_flashinfer else "unused",
        "cuda": str(torch.version.cuda) if is_cuda else "unused",
        "GPU architecture": _gpu_architecture(config.runtime.device) if is_cuda else "unused",
        "CPU": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "instruction set": _instruction_set(),
    }


def asks_for_any_rows(factors: Mapping[str, str]) -> bool:
    """True for deterministic steps of any number of rows, which a compile may find that the model has not."""
    return ANY_ROWS in factors.get("attention", "").split(", ")


def key_of(factors: Mapping[str, str]) -> str:
    """16 hex digits over all factors, whatever their order."""
    return _hash(json.dumps(factors, sort_keys=True).encode())


def changed_parts(now: str, then: str) -> tuple[str, str]:
    """The parts that only one of two values has; the values themselves where they have none."""
    now_parts, then_parts = now.split(", "), then.split(", ")
    only_now = [part for part in now_parts if part not in then_parts]
    only_then = [part for part in then_parts if part not in now_parts]
    if not only_now and not only_then:  # the same parts in another order
        return now, then
    return ", ".join(only_now) or "-", ", ".join(only_then) or "-"


def _attention(config: ResolvedConfig) -> str:
    """The backend and the versions of its kernels; a runtime holds FlashInfer's kernels."""
    runtime = config.runtime
    mode = ["deterministic"] if runtime.deterministic else []
    if runtime.any_rows:
        mode.append(ANY_ROWS)
    if runtime.attention_backend == "torch":
        kv_cache = [] if runtime.kv_cache_dtype == config.model.dtype else [f"{runtime.kv_cache_dtype} KV cache"]
        is_plain = runtime.device == "cpu" and not has_libraries(runtime.device, config.compile.backend)
        return ", ".join(["torch", *kv_cache, *mode, *(["no C++ compiler"] if is_plain else [])])
    if not config.compile.split_decode:
        mode.append("decodes by FlashInfer")
    elif not config.compile.hopper_decode:
        mode.append("no Hopper kernels")
    else:  # the kernels of few and of very many decodes depend on them
        mode += ["long requests"] if runtime.max_model_len > LONG_TOKENS else []
        mode += ["many requests"] if runtime.max_running_requests > MOST_REQUESTS else []
    mode += ["cascades"] if runtime.cascade_attention else []
    kv_cache = [f"{runtime.kv_cache_dtype} KV cache", f"pages of {runtime.page_size}"]
    return ", ".join([runtime.attention_backend, *kv_cache, *mode])


def _gpu_architecture(device: str) -> str:
    major, minor = torch.cuda.get_device_capability(torch.device(device))
    return f"sm_{major}{minor}"


@cache
def _instruction_set(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """This machine's instruction set: Inductor compiles host code for it (-march=native)."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return "unknown"
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    known = [flag for flag in flags if flag.startswith(_INSTRUCTION_SETS)]
    return ", ".join(sorted(known or flags))


def _model_code(config: ResolvedConfig, model: ModelFolder) -> str:
    """The Python files that trust_remote_code runs."""
    if not config.model.trust_remote_code:
        return "unused"
    return _file_hashes(model.path, model.path.glob("*.py")) or "none"


def _text(model: ModelFolder) -> str:
    """The tokenizer, the processor and the generation defaults: models of one shape may differ in them."""
    others = (model.path / name for name in (GENERATION_CONFIG_FILE, *PROCESSOR_FILES))
    files = [*tokenizer_files(model.path), *others]
    return _file_hashes(model.path, files) or "none"


@cache
def _sources() -> str:
    root = Path(__file__).parents[1]
    files = (root / f"{room}.py" for room in _SHAPING_ROOMS)  # a room may be a single file
    in_folders = (path for room in _SHAPING_ROOMS for path in (root / room).rglob("*"))
    paths = (path for path in (*files, *in_folders) if path.is_file())
    return _file_hashes(root, (path for path in paths if path.suffix in _SOURCE_SUFFIXES))


def _passes(disabled: Iterable[str]) -> str:
    off = [f"without {name}" for name in sorted(disabled)]
    return ", ".join([_pass_sources(), *off])


@cache
def _pass_sources() -> str:
    folder = Path(__file__).parents[1] / "passes"
    return _file_hashes(folder, folder.rglob("*.py"))


def _file_hashes(root: Path, paths: Iterable[Path]) -> str:
    """`model/tiny.py 1a2b3c4d, …`, sorted.

    Raises:
        CheckpointError: one cannot be read, is no regular file, or is larger than any text of a model.
    """
    found = ((path, read_file(path, CheckpointError)) for path in sorted(paths))
    return ", ".join(
        f"{path.relative_to(root).as_posix()} {hashlib.sha256(data).hexdigest()[:8]}"
        for path, data in found
        if data is not None
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
