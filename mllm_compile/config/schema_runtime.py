"""The config's section `runtime`: the device, the memory, the batches, and what is behind the KV cache."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from mllm_compile.config.schema_base import Auto, PathText, PositiveInt, Section, SwitchList, without_repeats
from mllm_compile.runtime.config_sections import DtypeName, KVRole, LogprobsMode, WritePolicy

MAX_PAGE_SIZE = 256
MAX_RANKS = 16


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

    kv_connector_extra_config: dict[str, Any] = Field(default={})
    """Options of the class; of PeerConnector hosts (that may be asked), hold_s and transport."""

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

    kv_offloading_write_policy: Auto | WritePolicy | None = "auto"
    """The host's memory and the folder get all that is computed, and a crash loses little (write_through); or each gets
    what the one above is about to give up, and the rest at the end (write_back): together they hold more, and a drive
    is worn less. auto, null: write_through where a folder, a store or other engines are behind that memory."""

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
    """Take weights and KV cache so that `Engine.sleep` gives their memory back in place (docs/rollouts.md). From the
    first sleep of level 1 on the engine holds as much of the host's memory as its weights take. A CPU's memory stays
    where it is."""

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
        return without_repeats(names)

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
