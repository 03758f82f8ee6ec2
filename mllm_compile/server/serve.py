"""Runs a server: its port, its event loop, its signals, its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import ssl
import stat
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from typing import Any

import uvicorn
import uvloop

from mllm_compile.errors import ConfigError
from mllm_compile.kv_events.installed import make_publisher
from mllm_compile.server.app import App, make_app, make_engines_app
from mllm_compile.server.connection import Connection
from mllm_compile.server.engine_facts import EngineFacts
from mllm_compile.server.engine_process import CommandLine, EarlyEngine, allow_open_files, command_line
from mllm_compile.server.front import Front
from mllm_compile.server.models.engines import EnginesFront
from mllm_compile.server.models.front import ModelsFront
from mllm_compile.server.options import ModelsOptions, ServeOptions
from mllm_compile.server.replicas.front import ReplicasFront
from mllm_compile.server.spare import Spare
from mllm_compile.server.telemetry.tracing import Tracing, make_tracing
from mllm_compile.version import __version__

_STAGES_SHOWN = 3
logger = logging.getLogger("mllm_compile.server")

_KEEP_ALIVE_S = 75  # longer than clients keep idle connections: they close first, and never meet a closed one
_BACKLOG = 4096


def run_server(
    options: ServeOptions,
    command_of: CommandLine | None = None,
    early: EarlyEngine | None = None,
    spare: Spare | None = None,
) -> None:
    """Serves until a signal ends it.

    Args:
        command_of: the engine's command line, where it is not the usual one.
        early: the engine's process, which was started ahead.
        spare: a process for engines that are started again.

    Raises:
        MllmError: the port cannot be had, or the engine cannot be started.
    """

    async def serve(listener: socket.socket, tracing: Tracing | None) -> None:
        events = None if options.kv_events is None else make_publisher(options.kv_events, options.kv_event_ranks)
        try:
            front = Front(options, command_of or command_line(options), tracing, events, early=early, spare=spare)
            await _serve(front, make_app(front), listener, _tell_ready(front, _url(options, listener)))
        finally:
            if events is not None:
                events.close()

    _run(options, serve)


def run_models(
    options: ServeOptions,
    models: ModelsOptions,
    command_of: Callable[[ServeOptions], CommandLine] = command_line,
    spare: Spare | None = None,
) -> None:
    """Serves several models until a signal ends it.

    Args:
        options: of the server, and of each model but for its source and name.
        command_of: the command line of each model's engine.
        spare: a process for engines that are started again.

    Raises:
        MllmError: the port cannot be had, or no model can be served.
    """

    async def serve(listener: socket.socket, tracing: Tracing | None) -> None:
        server = ModelsFront(options, models, command_of, tracing, partial(_say, options), spare)
        await _serve(server, make_engines_app(server), listener, _tell_engines(server, _url(options, listener)))

    _run(options, serve)


def run_replicas(
    options: ServeOptions,
    devices: tuple[str | None, ...],
    command_of: Callable[[ServeOptions], CommandLine] = command_line,
    spare: Spare | None = None,
) -> None:
    """Serves a model by several engines until a signal ends it.

    Args:
        options: of the server, and of each engine but for its devices.
        devices: of each engine, as CUDA_VISIBLE_DEVICES names them; None: those that this process sees.
        command_of: the command line of each engine.
        spare: a process for engines that are started again.

    Raises:
        MllmError: the port cannot be had, or no engine can be started.
    """

    async def serve(listener: socket.socket, tracing: Tracing | None) -> None:
        server = ReplicasFront(options, devices, command_of, tracing, partial(_say, options), spare)
        await _serve(server, make_engines_app(server), listener, _tell_engines(server, _url(options, listener)))

    _run(options, serve)


def _run(options: ServeOptions, serve: Callable[[socket.socket, Tracing | None], Coroutine[Any, Any, None]]) -> None:
    """Opens the port, and runs the event loop."""
    allow_open_files()
    _check_tls(options)
    listener = _listen(options) if options.uds is None else _listen_at_path(options.uds)
    tracing = make_tracing(options.otlp_traces_endpoint)
    try:
        uvloop.run(serve(listener, tracing))
    finally:
        if tracing is not None:
            tracing.close()
        if options.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(options.uds)


def _listen(options: ServeOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
    except OSError as error:
        listener.close()
        place = f"{options.host}:{options.port}"
        raise ConfigError(f"--host, --port: {place} cannot be listened at ({error.strerror}). Take another.") from None
    listener.listen(_BACKLOG)
    return listener


def _listen_at_path(path: str) -> socket.socket:
    """A Unix socket; one that a server has left behind is removed."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_behind(path):
            os.unlink(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--uds: {path} cannot be listened at ({error.strerror or error}). Take another.") from None
    listener.listen(_BACKLOG)
    return listener


def _is_left_behind(path: str) -> bool:
    """True for a socket at which nobody listens."""
    if not os.path.exists(path) or not stat.S_ISSOCK(os.stat(path).st_mode):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        return other.connect_ex(path) == errno.ECONNREFUSED


def _check_tls(options: ServeOptions) -> None:
    """
    Raises:
        ConfigError: the certificate or its key cannot be used.
    """
    if options.ssl_certfile is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(
            options.ssl_certfile, options.ssl_keyfile, _refuse_password
        )
    except (OSError, ValueError) as error:  # of ssl too
        files = " and ".join(filter(None, (options.ssl_certfile, options.ssl_keyfile)))
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"--ssl-certfile, --ssl-keyfile: {files} cannot be used ({why}). Give a certificate in PEM, and its key "
            "without a password"
        ) from None


