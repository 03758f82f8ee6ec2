"""The endpoints of rollouts have one form: a body and a query in, an object out."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import parse_qs

import msgspec

from mllm_compile.server.api.errors import ApiError, bad_request
from mllm_compile.server.api.fields import read_fields
from mllm_compile.server.endpoints import Answer, Endpoint, ToldBytes, from_body
from mllm_compile.server.flow.job import JSON
from mllm_compile.server.flow.memory import Share
from mllm_compile.server.flow.writer import Send
from mllm_compile.server.front import Front
from mllm_compile.server.http import Receive, Scope
from mllm_compile.server.rl.calls import RolloutCalls

F = TypeVar("F", bound=msgspec.Struct)
_MOST_OF_QUERY = 4096  # bytes
_FLAGS = {"true": True, "1": True, "false": False, "0": False}


@dataclass
class Asked:
    """One call of a client.

    Attributes:
        ignored: names of fields that nobody knows.
    """

    front: Front
    calls: RolloutCalls
    body: bytes
    query: dict[str, list[str]]
    ignored: list[str] = field(default_factory=list)

    def read(self, kind: type[F]) -> F:
        """The body's fields; without a body those that have defaults.

        Raises:
            ApiError: it is malformed.
        """
        fields, unknown = read_fields(kind, self.body or b"{}", {})
        self.ignored += unknown
        return fields

    def text(self, name: str, default: str) -> str:
        """A value of the query."""
        return self.query.get(name, [default])[-1]

    def flag(self, name: str, *, default: bool) -> bool:
        """
        Raises:
            ApiError: it is neither true nor false.
        """
        value = self.text(name, str(default)).lower()
        if value not in _FLAGS:
            raise bad_request(f"{name}: expected true or false, got {value[:50]!r}", name)
        return _FLAGS[value]


Handler = Callable[[Asked], Coroutine[Any, Any, Any]]


def endpoint(handler: Handler) -> Endpoint:
    """The endpoint that answers a call as `handler` says."""

    def made(front: Front) -> Answer:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            query = parse_qs(scope.get("query_string", b"")[:_MOST_OF_QUERY].decode("latin-1"))

            async def told(body: bytes, client: str, share: Share) -> ToldBytes:
                calls = front.rollouts
                assert calls is not None, "without --enable-rl there is no such path"
                await front.facts(None)
                asked = Asked(front, calls, body, query)
                data = await handler(asked)
                return msgspec.json.encode(data), asked.ignored

            await from_body(front, told, JSON)(scope, receive, send)

        return answer

    return made


def refused(why: str) -> Endpoint:
    """The endpoint of a path that other servers have, and this one has not: it says why."""

    async def handler(asked: Asked) -> Any:
        raise ApiError(400, why, code="unsupported_endpoint")

    return endpoint(handler)
