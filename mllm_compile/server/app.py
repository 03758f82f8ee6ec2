"""The ASGI application: its paths, the check of keys, and the answers to errors."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import hmac
import ipaddress
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router

from mllm_compile.server import about, adapters, endpoints, session_paths
from mllm_compile.server.api.anthropic import MessagesFields, MessagesRequest
from mllm_compile.server.api.errors import GENERATES, UNSUPPORTED, ApiError, not_ready, wrong_encoding
from mllm_compile.server.api.fields import ChatFields, CompletionFields
from mllm_compile.server.api.interfaces import ChatRequest, CompletionRequest
from mllm_compile.server.api.responses import ResponseFields, ResponsesRequest
from mllm_compile.server.audio import endpoints as audio
from mllm_compile.server.flow.job import JSON
from mllm_compile.server.flow.writer import Headers, Send
from mllm_compile.server.front import Front
from mllm_compile.server.generate import RequestKind, generate_endpoint
from mllm_compile.server.http import Receive, Scope, client_of, header, key_of, respond, respond_error
from mllm_compile.server.models.engines import EnginesFront
from mllm_compile.server.models.paths import answers_of
from mllm_compile.server.openapi import openapi
from mllm_compile.server.options import ServeOptions
from mllm_compile.server.pooling import endpoints as pooling
from mllm_compile.server.render import SUFFIX, render
from mllm_compile.server.rl import paths as rl

logger = logging.getLogger("mllm_compile.server")

OPEN_PATHS = frozenset({"/health", "/ready", "/ping"})
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_OTHER_SITE = (
    "pages of other sites may not ask this server; without a key neither may anybody by a name that a site can have. "
    "Use localhost or an IP address, or see --allowed-origin"
)
_MOST_OF_PATH = 60  # characters that the log has

# Paths of other servers, without /v1 or /v2 before them, and what to do instead.
_SLEEP = "serve with --enable-rl --enable-sleep-mode, or with --sleep-after, by which an engine sleeps by itself"
_CACHE = "use the engine in process: flush_prefix_cache()"
_ELSEWHERE = {
    **dict.fromkeys(("moderations", "encode"), GENERATES),
    "embeddings": "use /v1/embeddings",
    **dict.fromkeys(("audio/speech", "images/generations"), GENERATES),
    **dict.fromkeys(("invocations", "api/generate"), "use /v1/completions"),
    **dict.fromkeys(("api/chat", "chat"), "use /v1/chat/completions"),
    **dict.fromkeys(("sleep", "wake_up", "is_sleeping"), _SLEEP),
    **dict.fromkeys(("reset_prefix_cache", "flush_cache"), _CACHE),
    **dict.fromkeys(("files", "batches"), "nothing is stored. Send the requests themselves, many at once"),
    **dict.fromkeys(("get_model_info", "model_info", "api/tags"), "use /v1/models"),
    **dict.fromkeys(("get_server_info", "get_load"), "use /server_info, /load or /metrics"),
    "health_generate": "use /health, which sees a step that is stuck",
}
_FOR_ROLLOUTS = "it is for rollouts: serve with --enable-rl, and an API key or on this machine alone"


class _Raw:
    """An endpoint that speaks ASGI itself; Starlette would wrap a function."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _generating(kind: RequestKind) -> endpoints.Endpoint:
    return lambda front: generate_endpoint(front, kind)