def _refuse_password() -> str:
    raise ValueError("the key has a password")


class _Server(uvicorn.Server):
    """A server whose end is decided here: signals are not its own business."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Stop:
    """SIGTERM and SIGINT: the first asks for a drained end, the second for an end at once."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signal)

    def _signal(self) -> None:
        (self.now if self.asked.is_set() else self.asked).set()


async def _serve(
    front: Front | EnginesFront[Any], app: App, listener: socket.socket, tell_ready: Coroutine[Any, Any, None]
) -> None:
    options = front.options
    stop = _Stop()
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        access_log=False,
        log_level="error",
        server_header=False,
        proxy_headers=False,  # nothing asks for the client's address
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
        ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )
    server = _Server(config)
    url = _url(options, listener)
    engines = "engine" if isinstance(front, Front) else "engines"
    _say(options, f"listening at {options.uds or url}, starting the {engines}")
    if options.uds is None and not options.is_local and not options.api_keys:
        _say(options, f"warning: {options.host} can be reached from outside, and no --api-key is set")
    serving = asyncio.ensure_future(server.serve([listener]))
    engine = asyncio.ensure_future(front.run())
    others = [asyncio.ensure_future(work) for work in (front.sweep(), tell_ready)]
    asked = asyncio.ensure_future(stop.asked.wait())
    try:
        await asyncio.wait({asked, engine, serving}, return_when=asyncio.FIRST_COMPLETED)
        if not engine.done():
            _say(options, f"shutting down: running requests have {options.shutdown_timeout_s:g} s")
            await _first(front.drain(), stop.now.wait())
    finally:
        front.end()
        front.close()
        server.should_exit = True
        for work in (*others, asked):
            work.cancel()
        await _first(asyncio.wait({engine, serving}), stop.now.wait())
        server.force_exit = True
    if engine.done():
        engine.result()  # raises why it could not be started


def _url(options: ServeOptions, listener: socket.socket) -> str:
    """The address for clients, as this machine knows it."""
    scheme = "http" if options.ssl_certfile is None else "https"
    if options.uds is not None:
        return f"{scheme}://localhost"
    host, port, *_ = listener.getsockname()
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


