"""The endpoints that generate: from a body to a running request, and to its end or its client's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.api.interfaces import ApiRequest
from mllm_compile.server.client_sessions import session_of
from mllm_compile.server.flow.job import Job
from mllm_compile.server.flow.memory import Share
from mllm_compile.server.flow.writer import CHUNKS, Outlet, Send
from mllm_compile.server.front import Front
from mllm_compile.server.http import ClientGoneError, Receive, Scope, client_of, header, respond_error, unless_gone


class RequestKind(Protocol):
    """A class of requests.

    Attributes:
        prefix: of answers' ids.
        refusal: the body of an error response.
    """

    prefix: str

    @property
    def refusal(self) -> Callable[[ApiError], bytes]: ...

    def __call__(self, body: bytes) -> ApiRequest: ...


def generate_endpoint(front: Front, kind: RequestKind) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The endpoint of an interface."""

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        with front.memory.share() as share:
            await answer(scope, receive, send, share)

    async def answer(scope: Scope, receive: Receive, send: Send, share: Share) -> None:
        client = client_of(scope)
        outlet = Outlet(send, scope.get("extensions", {}).get(CHUNKS, {}).get("write"))

        async def refuse(error: ApiError) -> None:
            front.refused(error, scope["path"], client)
            await respond_error(send, error, kind.refusal(error))

        try:
            request = kind(await front.bodies.read(receive, share))
            name, parent = header(scope, b"x-request-id"), front.parent_of(scope["headers"])
            session = session_of(request.fields, header(scope, b"x-session-id"), front.owner_of(scope))
            starting = front.start(request, kind.prefix, outlet, client, name, share, parent, session)
            # Most wait for nothing, and need no tasks.
            job = await (starting if front.starts_at_once(request) else unless_gone(starting, receive))
        except ClientGoneError:
            return
        except ApiError as error:
            await refuse(error)
            return
        del request, starting  # an answer may take long, and needs neither the body nor what was parsed of it
        await until_over(job, receive)

    return endpoint


async def until_over(job: Job, receive: Receive) -> None:
    """Waits until a request's response is complete, or its client has left."""
    this = asyncio.current_task()
    assert this is not None, "a server runs each request in a task"
    job.on_left = this.cancel
    try:
        await receive()  # the client's leave; comes also when the response is complete
    except asyncio.CancelledError:
        if not job.has_left:
            raise
    finally:
        job.on_left = None
        job.leave()
