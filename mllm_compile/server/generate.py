"""The endpoints that generate: from a body to a running request, and to its end or its client's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.api.interfaces import Request
from mllm_compile.server.flow.writer import Send
from mllm_compile.server.front import Front
from mllm_compile.server.http import ClientGoneError, Receive, Scope, header, respond_error


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
        client = (header(scope, b"user-agent") or "-")[:60]

        async def refuse(error: ApiError) -> None:
            front.refused(error, client)
            await respond_error(send, error, kind.refusal(error))

        try:
            request = kind(await front.bodies.read(receive))
        except ClientGoneError:
            return
        except ApiError as error:
            await refuse(error)
            return
        # From here on there is nothing to receive but the client's leave.
        gone = asyncio.ensure_future(receive())
        starting = asyncio.ensure_future(
            front.start(request, kind.prefix, send, client, header(scope, b"x-request-id"))
        )
        try:
            await asyncio.wait({gone, starting}, return_when=asyncio.FIRST_COMPLETED)
            if not starting.done():
                return
            job = starting.result()
        except ApiError as error:
            await refuse(error)
            return
        finally:
            starting.cancel()
            if starting.cancelled() or not starting.done() or starting.exception() is not None:
                gone.cancel()
        job.on_left = gone.cancel
        try:
            await gone  # comes also when the response is complete
        except asyncio.CancelledError:
            if not job.has_left:
                raise
        finally:
            job.leave()

    return endpoint
