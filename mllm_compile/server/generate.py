"""The endpoints that generate: from a body to a running request, and to its end or its client's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol

from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.api.interfaces import Request
from mllm_compile.server.flow.job import Job
from mllm_compile.server.flow.writer import CHUNKS, Outlet, Send
from mllm_compile.server.front import Front
from mllm_compile.server.http import ClientGoneError, Receive, Scope, client_of, header, respond_error


class RequestKind(Protocol):
    """A class of requests.

    Attributes:
        prefix: of answers' ids.
        refusal: the body of an error response.
    """

    prefix: str

    @property
    def refusal(self) -> Callable[[ApiError], bytes]: ...

    def __call__(self, body: bytes) -> Request: ...


def generate_endpoint(front: Front, kind: RequestKind) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """The endpoint of an interface."""

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        client = client_of(scope)
        outlet = Outlet(send, scope.get("extensions", {}).get(CHUNKS, {}).get("write"))

        async def refuse(error: ApiError) -> None:
            front.refused(error, scope["path"], client)
            await respond_error(send, error, kind.refusal(error))

        try:
            request = kind(await front.bodies.read(receive))
            name, parent = header(scope, b"x-request-id"), front.parent_of(scope["headers"])
            starting = front.start(request, kind.prefix, outlet, client, name, parent)
            # Most wait for nothing, and need no tasks.
            job = await (starting if front.starts_at_once(request) else _unless_gone(starting, receive))
        except ClientGoneError:
            return
        except ApiError as error:
            await refuse(error)
            return
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

    return endpoint


async def _unless_gone(starting: Coroutine[Any, Any, Job], receive: Receive) -> Job:
    """The job of a request, once it has started.

    Raises:
        ApiError: it is refused.
        ClientGoneError: the client has left before.
    """
    gone = asyncio.ensure_future(receive())  # the body has come: there is nothing else to receive
    task = asyncio.ensure_future(starting)
    try:
        await asyncio.wait({gone, task}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
