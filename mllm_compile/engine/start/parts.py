"""The parts of an engine: assemble.py makes them, engine.py owns them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.engine.core.steps import StepSubmitter
from mllm_compile.engine.decoder_prompts import DecoderPrompts
from mllm_compile.engine.prompts import MediaSource, PromptTokenizer
from mllm_compile.engine.requests import GrammarSource
from mllm_compile.engine.stats import ExpertsSource, ForwardTimesSource
from mllm_compile.runtime.media.tower import Tower
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.schedule.data_parallel import DataParallelScheduler
from mllm_compile.runtime.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from mllm_compile.engine.core.adapter_queue import AdapterParts
    from mllm_compile.runtime.device.sleep import SleepingMemory  # torch, which an engine imports when it starts
    from mllm_compile.runtime.updates.live import LiveWeights


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """The parts of an engine; `assemble` makes them from a config, tests from fakes.

    Attributes:
        scheduler, step_runner: used by the engine's thread alone from now on.
        tokenizer: None when the model has none.
        vocab_size: rows of the model's embedding.
        eos_token_ids: ids that end a completion.
        default_params: for requests without SamplingParams.
        check_device: raises when the device cannot be used any more.
        check_idle: raises when no step could run any more; called while the engine is idle.
        shutdown: gives the device's memory back; called once, after the last step.
        prepare_thread: called on the engine's thread before its first step.
        grammars: compiles SamplingParams.structured_outputs; None: they are refused.
        media: prepares prompts with images; None: they are refused.
        config: the engine's config, every `auto` resolved.
        folder: the runtime's; None: they come from nowhere on disk.
        tokenizer_files: the files that texts and images are read with, by name; for a process that reads some too.
        forward_times: gives (num_tokens, count, median in ms) rows, for the figures.
        experts_chosen: gives each layer's counts by expert, likewise.
        snapshot_bytes: what the state of a cached prefix takes, likewise.
        tower: what prompts with images are checked with; a text: why none are served.
        adapters: the device's side of adapters; None: none are served.
        decoder: the decoder's side of prompts, of an encoder-decoder; None: it is another model.
        live: the weights, for updates; a text: why there are none.
        memory: what is given back while it sleeps; a text: why nothing is.
        num_local: ranks of a host.
        tell_ranks: sends the other ranks a message, on the engine's thread; None: there is one rank.
        ask_ranks: the least of a number of each rank, which all give at the same message; likewise.
        wait_ranks: returns when they have done what was sent.
    """

    scheduler: Scheduler | DataParallelScheduler
    step_runner: StepSubmitter
    tokenizer: PromptTokenizer | None
    vocab_size: int
    eos_token_ids: frozenset[int] = frozenset()
    default_params: SamplingParams = field(default_factory=SamplingParams)
    check_device: Callable[[], None] = lambda: None
    check_idle: Callable[[], None] = lambda: None
    shutdown: Callable[[], None] = lambda: None
    prepare_thread: Callable[[], None] = lambda: None
    grammars: GrammarSource | None = None
    media: MediaSource | None = None
    config: ResolvedConfig | None = None
    folder: Path | None = None
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    forward_times: ForwardTimesSource = tuple
    experts_chosen: ExpertsSource = dict
    snapshot_bytes: int = 0
    tower: Tower | str = "the model takes text alone"
    adapters: AdapterParts | None = None
    decoder: DecoderPrompts | None = None
    live: LiveWeights | str = "there are no weights to update"
    memory: SleepingMemory | str = "there is no memory to give back"
    num_local: int = 1
    tell_ranks: Callable[[Iterable[memoryview]], None] | None = None
    ask_ranks: Callable[[int], int] | None = None
    wait_ranks: Callable[[], None] = lambda: None
