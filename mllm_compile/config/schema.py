"""The user's config: the YAML file, validated and frozen.

Owns the keys, their ranges and their defaults. `auto` is left as it is: `resolve.py` replaces it once, when the model's
folder and the device are known. Nothing here imports torch, so that a mistake in a file is reported at once.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from mllm_compile.config.mistakes import describe_mistakes, show
from mllm_compile.config.names import check_adapter_name, is_local_path
from mllm_compile.config.yaml_file import read_yaml
from mllm_compile.errors import ConfigError
from mllm_compile.files.user_path import is_homeless, user_path
from mllm_compile.runtime.config_sections import (
    DtypeName,
    GraphMode,
    KVRole,
    LogprobsMode,
    SpeculativeMethod,
    Switch,
)
from mllm_compile.runtime.pooling.facts import ModelTask
from mllm_compile.runtime.weights.file_names import is_gguf

MAX_PAGE_SIZE = 256
MAX_RANKS = 16
MAX_DRAFTED = 32  # tokens of a draft
MAX_ADAPTERS = 256
MAX_ADAPTER_RANK = 512


def _checked_path(text: str) -> str:
    if not text or "\0" in text:
        raise ValueError("a path: a text that is not empty and has no null byte")
    if is_homeless(text):
        raise ValueError("a path from / on, or below a home folder that is known")
    return text


Auto = Literal["auto"]
PositiveInt = Annotated[int, Field(ge=1)]
PathText = Annotated[
    str,
    BeforeValidator(lambda value: os.fspath(value) if isinstance(value, os.PathLike) else value),
    AfterValidator(_checked_path),
]
_LIST_IS_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
NameList = Annotated[tuple[str, ...], _LIST_IS_TUPLE]
SizeList = Annotated[tuple[PositiveInt, ...], _LIST_IS_TUPLE]
SwitchList = Annotated[tuple[Switch, ...], _LIST_IS_TUPLE]


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
    """Type of weights and activations. auto: the checkpoint's on a GPU, bfloat16 on a CPU with AMX, else float32."""

    load_format: Literal["auto", "safetensors", "dummy"] = "auto"
    """Where weights come from. dummy: random ones from `runtime.seed`, for machines that only have a `config.json`."""

    quantization: Literal["auto", "none", "dequantize", "keep", "keep_a8", "fp8", "int8", "int4"] = "auto"
    """The weights of linears in memory. auto: as the checkpoint has them, if linears compute with its quantisation
    (docs/quantised.md), else in `dtype`. dequantize: in `dtype`. none: likewise; a quantised checkpoint is refused.
    keep: as the checkpoint has them, or it is refused. keep_a8: likewise, with inputs rounded to eight bits, on a CPU.
    fp8, int4: in eight or four bits, rounded to the nearest while a plain checkpoint is read; dummy weights too. int8:
    likewise, with inputs rounded to eight bits, on a CPU."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for models that Transformers itself does not know."""

    task: Literal[Auto, ModelTask] = "auto"
    """The task of the model (docs/encoders.md). auto: by the class that config.json names, and embed where the
    folder has sentence-transformers' modules.json."""

    classifier_from_token: Annotated[tuple[str, str], _LIST_IS_TUPLE] | None = None
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
        return _without_repeats(names)


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
        return "auto" if sizes == "auto" else tuple(sorted(_without_repeats(sizes)))


class KVEventsConfig(Section):
    """Events on the blocks of the prefix cache, for routers (docs/sessions.md)."""

    enable_kv_cache_events: bool = False
    """Tell which blocks are stored and removed, with their token ids: all who reach the endpoint read prompts."""

    publisher: Literal["zmq", "null"] = "zmq"
    """null: none are published."""

    endpoint: str = "tcp://*:5557"
    """The address of the ZMQ socket. With `*` or `::`, and of ipc:// and inproc://, subscribers connect to it; else it
    is a subscriber's. Rank n of experts over ranks has the port n higher."""

    replay_endpoint: str | None = None
    """The address at which past events are sent again."""

    buffer_steps: Annotated[int, Field(ge=1, le=1_000_000)] = 10_000
    """Steps whose events are kept for that."""

    hwm: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000
    """Steps that wait for a slow subscriber; later ones are dropped for it."""

    max_queue_size: Annotated[int, Field(ge=1, le=10_000_000)] = 100_000
    """Steps that wait to be published; where there are more, all blocks are told as removed."""

    topic: str = ""
    """The first part of each message; llm-d reads kv@POD@MODEL."""

    @field_validator("endpoint", "replay_endpoint")
    @classmethod
    def _address(cls, address: str | None) -> str | None:
        if address is not None and not re.fullmatch(r"tcp://\S+:(\d{1,5}|\*)|(ipc|inproc)://\S+", address):
            raise ValueError("an address such as tcp://*:5557")
        return address