# By path, the fields of what it takes.
_BODIES: dict[str, type[msgspec.Struct]] = {
    "/v1/load_lora_adapter": adapters.LoadFields,
    "/v1/unload_lora_adapter": adapters.UnloadFields,
    **{kind.path: kind for kind in (CompletionFields, ChatFields, ResponseFields, MessagesFields)},
    **{kind.path + SUFFIX: kind for kind in (CompletionFields, ChatFields)},
    "/v1/messages/count_tokens": MessagesFields,
    **pooling.BODIES,
    **audio.BODIES,
    "/tokenize": endpoints.TokenizeFields,
    "/detokenize": endpoints.DetokenizeFields,
}
_ROUTES: tuple[tuple[str, str, endpoints.Endpoint], ...] = (
    ("POST", CompletionFields.path, _generating(CompletionRequest)),
    ("POST", ChatFields.path, _generating(ChatRequest)),
    ("POST", ResponseFields.path, _generating(ResponsesRequest)),
    ("POST", MessagesFields.path, _generating(MessagesRequest)),
    ("POST", CompletionFields.path + SUFFIX, render(CompletionRequest)),
    ("POST", ChatFields.path + SUFFIX, render(ChatRequest)),
    *endpoints.ENDPOINTS,
    *pooling.ENDPOINTS,
    *audio.ENDPOINTS,
    ("POST", "/v1/load_lora_adapter", adapters.load),
    ("POST", "/v1/unload_lora_adapter", adapters.unload),
    ("GET", "/v1/sessions/{name:path}", session_paths.tell),
    ("DELETE", "/v1/sessions/{name:path}", session_paths.end),
    ("GET", "/load", about.load),
    ("GET", "/server_info", about.server_info),
    ("GET", "/openapi.json", lambda front: openapi(paths_of(front.options), _bodies_of(front.options))),
)


def paths_of(options: ServeOptions) -> list[tuple[str, str]]:
    """Method and path of every route of a server."""
    return [(method, path) for method, path, _ in _routes_of(options)]


def _routes_of(options: ServeOptions) -> tuple[tuple[str, str, endpoints.Endpoint], ...]:
    return (*_ROUTES, *rl.PATHS) if options.enable_rl else _ROUTES


def _bodies_of(options: ServeOptions) -> dict[str, type[msgspec.Struct]]:
    return _BODIES | rl.BODIES if options.enable_rl else _BODIES


def make_app(front: Front) -> App:
    """The application of a front."""
    return _guarded(front, [(method, path, endpoint(front)) for method, path, endpoint in _routes_of(front.options)])


def make_engines_app(server: EnginesFront[Any]) -> App:
    """The application of a server of several engines."""
    description = openapi(paths_of(server.options), _bodies_of(server.options))
    return _guarded(server, answers_of(server, _ROUTES, description))


def _guarded(front: Front | EnginesFront[Any], answers: Sequence[tuple[str, str, endpoints.Answer]]) -> App:
    routes = [Route(path, _Raw(answer), methods=[method]) for method, path, answer in answers]
    # A redirect would be made of the Host header, and lead from TLS to plain HTTP behind a proxy.
    router = Router(routes, redirect_slashes=False)
    app: App = _Guarded(router, front)
    if front.options.allowed_origins:
        app = CORSMiddleware(  # type: ignore[assignment]
            app,  # type: ignore[arg-type]
            allow_origins=front.options.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-mllm-timing", "x-mllm-ignored"],
        )
    return app


