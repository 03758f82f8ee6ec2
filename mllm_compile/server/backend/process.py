"""The engine's process: makes the engine, takes the front's commands, and says once in a while that it is alive.

The main thread waits for commands, and hands on requests with a grammar (form_queue.py). The engine's own thread sends
the events of each step (step_events.py). The pulse's thread asks the engine for its figures, which it answers between
two steps: a front that gets no pulse knows that a step is stuck.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mllm_compile.engine.sessions import Session
from mllm_compile.errors import EngineDeadError, EnginePausedError, MllmError
from mllm_compile.media.workers import SharedPrompt
from mllm_compile.process import passage
from mllm_compile.process.bytecode import kept_bytecode
from mllm_compile.process.interruption import ended_by_sigterm
from mllm_compile.process.log_lines import start_log
from mllm_compile.process.no_gc import imports_unseen
from mllm_compile.process.passage import Passage
from mllm_compile.process.progress import LogReporter, NullReporter, Reporter, Stage, reporter_for
from mllm_compile.process.timeline import Timeline
from mllm_compile.server.backend.form_queue import FormQueue
from mllm_compile.server.backend.step_events import StepEvents
from mllm_compile.server.wire import messages
from mllm_compile.server.wire.channel import Channel
from mllm_compile.server.wire.messages import (
    Abort,
    AdapterCard,
    AdaptersChanged,
    AskSession,
    Begin,
    Close,
    Command,
    Control,
    Failed,
    Grant,
    Hello,
    LoadAdapter,
    Needs,
    Pulse,
    SessionTold,
    Submit,
    UnloadAdapter,
)

if TYPE_CHECKING:
    from mllm_compile.engine.engine import Engine
    from mllm_compile.engine.sequences import Submission
    from mllm_compile.server.rl.engine_calls import EngineCalls

logger = logging.getLogger("mllm_compile.server")

PULSE_S = 0.5
_SIGN_S = 5.0  # between two signs of life of a stage
EXIT_MISTAKE = 2
EXIT_DEAD = 3
# Of a config: where things are on this machine, and what a store is reached with. Clients read the rest.
_NOT_TOLD: Any = {
    "cache": True,
    "model": {"folder"},
    "runtime": {"kv_transfer_config": {"kv_connector_extra_config"}},
}

# The bool: with the config's adapters. The function: of an engine that shares its device; takes what it needs, and
# gives the tokens of its KV cache.
MakeEngine = Callable[[Reporter, bool, Callable[[Needs], int] | None], "Engine"]


class _LivingStage:
    """A stage that shows life with each count."""

    def __init__(self, stage: Stage, show_life: Callable[[], None]) -> None:
        self._stage, self._show_life = stage, show_life

    def advance(self, count: int = 1) -> None:
        self._stage.advance(count)
        self._show_life()


class _StageTeller:
    """A reporter that also tells the front which stage is on; again while that counts: it may take long."""

    def __init__(self, reporter: Reporter, tell: Callable[[str], None]) -> None:
        self._reporter = reporter
        self._tell = tell
        self._name, self._next_sign_s = "start", 0.0

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Stage]:
        if threading.current_thread() is threading.main_thread():
            self._name, self._next_sign_s = name, time.monotonic() + _SIGN_S
            self._tell(name)
        with self._reporter.stage(name, total) as stage:
            yield _LivingStage(stage, self._show_life)

    def _show_life(self) -> None:
        now = time.monotonic()
        if now >= self._next_sign_s:
            self._next_sign_s = now + _SIGN_S
            self._tell(self._name)

    def note(self, text: str) -> None:
        self._reporter.note(text)

    def tell(self, text: str) -> None:
        """Tells nothing: the front has a banner."""

    def announce(self, text: str) -> None:
        self._reporter.announce(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._reporter.table(title, columns, rows)


class AdapterReplacedError(MllmError):
    """An adapter was replaced while a request for it was on its way; another try is answered by the new version."""


class EngineServer:
    """Serves one engine to the front.

    Args:
        channel: to the front.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._is_over = threading.Event()
        self._loads = ThreadPoolExecutor(2, thread_name_prefix="mllm-loads")
        self._calls: EngineCalls | None = None
        self._free_before: int | None = None  # of a shared device, ahead of the engine
        self._telling = threading.Lock()  # the last list of adapters that the front hears is the newest

    def run(self, make_engine: MakeEngine, reporter: Reporter) -> int:
        """Serves until the front says Close or the engine is dead; returns the exit code."""
        begin = self._begin_of_front()
        if begin is None:
            return self._left(0)
        try:
            timeline = Timeline(_StageTeller(reporter, lambda name: self._tell(messages.Stage(name))))
            engine = make_engine(timeline, begin.adapters is None, self._ask if begin.shares_device else None)
        except MllmError as error:
            self._tell(Failed(" ".join(str(error).split()), is_mistake=True))
            return self._left(EXIT_MISTAKE)
        if engine.pools:
            return self._serve_pooling(engine, timeline)
        with engine:
            if begin.shares_device:
                engine.pass_memory_by(passage_at(os.environ[passage.VARIABLE]))
            events = StepEvents(self._channel.send, lambda: engine.weights.version)
            engine.core.tell_steps(events)
            if engine.config is not None and engine.config.runtime.kv_events_config.is_on:
                engine.watch_pages(lambda rank, news: self._tell(messages.PagesChanged(rank, news)))
            _load_again(engine, begin.adapters or ())
            if engine.is_alive:  # else the front would forget the adapters that it could not load
                self._tell(_hello(engine, timeline, self._held_bytes(engine)))
            # First requests would wait 0.6 s while all imports are looked through. A compile leaves what is worth that.
            gc.collect(2 if "torch._dynamo" in sys.modules else 1)
            gc.freeze()
            pulse = threading.Thread(target=self._pulse, args=(engine,), name="mllm-pulse", daemon=True)
            pulse.start()
            forms = FormQueue(
                lambda command: _submission(engine, command),
                lambda command, built: self._submit(engine, events, [(command, built)]),
            )
            self._take_commands(engine, events, forms)
            forms.close()
            self._loads.shutdown(wait=False, cancel_futures=True)
            self._is_over.set()
            dead = engine.core.end_error
            if dead is not None:
                self._tell(Failed(str(dead), is_mistake=False))
        pulse.join()
        return self._left(0 if dead is None else EXIT_DEAD)

    def _serve_pooling(self, engine: Engine, timeline: Timeline) -> int:
        """Serves a model that pools, likewise."""
        from mllm_compile.server.backend.pooling import PoolingCommands, hello_of

        with engine:
            taking = PoolingCommands(engine, self._tell)
            self._tell(hello_of(engine, timeline))
            pulse = threading.Thread(target=self._pulse, args=(engine,), name="mllm-pulse", daemon=True)
            pulse.start()
            is_asked = True
            while is_asked and engine.is_alive and not self._channel.is_over:
                for frame in self._channel.wait(PULSE_S):
                    for command in messages.decode_commands(frame):
                        is_asked = is_asked and not isinstance(command, Close)
                        taking.take(command)
            self._is_over.set()
            dead = taking.end_error
            if dead is not None:
                self._tell(Failed(str(dead), is_mistake=False))
        pulse.join()
        return self._left(0 if dead is None else EXIT_DEAD)

    def _begin_of_front(self) -> Begin | None:
        """Waits for the first command; None: the front has gone."""
        begin = self._only_command()
        assert begin is None or isinstance(begin, Begin), "the first command is Begin"
        return begin

    def _only_command(self) -> Command | None:
        """Waits for a command ahead of the engine, with which the front waits with all others; None: it has gone."""
        while not self._channel.is_over:
            for frame in self._channel.wait(PULSE_S):
                (command,) = messages.decode_commands(frame)
                return command
        return None

    def _ask(self, needs: Needs) -> int:
        """Waits for the device's memory; returns the tokens of the KV cache."""
        self._tell(needs)
        self._tell(messages.Stage("wait for memory"))
        grant = self._only_command()
        if grant is None:
            raise SystemExit(self._left(0))
        assert isinstance(grant, Grant), "the second command is Grant"
        from mllm_compile.engine.device_share import begin_share  # torch

        self._free_before = begin_share(needs.device)
        return grant.kv_tokens

    def _held_bytes(self, engine: Engine) -> tuple[int, int]:
        if self._free_before is None:
            return 0, 0
        from mllm_compile.engine.device_share import held_bytes

        return held_bytes(engine, self._free_before)

    def _left(self, code: int) -> int:
        """Waits until the last messages are on their way."""
        self._channel.close(linger_s=2.0)
        return code

    def _tell(self, event: messages.EngineEvent) -> None:
        self._channel.send(messages.encode_event(event))

    def _pulse(self, engine: Engine) -> None:
        while not self._is_over.wait(PULSE_S):
            self._tell(Pulse(dataclasses.asdict(engine.stats())))

    def _take_commands(self, engine: Engine, events: StepEvents, forms: FormQueue) -> None:
        while engine.is_alive and not self._channel.is_over:
            commands = [command for frame in self._channel.wait(PULSE_S) for command in messages.decode_commands(frame)]
            self._begin(engine, events, forms, [command for command in commands if isinstance(command, Submit)])
            for command in commands:
                if isinstance(command, Abort):
                    submission = None if forms.drop(command.key) else events.submission_of(command.key)
                    if submission is not None:
                        engine.core.withdraw([submission])
                elif isinstance(command, LoadAdapter | UnloadAdapter):
                    self._loads.submit(self._change_adapters, engine, command)
                elif isinstance(command, AskSession):
                    self._loads.submit(self._tell_session, engine, command)
                elif isinstance(command, Control):
                    self._controls(engine).begin(command)
                elif isinstance(command, Close):
                    return

    def _controls(self, engine: Engine) -> EngineCalls:
        """The calls of rollouts, made when there is a first one."""
        if self._calls is None:
            from mllm_compile.server.rl.engine_calls import EngineCalls

            self._calls = EngineCalls(engine, self._tell)
        return self._calls

    def _change_adapters(self, engine: Engine, command: LoadAdapter | UnloadAdapter) -> None:
        """Loads or unloads an adapter, and tells how that went."""
        error: Exception | None = None
        try:
            if isinstance(command, LoadAdapter):
                engine.load_adapter(command.name, command.path, replace=command.replace)
            else:
                engine.unload_adapter(command.name)
        except Exception as fault:
            if not isinstance(fault, MllmError):
                logger.exception("adapter %r met an internal error", command.name)
            error = fault
        text = None if error is None else " ".join(str(error).split())
        with self._telling:
            self._tell(AdaptersChanged(command.key, _cards(engine), text, type(error).__name__))

    def _tell_session(self, engine: Engine, command: AskSession) -> None:
        """Tells the state of a session, and ends it where that is asked for."""
        state = engine.session_state(command.name, command.cache_salt)
        if command.ends:
            engine.end_session(command.name, command.cache_salt)
        self._tell(SessionTold(command.key, None if state is None else state._asdict()))

    def _begin(self, engine: Engine, events: StepEvents, forms: FormQueue, commands: Sequence[Submit]) -> None:
        """Begins requests that came together: those without a form are handed to the engine at once, for one step."""
        begun: list[tuple[Submit, Submission | MllmError]] = []
        if commands:
            engine.core.expect()
        for command in commands:
            try:
                if "structured_outputs" in command.params:
                    forms.add(command)
                else:
                    begun.append((command, _submission(engine, command)))
            except MllmError as error:
                begun.append((command, error))
        self._submit(engine, events, begun)

    def _submit(
        self, engine: Engine, events: StepEvents, begun: Sequence[tuple[Submit, Submission | MllmError]]
    ) -> None:
        """Hands submissions to the engine, and tells why one is refused."""
        taken = {command.key: built for command, built in begun if not isinstance(built, MllmError)}
        refused = {command.key: built for command, built in begun if isinstance(built, MllmError)}
        for key, submission in taken.items():
            events.take(key, submission)
        try:
            if taken:
                engine.core.submit(list(taken.values()))
        except EngineDeadError:  # all are told by Failed
            return
        except EnginePausedError as error:
            for key, submission in taken.items():
                events.give_back(submission)
                refused[key] = error
        if refused:
            ended = [messages.end_of(key, [], error) for key, error in refused.items()]
            self._channel.send(messages.encode_step(b"", b"", messages.StepRest(ended=ended)))


