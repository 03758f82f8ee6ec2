"""Sessions of clients: which one a request belongs to, and calls that ask for one's state or end it.

A session is its API key's: clients with other keys have sessions of their own under the same name. The engine keeps
those of different cache_salts apart.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Any, cast

from mllm_compile.engine.sessions import Retention, Session, check_session_id
from mllm_compile.errors import RequestError
from mllm_compile.server.api.errors import ApiError, bad_request
from mllm_compile.server.api.fields import GenerateFields
from mllm_compile.server.replies import Replies
from mllm_compile.server.wire.messages import AskSession, Command, SessionTold

# OpenAI's values, and Anthropic's; None asks for nothing.
_RETENTIONS: dict[str, Retention | None] = {"in_memory": None, "in-memory": None, "5m": "5m", "1h": "1h", "24h": "24h"}


def session_of(fields: GenerateFields, header_id: str | None, owner: str) -> Session | None:
    """The session of a request; None: it asks for nothing.

    Args:
        header_id: the header x-session-id, which counts where the body has no session_id.
        owner: the API key, or nothing.

    Raises:
        ApiError: a name is empty or too long, or a retention is unknown.
    """
    name, key, asked = fields.session_id, fields.prompt_cache_key, fields.prompt_cache_retention
    if name is None and header_id is not None:
        name = header_id
    if name is None and key is None and asked is None:
        return None
    if asked is not None and asked not in _RETENTIONS:
        expected = ", ".join(_RETENTIONS)
        raise bad_request(f"prompt_cache_retention: expected one of {expected}, got {asked[:40]!r}")
    for field, value in (("session_id", name), ("prompt_cache_key", key)):
        if value is not None:
            check_name(value, field)
    retention = None if asked is None else _RETENTIONS[asked]
    if name is None and key is None:
        return None if retention is None else Session(retention=retention)
    return Session(own_name(owner, cast(str, key if name is None else name)), retention, is_one_line=name is not None)


def check_name(name: str, field: str) -> None:
    """
    Raises:
        ApiError: it is empty or too long.
    """
    try:
        check_session_id(name, field)
    except RequestError as error:
        raise bad_request(str(error), field) from None


def own_name(owner: str, name: str) -> str:
    """The engine's name of an owner's session."""
    return blake2b(repr((owner, name)).encode(errors="surrogatepass"), digest_size=16).hexdigest()


class SessionCalls:
    """Calls on the sessions of an engine; for one event loop.

    Args:
        send: sends a command to the engine.
    """

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._replies = Replies(send, "sessions are being asked for")

    async def ask(self, name: str, cache_salt: str | None, *, ends: bool) -> dict[str, Any] | None:
        """The state of a session, which ends then if it is to; None: it is unknown.

        Raises:
            ApiError: the engine is lost.
        """
        state: dict[str, Any] | None = await self._replies.ask(lambda key: AskSession(key, name, cache_salt, ends))
        return state

    def told(self, event: SessionTold) -> None:
        """Tells the client that waits."""
        self._replies.over(event.key, event.state)

    def fail_all(self, error: ApiError) -> None:
        """Tells all of them that the engine is gone."""
        self._replies.fail_all(error)