class KVTransferConfig(Section):
    """A store of your own behind the host's memory (docs/lab/tiers.md), or other engines (docs/apart.md), by vLLM's
    names."""

    kv_connector: str = ""
    """package.module.Class, or the class alone with the key below; PeerConnector: other engines. \"\": none."""

    kv_connector_module_path: str | None = None
    """The module that has the class."""

    kv_role: KVRole = "kv_both"
    """kv_both: pages are stored and loaded. PeerConnector's kv_producer hands them over, its kv_consumer fetches."""

    kv_ip: str = "127.0.0.1"
    """The address of this host at which others fetch pages, with PeerConnector."""

    kv_port: int = Field(default=14579, ge=0, le=65535)
    """Its port; 0: a free one."""

    kv_connector_extra_config: dict[str, Any] = {}
    """Options of the class; of PeerConnector hosts (that may be asked) and hold_s."""

    timeout_s: float = Field(default=5.0, gt=0.0, le=600.0)
    """Longest time of a call; the engine goes on without the store then."""

    trust_local_code: bool = False
    """Import the module, and run what it says, as this user."""

    @field_validator("kv_connector", "kv_connector_module_path")
    @classmethod
    def _name(cls, name: str | None) -> str | None:
        if name and not all(part.isidentifier() for part in name.split(".")):
            raise ValueError("names with dots between, such as package.module.Class")
        return name