def _submission(engine: Engine, command: Submit) -> Submission:
    prompt: dict[str, Any] = {"prompt_token_ids": np.frombuffer(command.prompt, np.int32).tolist()}
    if command.media is not None:
        shared = SharedPrompt(command.media.segment, command.prompt, command.media.is_feature, command.media.items)
        prompt = {"prompt": shared.take()}
    if command.window is not None:
        assert engine.decoder is not None, "the front asks a model that reads sounds alone"
        source = engine.decoder.source_of_window(np.frombuffer(command.window, np.float32))
        prompt = {"encoder_prompt": {"multi_modal_data": {"audio": source}}}
    if command.decoder_prompt is not None:
        prompt["decoder_prompt"] = np.frombuffer(command.decoder_prompt, np.int32).tolist()
    if command.cache_salt is not None:
        prompt["cache_salt"] = command.cache_salt
    params = messages.params_of_wire(command.params)
    name, version = command.adapter or (None, 0)
    session = None if command.session is None else Session(*command.session)  # type: ignore[arg-type]  # checked there
    submission = engine.builder.build_one(
        prompt, params, request_id=command.request_id, priority=command.priority, adapter=name, session=session
    )
    # Without a name it may have the adapter of sounds, of whose versions the front says nothing.
    if name is not None and submission.adapter is not None and submission.adapter.version != version:
        raise AdapterReplacedError(f"adapter {name!r} was replaced while the request was on its way. Ask again.")
    return submission


