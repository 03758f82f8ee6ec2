"""How two processes that share a secret prove it to each other over a connection, and read what follows in bounds.

The secret is not sent: each end answers the other's random bytes by an HMAC. From these follows the session's key, by
which lines behind them have a MAC. Nothing is encrypted: the network between the two has to be private.
ranks/admission.py and kv_connectors/peers/ build on this.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from dataclasses import asdict
from typing import Any, Literal, NamedTuple, TypeVar

from mllm_compile.errors import ConfigError
from mllm_compile.runtime.files.json_data import from_json, parse_json

T = TypeVar("T")

_LEAST_CHARACTERS = 16
_NONCE, _MAC = 32, 32
_YES, _NO = b"\1", b"\0"
_MOST_BYTES = 1 << 16  # of a line


def secret_of(variable: str, why: str, whose: str) -> bytes:
    """The secret in a variable of the environment.

    Args:
        why: what asks for it; whose: those that have it in common. Both for people.

    Raises:
        ConfigError: it is missing, or short.
    """
    secret = os.environ.get(variable, "")
    if len(secret) < _LEAST_CHARACTERS:
        raise ConfigError(
            f"{why}, and {variable} has {len(secret)} characters; expected the same {_LEAST_CHARACTERS} or more "
            f"{whose}. Set it, such as to the output of: openssl rand -hex 32"
        )
    return secret.encode()


class Roles(NamedTuple):
    """The names of the two ends of a kind of connection, in their proofs.

    Attributes:
        greeting: the first bytes of the host's end.
        guest: the end that connects.
        host: the end that listens.
    """

    greeting: bytes
    guest: bytes
    host: bytes


Proven = Literal["both", "guest has another", "host has another"]


def prove_to_guest(connection: socket.socket, secret: bytes, roles: Roles, until: float) -> bytes | None:
    """The host's end: the session's key. None: the guest does not know the secret, and was told so.

    Args:
        until: time.monotonic() of its end.

    Raises:
        OSError, EOFError: the guest does not speak so, or is gone.
    """
    ours = secrets.token_bytes(_NONCE)
    connection.sendall(roles.greeting + ours)
    theirs, proof = read_exactly(connection, _NONCE, until), read_exactly(connection, _MAC, until)
    if not hmac.compare_digest(proof, _proof(secret, roles.guest, ours, theirs)):
        connection.sendall(_NO)
        return None
    connection.sendall(_YES + _proof(secret, roles.host, theirs, ours))
    return _proof(secret, b"session", theirs, ours)


def prove_to_host(connection: socket.socket, secret: bytes, roles: Roles, until: float) -> tuple[Proven, bytes]:
    """The guest's end: who knows which secret, and the session's key.

    Raises:
        OSError, EOFError, ValueError: the host does not speak so, or is gone.
    """
    if read_exactly(connection, len(roles.greeting), until) != roles.greeting:
        raise ValueError("it greets otherwise")
    theirs, ours = read_exactly(connection, _NONCE, until), secrets.token_bytes(_NONCE)
    connection.sendall(ours + _proof(secret, roles.guest, theirs, ours))
    if read_exactly(connection, 1, until) != _YES:
        return "guest has another", b""
    is_known = hmac.compare_digest(read_exactly(connection, _MAC, until), _proof(secret, roles.host, ours, theirs))
    return "both" if is_known else "host has another", _proof(secret, b"session", ours, theirs)


def read_exactly(connection: socket.socket, size: int, until: float | None = None) -> bytes:
    """So many bytes.

    Raises:
        TimeoutError: they did not come until time.monotonic() was `until`.
        OSError, EOFError: the other end is gone.
    """
    data = b""
    while len(data) < size:
        if until is not None:
            wait_until(connection, until)
        received = connection.recv(size - len(data))
        if not received:
            raise EOFError("the connection was closed")
        data += received
    return data


def send_line(connection: socket.socket, session: bytes, message: Any) -> None:
    """Sends a dataclass as a line of JSON."""
    line = json.dumps(asdict(message)).encode() + b"\n"
    connection.sendall(line + seal(session, type(message), line))


def seal(session: bytes, kind: type, line: bytes) -> bytes:
    """The MAC of a line of a kind of messages."""
    return hmac.digest(session, kind.__name__.encode() + b"\0" + line, "sha256")


def read_line(connection: socket.socket, session: bytes, kind: type[T], until: float | None = None) -> T:
    """The other end's one line of this kind; as read_exactly.

    Raises:
        ValueError: it is too long, was changed on its way, or is no such message.
    """
    data = b""
    while not data.endswith(b"\n"):
        if len(data) >= _MOST_BYTES:
            raise ValueError(f"a line of more than {_MOST_BYTES} bytes")
        data += read_exactly(connection, 1, until)
    if not hmac.compare_digest(read_exactly(connection, _MAC, until), seal(session, kind, data)):
        raise ValueError(f"its {kind.__name__} has another MAC than expected: it was changed on its way")
    return from_json(kind, parse_json(data))


def wait_until(connection: socket.socket, until: float) -> None:
    """Has the next call wait no longer than that.

    Raises:
        TimeoutError: it is later.
    """
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    connection.settimeout(left)


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + first + second, "sha256")
