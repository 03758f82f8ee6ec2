"""Engine: generates text for a Python program, or embeds and classifies texts, as its model does.

A thin layer: prompts.py and requests.py make requests, loop.py runs them, answers.py makes the answers. Many threads
may use one engine at once; AsyncEngine (async_engine.py) serves asyncio tasks from the same one.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mllm_compile.engine.answers import build_answer
from mllm_compile.engine.core.loop import EngineCore
from mllm_compile.engine.outputs import RequestOutput
from mllm_compile.engine.pooling.methods import PoolingMethods
from mllm_compile.engine.pooling.parts import PoolingParts
from mllm_compile.engine.prompts import Message, Prompt, Prompts, is_single_prompt
from mllm_compile.engine.requests import AdapterNames, RequestBuilder, as_request_ids, warn_of_refused
from mllm_compile.engine.rollouts.methods import RolloutMethods
from mllm_compile.engine.sequences import Submission
from mllm_compile.engine.sessions import SessionArg, SessionArgs, session_key
from mllm_compile.engine.speech.methods import SpeechMethods
from mllm_compile.engine.start.beside_core import (
    adapter_registry,
    engine_sleep,
    event_publisher,
    in_order,
    weight_updates,
)
from mllm_compile.engine.start.parts import EngineParts
from mllm_compile.engine.stats import EngineStats
from mllm_compile.engine.streams import Countdown, StreamQueue, TokenStream, wait_for_all
from mllm_compile.engine.unknown_arguments import unknown_of_a_call, unknown_of_an_engine
from mllm_compile.errors import RequestError
from mllm_compile.files.user_path import user_path
from mllm_compile.kv_connectors.peers.rules import PeerRules
from mllm_compile.process.bytecode import OF_TORCH, compiled_ahead, kept_bytecode
from mllm_compile.process.no_gc import imports_unseen
from mllm_compile.process.progress import Reporter, reporter_for
from mllm_compile.process.timeline import Timeline, timeline_of
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.schedule.pages.sessions import SessionState
from mllm_compile.runtime.unknown_names import tells_unknown

if TYPE_CHECKING:
    from mllm_compile.adapters.registry import Adapter, AdapterRegistry
    from mllm_compile.config.sources import EngineSource
    from mllm_compile.engine.core.page_events import TellNews
    from mllm_compile.engine.pooling.core import PoolingCore


class Engine(PoolingMethods, RolloutMethods, SpeechMethods):
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
        from mllm_compile.engine.start.early_context import early_context
        from mllm_compile.ranks.early_start import early_ranks

        self.timeline = timeline_of(reporter or reporter_for())
        source = config_or_runtime(config)
        if load_adapters and not isinstance(source, Path) and source.lora.adapters:
            from mllm_compile.adapters.peft_config import check_folders

            check_folders(source.lora.adapters.values())
        with (
            kept_bytecode(),
            early_context(source, self.timeline),
            compiled_ahead(OF_TORCH),
            early_ranks(source) as early,
        ):
            with self.timeline.stage("import torch"), imports_unseen():
                from mllm_compile.engine.start.assemble import assemble_any
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
        publisher = event_publisher(parts.config) if publish_kv_events else None
        self._pooling = None
        self.core = EngineCore(
            parts.scheduler,
            parts.step_runner,
            check_device=parts.check_device,
            check_idle=parts.check_idle,
            shutdown=parts.shutdown if publisher is None else in_order(parts.shutdown, publisher.close),
            prepare_thread=parts.prepare_thread,
            forward_times=parts.forward_times,
            experts_chosen=parts.experts_chosen,
            snapshot_bytes=parts.snapshot_bytes,
            log_interval_s=log_interval_s,
            adapters=parts.adapters,
        )
        # Also when the engine is garbage, and when the interpreter ends: a thread must not launch work into that.
        self._close = weakref.finalize(self, self.core.close)
        self.weights = weight_updates(self.core, parts)
        self._sleep = engine_sleep(self.core, self.weights, parts)
        self.adapters = None if parts.adapters is None else adapter_registry(parts.adapters, self.core)
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
            adapter_of_sounds="" if parts.config is None else parts.config.lora.of_sounds,
            decoder=parts.decoder,
            peers=None if parts.config is None else PeerRules.of(parts.config.runtime.kv_transfer_config),
        )
        self.decoder = parts.decoder
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
            wait_for_all(countdown, len(accepted), progress)
        except BaseException:
            self.core.withdraw(accepted)
            raise
        answers = [build_answer(submission, self.tokenizer) for submission in submissions]
        if is_single and submissions[0].failure is not None:
            raise submissions[0].failure.with_traceback(None)
        warn_of_refused(submissions)
        return answers

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
        stats = self._running_core.stats()
        if self._pooling is not None:
            return stats
        held_seconds, host_bytes = self.core.gate.held_seconds, self._sleep.host_bytes
        return replace(stats, sleep_host_bytes=host_bytes, held_seconds=held_seconds)

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
        from mllm_compile.engine.core.page_events import PageEvents

        adapters = tuple if self.adapters is None else self.adapters.all
        self.core.watch_pages(lambda caches, tiers: PageEvents(caches, tiers, adapters, tell).flush)

    def flush_prefix_cache(self, *, retracts: bool = False) -> None:
        """Forgets all cached prefixes.

        Args:
            retracts: also the KV of running requests, which is computed anew (vLLM's reset_running_requests).

        Raises:
            EngineDeadError: this process is a fork of the engine's.
        """
        self.core.flush_prefix_cache(retracts=retracts)

    @property
    def is_alive(self) -> bool:
        """True if it takes further requests."""
        return self._running_core.end_error is None

    @property
    def _running_core(self) -> EngineCore | PoolingCore:
        return self.core if self._pooling is None else self._pooling.core

    def close(self) -> None:
        """Aborts all requests and gives all memory back. May be called again."""
        if self._pooling is None:
            self.weights.let_go()  # first: the core has their memory given back
        self._running_core.close()
        self._close.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()