def _load_again(engine: Engine, cards: Iterable[AdapterCard]) -> None:
    """Loads the adapters of an engine that was lost; one that cannot be is left out with a line in the log."""
    for card in cards:
        assert engine.adapters is not None, "an engine that was started again has the same config"
        engine.adapters.resume(card.name, card.version, card.digest)
        try:
            engine.load_adapter(card.name, card.folder)
        except MllmError as error:
            logger.error("adapter %r is left out: %s", card.name, " ".join(str(error).split()))


def _cards(engine: Engine) -> list[AdapterCard]:
    return [AdapterCard(one.name, one.version, str(one.folder), one.digest) for one in engine.list_adapters()]


def _hello(engine: Engine, timeline: Timeline, held_bytes: tuple[int, int]) -> Hello:
    limits = engine.core.scheduler_config
    config, folder = engine.config, engine.folder
    decoder = engine.decoder
    return Hello(
        model="" if config is None else config.model.source,
        dtype="" if config is None else config.model.dtype,
        device="" if config is None else config.runtime.device,
        max_model_len=limits.max_model_len,
        max_running_requests=limits.max_running_requests,
        kv_tokens=limits.usable_pages * limits.page_size,
        page_size=limits.page_size,
        config={} if config is None else config.model_dump(mode="json", exclude=_NOT_TOLD),
        vocab_size=engine.vocab_size,
        eos_token_ids=sorted(engine.eos_token_ids),
        default_params=messages.params_to_wire(engine.default_params),
        tokenizer_files=dict(engine.tokenizer_files),
        why_no_media="the model takes text alone" if engine.media is None else engine.media.why_not,
        media_domains=[] if engine.media is None else sorted(engine.media.domains),
        fingerprint="" if folder is None else f"mllm-{folder.name}",
        seconds=timeline.age_s,
        stages=timeline.stages,
        stats=dataclasses.asdict(engine.stats()),
        adapters=_cards(engine),
        held_bytes=held_bytes,
        encoder=None if decoder is None else decoder.told(),
    )


