"""The state of a server's front, and what its endpoints do with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mllm_compile.engine.requests import as_priority
from mllm_compile.engine.sessions import Session
from mllm_compile.errors import MllmError
from mllm_compile.server.adapter_changes import AdapterChanges
from mllm_compile.server.api.errors import ApiError, bad_request, not_ready, of_error
from mllm_compile.server.api.fields import check_request_id
from mllm_compile.server.api.interfaces import AnswerPlan, ApiRequest
from mllm_compile.server.client_sessions import SessionCalls
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.engine_process import CommandLine, EarlyEngine
from mllm_compile.server.flow.admission import Admission
from mllm_compile.server.flow.choice import PromptRun
from mllm_compile.server.flow.dispatcher import Dispatcher
from mllm_compile.server.flow.job import Job
from mllm_compile.server.flow.memory import Memory, Share
from mllm_compile.server.flow.threads import Threads
from mllm_compile.server.flow.writer import Headers, Outlet
from mllm_compile.server.http import Bodies, Scope, key_of
from mllm_compile.server.names import ModelNames
from mllm_compile.server.options import ServeOptions
from mllm_compile.server.pooling.calls import PoolingRequests
from mllm_compile.server.rl.calls import RolloutCalls
from mllm_compile.server.spare import Spare
from mllm_compile.server.supervisor import PARKED, READY, TAKES_REQUESTS, Landlord, Supervisor
from mllm_compile.server.telemetry.metrics import Metrics
from mllm_compile.server.telemetry.request_log import request_over, request_refused
from mllm_compile.server.wire.messages import AdaptersChanged, PagesChanged

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from mllm_compile.kv_events.publisher import KVEventPublisher
    from mllm_compile.server.telemetry.tracing import Tracing

logger = logging.getLogger("mllm_compile.server")
T = TypeVar("T")

_THREADS = 4  # that tokenize
_LONG_THREADS = 2  # for those that would hold up others
_LONG_BYTES = 1 << 20  # of a request
_SOUND_THREADS = 2
_IMAGE_THREADS = 2  # that wait for workers, as many as there are
_SWEEP_S = 0.5
_MOST_OF_NAME = 64  # characters
_MOST_NAMES = 20  # of fields, in a header


class Front:
    """The state of one server.

    Attributes:
        on_ready: told of each engine that is ready.
        forms: reads bodies with a sound; `sounds`: the threads that read these.

    Args:
        command_of: the engine's command line.
        tracing: makes spans of requests, or None.
        events: publishes KV events, or None.
        landlord: shares the device out among engines of several models.
        memory: of the requests of all models.
        early: the first engine's process, which was started ahead.
        spare: a process for an engine that is started again.
    """

    def __init__(
        self,
        options: ServeOptions,
        command_of: CommandLine,
        tracing: Tracing | None = None,
        events: KVEventPublisher | None = None,
        landlord: Landlord | None = None,
        memory: Memory | None = None,
        early: EarlyEngine | None = None,
        spare: Spare | None = None,
    ) -> None:
        self.options = options
        self._events = events
        self.tracing = tracing
        self.names = ModelNames(options)
        self.bodies = Bodies(options.most_body_bytes)
        self.forms = Bodies.of_sounds()
        self.memory = memory or Memory()
        self.admission = Admission(options.max_queue, lambda: self.dispatcher.num_running())
        self.is_draining = self._is_ended = False
        self._num_going_on = 0
        self.on_ready: Callable[[EngineFacts], None] = lambda facts: None
        self._texts = Threads(_THREADS, "mllm-texts")
        self._long_texts = Threads(_LONG_THREADS, "mllm-long-texts")
        self._images = Threads(_IMAGE_THREADS, "mllm-images")
        self.sounds = Threads(_SOUND_THREADS, "mllm-sounds")
        self._told: set[str] = set()
        self.supervisor = Supervisor(
            command_of,
            sleep_after_s=options.sleep_after_s,
            stuck_after_s=options.stuck_after_s,
            on_step=lambda frame: self.dispatcher.on_step(frame),
            on_ready=self._engine_ready,
            on_lost=self._engine_lost,
            is_idle=lambda: self.is_idle,
            on_adapters=self._adapters_changed,
            adapters=lambda: self.names.adapters,
            on_pooled=lambda event: self.pooling.over(event),
            on_controlled=lambda event: self.rollouts.over(event) if self.rollouts is not None else None,
            on_pages=self._pages_changed,
            on_session=lambda event: self.sessions.told(event),
            landlord=landlord,
            name=options.name_in_log,
            environment=options.environment,
            early=early,
            spare=spare,
        )
        self.rollouts = RolloutCalls(self.supervisor.send) if options.enable_rl or landlord is not None else None
        self.adapter_changes = AdapterChanges(self.supervisor.send)
        self.sessions = SessionCalls(self.supervisor.send)
        self.pooling = PoolingRequests(self.supervisor.send)
        self.dispatcher = Dispatcher(self.supervisor.send, self.admission.leave, gives_aborted=options.enable_rl)
        self.metrics = Metrics(
            lambda: self.names.first or "",
            {
                "requests_waiting": ("Prompts that wait.", "num_requests_waiting", lambda: self.num_waiting),
                "connections_generating": ("Requests in work.", None, lambda: len(self.dispatcher.jobs)),
                "requests_refused_total": (
                    "Requests that a full queue refused.",
                    None,
                    lambda: self.admission.refused,
                ),
                "engine_ready": ("1: an engine is ready.", None, lambda: self.supervisor.state == READY),
                "engine_restarts_total": ("Engines that were lost.", None, lambda: self.supervisor.restarts),
            },
            lambda: self.supervisor.stats,
            lambda: {} if self.supervisor.facts is None else self.supervisor.facts.cache_config,
        )

    def _engine_ready(self, facts: EngineFacts) -> None:
        self.names.engine_ready(facts)
        self.admission.engine_ready(facts.hello.max_running_requests)
        self.on_ready(facts)

    def _engine_lost(self, error: ApiError) -> None:
        self.dispatcher.fail_all(error)
        self.adapter_changes.fail_all(error)
        self.sessions.fail_all(error)
        self.pooling.fail_all(error)
        if self.rollouts is not None:
            self.rollouts.engine_lost(error)

    def _adapters_changed(self, event: AdaptersChanged) -> None:
        self.names.set_adapters(event.adapters)
        self.adapter_changes.over(event)

    def _pages_changed(self, event: PagesChanged | None) -> None:
        if self._events is None:
            return
        if event is None:
            self._events.engine_is_gone()
        else:
            self._events.take(event.rank, event.news)

    def owner_of(self, scope: Scope) -> str:
        """Whose sessions a request may name: those of its API key, where there are keys."""
        return key_of(scope) if self.options.api_keys else ""

    def refuse(self, error: ApiError) -> None:
        """Tells the requests that wait for a parked engine, and those within it, that it cannot run now."""
        self.supervisor.refuse(error)
        self.dispatcher.end_all(error)

    @property
    def num_waiting(self) -> int:
        """Prompts that no step has taken, as far as is known here: of texts a step takes as many as can run."""
        return self.admission.waiting - min(self.pooling.num_texts, self.admission.max_running)

    @property
    def is_idle(self) -> bool:
        calls = (self.dispatcher, self.pooling, self.adapter_changes)
        return all(one.is_idle for one in calls) and self.admission.waiting == self._num_going_on == 0

    def health(self) -> tuple[bool, dict[str, Any]]:
        """True if there is no reason to restart this server, and what it does."""
        supervisor = self.supervisor
        state: dict[str, Any] = {"state": "draining" if self.is_draining else supervisor.state}
        stuck = supervisor.stuck_for()
        if stuck is not None:
            return False, {"state": "stuck", "seconds": round(stuck, 1)}
        is_lost = supervisor.restarts > 0 and supervisor.state not in TAKES_REQUESTS
        return not is_lost, state

    def readiness(self) -> tuple[bool, dict[str, Any]]:
        """True if a request would be taken now, and the stage of the start."""
        supervisor = self.supervisor
        is_ready = supervisor.state in TAKES_REQUESTS and not self.is_draining and supervisor.stuck_for() is None
        state = {"state": "draining" if self.is_draining else supervisor.state}
        if supervisor.state not in TAKES_REQUESTS:
            state |= {
                "stage": supervisor.stage,
                "seconds": f"{time.monotonic() - supervisor.stage_since_s:.1f}",
            }
        return is_ready, state

    def refused(self, error: ApiError, path: str, client: str) -> None:
        """Logs and counts a request that did not begin."""
        request_refused(error, self.metrics, path, client)

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """For as long as a request asks for one prompt behind another: a drain waits for the last one.

        Raises:
            ApiError: no further request is taken.
        """
        self.check_open()
        self._num_going_on += 1
        try:
            yield
        finally:
            self._num_going_on -= 1

    def check_open(self, goes_on: bool = False) -> None:
        """
        Args:
            goes_on: the request is `going_on`.

        Raises:
            ApiError: no further request is taken.
        """
        if self._is_ended or (self.is_draining and not goes_on):
            raise not_ready("the server is shutting down", "shutting_down")
        if self.rollouts is not None:
            self.rollouts.check_weights()

    def check_ignored(self, names: Sequence[str], why: str = "this server knows no such field") -> None:
        """Says once in the log that a field changes nothing.

        Raises:
            ApiError: the server is strict.
        """
        if names and self.options.is_strict:
            raise bad_request(f"{_header_text(names)}: {why}, and is strict", _shown(names)[0], "unknown_field")
        for name in _shown(names):
            if name not in self._told and len(self._told) < 1000:
                self._told.add(name)
                logger.info("requests have the field %r, which is ignored: %s", name, why)

    async def in_thread(self, num_bytes: int, function: Callable[..., T], *args: Any) -> T:
        """The result of a function that tokenizes, of a request of so many bytes."""
        threads = self._long_texts if num_bytes > _LONG_BYTES else self._texts
        return await threads.run(function, *args)

    async def _planned(self, request: ApiRequest, facts: EngineFacts, share: Share) -> AnswerPlan:
        if request.has_media:
            return await self._images.run(request.plan, facts)
        return await self.in_thread(share.num_bytes, request.plan, facts)

    async def facts(self, model: str | None) -> EngineFacts:
        """The facts of the engine that serves a model; wakes it, waits for it.

        Raises:
            ApiError: there is no such model, or none will be ready.
        """
        facts = self.supervisor.facts
        if facts is None or self.supervisor.state != READY:
            facts = await self._facts_later()
        self.names.check(model)
        return facts

    async def facts_of_texts(self, model: str | None) -> EngineFacts:
        """Likewise, for what needs no engine: a parked one is not woken."""
        facts = self.supervisor.facts
        if facts is None or self.supervisor.state != PARKED:
            return await self.facts(model)
        self.names.check(model)
        return facts

    async def _facts_later(self) -> EngineFacts:
        limits = (self.options.max_queue_s, self.options.request_timeout_s)
        try:
            async with asyncio.timeout(min((limit for limit in limits if limit is not None), default=None)):
                return await self.supervisor.ready()
        except TimeoutError:
            raise not_ready(f"the engine is not ready: {self.supervisor.stage}", "starting") from None

    def parent_of(self, headers: Headers) -> Context | None:
        """The span that a request's headers name, where there are spans."""
        return None if self.tracing is None else self.tracing.parent_of(headers)

    def starts_at_once(self, request: ApiRequest) -> bool:
        """True if a request waits neither for an engine nor for a thread."""
        return request.is_quick and self.supervisor.state == READY

    async def start(
        self,
        request: ApiRequest,
        prefix: str,
        outlet: Outlet,
        client: str,
        header_id: str | None,
        share: Share,
        parent: Context | None = None,
        session: Session | None = None,
        goes_on: bool = False,
    ) -> Job:
        """Starts a request; waits for nothing if `starts_at_once`.

        Args:
            share: of the memory, which then holds what the answer needs.
            goes_on: it is of one that is `going_on`, which a drain or a full queue does not stop. Its share is held.

        Raises:
            ApiError: it is refused.
        """
        arrived_s = time.monotonic()
        self.check_open(goes_on)
        self.check_ignored(request.ignored)
        count = request.num_prompts
        self.admission.enter(count, is_bounded=not goes_on)
        try:
            facts = await self.facts(request.fields.model)
            if facts.pooling is not None:
                raise facts.pooling.not_generating()
            try:
                plan: AnswerPlan = (
                    request.plan(facts) if request.is_quick else await self._planned(request, facts, share)
                )
                if self.supervisor.state == PARKED:  # meanwhile; the engine keeps the request until its turn
                    self.supervisor.want()
                elif self.supervisor.state != READY:
                    raise not_ready("the engine is gone. It starts again.", "engine_lost")
                self.names.check(request.fields.model)  # again: its adapter may have been unloaded meanwhile
                self.check_ignored(plan.unread, "this server's model has a chat template that reads no such variable")
                ignored = [*request.ignored, *plan.unread]
                headers = ignored_headers(ignored)
                priority = 0 if request.fields.priority is None else as_priority(request.fields.priority)
                name = self._name(prefix, request.fields.request_id, header_id)
                if not goes_on:
                    share.hold(plan.num_bytes)
                job = self._job(name, request, plan, facts, outlet, client, headers, parent)
            except MllmError as error:
                raise of_error(error, request.fields.subject) from None
            job.arrived_s = arrived_s
        except BaseException:
            self.admission.leave(count)
            raise
        adapter = self.names.adapter(request.fields.model)
        self.dispatcher.start(job, plan.params, priority, request.fields.cache_salt, adapter, session)
        return job

    def _name(self, prefix: str, asked: str | None, header_id: str | None) -> str:
        """The answer's id: with the client's own name of the request, where it gives one."""
        own = check_request_id(asked)
        if own is None and header_id is not None:
            # One that does not do is passed over: proxies set this header, and the client need not know of it.
            with contextlib.suppress(ApiError):
                own = check_request_id(header_id)
            own = None if own is not None and prefix + own in self.dispatcher.jobs else own
        name = prefix + (own or secrets.token_hex(12))
        if name in self.dispatcher.jobs:
            raise bad_request(f"request_id: {own} is in use; give each live request an id of its own")
        return name

    def _job(
        self,
        name: str,
        request: ApiRequest,
        plan: AnswerPlan,
        facts: EngineFacts,
        outlet: Outlet,
        client: str,
        headers: Headers,
        parent: Context | None,
    ) -> Job:
        adapter = self.names.adapter(request.fields.model)
        model = self.names.first if adapter is None else adapter.name
        head = {
            "id": name,
            "created": int(time.time()),
            "model": request.fields.model or self.names.first,
            "system_fingerprint": self.names.fingerprint(facts.hello.fingerprint, request.fields.model),
        }
        job = Job(
            name,
            plan.format(head),
            outlet,
            is_stream=bool(request.fields.stream),
            stream_interval=request.fields.stream_interval or 1,
            headers=[(b"x-request-id", name.encode()), *headers],
            form_field=request.fields.form_field or "tools",  # whose form is no field's
            whole_headers=plan.whole_headers,
            cancel=self.dispatcher.cancel,
            on_over=lambda job: self._over(job, model, client, parent),
        )
        for prompt in plan.prompts:
            key = self.dispatcher.next_key()
            run = PromptRun(
                key,
                prompt.token_ids,
                prompt.text,
                plan.is_only_echoed,
                prompt.media,
                prompt.decoder_ids,
                prompt.window,
            )
            job.add(run, plan.params, facts.tokenizer if plan.has_text else None, plan.make_parser)
        return job

    def _over(self, job: Job, model: str | None, client: str, parent: Context | None) -> None:
        request_over(job, self.metrics, client)
        if self.tracing is not None and parent is not None:
            self.tracing.request_over(job, model, parent)

    async def run(self) -> None:
        """Runs the engine until `close`.

        Raises:
            EngineFailedError: it cannot be started.
        """
        await self.supervisor.run()

    def close(self) -> None:
        """Ends the engine, and `run`, soon."""
        self.supervisor.close()

    async def sweep(self) -> None:
        """Ends requests that wait too long, until it is cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.dispatcher.sweep(self.options.max_queue_s, self.options.request_timeout_s)

    async def drain(self) -> None:
        """Takes no more requests; lets those that run end, within the time that they have."""
        self.is_draining = True
        end = time.monotonic() + self.options.shutdown_timeout_s
        while not self.is_idle and time.monotonic() < end:
            await asyncio.sleep(0.05)

    def end(self) -> None:
        """Ends the requests that still run."""
        self.is_draining = self._is_ended = True
        error = ApiError(503, "the server is shutting down", code="shutting_down")
        for calls in (self.dispatcher, self.pooling, self.adapter_changes):
            calls.fail_all(error)


def ignored_headers(names: Sequence[str]) -> Headers:
    """The header that names fields which change nothing."""
    return [(b"x-mllm-ignored", _header_text(names).encode())] if names else []


def _header_text(names: Sequence[str]) -> str:
    """Names of fields as a header holds them."""
    texts = [name.encode("ascii", "replace").decode() for name in _shown(names)]
    return ",".join("".join(c for c in text if c.isprintable()) for text in texts)


def _shown(names: Sequence[str]) -> list[str]:
    """The first names, which may be of any length, as far as they are told and kept."""
    return [name[:_MOST_OF_NAME] for name in names[:_MOST_NAMES]]
