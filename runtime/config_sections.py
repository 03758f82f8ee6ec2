"""The sections of a config that the runtime reads, with every `auto` resolved. Imports no torch.

A field has the name of its key in the YAML; mllm_compile/config/schema*.py document it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

BackendName = Literal["flashinfer", "torch"]
# In torch's names.
DtypeName = Literal["float32", "float16", "bfloat16"]
KVDtypeName = Literal[DtypeName, "float8_e4m3fn"]
GraphMode = Literal["none", "piecewise", "full", "full_decode_only", "full_and_piecewise"]
# ms, or tenfold what a step's decodes take alone, which is known while serving (schedule/pace.py).
MaxStepMs = float | Literal["tenfold", "none"]
# Parts that `runtime.without` can leave out, to find a fault or measure a part; docs/debugging.md has the replacements.
Switch = Literal[
    "split_decode",
    "hopper_decode",
    "sample_in_graph",
    "whole_prompts",
    "copy_prefix",
    "divide_prefix",
    "paged_attention",
    "any_rows",
]
# Of a product of the library in steps of any number of rows. For one row of 1024 x 3072 it adds up in another order;
# and without dividing its sums 1 to 16 rows of 4096 x 12288 take 290 µs on an H200, where 64 take 28. Steps of fewer
# have all products by kernels of ours (ops/stream_linear/undivided.py), in the library's order, or are padded.
LEAST_ROWS = 64
SWITCHES: tuple[Switch, ...] = get_args(Switch)
# The scores whose softmax log-probabilities are of: the model's logits, those over the temperature, what the draw has.
LogprobsMode = Literal["raw_logprobs", "tempered_logprobs", "processed_logprobs"]
LOGPROBS_MODES: tuple[LogprobsMode, ...] = get_args(LogprobsMode)
ALL_LINEAR = "all-linear"  # a target of adapters, as PEFT names it: each linear but the head
SpeculativeMethod = Literal["none", "ngram", "suffix", "draft_model", "eagle3", "dflash", "mtp"]
# Most tokens of a draft; by_cost: it is chosen while serving (speculation/depth.py).
DraftedTokens = int | Literal["by_cost"]
# Those of captured verify steps, by cost: all requests of a step are padded to one of them.
CAPTURED_BY_COST = (1, 3, 7, 15)
MOST_BY_COST = CAPTURED_BY_COST[-1]


@dataclass(frozen=True, kw_only=True)
class CudaGraphSection:
    """`cudagraph`. Sizes ascend; they are empty where the mode captures none of that kind.

    `mixed_tokens` that were not asked for are left out where a model's attention cannot be captured with prompts, and
    `whole_prompts` is false then. `whole_prompts` and `sample_in_graph` say what serves: no key sets them. With
    `few_sizes` about half of each list is captured, for a model whose padding costs less than captures.
    """

    mode: GraphMode
    piecewise_tokens: tuple[int, ...] = ()
    decode_requests: tuple[int, ...] = ()
    mixed_tokens: tuple[int, ...] = ()
    mixed_tokens_asked: bool = False
    sample_in_graph: bool = False
    whole_prompts: bool = False
    few_sizes: bool = False


PEER_CONNECTOR = "PeerConnector"  # of engines that hand pages over to each other
KVRole = Literal["kv_both", "kv_producer", "kv_consumer"]
WritePolicy = Literal["write_through", "write_back"]


@dataclass(frozen=True, kw_only=True)
class KVTransferSection:
    """`runtime.kv_transfer_config`."""

    kv_connector: str = ""
    kv_connector_module_path: str | None = None
    kv_role: KVRole = "kv_both"
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    kv_connector_extra_config: Mapping[str, object] = field(default_factory=dict)
    timeout_s: float = 5.0
    trust_local_code: bool = False

    @property
    def names_peers(self) -> bool:
        """True if other engines are asked, or ask."""
        return self.kv_connector == PEER_CONNECTOR and not self.kv_connector_module_path

    @property
    def hosts(self) -> tuple[str, ...]:
        """Hosts and networks of the engines that may be asked."""
        given: Any = self.kv_connector_extra_config.get("hosts", ("127.0.0.0/8", "::1", "localhost"))
        return tuple(given)

    @property
    def hold_s(self) -> float:
        """Seconds that pages which another engine will fetch stay ahead of others."""
        given: Any = self.kv_connector_extra_config.get("hold_s", 60.0)
        return float(given)

    @property
    def transport(self) -> str:
        """`nixl`, or `auto`: the memory itself on one host, else TCP."""
        return str(self.kv_connector_extra_config.get("transport", "auto"))

    @property
    def import_path(self) -> str:
        """module.Class of the store; empty without one."""
        if self.names_peers:
            return ""
        module = self.kv_connector_module_path
        return f"{module}.{self.kv_connector}" if module and self.kv_connector else self.kv_connector


@dataclass(frozen=True, kw_only=True)
class KVEventsSection:
    """`runtime.kv_events_config`."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq", "null"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    @property
    def is_on(self) -> bool:
        """True if events are published."""
        return self.enable_kv_cache_events and self.publisher == "zmq"