def _make_engine(model: str, speculative: str, lora: str, runtime: str) -> MakeEngine:
    def make(reporter: Reporter, load_adapters: bool, ask: Callable[[Needs], int] | None) -> Engine:
        with imports_unseen():
            from mllm_compile.config.sources import config_or_runtime, with_lora, with_runtime, with_speculative
            from mllm_compile.engine.engine import Engine

        source = with_speculative(config_or_runtime(model), speculative or None)
        source = with_runtime(with_lora(source, json.loads(lora)), json.loads(runtime))
        if ask is not None:
            from mllm_compile.engine.device_share import device_needs

            assert not isinstance(source, Path), "a server of many models has refused a compiled runtime"
            needs = Needs(**dataclasses.asdict(device_needs(source, reporter)))
            source = with_runtime(source, {"enable_sleep_mode": True, "max_total_tokens": ask(needs)})
        return Engine(source, reporter=reporter, load_adapters=load_adapters, publish_kv_events=False)

    return make


def channel_at(descriptor: str) -> Channel:
    """The channel whose descriptor the front has handed on; processes that are started here do not get it."""
    end = socket.socket(fileno=int(descriptor))
    end.set_inheritable(False)
    return Channel(end)


def passage_at(descriptor: str) -> Passage:
    """The engine's end of the way that its device's memory goes, likewise."""
    end = socket.socket(fileno=int(descriptor))
    end.set_inheritable(False)
    return Passage(end)


def main() -> None:
    """Entry point of the process.

    Its arguments are MODEL, the channel's descriptor, how much to show, the format of lines, --speculative-config or
    nothing, the keys that options give of the sections lora and runtime, and the model's name in the log or nothing.
    """
    model, descriptor, how, log, speculative, lora, runtime, name = sys.argv[1:]
    level = logging.WARNING if how == "quiet" else logging.INFO
    start_log(level, log, name)
    reporter: Reporter = NullReporter()
    if log == "json":
        reporter = LogReporter()
    elif how != "quiet":
        reporter = reporter_for(plain_lines=True, details=how == "verbose")
    with kept_bytecode(), ended_by_sigterm():
        code = EngineServer(channel_at(descriptor)).run(_make_engine(model, speculative, lora, runtime), reporter)
    sys.exit(code)


if __name__ == "__main__":
    main()