async def _first(*works: Awaitable[object]) -> None:
    """Waits for one of them, and cancels the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


async def _tell_ready(front: Front, url: str) -> None:
    with contextlib.suppress(Exception):
        facts = await front.supervisor.ready()
        for line in banner_lines(front, facts, url):
            _say(front.options, line)
        _collect_seldom()


async def _tell_engines(server: EnginesFront[Any], url: str) -> None:
    with contextlib.suppress(Exception):
        await server.begun.wait()
        if not server.health()[0]:
            return  # each has said why it failed, and the server ends
        for line in engines_banner_lines(server, url):
            _say(server.options, line)
        _collect_seldom()


def _collect_seldom() -> None:
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 50, 50)


def _say(options: ServeOptions, line: str) -> None:
    if options.log == "json":
        logger.info("%s", " ".join(line.split()))
    elif options.how != "quiet":
        print(line, file=sys.stderr, flush=True)


def banner_lines(front: Front, facts: EngineFacts, url: str) -> list[str]:
    """The lines of the banner."""
    hello = facts.hello
    name = front.names.first
    has_chat = facts.tokenizer is not None and facts.tokenizer.has_chat_template
    if facts.pooling is not None:
        return _pooling_lines(front, facts, url)
    whole = hello.kv_tokens // hello.max_model_len
    longest = sorted(hello.stages, key=lambda stage: -stage[1])[:_STAGES_SHOWN]
    stages = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in longest)
    path, data = "completions", '{"prompt": "Hello", "max_tokens": 32}'
    kind = "no chat template: completions only"
    if has_chat:
        path, data, kind = "chat/completions", '{"messages": [{"role": "user", "content": "Hello"}]}', "chat"
    elif facts.tokenizer is None:
        data, kind = '{"prompt": [1, 2, 3], "max_tokens": 32}', "no tokenizer: completions of token ids only"
    curl = "curl" if front.options.uds is None else f"curl --unix-socket {front.options.uds}"
    key = " -H 'Authorization: Bearer KEY'" if front.options.api_keys else ""
    return [
        f"mllm-compile {__version__}  {name}  {hello.dtype}  {hello.device}",
        f"  memory    {hello.kv_tokens:,} KV tokens: {whole:,} requests of {hello.max_model_len:,}",
        f"  limits    {hello.max_running_requests} running, {front.admission.most} waiting, "
        f"prompt and answer {hello.max_model_len:,} tokens",
        f"  template  {kind}; {facts.syntax.described()}",
        f"  ready     {url}/v1  in {hello.seconds:.1f} s ({stages})",
        f"  try       {curl} {url}/v1/{path}{key} -H 'content-type: application/json' -d '{data}'",
    ]


def engines_banner_lines(server: EnginesFront[Any], url: str) -> list[str]:
    """The lines of the banner of several engines."""
    states = server.states()
    cards = {card["id"]: card.get("state") for card in server.cards()}
    name = next((name for name, state in cards.items() if state != "failed"), "")
    return [
        f"mllm-compile {__version__}  {len(states)} {server.kind}s",
        *(f"  {name:<24}  {state}" for name, state in states.items()),
        f"  ready     {url}/v1",
        f"""  try       curl {url}/v1/completions -H 'content-type: application/json' -d '{{"model": "{name}", """
        '"prompt": "Hello", "max_tokens": 32}\'',
    ]


def _pooling_lines(front: Front, facts: EngineFacts, url: str) -> list[str]:
    """The banner of a model that pools."""
    hello, pooling = facts.hello, facts.pooling
    tasks = [] if pooling is None else pooling.rules.names
    path = "/v1/embeddings" if "embed" in tasks else "/classify" if "classify" in tasks else "/pooling"
    curl = "curl" if front.options.uds is None else f"curl --unix-socket {front.options.uds}"
    key = " -H 'Authorization: Bearer KEY'" if front.options.api_keys else ""
    data = '{"input": "Hello"}' if facts.tokenizer is not None else '{"input": [1, 2, 3]}'
    return [
        f"mllm-compile {__version__}  {front.names.first}  {hello.dtype}  {hello.device}",
        f"  tasks     {', '.join(tasks)}",
        f"  limits    texts of {hello.max_model_len:,} tokens",
        f"  ready     {url}/v1  in {hello.seconds:.1f} s",
        f"  try       {curl} {url}{path}{key} -H 'content-type: application/json' -d '{data}'",
    ]
