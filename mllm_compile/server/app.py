"""The ASGI application: which path leads where, who may enter, and the answer to what goes wrong."""

from __future__ import annotations

import base64
import contextlib
import difflib
import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route, Router

from mllm_compile.server import endpoints
from mllm_compile.server.api.anthropic import MessagesRequest
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.api.interfaces import ChatRequest, CompletionRequest
from mllm_compile.server.api.responses import ResponsesRequest
from mllm_compile.server.flow.job import JSON
from mllm_compile.server.flow.writer import Headers, Send
from mllm_compile.server.front import Front
from mllm_compile.server.generate import RequestKind, generate_endpoint
from mllm_compile.server.http import Receive, Scope, client_of, header, respond, respond_error

logger = logging.getLogger("mllm_compile.server")

OPEN_PATHS = frozenset({"/health", "/ready"})
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_MOST_OF_PATH = 60  # characters that the log has

_GENERATES_ONLY = ("embeddings", "score", "rerank", "moderations", "audio/transcriptions", "images/generations")


class _Raw:
    """An endpoint that speaks ASGI itself; Starlette would wrap a function."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _generates_only(front: Front) -> App:
    error = ApiError(
        404,
        "this engine generates text, and only that. Use /v1/completions or /v1/chat/completions",
        code="unsupported_endpoint",
    )

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        front.refused(error, scope["path"], client_of(scope))
        await respond_error(send, error)

    return refuse


def _generating(kind: RequestKind) -> endpoints.Endpoint:
    return lambda front: generate_endpoint(front, kind)


_ROUTES: tuple[tuple[str, str, endpoints.Endpoint], ...] = (
    ("POST", "/v1/completions", _generating(CompletionRequest)),
    ("POST", "/v1/chat/completions", _generating(ChatRequest)),
    ("POST", "/v1/responses", _generating(ResponsesRequest)),
    ("POST", "/v1/messages", _generating(MessagesRequest)),
    *endpoints.ENDPOINTS,
    *(("POST", f"/v1/{name}", _generates_only) for name in _GENERATES_ONLY),
)


def paths_of() -> list[tuple[str, str]]:
    """Method and path of every route."""
    return [(method, path) for method, path, _ in _ROUTES]


def make_app(front: Front) -> App:
    """The application of a front."""
    routes = [Route(path, _Raw(endpoint(front)), methods=[method]) for method, path, endpoint in _ROUTES]
    # A redirect would be made of the Host header, and lead from TLS to plain HTTP behind a proxy.
    router = Router(routes, redirect_slashes=False)
    app: App = _Guarded(router, front)
    if front.options.allowed_origins:
        app = CORSMiddleware(  # type: ignore[assignment]
            app,  # type: ignore[arg-type]
            allow_origins=front.options.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-mllm-timing", "x-mllm-ignored"],
        )
    return app


class _Guarded:
    """Asks for a key on every path but the open ones, and answers what an endpoint did not catch."""

    def __init__(self, app: Router, front: Front) -> None:
        options = front.options
        self._app = app
        self._front = front
        self._keys = [key.encode() for key in options.api_keys]
        self._origins = options.allowed_origins
        self._is_private = options.is_local and not options.api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1000})
            return
        if self._keys and scope["path"] not in OPEN_PATHS and not self._has_key(scope):
            error = ApiError(401, "this server needs a key: Authorization: Bearer KEY", code="invalid_api_key")
            self._tell(scope, error)
            asks = [(b"www-authenticate", b'Basic realm="mllm-compile", charset="UTF-8"')]  # of a browser
            await respond(send, error.body, status=401, headers=[*JSON, *(asks if scope["path"] == "/" else [])])
            return
        if not self._may_ask(scope):
            error = ApiError(403, "pages of other sites may not ask this server; see --allowed-origin", code="origin")
            self._tell(scope, error)
            await respond_error(send, error)
            return
        scope["app"] = self  # so that the router raises what it does not find
        try:
            await self._app(scope, receive, send)  # type: ignore[arg-type]
        except HTTPException as missed:
            error, headers = _not_found(scope["path"], missed)
            self._tell(scope, error)
            await respond(send, error.body, status=error.status, headers=headers)
        except Exception as raised:
            logger.exception("a request to %s met an internal error", scope["path"])
            failure = ApiError(500, "internal error; the server's log has it", code="internal_error")
            try:
                await respond_error(send, failure)
            except RuntimeError:  # the answer had begun
                raise raised from None

    def _tell(self, scope: Scope, error: ApiError) -> None:
        """Logs and counts a request that comes to no endpoint. A path that is none is quoted: it may hold anything."""
        path = scope["path"]
        is_known = any(path == known for _, known in paths_of())
        self._front.refused(error, path if is_known else repr(path[:_MOST_OF_PATH]), client_of(scope))

    def _may_ask(self, scope: Scope) -> bool:
        """True unless a browser says that a page of another site asks: it need not be able to read the answer.

        A site can make its own name lead to 127.0.0.1, and is then this server's Host. So where nothing but the address
        keeps strangers out, the name has to be one that no site can have.
        """
        origin = header(scope, b"origin")
        if origin is None or origin in self._origins:
            return True
        try:
            place = urlsplit(origin)
            name = place.hostname or ""
        except ValueError:
            return False
        return place.netloc == header(scope, b"host") and (not self._is_private or _is_of_no_site(name))

    def _has_key(self, scope: Scope) -> bool:
        kind, _, value = (header(scope, b"authorization") or "").partition(" ")
        if kind == "Basic":  # a browser's: any name, and the key as password
            with contextlib.suppress(ValueError):
                value = base64.b64decode(value, validate=True).decode().partition(":")[2]
        given = (value.strip() or header(scope, b"x-api-key") or "").encode()
        # All are compared: how long it takes says nothing about which one is nearly right.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return any(matches)


def _is_of_no_site(name: str) -> bool:
    """True for an address, and for localhost, which browsers do not look up."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _not_found(path: str, error: HTTPException) -> tuple[ApiError, Headers]:
    """The answer to a path that is not there, or not for the method, and its headers."""
    if error.status_code == 405:
        methods = sorted((error.headers or {}).get("Allow", "").split(", "))
        allowed = ", ".join(methods)
        refused = ApiError(405, f"{path}: expected {' or '.join(methods)}")
        return refused, [*JSON, (b"allow", allowed.encode())]
    paths = {path for _, path in paths_of()}
    bare = path.rstrip("/")
    meant = [like for like in (bare, f"/v1{bare}") if like in paths] or difflib.get_close_matches(
        bare, paths, n=1, cutoff=0.85
    )
    hint = f"; did you mean {meant[0]}?" if meant else ""
    return ApiError(error.status_code, f"there is no {path}{hint}"), JSON
