"""Sessions as callers name them, and the tags that requests get of them (docs/sessions.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal, get_args

from mllm_compile.errors import RequestError
from mllm_compile.runtime.schedule.pages.sessions import RETENTIONS, SessionTag
from mllm_compile.runtime.short_repr import short_repr, typed_repr

Retention = Literal["5m", "1h", "24h"]
_LONGEST_ID = 256


@dataclass(frozen=True)
class Session:
    """A conversation that a request belongs to, and how long its prefix is of use.

    Attributes:
        id: its name, of up to 256 characters; None: the request belongs to none.
        retention: "5m", "1h" or "24h": other prefixes are given up first, until nobody has asked for this one for so
            long. None: the least recently used goes first. Pages are never pinned.
        is_one_line: each request follows the one before; prefixes that it does not go on from are given up first.

    Raises:
        RequestError: a value of another kind.
    """

    id: str | None = None
    retention: Retention | None = None
    is_one_line: bool = True

    def __post_init__(self) -> None:
        if self.id is not None:
            check_session_id(self.id)
        if self.retention not in (None, *get_args(Retention)):
            raise RequestError(f"retention: expected 5m, 1h or 24h, got {short_repr(self.retention)}")

    def tag(self, cache_salt: str | None) -> SessionTag:
        """The tag of a request; sessions of one name under two salts are two."""
        key = None if self.id is None else session_key(self.id, cache_salt)
        return SessionTag(key, RETENTIONS.get(self.retention or "", 0), self.is_one_line)


SessionArg = str | Session | None
SessionArgs = SessionArg | Sequence[SessionArg]  # of all prompts of a call, or of each


def check_session_id(name: object, field: str = "session_id") -> None:
    """
    Raises:
        RequestError: no text of 1 to 256 characters.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= _LONGEST_ID:
        got = f"{len(name):,} characters" if isinstance(name, str) else typed_repr(name)
        raise RequestError(f"{field}: expected a text of 1 to {_LONGEST_ID} characters, got {got}")


def session_key(name: str, cache_salt: str | None) -> bytes:
    """The key of a session: of a few bytes, whatever the salt is."""
    return blake2b(repr((cache_salt, name)).encode(errors="surrogatepass"), digest_size=16).digest()


def as_session(session: SessionArg) -> Session | None:
    """
    Raises:
        RequestError: neither a name nor a Session.
    """
    if session is None or isinstance(session, Session):
        return session
    return Session(session)


def session_of_each(sessions: SessionArgs, count: int) -> list[Session | None]:
    """The session of each prompt.

    Raises:
        RequestError: neither one, nor one for each prompt.
    """
    if sessions is None or isinstance(sessions, str | Session):
        return [as_session(sessions)] * count
    if not isinstance(sessions, Sequence) or len(sessions) != count:
        got = f"{len(sessions)}" if isinstance(sessions, Sequence) else typed_repr(sessions)
        raise RequestError(f"session: expected one, or one for each of the {count} prompts, got {got}")
    return [as_session(one) for one in sessions]
