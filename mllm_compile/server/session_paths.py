"""The path /v1/sessions/NAME: GET tells of a session, DELETE ends it."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import parse_qs

from mllm_compile.server.api.errors import ApiError, not_ready
from mllm_compile.server.client_sessions import check_name, own_name
from mllm_compile.server.endpoints import Answer
from mllm_compile.server.flow.writer import Send
from mllm_compile.server.front import Front
from mllm_compile.server.http import Receive, Scope, client_of, respond_error, respond_json
from mllm_compile.server.supervisor import PARKED, READY

_MOST_OF_QUERY = 4096  # bytes
_MOST_S = 10.0  # for an answer between two steps


def tell(front: Front) -> Answer:
    """Tells the state of a session."""
    return _answer(front, ends=False)


def end(front: Front) -> Answer:
    """Ends a session: its cached pages are given up first."""
    return _answer(front, ends=True)


async def _asked(front: Front, name: str, salt: str | None, ends: bool) -> dict[str, Any] | None:
    try:
        async with asyncio.timeout(_MOST_S):
            return await front.sessions.ask(name, salt, ends=ends)
    except TimeoutError:
        raise not_ready("the engine has not answered", "engine_busy") from None


def _answer(front: Front, *, ends: bool) -> Answer:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path_params"]["name"]
        query = parse_qs(scope.get("query_string", b"")[:_MOST_OF_QUERY].decode("latin-1"))
        salt = query["cache_salt"][-1] if "cache_salt" in query else None
        try:
            check_name(name, "session_id")
            state = None
            if front.supervisor.state in (READY, PARKED):  # one that sleeps or starts has no sessions
                state = await _asked(front, own_name(front.owner_of(scope), name), salt, ends)
            if state is None:
                what = "none of this API key and cache_salt has that name, or it was ended or forgotten"
                raise ApiError(404, f"session_id: {what}", param="session_id", code="session_not_found")
        except ApiError as error:
            front.refused(error, "/v1/sessions", client_of(scope))
            await respond_error(send, error)
            return
        told = {"id": name, "object": "session", **state}
        await respond_json(send, told | {"deleted": True} if ends else told)

    return answer
