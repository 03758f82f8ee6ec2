"""Engine: generates text for a Python program, or embeds and classifies texts, as its model does.

A thin layer: prompts.py and requests.py make requests, loop.py runs them, answers.py makes the answers. Many threads
may use one engine at once; AsyncEngine (async_engine.py) serves asyncio tasks from the same one.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, Self, Unpack

from mllm_compile.engine.answers import build_answer
from mllm_compile.engine.engine_parts import EngineParts
from mllm_compile.engine.gate import EngineState, as_pause_mode
from mllm_compile.engine.loop import EngineCore
from mllm_compile.engine.outputs import RequestOutput
from mllm_compile.engine.pauses import pause, resume
from mllm_compile.engine.pooling.outputs import (
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
)
from mllm_compile.engine.pooling.parts import PoolingParts
from mllm_compile.engine.pooling.texts import TextPrompts
from mllm_compile.engine.prompts import Message, Prompt, Prompts, is_single_prompt
from mllm_compile.engine.requests import AdapterNames, RequestBuilder, as_request_ids, warn_of_refused
from mllm_compile.engine.sequences import Submission
from mllm_compile.engine.sessions import SessionArg, SessionArgs, session_key
from mllm_compile.engine.stats import EngineStats
from mllm_compile.engine.streams import Countdown, StreamQueue, TokenStream
from mllm_compile.errors import ConfigError, RequestError
from mllm_compile.files.user_path import user_path
from mllm_compile.process.bytecode import OF_TORCH, compiled_ahead, kept_bytecode
from mllm_compile.process.no_gc import gc_paused
from mllm_compile.process.progress import Reporter, reporter_for
from mllm_compile.process.timeline import Timeline, timeline_of
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.schedule.pages.sessions import SessionState
from mllm_compile.runtime.unknown_names import tells_unknown

if TYPE_CHECKING:
    import torch

    from mllm_compile.adapters.peft_folder import Matrices
    from mllm_compile.adapters.registry import Adapter, AdapterRegistry
    from mllm_compile.config.resolved import ResolvedConfig
    from mllm_compile.config.sources import EngineSource
    from mllm_compile.engine.adapter_queue import AdapterParts
    from mllm_compile.engine.page_events import TellNews
    from mllm_compile.engine.pooling.calls import PoolingCalls
    from mllm_compile.engine.pooling.core import PoolingCore
    from mllm_compile.engine.sleep import EngineSleep
    from mllm_compile.engine.weight_updates import Options, UpdateReport, WeightUpdates
    from mllm_compile.kv_events.publisher import KVEventPublisher

# Work that is over before this shows no bar.
_BAR_AFTER_S = 1.0
_BAR_INTERVAL_S = 0.1


# vLLM's arguments of a call, and what to use here.
_OF_A_CALL = {
    "lora_request": "Load it by load_adapter(name, path), and give adapter=name.",
    "prompt_token_ids": "Give token ids as prompts, or {'prompt_token_ids': …}.",
}


def unknown_of_an_engine(name: str, known: Seq[str]) -> ConfigError:
    """The error for an argument that an engine does not take."""
    from mllm_compile.config.sources import unknown_argument

    return unknown_argument(name, known)


def unknown_of_a_call(name: str, known: Seq[str]) -> RequestError:
    """The error for an argument that a call for answers does not take."""
    if name == "use_tqdm" and "progress" in known:
        instead = "Did you mean progress?"
    else:
        instead = _OF_A_CALL.get(name) or f"Known: {', '.join(known)}."
    return RequestError(f"a call has no argument {name}. {instead}")


class Engine:
    """Serves one model.

    Use it as a context manager or call `close()`: both give all memory back. Any thread may call it.

    Attributes:
        config: the config with every `auto` resolved.
        folder: the folder of the runtime that it serves.
        tokenizer: None for a model without one, which takes token ids alone.
        vocab_size: prompts hold ids below it.
        eos_token_ids: the ids that end an answer.
        default_params: the SamplingParams of a request that has none.
        timeline: the seconds of each stage of its start.
        weights: updates of its weights in sessions, as wires make them.

    Args:
        config: a hub id, a model's folder, a YAML file, its content as an EngineConfig or a dict, or a runtime's
            folder. It compiles first when no cached runtime fits.
        reporter: where progress is shown; None: a bar on a terminal, elsewhere the log "mllm_compile.progress".
            `NullReporter()` of mllm_compile.process.progress shows nothing.
        log_interval_s: seconds between two log lines of statistics ("mllm_compile.engine", INFO) while there is work;
            0: none.
        forward_times: measure every forward, for `stats().forward_times`; the host then waits for the device around
            each.
        load_adapters: False: those of the config are not loaded.
        publish_kv_events: False: those of the config are not published; `watch_pages` tells them.

    Raises:
        MllmError: of the kind that says what is wrong with the config, the model, or the device.
    """

    @tells_unknown(unknown_of_an_engine)
    def __init__(
        self,
        config: EngineSource,
        *,
        reporter: Reporter | None = None,
        log_interval_s: float = 10.0,
        forward_times: bool = False,
        load_adapters: bool = True,
        publish_kv_events: bool = True,
    ) -> None:
        from mllm_compile.config.sources import config_or_runtime
        from mllm_compile.ranks.early_start import early_ranks

        self.timeline = timeline_of(reporter or reporter_for())
        source = config_or_runtime(config)
        with kept_bytecode(), compiled_ahead(OF_TORCH), early_ranks(source) as early:
            with self.timeline.stage("import torch"), gc_paused():
                from mllm_compile.engine.assemble import assemble_any
            parts = assemble_any(source, self.timeline, forward_times=forward_times, early=early)
        if isinstance(parts, PoolingParts):
            self._start_pooling(parts)
        else:
            self._start(parts, log_interval_s, load_adapters, publish_kv_events)

    @classmethod
    def from_parts(cls, parts: EngineParts | PoolingParts, *, log_interval_s: float = 10.0) -> Self:
        """An engine over parts that are there already."""
        engine = cls.__new__(cls)
        engine.timeline = Timeline()
        if isinstance(parts, PoolingParts):
            engine._start_pooling(parts)
        else:
            engine._start(parts, log_interval_s, load_adapters=True, publish_kv_events=True)
        return engine

    def _start(self, parts: EngineParts, log_interval_s: float, load_adapters: bool, publish_kv_events: bool) -> None:
        self.config = parts.config
        self.folder = parts.folder
        self.tokenizer_files = parts.tokenizer_files
        self.vocab_size = parts.vocab_size
        self.eos_token_ids = parts.eos_token_ids
        self.tokenizer = parts.tokenizer
        self.default_params = parts.default_params
        self.media = parts.media
        self.tower = parts.tower
        publisher = _publisher(parts.config) if publish_kv_events else None
        self._pooling: PoolingCalls | None = None
        self.core = EngineCore(
            parts.scheduler,
            parts.step_runner,
            check_device=parts.check_device,
            check_idle=parts.check_idle,
            shutdown=parts.shutdown if publisher is None else _in_order(parts.shutdown, publisher.close),
            prepare_thread=parts.prepare_thread,
            forward_times=parts.forward_times,
            experts_chosen=parts.experts_chosen,
            snapshot_bytes=parts.snapshot_bytes,
            log_interval_s=log_interval_s,
            adapters=parts.adapters,
        )
        # Also when the engine is garbage, and when the interpreter ends: a thread must not launch work into that.
        self._close = weakref.finalize(self, self.core.close)
        self.weights = _updates(self.core, parts)
        self._sleep = _sleep(self.core, self.weights, parts)
        self.adapters = None if parts.adapters is None else _registry(parts.adapters, self.core)
        self.builder = RequestBuilder(
            tokenizer=parts.tokenizer,
            vocab_size=parts.vocab_size,
            keeps_routes=parts.config is not None and parts.config.runtime.routed_experts,
            eos_token_ids=parts.eos_token_ids,
            default_params=parts.default_params,
            grammars=parts.grammars,
            media=parts.media,
            tower=parts.tower,
            adapters=self.adapters,
        )
        try:
            self.core.start()
            if publisher is not None:
                self.watch_pages(publisher.take)
            if self.adapters is not None and parts.config is not None and load_adapters:
                for name, folder in parts.config.lora.adapters.items():
                    self.load_adapter(name, folder)
        except BaseException:  # Ctrl-C, an adapter that is refused, or no thread can be started
            self._close()
            raise

    def _start_pooling(self, parts: PoolingParts) -> None:
        """The engine of a model that pools: what generates refuses every use."""
        from mllm_compile.engine.pooling.refusal import NotGenerating

        self.config, self.folder = parts.config, parts.folder
        self.tokenizer, self.tokenizer_files, self.vocab_size = parts.tokenizer, parts.tokenizer_files, parts.vocab_size
        self.eos_token_ids, self.default_params = frozenset(), SamplingParams()
        self.media, self.tower, self.adapters = None, "the model takes text alone", None
        refusing: Any = NotGenerating(parts.calls.rules.facts.tasks)
        self.core = self.builder = self.weights = self._sleep = refusing
        self._pooling = parts.calls
        self._close = weakref.finalize(self, parts.calls.core.close)
        parts.calls.core.start()

    # --- whole answers ------------------------------------------------------------------------------------------------

    @tells_unknown(unknown_of_a_call)
    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        priority: int = 0,
        adapter: AdapterNames = None,
        session: SessionArgs = None,
    ) -> list[RequestOutput]:
        """Answers prompts, all of them at once as far as there is room.

        In a list, a prompt that fails has `finish_reason` "error" and the reason in `error`; the others are answered. A
        single prompt raises instead. Ctrl-C aborts the prompts of this call.

        Args:
            prompts: a text, token ids, vLLM's dict (`prompt` or `prompt_token_ids`, with `cache_salt` or
                `multi_modal_data`), a MediaPrompt, or a list of such.
            sampling_params: for all prompts, or one for each; None takes the model's own defaults.
            progress: show a bar when it takes longer than a second; None: on a terminal only.
            priority: lower is served first.
            adapter: the name of an adapter, or a list with one or None for each prompt.
            session: the conversation, by name or as a Session; or a list with one for each prompt. It says what the
                prefix cache should keep (docs/sessions.md).

        Returns:
            One output a prompt, in their order.

        Raises:
            RequestError: a single prompt is refused, or the arguments as a whole are wrong.
            MllmError: the step of a single prompt failed.
            EngineDeadError: the engine is closed, or dead after an error on the device.
        """
        self.core.expect()
        submissions = self.builder.build(prompts, sampling_params, priority, adapter, session)
        return self._answer(submissions, is_single_prompt(prompts), progress)

    def chat(
        self,
        messages: Seq[Message] | Seq[Seq[Message]],
        sampling_params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        priority: int = 0,
        adapter: AdapterNames = None,
        session: SessionArgs = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Like generate, for one conversation or a list of them; raises the same.

        Args:
            messages: a list of `{"role": …, "content": …}`, or a list of such lists; a content may be a list of parts
                in OpenAI's form.
            sampling_params, progress, priority, adapter, session: as in generate.
            template_options: variables of the model's chat template, such as `tools` or `enable_thinking=False`. With
                `continue_final_message=True` the answer continues the last message. An option that it does not read is
                refused.
        """
        submissions, is_single = self.builder.build_chats(
            messages, sampling_params, template_options, priority, adapter, session
        )
        return self._answer(submissions, is_single, progress)

    def _answer(self, submissions: list[Submission], is_single: bool, progress: bool | None) -> list[RequestOutput]:
        if is_single and submissions[0].failure is not None:
            raise submissions[0].failure.with_traceback(None)
        accepted = [submission for submission in submissions if submission.failure is None]
        countdown = Countdown(accepted)
        for submission in accepted:
            submission.sink = countdown
        try:
            self.core.submit(accepted)
            _wait(countdown, len(accepted), progress)
        except BaseException:
            self.core.withdraw(accepted)
            raise
        answers = [build_answer(submission, self.tokenizer) for submission in submissions]
        if is_single and submissions[0].failure is not None:
            raise submissions[0].failure.with_traceback(None)
        warn_of_refused(submissions)
        return answers

    # --- embeddings, scores and labels -------------------------------------------------------------------------------

    @tells_unknown(unknown_of_a_call)
    def embed(
        self,
        prompts: TextPrompts,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of each text (docs/encoders.md).

        Args:
            prompts: a text, token ids, vLLM's dict (`prompt` or `prompt_token_ids`), or a list of such.
            pooling: cls, last, mean or max; None: as the model's files say.
            normalize: to a length of 1; None: likewise.
            dimensions: the first numbers alone, of a model that was trained so.
            prompt_name: of the prompts in the model's files, the one that goes ahead of each text.
            truncate_prompt_tokens: cut longer texts to so many tokens; -1: to as many as the model takes. None: they
                are refused.
            priority: lower is served first.

        Raises:
            RequestError: a text or an argument is refused, or the model does not embed.
            EngineDeadError: the engine is closed, or dead after an error on the device.
        """
        return self.pooling.embed(
            prompts, pooling, normalize, dimensions, prompt_name, truncate_prompt_tokens, priority
        )

    @tells_unknown(unknown_of_a_call)
    def classify(
        self,
        prompts: TextPrompts,
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of each label; arguments and errors as `embed`.

        Args:
            use_activation: False: raw scores.
        """
        return self.pooling.classify(prompts, use_activation, truncate_prompt_tokens, priority)

    @tells_unknown(unknown_of_a_call)
    def score(
        self,
        data_1: TextPrompts,
        data_2: TextPrompts,
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together: by a cross-encoder's head, or by their embeddings; arguments and errors as
        `embed`.

        Args:
            data_1: one text for all of data_2, or as many.
            data_2: a text or several.
        """
        return self.pooling.score(data_1, data_2, use_activation, truncate_prompt_tokens, priority)

    @tells_unknown(unknown_of_a_call)
    def reward(
        self, prompts: TextPrompts, *, truncate_prompt_tokens: int | None = None, priority: int = 0
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The raw score of each text, of a classifier with one label; arguments and errors as `embed`."""
        calls = self.pooling
        return calls.pooled(prompts, calls.rules.reward(), truncate_prompt_tokens, priority)

    @tells_unknown(unknown_of_a_call)
    def encode(
        self,
        prompts: TextPrompts,
        *,
        pooling_task: str | None = None,
        normalize: bool | None = None,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        priority: int = 0,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The model's result for a task; arguments and errors as `embed`.

        Args:
            pooling_task: embed, token_embed, classify or token_classify, as far as the model has it; None: of an
                embedder token_embed, else the model's own.
        """
        calls = self.pooling
        asked = calls.rules.encode(pooling_task, normalize, use_activation)
        return calls.pooled(prompts, asked, truncate_prompt_tokens, priority)

    @property
    def pooling(self) -> PoolingCalls:
        """The calls of a model that pools.

        Raises:
            RequestError: it generates.
        """
        if self._pooling is None:
            from mllm_compile.engine.pooling.refusal import not_pooling

            raise not_pooling()
        return self._pooling

    @property
    def pools(self) -> bool:
        """True if the model embeds or classifies texts, and generates none."""
        return self._pooling is not None

    # --- streams ------------------------------------------------------------------------------------------------------

    @tells_unknown(unknown_of_a_call)
    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        adapter: str | None = None,
        session: SessionArg = None,
    ) -> TokenStream:
        """Answers one prompt piece by piece; generation starts with this call.

        Each output holds what is new. Leaving the iterator early aborts the request.

        Args:
            prompt: as one of generate's.
            sampling_params: None takes the model's own defaults.
            request_id: a name for `abort`; None makes one.
            priority: lower is served first.
            adapter: the name of a loaded adapter.
            session: as in generate.

        Raises:
            RequestError: the prompt is refused.
            EngineDeadError: the engine is closed or dead.
        """
        self.core.expect()
        return self._stream(
            self.builder.build_one(
                prompt, sampling_params, request_id=request_id, priority=priority, adapter=adapter, session=session
            )
        )

    def stream_chat(
        self,
        messages: Seq[Message],
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        adapter: str | None = None,
        session: SessionArg = None,
        **template_options: Any,
    ) -> TokenStream:
        """Like stream, for one conversation; template_options as in chat."""
        return self._stream(
            self.builder.build_chat(
                messages,
                sampling_params,
                template_options,
                request_id=request_id,
                priority=priority,
                adapter=adapter,
                session=session,
            )
        )

    def _stream(self, submission: Submission) -> TokenStream:
        queue = StreamQueue(len(submission.sequences))
        submission.sink = queue
        submission.is_stream = True
        # Made first: it withdraws the submission if an interruption keeps it from the caller.
        # Through self: while a stream is read, its engine is no garbage.
        stream = TokenStream(
            submission, queue, self.tokenizer, lambda: self.core.withdraw([submission]), self.core.check_process
        )
        self.core.submit([submission])
        return stream

    # --- adapters -----------------------------------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str | os.PathLike[str], *, replace: bool = False) -> Adapter:
        """Loads an adapter, a folder as PEFT writes it, while requests run (docs/adapters.md).

        Args:
            replace: a name that is taken gets a new version.

        Raises:
            RequestError: the name is malformed, taken, or being loaded.
            MllmError: the adapter is damaged, another model's, or asks for something that is not served.
        """
        return self._served_adapters().load(name, user_path(os.fspath(path)).absolute(), replace=replace)

    def unload_adapter(self, name: str) -> None:
        """Takes an adapter's name back; its requests are answered to their end.

        Raises:
            RequestError: there is no such adapter.
        """
        self._served_adapters().unload(name)

    def list_adapters(self) -> list[Adapter]:
        """The adapters that requests can name."""
        return [] if self.adapters is None else self.adapters.all()

    def _served_adapters(self) -> AdapterRegistry:
        if self.adapters is None:
            raise RequestError("no adapters are served. Set lora.max_adapters in the config to how many there may be.")
        return self.adapters

    # --- other weights ------------------------------------------------------------------------------------------------

    def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], *, version: str | None = None, **options: Unpack[Options]
    ) -> UpdateReport:
        """Serves other weights from the next step on, all or none of them (docs/rollouts.md).

        Args:
            weights: whole tensors by their names in the checkpoint or of Transformers' parameters.
            version: a label, which answers have; None: the update's number.
            options: `partial`, `direct`, `names` and `keep_prefix_cache`, as that page has them.

        Raises:
            WeightUpdateError: a tensor is refused; the old weights serve on.
            UpdateConflictError: another update is open.
            WeightsTornError: weights are torn, and this update is partial.
        """
        return self.weights.update(weights, version, **options)

    def update_weights_from_folder(
        self, path: str | os.PathLike[str], *, version: str | None = None, **options: Unpack[Options]
    ) -> UpdateReport:
        """Like update_weights, with the tensors of a folder's safetensors files.

        Raises:
            CheckpointError: it has none, or one is damaged.
        """
        from mllm_compile.engine.folder_weights import tensors_of_folder

        folder = user_path(os.fspath(path)).absolute()
        return self.weights.update(tensors_of_folder(folder, self.weights.device), version, **options)

    def pause(self, mode: str = "abort") -> None:
        """Returns when no step runs; `resume` lets them run again.

        Args:
            mode: "abort" ends requests, "wait" answers them; both refuse new ones. "keep" holds them, "retract" has
                their KV computed anew; both queue new ones.

        Raises:
            RequestError: there is no such mode.
            UpdateConflictError: another call ended the wait.
            WeightsTornError: it waits, and requests cannot end.
        """
        pause(self.core, as_pause_mode(mode))

    def resume(self) -> None:
        """Ends a pause, if there is one.

        Raises:
            WeightsTornError: the weights are not whole.
        """
        resume(self.core)

    def sleep(
        self, level: int = 1, mode: str = "abort", tags: Collection[str] | None = None, *, refuses: bool = False
    ) -> None:
        """Gives memory back in place, and returns when it is; graphs and addresses stay. `wake_up` takes it again.

        Args:
            level: 0 stops steps alone. 1 also drops the KV cache, and copies weights to the host's memory. 2 drops
                both: an update has to bring the weights anew.
            mode: what becomes of requests, as of `pause`; kept ones are computed anew.
            tags: what sleeps: "weights", "kv_cache"; None: both.
            refuses: requests that come are refused; else they wait.

        Raises:
            RequestError: an argument is unknown, or runtime.enable_sleep_mode is not set, which levels 1 and 2 need.
            UpdateConflictError: an update of the weights is open; or another call ended the wait for requests.
            WeightUpdateError: level 2, and these weights cannot be updated.
            DeviceMemoryError: the host has no room for the weights.
        """
        self._sleep.sleep(level, as_pause_mode(mode), tags, refuses=refuses)

    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Takes memory again; steps run when all is awake.

        Args:
            tags: what wakes: "weights", "kv_cache", and "scheduling" after level 0; None: all.

        Raises:
            RequestError: there is no such tag.
            DeviceMemoryError: others have taken the memory; what does not fit sleeps on.
        """
        self._sleep.wake_up(tags)

    @property
    def is_sleeping(self) -> bool:
        """True until all is awake."""
        return bool(self.core.gate.sleeping)

    @property
    def sleep_bytes(self) -> int:
        """Bytes of the device that sleep gives back at level 1; 0 on a CPU and without enable_sleep_mode."""
        return self._sleep.num_bytes

    @property
    def state(self) -> EngineState:
        """The state: running, pausing, paused, updating, torn or sleeping (docs/rollouts.md)."""
        return self.core.gate.state

    @property
    def is_paused(self) -> bool:
        """True unless it is running."""
        return self.state != "running"

    # --- control ------------------------------------------------------------------------------------------------------

    def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends a request, or several, with finish_reason 'abort'; nothing happens to one that has ended already.

        Raises:
            RequestError: neither an id nor ids.
        """
        self.core.abort(as_request_ids(request_id))

    def stats(self) -> EngineStats:
        """The requests running and waiting, and the speed; see EngineStats.

        Raises:
            EngineDeadError: this process is a fork of the engine's.
        """
        return self._running_core.stats()

    def session_state(self, session_id: str, cache_salt: str | None = None) -> SessionState | None:
        """The state of a session; None: none has that name.

        Args:
            cache_salt: of its requests.

        Raises:
            EngineDeadError: this process is a fork of the engine's.
        """
        return self.core.session_state(session_key(session_id, cache_salt))

    def end_session(self, session_id: str, cache_salt: str | None = None) -> bool:
        """Ends a session: its prefixes are given up first. False: none has that name.

        Args:
            cache_salt: of its requests.

        Raises:
            EngineDeadError: this process is a fork of the engine's.
        """
        return self.core.end_session(session_key(session_id, cache_salt))

    def watch_pages(self, tell: TellNews) -> None:
        """Tells how the prefix cache changes from now on; nobody was told before.

        Args:
            tell: takes a rank and the news of a step, on the engine's thread; it does not wait.
        """
        from mllm_compile.engine.page_events import PageEvents

        adapters = tuple if self.adapters is None else self.adapters.all
        self.core.watch_pages(lambda caches, tiers: PageEvents(caches, tiers, adapters, tell).flush)

    def flush_prefix_cache(self) -> None:
        """Forgets all cached prefixes.

        Raises:
            EngineDeadError: this process is a fork of the engine's.
        """
        self.core.flush_prefix_cache()

    @property
    def is_alive(self) -> bool:
        """True if it takes further requests."""
        return self._running_core.end_error is None

    @property
    def _running_core(self) -> EngineCore | PoolingCore:
        return self.core if self._pooling is None else self._pooling.core

    def close(self) -> None:
        """Aborts all requests and gives all memory back. May be called again."""
        self._running_core.close()
        self._close.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _wait(countdown: Countdown, total: int, progress: bool | None) -> None:
    """Waits for all answers, with a bar over the number of answered prompts if it takes long."""
    is_shown = sys.stderr.isatty() if progress is None else progress
    if not is_shown:
        if not countdown.wait_in_naps():
            countdown.wait()
    elif not countdown.wait(_BAR_AFTER_S):
        # It has taken long already: shown at once.
        with reporter_for(plain_lines=True, details=True).stage("generate", total=total) as stage:
            shown = 0
            while shown < total:
                countdown.wait(_BAR_INTERVAL_S)
                done = total - countdown.remaining
                stage.advance(done - shown)
                shown = done


def _publisher(config: ResolvedConfig | None) -> KVEventPublisher | None:
    """Makes the publisher of the KV events that a config asks for."""
    if config is None or not config.runtime.kv_events_config.is_on:
        return None
    from mllm_compile.kv_events.installed import make_publisher

    return make_publisher(config.runtime.kv_events_config, config.runtime.expert_parallel_size)


def _in_order(*functions: Callable[[], None]) -> Callable[[], None]:
    """Calls all of them."""

    def call() -> None:
        for function in functions:
            function()

    return call


def _updates(core: EngineCore, parts: EngineParts) -> WeightUpdates:
    from mllm_compile.engine.weight_updates import WeightUpdates  # torch

    return WeightUpdates(core, parts.live, parts.tell_ranks, parts.ask_ranks)


def _sleep(core: EngineCore, weights: WeightUpdates, parts: EngineParts) -> EngineSleep:
    from mllm_compile.engine.sleep import EngineSleep  # torch

    return EngineSleep(core, weights, parts.memory, parts.tell_ranks, parts.ask_ranks, parts.wait_ranks)


def _registry(parts: AdapterParts, core: EngineCore) -> AdapterRegistry:
    """The adapters of an engine; they hold its core, and not the engine, which ends when nobody holds it."""
    from mllm_compile.adapters.registry import AdapterRegistry

    queue = core.adapters

    def place(adapter: Adapter, matrices: Matrices) -> None:
        prepared = parts.writer.prepared(matrices)
        core.between_steps(lambda: queue.place(adapter, prepared))

    return AdapterRegistry(parts.base, place, lambda adapter: core.post(lambda: queue.retire(adapter)))
