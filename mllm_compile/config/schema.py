"""The user's config: the YAML file, validated and frozen.

Owns the keys, their ranges and their defaults. `auto` is left: `resolution/` replaces it once, when the model's
folder and the device are known. Nothing here imports torch, so that a mistake in a file is reported at once.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from mllm_compile.config.mistakes import describe_mistakes, show
from mllm_compile.config.names import check_adapter_name
from mllm_compile.config.schema_base import (
    Auto,
    NameList,
    NamePair,
    PathText,
    Section,
    SizeList,
    anchored_model_path,
    without_repeats,
)
from mllm_compile.config.schema_runtime import RuntimeConfig
from mllm_compile.config.schema_speculative import SpeculativeConfig
from mllm_compile.config.yaml_file import read_yaml
from mllm_compile.errors import ConfigError
from mllm_compile.files.user_path import user_path
from mllm_compile.runtime.config_sections import (
    DtypeName,
    GraphMode,
)
from mllm_compile.runtime.pooling.facts import ModelTask

HeadQuantization = Literal["none", "fp8", "int4"]
MAX_ADAPTERS = 256
MAX_ADAPTER_RANK = 512


class ModelConfig(Section):
    """The model, and how its weights are read."""

    path: PathText
    """A Hugging Face hub id (`Qwen/Qwen3-0.6B`) or a local folder with `config.json` and safetensors files."""

    revision: str | None = None
    """Branch, tag or commit of the hub repository; null takes the main branch. Refused for a local folder."""

    dtype: Literal[Auto, DtypeName] = "auto"
    """Type of weights and activations. auto: the checkpoint's on a GPU, bfloat16 on a CPU with AMX, else float32."""

    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """Where weights come from. dummy: random ones from `runtime.seed`, for machines that only have a `config.json`;
    experts' in MXFP4 if it says so."""

    quantization: Literal["auto", "none", "dequantize", "keep", "keep_a8", "fp8", "int8", "int4"] = "auto"
    """The weights of linears in memory. auto: as the checkpoint has them, if linears compute with its quantisation
    (docs/quantised.md), else in `dtype`. dequantize: in `dtype`. none: likewise; a quantised checkpoint is refused.
    keep: as the checkpoint has them, or it is refused. keep_a8: likewise, with inputs rounded to eight bits, on a CPU.
    fp8, int4: in eight or four bits, rounded to the nearest while a plain checkpoint is read; dummy weights too. int8:
    likewise, with inputs rounded to eight bits, on a CPU."""

    lm_head_quantization: HeadQuantization = "none"
    """The head's weight in memory. none: as `quantization` has it, which leaves a plain one in `dtype`, but for int8.
    fp8, int4: a plain one in eight or four bits, rounded to the nearest while it is read; dummy weights too. A tied
    embedding stays, beside it."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models that Transformers itself does not know."""

    task: Literal[Auto, ModelTask] = "auto"
    """The task of the model (docs/encoders.md). auto: by the class that config.json names, and embed where the
    folder has sentence-transformers' modules.json."""

    classifier_from_token: NamePair | None = None
    """The tokens that say no and yes, of a causal LM that reranks. A pair's score is the probability of yes of the
    two."""

    score_template: str | None = None
    """The text that a pair is read as, of a model that scores pairs, with `{query}` and `{document}` once each: what
    its card writes around them. None: the tokenizer's own way of pairs."""

    split_special_tokens: bool = False
    """Read special tokens in users' texts, such as `<|im_end|>`, as other text; those that a chat template writes stay
    special. false: as the model's `tokenizer_config.json` says; nearly always they become the tokens."""


class CompileConfig(Section):
    """How the pieces between two attentions are compiled."""

    backend: Literal["inductor", "eager"] = "inductor"
    """inductor compiles; eager runs the pieces as they were traced, for debugging and for tests."""

    disable_passes: NameList = ()
    """Names of optional graph passes to leave out, as `mllm-compile inspect` prints them."""

    @field_validator("disable_passes")
    @classmethod
    def _no_name_twice(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return without_repeats(names)


class CudaGraphConfig(Section):
    """The batch shapes that are captured as CUDA graphs."""

    mode: Literal[Auto, GraphMode] = "auto"
    """auto: full_and_piecewise on a GPU, none on a CPU (which has no CUDA graphs)."""

    piecewise_tokens: Auto | SizeList = "auto"
    """Token counts of a step for which the pieces between attentions are captured; of models that pool, whole steps."""

    decode_requests: Auto | SizeList = "auto"
    """Request counts for which a whole decode step is captured."""

    mixed_tokens: Auto | SizeList = "auto"
    """Token counts for which a whole step with prompts is captured, attention included, decodes among them or not.
    auto: on Hopper, of models up to 2048 wide, whose pieces and attentions run faster than the host launches them;
    [] for none."""

    @field_validator("piecewise_tokens", "decode_requests")
    @classmethod
    def _some_sizes(cls, sizes: Auto | tuple[int, ...]) -> Auto | tuple[int, ...]:
        if not sizes:
            raise ValueError("at least one size; to capture nothing set cudagraph.mode: none")
        return sizes

    @field_validator("piecewise_tokens", "decode_requests", "mixed_tokens")
    @classmethod
    def _in_order(cls, sizes: Auto | tuple[int, ...]) -> Auto | tuple[int, ...]:
        return "auto" if sizes == "auto" else tuple(sorted(without_repeats(sizes)))


class LoraConfig(Section):
    """Adapters (LoRA), which requests name (docs/adapters.md)."""

    max_adapters: Annotated[int, Field(ge=0, le=MAX_ADAPTERS)] = 0
    """Most adapters on the device at once; 0: none are served. Each takes memory, used or not."""

    max_rank: Annotated[int, Field(ge=1, le=MAX_ADAPTER_RANK)] = 16
    """Highest rank of an adapter."""

    targets: Auto | NameList = "auto"
    """Last parts of the names of modules that adapters may change, such as q_proj, embed_tokens or lm_head; all-linear
    is every linear but the head. auto: all-linear."""

    dora: bool = False
    """Adapters may be DoRA's (use_dora), which scale each output; the others pay for reading a scale."""

    adapters: dict[str, PathText] = Field(default={})
    """Adapters to begin with: a folder as PEFT writes it, by the name that requests use."""

    @field_validator("targets")
    @classmethod
    def _some_targets(cls, targets: Auto | tuple[str, ...]) -> Auto | tuple[str, ...]:
        if targets == "auto":
            return targets
        if not targets or not all(re.fullmatch(r"\w+|all-linear", name) for name in targets):
            raise ValueError(f"auto, or last parts of modules' names such as q_proj; got {show(targets)}")
        return without_repeats(targets)

    @field_validator("adapters")
    @classmethod
    def _names(cls, adapters: dict[str, str]) -> dict[str, str]:
        for name in adapters:
            check_adapter_name(name)
        return adapters

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.max_adapters:
            return self
        for name in self.model_fields_set - {"max_adapters"}:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"max_adapters of at least 1, without which {name} has no effect")
        return self