@dataclass(frozen=True, kw_only=True)
class RuntimeSection:
    """`runtime`. `device` is `cpu` or `cuda:N`. No key sets `any_rows`: with `deterministic`, a row's numbers do not
    depend on how many rows its step has, so that steps have as many as they need."""

    device: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    nnodes: int
    node_rank: int
    master_addr: str
    master_port: int
    expert_parallel_size: int
    distributed_executor_backend: Literal["mp", "ray"]
    attention_backend: BackendName
    page_size: int
    kv_cache_dtype: KVDtypeName
    state_dtype: DtypeName
    mem_fraction_static: float
    max_model_len: int
    max_total_tokens: int | None
    max_running_requests: int
    max_num_batched_tokens: int
    enable_prefix_cache: bool
    kv_events_config: KVEventsSection
    kv_offloading_size: float
    kv_offloading_min_gain: float
    kv_offloading_memory_file: str | None
    kv_offloading_disk_path: str | None
    kv_offloading_disk_size: float
    kv_offloading_write_policy: WritePolicy | None
    """None: there is no memory behind the KV cache."""
    kv_transfer_config: KVTransferSection
    kv_load_failure_policy: Literal["recompute"]
    deterministic: bool
    any_rows: bool
    enable_sleep_mode: bool
    pinned: bool
    expert_stats: bool
    routed_experts: bool
    skip_compiled: bool
    seed: int
    logprobs_mode: LogprobsMode
    max_step_ms: MaxStepMs
    cascade_attention: bool
    without: tuple[Switch, ...]
    enable_dbo: bool
    dbo_prefill_token_threshold: int

    def takes(self, switch: Switch) -> bool:
        """False if the config leaves this out."""
        return switch not in self.without

    @property
    def sees_experts(self) -> bool:
        """True if the program has what sees the choice of experts."""
        return self.expert_stats or self.routed_experts

    @property
    def num_ranks(self) -> int:
        """Processes that a model is spread over; only one of the sizes of tensors and experts is more than 1."""
        return max(self.tensor_parallel_size, self.expert_parallel_size) * self.pipeline_parallel_size

    def stage_of(self, rank: int) -> int:
        """The stage of a rank: rank 0, which samples, has the last one, and the last rank the first."""
        return self.pipeline_parallel_size - 1 - rank // (self.num_ranks // self.pipeline_parallel_size)

    def part_of(self, rank: int) -> int:
        """The part of its stage's weights that a rank has."""
        return rank % (self.num_ranks // self.pipeline_parallel_size)

    @property
    def max_requests_of_ranks(self) -> int:
        """Most requests in one step on all ranks together; where experts are spread each rank has its own."""
        return self.max_running_requests * self.expert_parallel_size


@dataclass(frozen=True, kw_only=True)
class SpeculativeSection:
    """`speculative`."""

    method: SpeculativeMethod = "none"
    num_speculative_tokens: DraftedTokens = "by_cost"
    model: str | None = None
    token_map: str | None = None
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float | None = None  # None: factory.py chooses
    suffix_decoding_min_token_prob: float = 0.1
    synthetic_acceptance_length: float | None = None

    @property
    def has_model(self) -> bool:
        """True if a model of its own drafts."""
        return self.method == "draft_model" or self.reads_hidden_states

    @property
    def reads_hidden_states(self) -> bool:
        """True if it reads hidden states of the model."""
        return self.method in ("eagle3", "dflash", "mtp")

    @property
    def most_drafted(self) -> int:
        """Most tokens of a draft; 0 without drafts."""
        if self.method == "none":
            return 0
        return MOST_BY_COST if self.num_speculative_tokens == "by_cost" else self.num_speculative_tokens

    @property
    def captured_depths(self) -> tuple[int, ...]:
        """Tokens of drafts in captured verify steps, ascending; each step has one of them for all requests."""
        if self.method == "none":
            return ()
        return CAPTURED_BY_COST if self.by_cost else (self.most_drafted,)

    @property
    def by_cost(self) -> bool:
        """True if it is chosen while serving how many tokens are drafted."""
        return self.num_speculative_tokens == "by_cost"

    def most_drafted_of(self, num_requests: int) -> int:
        """Most drafted tokens of a step with so many requests."""
        if self.most_drafted and self.num_speculative_tokens == "by_cost":
            return most_drafted_by_cost(num_requests)
        return num_requests * self.most_drafted


@dataclass(frozen=True, kw_only=True)
class LoraSection:
    """`lora`. Without targets all linears that can be are.

    Attributes:
        of_sounds: the adapter of requests with sounds that name none; "": they have none.
    """

    max_adapters: int = 0
    max_rank: int = 16
    targets: tuple[str, ...] = ()
    dora: bool = False
    adapters: Mapping[str, str] = field(default_factory=dict)
    of_sounds: str = ""


def most_drafted_by_cost(num_requests: int) -> int:
    """Most drafted tokens of a step: with many requests few each, as memory is kept for the logits of all."""
    return min(num_requests * MOST_BY_COST, max(112, 3 * num_requests))
