"""The scheduler's settings (SchedulerConfig) and its figures at any time (SchedulerStats). Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from mllm_compile.runtime.config_sections import CudaGraphSection, MaxStepMs, RuntimeSection
from mllm_compile.runtime.errors import ConfigError, RequestError
from mllm_compile.runtime.media.request import RequestMedia
from mllm_compile.runtime.media.tower import MAX_FEATURES
from mllm_compile.runtime.schedule.rope_lengths import RopeLengths
from mllm_compile.runtime.schedule.tiers.figures import TierFigures
from mllm_compile.runtime.sources.request import RequestSource


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Limits of the scheduler.

    Raises:
        ConfigError: values that cannot work together.
    """

    max_running_requests: int
    """Requests that hold a row at once: rows 1 … max_running_requests of ReqToTokenPool, whose row 0 is the dummy."""
    max_num_batched_tokens: int
    """Tokens of one step; a prompt is cut into chunks by what the decodes leave of it. At least max_running_requests,
    so that every decode fits and a prompt, which holds one of the rows, always has a token left."""
    max_model_len: int
    """Longest prompt and output together, in tokens."""
    page_size: int
    """Tokens of a KV page."""
    num_pages: int
    """Pages of the KV pool with the dummy page 0, which is never handed out."""
    enable_prefix_cache: bool = True
    max_step_ms: MaxStepMs = "none"
    """Most time of a step with decodes and prompts; pace.py."""
    step_sizes: tuple[int, ...] = ()
    """Token counts of a step with prompts for which CUDA graphs are captured, ascending."""
    query_blocks: float = 0.0
    """Blocks of 128 queries of one prompt that the device attends for side by side; 0: not known."""
    divide_prefix: bool = False
    """Blocks share what is before few tokens of a prompt; attention/flashinfer/prefix_parts.py."""
    pipeline_parallel_size: int = 1
    """Stages of the model, which compute steps of different requests at once; stage_turns.py."""
    num_snapshots: int = 0
    """States of prefixes that the prefix cache keeps; 0 of a model whose layers carry none."""
    rope: RopeLengths | None = None
    """How RoPE's frequencies follow the length of a text; None: they do not."""
    max_source_len: int = 0
    """Most states of an encoder-decoder's source; 0 of another model."""

    @classmethod
    def of(
        cls,
        runtime: RuntimeSection,
        cudagraph: CudaGraphSection,
        num_pages: int,
        num_snapshots: int = 0,
        rope: RopeLengths | None = None,
        query_blocks: float = 0.0,
        max_source_len: int = 0,
    ) -> SchedulerConfig:
        """The limits that a config names, with `num_pages`, the dummy page included."""
        of_model: dict[str, Any] = {
            "num_pages": num_pages,
            "num_snapshots": num_snapshots,
            "rope": rope,
            "query_blocks": query_blocks,
            "max_source_len": max_source_len,
            "divide_prefix": runtime.takes("divide_prefix"),
        }
        of_model["step_sizes"] = tuple(sorted({*cudagraph.piecewise_tokens, *cudagraph.mixed_tokens}))
        names = {field.name for field in fields(cls)} - set(of_model)
        return cls(**of_model, **{name: getattr(runtime, name) for name in names})

    def __post_init__(self) -> None:
        least = {"max_running_requests": 1, "max_num_batched_tokens": 1, "max_model_len": 2, "page_size": 1}
        for name, minimum in {**least, "num_pages": 2, "num_snapshots": 0}.items():
            value = getattr(self, name)
            if value < minimum:
                raise ConfigError(f"{name} is {value}; expected at least {minimum}")
        if self.max_num_batched_tokens < self.max_running_requests:
            raise ConfigError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_running_requests "
                f"{self.max_running_requests}: a step could not hold one token of each running request. "
                "Raise max_num_batched_tokens or lower max_running_requests."
            )

    @property
    def max_features_per_step(self) -> int:
        """Features of the images that have tokens in a step; an image with more is computed alone."""
        return min(self.max_num_batched_tokens, MAX_FEATURES)

    def check_whole_images(self, media: RequestMedia) -> None:
        """
        Raises:
            RequestError: an image that one step has to have whole may never find room beside decodes.
        """
        most = self.max_num_batched_tokens - self.max_running_requests + 1
        longest = max((image.end - image.start for image in media.images if image.sees_ahead), default=0)
        if longest > most:
            raise RequestError(
                f"an image has {longest} tokens, which this model computes in one step, but beside running requests a "
                f"step has room for {most}; raise runtime.max_num_batched_tokens to "
                f"{longest + self.max_running_requests - 1} or lower runtime.max_running_requests"
            )

    @property
    def usable_pages(self) -> int:
        """All pages but the dummy."""
        return self.num_pages - 1

    @property
    def max_tokens_per_request(self) -> int:
        """Longest prompt and output that one request can have alone; the last sampled token needs no KV."""
        return min(self.max_model_len, self.usable_pages * self.page_size + 1)

    def pages_of_source(self, source: RequestSource | None) -> int:
        """Pages that a request's source takes.

        Raises:
            RequestError: it is longer than any may be.
        """
        length = 0 if source is None else source.length
        if length > self.max_source_len:
            raise RequestError(
                f"the encoder's prompt has {length} tokens; expected at most {self.max_source_len}. Shorten it."
            )
        return -(-length // self.page_size)

    def max_new_tokens(self, prompt_len: int, max_tokens: int | None, source_pages: int = 0) -> int:
        """How many tokens a request may get: max_tokens clipped to max_model_len; None: all that fit.

        Args:
            source_pages: pages that its source takes.

        Raises:
            RequestError: the request could never run.
        """
        if prompt_len == 0:
            raise RequestError("the prompt is empty; a request needs at least one token to compute")
        if prompt_len >= self.max_model_len:
            raise RequestError(
                f"the prompt has {prompt_len} tokens, but max_model_len is {self.max_model_len} with the output "
                "included; shorten the prompt, or raise runtime.max_model_len if the model takes more"
            )
        most = min(self.max_model_len, (self.usable_pages - source_pages) * self.page_size + 1)
        rest = most - prompt_len
        wanted = rest if max_tokens is None else min(max_tokens, self.max_model_len - prompt_len)
        if wanted > rest or rest < 1:
            num_written = prompt_len + max(wanted, 1) - 1
            attended = f" ({source_pages} of them for images, sound or text that it attends to)" if source_pages else ""
            raise RequestError(
                f"a prompt of {prompt_len} tokens with max_tokens {max_tokens} needs "
                f"{source_pages - (-num_written // self.page_size)} KV pages of {self.page_size} tokens{attended}, "
                f"but only {self.usable_pages} exist; lower max_tokens or the prompt, or raise mem_fraction_static"
            )
        return wanted


@dataclass(frozen=True, kw_only=True)
class SchedulerStats:
    """Figures at one moment; those from prefix_queried_tokens to recomputed_tokens count from the start."""

    running: int
    waiting: int
    pages_total: int
    pages_used: int  # held by requests, shared ones counted once
    pages_cached: int  # owned by the prefix cache, in use or not
    prefix_queried_tokens: int  # prompt tokens of admitted requests that asked the prefix cache
    prefix_hit_tokens: int  # of these, tokens that came out of it
    preemptions: int
    recomputed_tokens: int  # tokens whose KV was lost to preemptions and not found in the prefix cache again
    snapshots_kept: int = 0  # prefixes whose state the prefix cache has
    snapshots_total: int = 0  # rows for such states
    sessions: int = 0  # that are known
    sessions_ended: int = 0  # by a caller
    ended_pages_evicted: int = 0  # pages of no further use that were given up
    tiers: tuple[TierFigures, ...] = ()  # of the memory behind the KV cache
    step_bound_ms: float | None = None  # of the last step with decodes and prompts; None: there was none