class StructuredOutputsConfig(Section):
    """The library that keeps answers to the form that a request asks for."""

    backend: Literal["auto", "llguidance", "xgrammar"] = "auto"
    """auto: llguidance, and xgrammar for what that does not take."""

    threads: Auto | Annotated[int, Field(ge=1, le=64)] = "auto"
    """Threads that find the tokens which may follow. auto: a quarter of the processors, one to four."""


class MediaConfig(Section):
    """Images that requests name by an address."""

    allowed_domains: NameList = ()
    """Hosts that they are fetched from, over http and https; empty: no address is fetched."""

    @field_validator("allowed_domains")
    @classmethod
    def _hosts(cls, domains: tuple[str, ...]) -> tuple[str, ...]:
        for domain in domains:
            if not re.fullmatch(r"[\w.-]+|[\da-fA-F:.]+", domain, re.ASCII):
                raise ValueError(
                    f"names of hosts such as images.example.org, without scheme, port or path; got {domain!r}"
                )
        return without_repeats(tuple(domain.lower() for domain in domains))


class CacheConfig(Section):
    """The folder of compiled runtimes."""

    dir: PathText = "auto"
    """A folder, or auto: $MLLM_COMPILE_CACHE, else `mllm_compile` in the user's ($XDG_CACHE_HOME, else ~/.cache)."""


_OPTIONAL_SECTIONS = ("compile", "cudagraph", "runtime", "speculative", "lora", "structured_outputs", "media", "cache")


class EngineConfig(Section):
    """One YAML file. Everything but `model.path` has a default; a mistake is a ConfigError that names the key."""

    model: ModelConfig
    compile: CompileConfig = CompileConfig()
    cudagraph: CudaGraphConfig = CudaGraphConfig()
    runtime: RuntimeConfig = RuntimeConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    lora: LoraConfig = LoraConfig()
    structured_outputs: StructuredOutputsConfig = StructuredOutputsConfig()
    media: MediaConfig = MediaConfig()
    cache: CacheConfig = CacheConfig()

    def __init__(self, **sections: Any) -> None:
        # A section of a YAML whose keys are all commented out is None: it has none.
        given = {name: keys for name, keys in sections.items() if keys is not None or name not in _OPTIONAL_SECTIONS}
        try:
            super().__init__(**given)
        except ValidationError as error:
            raise ConfigError("; ".join(describe_mistakes(error, type(self)))) from None

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
            raise ConfigError(f"the top level is {show(sections)}; expected sections: {', '.join(cls.model_fields)}")
        if not_text := [key for key in sections if not isinstance(key, str)]:
            raise ConfigError(f"{not_text[0]!r} is not a known section; known: {', '.join(cls.model_fields)}")
        config = cls(**sections)
        return config if base_folder is None else config._anchored(base_folder)

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Reads and validates a YAML file.

        `model.path` and `speculative.model` are folders beside the file if there are such, or if they start with `.` or
        `..`; else hub ids. Other relative paths are beside the file too.

        Raises:
            ConfigError: the file cannot be read, is no YAML, names a key twice, or holds a wrong key or value.
        """
        path = Path(path)
        try:
            return cls.from_dict(read_yaml(path), base_folder=path.absolute().parent)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None

    def _anchored(self, folder: Path) -> Self:
        model = self.model.model_copy(update={"path": anchored_model_path(self.model.path, folder)})
        paths = {name: os.path.normpath(folder / user_path(path)) for name, path in self.lora.adapters.items()}
        lora = self.lora.model_copy(update={"adapters": paths}) if paths else self.lora
        cache = self.cache
        if cache.dir != "auto":
            cache = cache.model_copy(update={"dir": os.path.normpath(folder / user_path(cache.dir))})
        runtime = self.runtime
        for key in ("kv_offloading_memory_file", "kv_offloading_disk_path"):
            if getattr(runtime, key) is not None:
                path = os.path.normpath(folder / user_path(getattr(runtime, key)))
                runtime = runtime.model_copy(update={key: path})
        sections = {"model": model, "speculative": self.speculative.anchored(folder), "lora": lora, "cache": cache}
        return self.model_copy(update={**sections, "runtime": runtime})
