"""The user's config: the YAML file, validated and frozen.

Owns the keys, their ranges and their defaults. `auto` is left as it is: `resolve.py` replaces it once, when the model's
folder and the device are known. Nothing here imports torch, so that a mistake in a file is reported at once.
"""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from reprlib import Repr
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from mllm_compile.errors import ConfigError
from mllm_compile.runtime.config_sections import DtypeName, GraphMode

MAX_PAGE_SIZE = 256
_MAX_CONFIG_CHARACTERS = 1 << 20

# By these a folder is known. The modules that own the names, artifact.py and model_folder.py, are
# above this one.
_RUNTIME_FILES = ("manifest.json", "program.json")
_MODEL_FILE = "config.json"
YAML_SUFFIXES = (".yaml", ".yml")
_EXPECTED = (
    "Expected a hub id such as Qwen/Qwen3-0.6B, a model's folder, a YAML config, or the folder of a compiled runtime."
)


def _checked_path(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("a path: a text that is not empty and has no null byte")
    return text


Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
PathText = Annotated[
    str,
    BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value),
    AfterValidator(_checked_path),
]
NameList = Annotated[tuple[str, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
SizeList = Annotated[
    tuple[PositiveInt, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
]


class Section(BaseModel):
    """Base of every section: frozen, no unknown keys, no silent conversion (`"16"` is no 16, 1 is no `true`)."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())


class ModelConfig(Section):
    """The model, and how its weights are read."""

    path: PathText
    """A Hugging Face hub id (`Qwen/Qwen3-0.6B`) or a local folder with `config.json` and safetensors files."""

    revision: str | None = None
    """Branch, tag or commit of the hub repository; null takes the main branch. Refused for a local folder."""

    dtype: Literal[Auto, DtypeName] = "auto"
    """Type of weights and activations. auto: the checkpoint's on a GPU, float32 on a CPU."""

    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """Where weights come from. dummy: random ones from `runtime.seed`, for machines that only have a `config.json`."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models that Transformers itself does not know."""


class CompileConfig(Section):
    """How the pieces between two attentions are compiled."""

    backend: Literal["inductor", "eager"] = "inductor"
    """inductor compiles; eager runs the pieces as they were traced, for debugging and for tests."""

    disable_passes: NameList = ()
    """Names of optional graph passes to leave out, as `mllm-compile inspect` prints them."""

    split_decode: Auto | bool = "auto"
    """Decode by a kernel that is compiled with the model, where it serves a layer. auto: with FlashInfer and a KV cache
    of the model's dtype; false: FlashInfer decodes."""

    hopper_decode: Auto | bool = "auto"
    """On Hopper, decode by CUDA kernels of ours where they serve a layer: heads of 128, 8 KV heads or more, no window,
    no soft cap. auto: with split_decode in bfloat16, unless runtime.deterministic; false: as split_decode elsewhere."""

    @field_validator("disable_passes")
    @classmethod
    def _no_name_twice(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return _without_repeats(names)


class CudaGraphConfig(Section):
    """The batch shapes that are captured as CUDA graphs."""

    mode: Literal[Auto, GraphMode] = "auto"
    """auto: full_and_piecewise on a GPU, none on a CPU (which has no CUDA graphs)."""

    piecewise_tokens: Auto | SizeList = "auto"
    """Token counts of a step for which the pieces between attentions are captured."""

    decode_requests: Auto | SizeList = "auto"
    """Request counts for which a whole decode step is captured."""

    mixed_tokens: Auto | SizeList = "auto"
    """Token counts for which a whole step with prompts is captured, attention included, decodes among them or not.
    auto: on Hopper, of models up to 2048 wide, whose pieces and attentions run faster than the host launches them;
    [] for none."""

    sample_in_graph: bool = True
    """Captured decodes choose their tokens, and take their inputs from where the step before and the host leave them:
    one launch a step. Only where decode attention and sampling are kernels of the program. false: launches around the
    graph do that."""

    @field_validator("piecewise_tokens", "decode_requests")
    @classmethod
    def _some_sizes(cls, sizes: Auto | tuple[int, ...]) -> Auto | tuple[int, ...]:
        if not sizes:
            raise ValueError("at least one size; to capture nothing set cudagraph.mode: none")
        return sizes

    @field_validator("piecewise_tokens", "decode_requests", "mixed_tokens")
    @classmethod
    def _in_order(cls, sizes: Auto | tuple[int, ...]) -> Auto | tuple[int, ...]:
        return "auto" if sizes == "auto" else tuple(sorted(_without_repeats(sizes)))


class RuntimeConfig(Section):
    """The device, the memory and the batches of serving."""

    device: str = "auto"
    """auto (a GPU where there is one) | cpu | cuda | cuda:N."""

    attention_backend: Literal["auto", "flashinfer", "torch"] = "auto"
    """auto: flashinfer on a GPU, torch on a CPU and for float32."""

    page_size: Auto | Annotated[int, Field(ge=1, le=MAX_PAGE_SIZE)] = "auto"
    """Tokens in one page of the KV cache."""

    kv_cache_dtype: Literal[Auto, DtypeName, "fp8_e4m3"] = "auto"
    """Type of the KV cache: the model's own (auto), or fp8_e4m3, which takes half of bfloat16's memory."""

    mem_fraction_static: float = Field(default=0.9, gt=0.0, lt=1.0)
    """The share of a GPU's memory for weights, KV cache and graphs together. (On a CPU the KV cache takes a quarter of
    what is free.)"""

    max_model_len: Auto | Annotated[int, Field(ge=2)] = "auto"
    """Most tokens of one request, prompt and answer together."""

    max_running_requests: Auto | PositiveInt = "auto"
    """Most requests in one step; more of them wait."""

    max_num_batched_tokens: Auto | PositiveInt = "auto"
    """Most tokens in one step; longer prompts are computed in chunks."""

    enable_prefix_cache: bool = True
    """Keep the KV cache of finished requests for prompts that begin alike."""

    deterministic: bool = False
    """Bitwise the same answer whatever else is in the batch, however a prompt is cut, and after a prefix hit or a
    preemption. Every step is then computed with exactly max_num_batched_tokens tokens, padding included."""

    skip_compiled: bool = False
    """Run Transformers' own model in place of the compiled one, to find out whose a wrong answer is."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of requests that bring none, and of dummy weights."""

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError("auto, cpu, cuda or cuda:N")
        return device


class CacheConfig(Section):
    """Where compiled runtimes are kept."""

    dir: PathText = "auto"
    """A folder, or auto: $MLLM_COMPILE_CACHE, else `mllm_compile` in the user's ($XDG_CACHE_HOME, else ~/.cache)."""


_OPTIONAL_SECTIONS = ("compile", "cudagraph", "runtime", "cache")


class EngineConfig(Section):
    """One YAML file. Everything but `model.path` has a default; a mistake is a ConfigError that names the key."""

    model: ModelConfig
    compile: CompileConfig = CompileConfig()
    cudagraph: CudaGraphConfig = CudaGraphConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    cache: CacheConfig = CacheConfig()

    def __init__(self, **sections: Any) -> None:
        # A section of a YAML whose keys are all commented out is None: it has none.
        given = {name: keys for name, keys in sections.items() if keys is not None or name not in _OPTIONAL_SECTIONS}
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise ConfigError("; ".join(_describe_mistakes(error))) from None

    @classmethod
    def from_dict(cls, sections: Any, *, base_folder: Path | None = None) -> Self:
        """Validates plain data, as a YAML file holds it.

        Args:
            sections: a mapping of section name to a mapping of keys.
            base_folder: relative paths in `model.path` and `cache.dir` are taken from here; None leaves them be.

        Raises:
            ConfigError: naming every key that is wrong, what it got and what it takes.
        """
        if not isinstance(sections, dict):
            raise ConfigError(f"the top level is {_show(sections)}; expected sections: {', '.join(cls.model_fields)}")
        if not_text := [key for key in sections if not isinstance(key, str)]:
            raise ConfigError(f"{not_text[0]!r} is not a known section; known: {', '.join(cls.model_fields)}")
        config = cls(**sections)
        return config if base_folder is None else config._anchored(base_folder)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Reads and validates a YAML file.

        `model.path` is taken from the file's own folder when a folder of that name exists there, or when it starts
        with `.` or `..`; `~` is the home folder; anything else is a hub id. A relative `cache.dir` is taken from the
        file's folder too.

        Raises:
            ConfigError: the file cannot be read, is no YAML, names a key twice, or holds a wrong key or value.
        """
        path = Path(path)
        try:
            return cls.from_dict(_read_yaml(path), base_folder=path.absolute().parent)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def _anchored(self, folder: Path) -> Self:
        model = self.model.model_copy(update={"path": _anchored_model_path(self.model.path, folder)})
        cache = self.cache
        if cache.dir != "auto":
            cache = cache.model_copy(update={"dir": os.path.normpath(folder / Path(cache.dir).expanduser())})
        return self.model_copy(update={"model": model, "cache": cache})


EngineSource = str | os.PathLike[str] | EngineConfig | dict[str, Any]


def config_or_runtime(source: EngineSource) -> EngineConfig | Path:
    """An engine's source: a config, validated, or the folder of a compiled runtime as it is.

    Args:
        source: a hub id, a model's folder, a YAML file, a runtime's folder, an EngineConfig, or a dict of what a YAML
            would hold. The first two mean a config that sets `model.path` alone. Relative paths are taken from the
            current folder, but in a YAML from its own.

    Raises:
        ConfigError: it is none of these, or the config is wrong.
    """
    if isinstance(source, EngineConfig):
        return source
    if isinstance(source, dict):
        return EngineConfig.from_dict(source)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            f"the model is {_show(source)}; expected a hub id, a model's folder, a YAML file, a runtime's folder, an "
            "EngineConfig, or a dict such as {'model': {'path': …}}"
        )
    text = os.fspath(source)
    path = Path(text).expanduser()
    if os.path.isdir(path):
        return _model_or_runtime(path)
    if os.path.exists(path) or path.suffix in YAML_SUFFIXES:
        return EngineConfig.from_yaml(path)
    if is_hub_id(text):
        return EngineConfig(model={"path": text})
    raise ConfigError(f"{text}: there is no such file or folder{nearest_path(text)}. {_EXPECTED}")


def source_name(source: str) -> str:
    """A short name of what config_or_runtime takes as text: `Qwen3-0.6B` of a hub id or folder, `tiny` of a YAML."""
    path = Path(os.path.abspath(source))
    return path.stem if path.suffix in YAML_SUFFIXES else path.name


def is_hub_id(text: str) -> bool:
    """True if `text` can name a repository on the hub: `Qwen/Qwen3-0.6B`, or `gpt2` for a few old ones."""
    return not is_local_path(text) and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", text, re.ASCII) is not None


def nearest_path(text: str) -> str:
    """` (the nearest is …)` with what is there under the most similar name, else nothing."""
    path = Path(text).expanduser()
    try:
        near = _closest(path.name, os.listdir(path.parent))
    except (OSError, ValueError):
        return ""
    return f" (the nearest is {path.parent / near})" if near else ""


def is_local_path(text: str) -> bool:
    """True when `model.path` can only mean a folder: absolute, or starting with `.`, `..` or `~`."""
    return os.path.isabs(text) or text.split("/", 1)[0] in (".", "..", "~")


def _anchored_model_path(text: str, folder: Path) -> str:
    candidate = os.path.normpath(folder / Path(text).expanduser())
    return candidate if is_local_path(text) or os.path.isdir(candidate) else text


def _without_repeats(items: tuple[Any, ...]) -> tuple[Any, ...]:
    for item in items:
        if items.count(item) > 1:
            raise ValueError(f"each entry once, but {item!r} is there {items.count(item)} times")
    return items


class _OneKeyOnceLoader(yaml.SafeLoader):
    """SafeLoader that refuses a repeated key, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise ConfigError(f"line {line}: a key is a list or a mapping; expected the name of a key")
            if key in seen:
                raise ConfigError(f"line {line}: the key {key!r} is there twice; keep one")
            seen.add(key)
        return super().construct_mapping(node, deep)


def _read_yaml(path: Path) -> Any:
    try:
        with open(path, encoding="utf-8") as file:  # a named pipe too, as a shell makes of <(…)
            text = file.read(_MAX_CONFIG_CHARACTERS + 1)
    except FileNotFoundError:
        raise ConfigError(f"there is no such file{nearest_path(str(path))}; expected a YAML config") from None
    except IsADirectoryError:
        raise ConfigError("this is a folder; expected a YAML config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read as a text file: {error}") from None
    if len(text) > _MAX_CONFIG_CHARACTERS:
        raise ConfigError(f"has more than {_MAX_CONFIG_CHARACTERS:,} characters; expected a YAML config")
    try:
        # _OneKeyOnceLoader is a SafeLoader: it builds plain data only.
        content = yaml.load(text, Loader=_OneKeyOnceLoader)
    except ConfigError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a ValueError: a number or a date that is none
        raise ConfigError(f"not valid YAML: {' '.join(str(error).split())}") from None
    if content is None:
        raise ConfigError("the file is empty; it needs at least 'model: {path: …}'")
    return content


def _is_runtime(folder: Path) -> bool:
    """True also of a runtime that lost its manifest: opening it tells what it lacks."""
    return any(os.path.isfile(folder / name) for name in _RUNTIME_FILES)


def _model_or_runtime(folder: Path) -> EngineConfig | Path:
    # One that this user may not enter could be a runtime: opening it says so.
    if not os.access(folder, os.X_OK) or any(os.path.isfile(folder / name) for name in _RUNTIME_FILES):
        return folder  # also one that lost its manifest: opening it says what it lacks
    if os.path.isfile(folder / _MODEL_FILE):
        return EngineConfig(model={"path": str(folder)})
    raise ConfigError(
        f"{folder}: this is a folder, but no model's (it holds no {_MODEL_FILE}) and no runtime's (no "
        f"{_RUNTIME_FILES[0]}). {_EXPECTED}"
    )


def _describe_mistakes(error: ValidationError) -> list[str]:
    """One sentence for each wrong key; the members of a union (`auto` or a number) are joined into one."""
    by_key: dict[tuple[str, ...], list[Any]] = {}
    for item in error.errors():
        by_key.setdefault(tuple(str(part) for part in item["loc"][:2]), []).append(item)
    return [_describe_mistake(key, items) for key, items in by_key.items()]


def _describe_mistake(key: tuple[str, ...], items: list[Any]) -> str:
    name = ".".join(key)
    kind = items[0]["type"]
    if kind == "extra_forbidden":
        return _describe_unknown_key(key)
    if kind == "missing":  # model, or its path: nothing else is without a default
        return "model.path is missing; give a hub id (Qwen/Qwen3-0.6B) or a local folder"
    if kind in ("model_type", "model_attributes_type"):
        if name == "model" and isinstance(items[0]["input"], str):
            return f"model is {_show(items[0]['input'])}; expected model: {{path: {items[0]['input']}}}"
        section = EngineConfig.model_fields[key[0]].annotation
        return f"{name} is {_show(items[0]['input'])}; expected keys: {', '.join(section.model_fields)}"  # type: ignore[union-attr]
    # A union reports every member that did not fit; the one that came furthest (an entry of a list, a range) has the
    # value that is really wrong.
    wrong = max(items, key=lambda item: len(item["loc"]))["input"]
    expected = " or ".join(dict.fromkeys(_expectation(item["msg"]) for item in items))
    return f"{name} is {_show(wrong)}; expected {expected}"


# What vLLM and SGLang call it, where no likeness leads from one name to the other.
_NAMES_ELSEWHERE = {
    "gpu_memory_utilization": "runtime.mem_fraction_static",
    "max_num_seqs": "runtime.max_running_requests",
    "context_length": "runtime.max_model_len",
    "max_seq_len": "runtime.max_model_len",
    "block_size": "runtime.page_size",
    "chunked_prefill_size": "runtime.max_num_batched_tokens",
    "enforce_eager": "cudagraph.mode: none",
    "disable_cuda_graph": "cudagraph.mode: none",
    "cudagraph_capture_sizes": "cudagraph.decode_requests",
    "cuda_graph_bs": "cudagraph.decode_requests",
}


def _describe_unknown_key(key: tuple[str, ...]) -> str:
    sections = {name: field.annotation.model_fields for name, field in EngineConfig.model_fields.items()}  # type: ignore[union-attr]
    if len(key) == 1:
        # A key that was written without its section, such as `device: cpu` at the top level, is found in its section.
        closest = _closest(key[0], list(sections)) or next(
            (f"{section}.{near}" for section, fields in sections.items() if (near := _closest(key[0], list(fields)))),
            None,
        )
        listed = f"known sections: {', '.join(sections)}"
    else:
        near = _closest(key[1], list(sections[key[0]]))
        closest = f"{key[0]}.{near}" if near else None
        listed = f"known: {', '.join(sections[key[0]])}"
    closest = _NAMES_ELSEWHERE.get(key[-1], closest)
    hint = f"; did you mean {closest}?" if closest else ""
    return f"{'.'.join(key)} is not a known key{hint} ({listed})"


def _closest(name: str, known: list[str]) -> str | None:
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)


def _expectation(message: str) -> str:
    """Pydantic's message as the rest of 'expected …'."""
    for start in ("Value error, ", "Input should be ", "Input should "):
        message = message.removeprefix(start)
    return message.replace("a valid tuple", "a list")


def _show(value: Any) -> str:
    text = _SHORT.repr(value)  # a few aliases of a YAML may stand for more than memory holds
    return text if len(text) <= 80 else f"{text[:77]}..."


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 100
