"""How two engines meet: each proves that it knows the secret, then they compare what their pages depend on.

The secret is MLLM_KV_SECRET of both; process/shared_secret.py has the proofs. Keys of pages are made with it too, so
that the same prompt has the same keys in both. Behind the meeting the connection is plain: the network between the two
has to be private.
"""

from __future__ import annotations

import hmac
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b

from mllm_compile.process.shared_secret import Roles, prove_to_guest, prove_to_host, read_line, secret_of, send_line
from mllm_compile.runtime.tiers.connector import Namespace

VARIABLE = "MLLM_KV_SECRET"
_ROLES = Roles(b"mllm-kv 1\n", guest=b"decode", host=b"prefill")
_LONGEST = 80  # characters of a fact that is sent as it is


class RefusedError(Exception):
    """The other engine hands nothing over; the message says why."""


@dataclass(frozen=True)
class Hello:
    """The engine that asks.

    Attributes:
        engine_id: of the engine that it wants.
        facts: what its pages depend on; long values as hashes.
        page_bytes, state_bytes: of a value.
    """

    engine_id: str
    facts: dict[str, str]
    page_bytes: int
    state_bytes: int


@dataclass(frozen=True)
class Welcome:
    """The answer.

    Attributes:
        refusal: why nothing is handed over, or None.
        memory: the name of a socket of this host where the memory itself can be had; None: it cannot.
        pass_word: by which that socket knows who asks.
        nixl_agent, nixl_address: as nixl.py's Lent has them; None: it does not lend by NIXL.
    """

    refusal: str | None
    memory: str | None = None
    pass_word: str | None = None
    nixl_agent: str | None = None
    nixl_address: int = 0


def peer_secret() -> bytes:
    """The secret of engines that hand pages over.

    Raises:
        ConfigError: it is missing, or short.
    """
    why = "runtime.kv_transfer_config names PeerConnector"
    return secret_of(VARIABLE, why, "for all engines that hand pages over")


def secret_of_keys(secret: bytes) -> bytes:
    """The secret that names of pages are made with."""
    return hmac.digest(secret, b"keys of pages", "sha256")


def hello_of(namespace: Namespace, engine_id: str) -> Hello:
    """The words of an engine with this namespace."""
    return Hello(engine_id, facts_of(namespace), namespace.page_bytes, namespace.state_bytes)


def facts_of(namespace: Namespace) -> dict[str, str]:
    """The facts that pages depend on; long values as hashes."""
    return {name: _short(value) for name, value in sorted(namespace.facts.items())}


def introduce(connection: socket.socket, secret: bytes, hello: Hello, until: float) -> Welcome:
    """The end that asks.

    Raises:
        RefusedError: the other engine runs something else, or one end does not know the secret.
        OSError, EOFError, ValueError: it does not speak so, or is gone.
    """
    proven, session = prove_to_host(connection, secret, _ROLES, until)
    if proven == "guest has another":
        raise RefusedError(f"it has another {VARIABLE}: set the same for both engines")
    if proven == "host has another":
        raise RefusedError(f"who listens there does not know {VARIABLE}: look who does")
    send_line(connection, session, hello)
    welcome = read_line(connection, session, Welcome, until)
    if welcome.refusal is not None:
        raise RefusedError(welcome.refusal)
    return welcome


def receive(connection: socket.socket, secret: bytes, until: float) -> tuple[Hello, bytes]:
    """The end that listens, ahead of its Welcome: who is there, and the session's key.

    Raises:
        RefusedError: the other end does not know the secret.
        OSError, EOFError, ValueError: it does not speak so, or is gone.
    """
    session = prove_to_guest(connection, secret, _ROLES, until)
    if session is None:
        raise RefusedError("it does not know the secret")
    return read_line(connection, session, Hello, until), session


def difference(own: Mapping[str, str], other: Mapping[str, str]) -> str | None:
    """The first fact in which the two differ, for people; None: their pages are the same."""
    for name in sorted({*own, *other}):
        ours, theirs = own.get(name, "nothing"), other.get(name, "nothing")
        if ours != theirs:
            return (
                f"{name} is {ours} there and {theirs} here: pages of one do not fit the other. Give both engines the "
                "same model, config and version"
            )
    return None


def deadline(seconds: float) -> float:
    """time.monotonic() in so many seconds."""
    return time.monotonic() + seconds


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else "#" + blake2b(text.encode(), digest_size=8).hexdigest()