class RuntimeConfig(Section):
    """The device, the memory and the batches of serving."""

    device: str = "auto"
    """auto (a GPU where there is one) | cpu | cuda | cuda:N."""

    tensor_parallel_size: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    """Ranks that each compute a part of every layer, a process each; on GPUs the device and those behind it."""

    pipeline_parallel_size: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    """Stages that each compute a part of the layers, one behind the other; each has tensor_parallel_size ranks."""

    nnodes: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    """Hosts that have equally many of the stages; each runs the same command with its own node_rank."""

    node_rank: Annotated[int, Field(ge=0, lt=MAX_RANKS)] = 0
    """The number of this one; node 0 has the engine."""

    master_addr: str = "127.0.0.1"
    """An address of node 0, at which the others reach it."""

    master_port: Annotated[int, Field(ge=1, le=65535)] = 29501
    """The port of node 0 at which it waits for the others."""

    expert_parallel_size: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    """Ranks that each have a part of a mixture's experts and requests of their own, with their keys and values; other
    weights are whole on each. max_running_requests and max_num_batched_tokens are then of each rank."""

    enable_dbo: bool = False
    """With tensor_parallel_size: compute steps with prompts in two halves beside each other (dual batch overlap): sums
    over ranks of one half are hidden behind the other's work. docs/parallel.md has measurements."""

    dbo_prefill_token_threshold: PositiveInt = 8192
    """Least tokens of a step that enable_dbo divides."""

    distributed_executor_backend: Literal["mp", "ray"] = "mp"
    """Ranks are started on this host by the engine's process (mp), or on its nodes by Ray, in a placement group."""

    attention_backend: Literal["auto", "flashinfer", "torch"] = "auto"
    """auto: flashinfer on a GPU, torch on a CPU and for float32."""

    page_size: Auto | Annotated[int, Field(ge=1, le=MAX_PAGE_SIZE)] = "auto"
    """Tokens in one page of the KV cache."""

    kv_cache_dtype: Literal[Auto, DtypeName, "fp8_e4m3"] = "auto"
    """Type of the KV cache: the model's own (auto), or fp8_e4m3, which takes half of bfloat16's memory."""

    state_dtype: DtypeName = "float32"
    """Type of the sums that recurrent layers (gated delta nets, Mamba) keep of each request. float32 is what models are
    trained with; bfloat16 takes half of the memory, and errors add up over a long request."""

    mem_fraction_static: float = Field(default=0.9, gt=0.0, lt=1.0)
    """The share of a GPU's memory for weights, KV cache and graphs together. (On a CPU the KV cache takes a quarter of
    what is free.)"""

    max_model_len: Auto | Annotated[int, Field(ge=2)] = "auto"
    """Most tokens of one request, prompt and answer together."""

    max_total_tokens: PositiveInt | None = None
    """Most tokens in the KV cache, at least max_model_len; none given: as many as fit."""

    max_running_requests: Auto | PositiveInt = "auto"
    """Most requests in one step; more of them wait."""

    max_num_batched_tokens: Auto | PositiveInt = "auto"
    """Most tokens in one step; longer prompts are computed in chunks."""

    max_step_ms: Literal["auto", "none"] | Annotated[float, Field(gt=0)] = "none"
    """Most milliseconds of a step in which prompts are computed beside running answers: it is the longest gap between
    an answer's tokens. Prompts are cut to it, by what steps were seen to take. auto: ten times what the answers' next
    tokens take alone, which costs prompts about a tenth of their throughput; none: cut by max_num_batched_tokens."""

    enable_prefix_cache: bool = True
    """Keep the KV cache of finished requests for prompts that begin alike."""

    kv_events_config: KVEventsConfig = KVEventsConfig()
    """Events on what it keeps, for routers (docs/sessions.md): {enable_kv_cache_events: true, endpoint: …, …}."""

    kv_offloading_size: float = Field(default=0.0, ge=0.0, le=65536.0)
    """GiB of the host's memory behind the KV cache: prefixes that the device has no room for are kept there, and
    loaded (docs/tiers.md). 0: none."""

    kv_offloading_min_gain: float = Field(default=1.0, ge=0.0, le=1e6)
    """A prefix is loaded where computing it takes at least so many times as long, by what both were seen to take. 0:
    always."""

    kv_offloading_memory_file: PathText | None = None
    """A file for that memory, as in /dev/shm: the next server finds prefixes there (docs/tiers.md). It is as secret as
    prompts."""

    kv_offloading_disk_path: PathText | None = None
    """A folder behind that memory, whose files are there again after a restart (docs/tiers.md). It is as secret as
    prompts."""

    kv_offloading_disk_size: float = Field(default=0.0, ge=0.0, le=1048576.0)
    """GiB of files in it."""

    kv_offloading_write_policy: Literal["write_through", "write_back"] = "write_through"
    """The folder gets what the host's memory gets at once, so that a crash loses nothing (write_through), or what that
    is about to give up, and the rest at the end (write_back), which wears a drive less."""

    kv_transfer_config: KVTransferConfig = KVTransferConfig()
    """A store of your own in place of that folder: {kv_connector: package.module.Class, trust_local_code: true}."""

    kv_load_failure_policy: Literal["recompute"] = "recompute"
    """Pages that do not arrive are computed."""

    cascade_attention: Auto | bool = "auto"
    """Decodes of requests that begin with the same cached tokens read these once, in steps where that is estimated to
    be faster. On a GPU kernels are compiled for it, and a few more CUDA graphs captured where some prefix would pay.
    auto: where decodes are captured whole."""

    deterministic: bool = False
    """Bitwise the same answer whatever else is in the batch, however a prompt is cut, and after a prefix hit or a
    preemption. Where products depend on the number of rows, every step is then computed with exactly
    max_num_batched_tokens tokens, padding included."""

    enable_sleep_mode: bool = False
    """Take weights and KV cache so that `Engine.sleep` gives their memory back in place (docs/rollouts.md). A CPU's
    memory stays where it is."""

    pinned: bool = False
    """Never park this model where a server has several (docs/many-models.md)."""

    expert_stats: bool = False
    """Count how often each expert of a mixture is chosen, for `Engine.stats().experts`. Compiles a program of its own,
    whose steps take somewhat longer."""

    routed_experts: bool = False
    """Keep which experts each token chose beside its KV, for requests with `return_routed_experts`. Compiles a program
    of its own, as expert_stats does."""

    without: SwitchList = ()
    """Parts of serving to leave out, to find a faulty one: split_decode, hopper_decode, sample_in_graph, whole_prompts,
    copy_prefix, divide_prefix, paged_attention, any_rows. docs/debugging.md has the replacements."""

    skip_compiled: bool = False
    """Run Transformers' own model in place of the compiled one, to find which of them gives a wrong answer."""

    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of requests that bring none, and of dummy weights."""

    logprobs_mode: LogprobsMode = "raw_logprobs"
    """Distribution of the log-probabilities of requests that name none: the model's own (raw), after bias, penalties
    and temperature (tempered), or that of the draw, after filters too (processed)."""

    @field_validator("without")
    @classmethod
    def _no_name_twice(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        return _without_repeats(names)

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError("auto, cpu, cuda or cuda:N")
        return device

    @property
    def num_ranks(self) -> int:
        """Processes that a model is spread over, as RuntimeSection has it."""
        return max(self.tensor_parallel_size, self.expert_parallel_size) * self.pipeline_parallel_size


class SpeculativeConfig(Section):
    """Drafts of the next tokens, which one step checks together: answers are the same (docs/speculation.md)."""

    method: Literal[Auto, SpeculativeMethod] = "none"
    """Where drafts come from. ngram: what followed the newest tokens before, in prompt and answer. suffix: likewise,
    and in past answers, by majority. draft_model: a smaller model of the same vocabulary. eagle3, dflash: a head that
    reads the model's hidden states. mtp: the checkpoint's own layer for multi-token prediction. auto: mtp where
    the checkpoint has such a layer, else suffix. none: nowhere."""

    num_speculative_tokens: Auto | Annotated[int, Field(ge=1, le=MAX_DRAFTED)] = "auto"
    """Most tokens of a draft. auto: as many as pay, by the times of steps and what is accepted; 0 in a large batch."""

    model: PathText | None = None
    """draft_model, eagle3, dflash: a hub id or a folder, as model.path. It computes in the model's dtype."""

    token_map: PathText | None = None
    """eagle3, dflash, mtp: a file with a JSON array of token ids. The head is cut to these tokens: a pass reads less of
    it, and drafts no other token."""

    prompt_lookup_min: Annotated[int, Field(ge=1, le=64)] = 2
    """ngram: fewest of the newest tokens that are looked up."""

    prompt_lookup_max: Annotated[int, Field(ge=1, le=64)] = 4
    """ngram: most of them; the longest that is found counts."""

    suffix_decoding_max_tree_depth: Annotated[int, Field(ge=3, le=256)] = 24
    """suffix: most of the newest tokens that are compared."""

    suffix_decoding_max_cached_requests: Annotated[int, Field(ge=0, le=100_000)] = 10_000
    """suffix: past answers that are kept, of each cache_salt; 0: none. A bound on their tokens holds besides."""

    suffix_decoding_max_spec_factor: float = Field(default=1.0, gt=0.0, le=16.0)
    """suffix: a draft has at most so many tokens for each one that agrees."""

    suffix_decoding_min_token_prob: float = Field(default=0.1, ge=0.0, le=1.0)
    """suffix: a draft ends before a token that a smaller share of the places goes on with."""

    synthetic_acceptance_length: Annotated[float, Field(ge=1.0)] | None = None
    """For benchmarks: accept drafts up to this mean of tokens a step, whatever the model says. Answers are wrong."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(f"prompt_lookup_min of at most prompt_lookup_max, which is {self.prompt_lookup_max}")
        length, most = self.synthetic_acceptance_length, self.num_speculative_tokens
        if length is not None and most == "auto":
            raise ValueError("num_speculative_tokens: a number, where synthetic_acceptance_length is set")
        if length is not None and most != "auto" and length > most + 1:
            raise ValueError(f"synthetic_acceptance_length of at most num_speculative_tokens + 1, which is {most + 1}")
        if self.method in _METHODS_OF_KEYS["model"] and self.model is None:
            raise ValueError(f"method: {self.method} with speculative.model, a hub id or a folder of what drafts")
        for name in type(self).model_fields:
            wanted = _METHODS_OF_KEYS.get(name.partition("_")[0])
            is_used = name == "method" or (self.method != "none" if wanted is None else self.method in wanted)
            if not is_used and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"method: {' or '.join(wanted) if wanted else 'another than none'}, which alone reads {name}"
                )
        return self

    def anchored(self, folder: Path) -> Self:
        """The section of a file in this folder, with whole paths."""
        paths = {}
        if self.model is not None:
            paths["model"] = _anchored_model_path(self.model, folder)
        if self.token_map is not None:
            paths["token_map"] = os.path.normpath(folder / user_path(self.token_map))
        return self.model_copy(update=paths) if paths else self


# The first words of SpeculativeConfig's keys that some methods alone read.
_METHODS_OF_KEYS = {
    "prompt": ("ngram",),
    "suffix": ("suffix",),
    "model": ("draft_model", "eagle3", "dflash"),
    "token": ("eagle3", "dflash", "mtp"),
}


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

    adapters: dict[str, PathText] = {}
    """Adapters to begin with: a folder as PEFT writes it, by the name that requests use."""

    @field_validator("targets")
    @classmethod
    def _some_targets(cls, targets: Auto | tuple[str, ...]) -> Auto | tuple[str, ...]:
        if targets == "auto":
            return targets
        if not targets or not all(re.fullmatch(r"\w+|all-linear", name) for name in targets):
            raise ValueError(f"auto, or last parts of modules' names such as q_proj; got {show(targets)}")
        return _without_repeats(targets)

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
        return _without_repeats(tuple(domain.lower() for domain in domains))


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
        model = self.model.model_copy(update={"path": _anchored_model_path(self.model.path, folder)})
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


def _anchored_model_path(text: str, folder: Path) -> str:
    candidate = os.path.normpath(folder / user_path(text))
    is_there = os.path.isdir(candidate) or (is_gguf(Path(candidate)) and os.path.isfile(candidate))
    return candidate if is_local_path(text) or is_there else text


def _without_repeats(items: tuple[Any, ...]) -> tuple[Any, ...]:
    for item in items:
        if items.count(item) > 1:
            raise ValueError(f"each entry once, but {item!r} is there {items.count(item)} times")
    return items