class _Guarded:
    """Asks for a key on every path but the open ones, and answers what an endpoint did not catch."""

    def __init__(self, app: Router, front: Front | EnginesFront[Any]) -> None:
        options = front.options
        self._app = app
        self._front = front
        self._keys = [key.encode() for key in options.api_keys]
        self._origins = options.allowed_origins
        self._root = options.root_path
        self._known_hosts = {_place_of(origin) for origin in options.allowed_origins}
        self._paths = paths_of(options)
        self._is_private = options.is_local and options.uds is None and not options.api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._leave_root(scope)
        if self._keys and scope["path"] not in OPEN_PATHS and not self._has_key(scope):
            error = ApiError(401, "this server needs a key: Authorization: Bearer KEY", code="invalid_api_key")
            self._tell(scope, error)
            asks = [(b"www-authenticate", b'Basic realm="mllm-compile", charset="UTF-8"')]  # of a browser
            await respond(send, error.body, status=401, headers=[*JSON, *(asks if scope["path"] == "/" else [])])
            return
        if scope["path"] not in OPEN_PATHS and not self._may_ask(scope):
            error = ApiError(403, _OTHER_SITE, code="origin")
            self._tell(scope, error)
            await respond_error(send, error)
            return
        encoding = (header(scope, b"content-encoding") or "identity").strip()
        if encoding.lower() != "identity":
            error = wrong_encoding(repr(encoding[:_MOST_OF_PATH]))
            self._tell(scope, error)
            await respond_error(send, error)
            return
        scope["app"] = self  # so that the router raises what it does not find
        try:
            await self._app(scope, receive, send)  # type: ignore[arg-type]
        except HTTPException as missed:
            error, headers = _not_found(scope["method"], scope["path"], missed, self._paths)
            self._tell(scope, error)
            await respond(send, error.body, status=error.status, headers=headers)
        except asyncio.CancelledError:  # of the server, which ends, while it waited for its body or a thread
            if not self._front.is_draining:
                raise
            with contextlib.suppress(RuntimeError):  # the answer had begun
                await respond_error(send, not_ready("the server is shutting down", "shutting_down"))
        except Exception as raised:
            logger.exception("a request to %s met an internal error", scope["path"])
            failure = ApiError(500, "internal error; the server's log has it", code="internal_error")
            try:
                await respond_error(send, failure)
            except RuntimeError:  # the answer had begun
                raise raised from None

    def _leave_root(self, scope: Scope) -> None:
        """Takes --root-path from a request's path; some proxies pass it on, and others have taken it."""
        path = scope["path"]
        if self._root and (path == self._root or path.startswith(f"{self._root}/")):
            scope["path"] = path[len(self._root) :] or "/"

    def _tell(self, scope: Scope, error: ApiError) -> None:
        """Logs and counts a request that comes to no endpoint. An unknown path is quoted: it may hold anything."""
        path = scope["path"]
        is_known = error.code == UNSUPPORTED or any(path == known for _, known in self._paths)
        self._front.refused(error, path if is_known else repr(path[:_MOST_OF_PATH]), client_of(scope))

    def _may_ask(self, scope: Scope) -> bool:
        """True unless a browser says that a page of another site asks: it need not be able to read the answer.

        A site can make its own name lead to 127.0.0.1, and is then this server's Host; what its page gets there has no
        Origin. So where nothing but the address keeps strangers out, the name has to be one that no site can have.
        """
        origin, host = header(scope, b"origin"), header(scope, b"host")
        if origin in self._origins:
            return True
        if origin is not None and _place_of(origin) != host:
            return False
        return not self._is_private or host is None or host in self._known_hosts or _is_of_no_site(host)

    def _has_key(self, scope: Scope) -> bool:
        given = key_of(scope).encode()
        # All are compared: how long it takes says nothing about which one is nearly right.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return any(matches)


def _place_of(origin: str) -> str | None:
    """The name and the port of an origin; None: it has none."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _is_of_no_site(host: str) -> bool:
    """True for an address, a name without a dot, and names of localhost, which browsers do not look up."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if "." not in name or name.endswith(".localhost"):
            return True
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _not_found(
    method: str, path: str, error: HTTPException, paths: Sequence[tuple[str, str]]
) -> tuple[ApiError, Headers]:
    """The answer to a path that is not among `paths`, or not for the method, and its headers."""
    if error.status_code == 405:
        methods = sorted((error.headers or {}).get("Allow", "").split(", "))
        allowed = ", ".join(methods)
        refused = ApiError(405, f"{path}: expected {' or '.join(methods)}")
        return refused, [*JSON, (b"allow", allowed.encode())]
    bare = path.rstrip("/")
    why = _ELSEWHERE.get(re.sub(r"^/(v[12]/)?", "", bare))
    if why is None and any(bare == of_rollouts for _, of_rollouts, _ in rl.PATHS):
        why = _FOR_ROLLOUTS
    if why is not None:
        return ApiError(404, f"there is no {path}: {why}", code=UNSUPPORTED), JSON
    known: dict[str, list[str]] = {}
    for one, like in paths:
        if "{" not in like:
            known.setdefault(like, []).append(one)
    meant = [like for like in (bare, f"/v1{bare}", bare.removeprefix("/v1")) if like in known]
    meant = meant or difflib.get_close_matches(bare, known, n=1, cutoff=0.85)
    if not meant:
        return ApiError(404, f"there is no {path}"), JSON
    place = meant[0] if method in known[meant[0]] else f"{known[meant[0]][0]} {meant[0]}"
    return ApiError(404, f"there is no {path}; did you mean {place}?"), JSON
