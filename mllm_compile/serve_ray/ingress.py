"""The ingress of the deployment: takes every request, and relays a replica's answer."""

from __future__ import annotations

import string
from contextlib import suppress
from typing import Any
from urllib.parse import quote

from mllm_compile.serve_ray.replica import Asked, passed_on
from mllm_compile.server.api.errors import ApiError
from mllm_compile.server.client_sessions import own_name
from mllm_compile.server.flow.memory import Memory
from mllm_compile.server.http import Bodies, ClientGoneError
from mllm_compile.server.options import MOST_BODY
from mllm_compile.server.replicas.keys import Keys, keys_of

TRIES = 5  # replicas that a request is sent to, while none has begun to answer


class Ingress:
    """Passes requests on to replicas, whose --max-body is each body's bound; here all bodies together have one.

    Args:
        replicas: the handle of their deployment.
    """

    def __init__(self, replicas: Any) -> None:
        self._relay = replicas.options(stream=True, method_name="relay")
        self._bodies, self._memory = Bodies(MOST_BODY, held=len, bound="no server takes more"), Memory()

    async def __call__(self, request: Any) -> Any:
        from starlette.responses import Response

        with self._memory.share() as share:
            try:
                body = await self._bodies.read(request.receive, share)
            except ApiError as error:
                headers = {name.decode(): value.decode() for name, value in error.headers}
                return Response(error.body, error.status, headers, "application/json")
            except ClientGoneError:
                return Response()  # to nobody
            return await self._passed_on(request, body)

    async def _passed_on(self, request: Any, body: bytes) -> Any:
        from ray.exceptions import RayError
        from starlette.responses import JSONResponse

        path, keys = request.scope["path"], Keys()
        with suppress(ApiError):  # of a body that is no JSON: a replica says so
            keys = keys_of(path, body, request.headers.get("x-session-id"))
        owner = request.headers.get("authorization", "")  # names of sessions are each client's own
        names = (None if name is None else own_name(owner, name) for name in (keys.session, keys.hint))
        query = quote(request.scope["query_string"], safe=string.punctuation)
        headers = passed_on(request.headers.items())
        asked = Asked(request.method, quote(path) + (query and f"?{query}"), headers, body, Keys(keys.text, *names))
        for _ in range(TRIES):
            try:
                return await self._answer(asked)
            except RayError:  # ahead of its first piece nothing is lost: another replica may answer
                continue
        error = {"message": f"no replica has answered, of {TRIES} that were asked", "type": "unavailable", "code": 503}
        return JSONResponse({"error": error}, status_code=503, headers={"Retry-After": "5"})

    async def _answer(self, asked: Asked) -> Any:
        from starlette.responses import StreamingResponse

        pieces = self._relay.remote(asked)
        status, headers = await anext(pieces)
        response = StreamingResponse(pieces, status)
        response.raw_headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
        return response
