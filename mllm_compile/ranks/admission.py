"""How a rank of another host is let in: each end proves that it knows the secret, then says what it would run.

The secret is MLLM_NODES_SECRET of both hosts. It is not sent: each end answers the other's random bytes by an HMAC.
From these follows the session's key, by which all that comes behind has a MAC (runtime/ranks/sealed.py). Nothing is
encrypted, and NCCL's and gloo's own connections have neither: the network between nodes has to be private.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

from mllm_compile.errors import ConfigError, DeviceError
from mllm_compile.runtime.files.json_data import from_json, parse_json
from mllm_compile.version import __version__

VARIABLE = "MLLM_NODES_SECRET"
HANDSHAKE_S = 10.0  # each end waits so long for all of the other's words
_LEAST_SECRET = 16  # characters
_GREETING = b"mllm-node 2\n"
_NONCE, _MAC = 32, 32
_YES, _NO = b"\1", b"\0"
_MOST_BYTES = 1 << 16  # of a line


def _torch_version() -> str:
    import torch  # only where ranks meet: the command line asks for the secret alone

    return str(torch.__version__)


@dataclass(frozen=True)
class Hello:
    """The version, device and runtime of a rank of another host.

    Attributes:
        node, rank: which it is; of num_nodes.
        device: its kind of device, for people.
        factors: of the runtime's key, by name.
        program: sha256 of the runtime's program.
    """

    node: int
    rank: int
    num_nodes: int
    device: str
    factors: dict[str, str]
    program: str
    version: str = field(default=__version__)
    torch_version: str = field(default_factory=_torch_version)


@dataclass(frozen=True)
class Verdict:
    """Rank 0's answer to a Hello: why it is refused, or None."""

    refusal: str | None


class WrongSecretError(DeviceError):
    """The other end does not know the secret."""


def node_secret() -> bytes:
    """The secret of the nodes.

    Raises:
        ConfigError: it is missing, or short.
    """
    secret = os.environ.get(VARIABLE, "")
    if len(secret) < _LEAST_SECRET:
        raise ConfigError(
            f"runtime.nnodes is more than 1, and {VARIABLE} has {len(secret)} characters; expected the same "
            f"{_LEAST_SECRET} or more on each node, by which nodes know each other. Set it, such as to the output of: "
            "openssl rand -hex 32"
        )
    return secret.encode()


def difference(own: Hello, other: Hello) -> str | None:
    """The first thing in which a rank of another host differs from rank 0, for people; None: it runs the same."""
    pairs = [
        ("mllm-compile", own.version, other.version),
        ("torch", own.torch_version, other.torch_version),
        ("runtime.nnodes", str(own.num_nodes), str(other.num_nodes)),
        ("the device", own.device, other.device),
        *(
            (name, own.factors.get(name, "-"), other.factors.get(name, "-"))
            for name in {**own.factors, **other.factors}
        ),
        ("the program of the runtime", own.program, other.program),
    ]
    for name, ours, theirs in pairs:
        if ours != theirs:
            return (
                f"node {other.node} runs something else than node 0: {name} is {_short(theirs)} there and "
                f"{_short(ours)} here. Give both the same model, config and versions."
            )
    return None


def admit(connection: socket.socket, secret: bytes) -> tuple[Hello, bytes]:
    """Rank 0's end, ahead of `answer`: who is there, and the session's key.

    Raises:
        WrongSecretError: the other end does not know the secret.
        OSError, EOFError, ValueError: it does not speak so, or is gone.
    """
    until = time.monotonic() + HANDSHAKE_S
    connection.settimeout(HANDSHAKE_S)
    ours = secrets.token_bytes(_NONCE)
    connection.sendall(_GREETING + ours)
    theirs, proof = _exactly(connection, _NONCE, until), _exactly(connection, _MAC, until)
    if not hmac.compare_digest(proof, _proof(secret, b"node", ours, theirs)):
        connection.sendall(_NO)
        raise WrongSecretError("it does not know the secret")
    connection.sendall(_YES + _proof(secret, b"rank 0", theirs, ours))
    session = _proof(secret, b"session", theirs, ours)
    hello = from_json(Hello, parse_json(_line(connection, session, Hello, until)))
    connection.settimeout(None)
    return hello, session


def answer(connection: socket.socket, session: bytes, refusal: str | None) -> None:
    """Tells the other end whether it is let in."""
    _send_line(connection, session, Verdict(refusal))


def introduce(connection: socket.socket, secret: bytes, hello: Hello) -> bytes:
    """Another host's end, ahead of `hear`: the session's key.

    Raises:
        WrongSecretError: one end does not know the other's secret.
        DeviceError: rank 0 is gone, or is no rank 0.
    """
    until = time.monotonic() + HANDSHAKE_S
    connection.settimeout(HANDSHAKE_S)
    with _told(hello.rank):
        if _exactly(connection, len(_GREETING), until) != _GREETING:
            raise ValueError("it greets otherwise")
        theirs, ours = _exactly(connection, _NONCE, until), secrets.token_bytes(_NONCE)
        connection.sendall(ours + _proof(secret, b"node", theirs, ours))
        if _exactly(connection, 1, until) != _YES:
            raise WrongSecretError(f"node 0 has another {VARIABLE}. Set the same on each node.")
        if not hmac.compare_digest(_exactly(connection, _MAC, until), _proof(secret, b"rank 0", ours, theirs)):
            raise WrongSecretError(f"who listens at node 0's address does not know {VARIABLE}. Look who does.")
        session = _proof(secret, b"session", ours, theirs)
        _send_line(connection, session, hello)
        connection.settimeout(None)
    return session


def hear(connection: socket.socket, session: bytes, rank: int, within_s: float | None = None) -> None:
    """Waits until a rank of another host is let in, which is when all nodes have come.

    Raises:
        DeviceError: rank 0 refuses it, is gone, or says nothing within that time.
    """
    until = None if within_s is None else time.monotonic() + within_s
    with _told(rank):
        verdict = from_json(Verdict, parse_json(_line(connection, session, Verdict, until)))
    if verdict.refusal is not None:
        raise DeviceError(verdict.refusal)


@contextmanager
def _told(rank: int) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError) as error:
        raise DeviceError(f"node 0 did not let rank {rank} in: {error}. Look at what node 0 says.") from error


def _proof(secret: bytes, role: bytes, first: bytes, second: bytes) -> bytes:
    return hmac.digest(secret, role + b"\0" + first + second, "sha256")


def _exactly(connection: socket.socket, size: int, until: float | None = None) -> bytes:
    data = b""
    while len(data) < size:
        if until is not None and (left := until - time.monotonic()) > 0:
            connection.settimeout(left)
        elif until is not None:
            raise TimeoutError("timed out")
        received = connection.recv(size - len(data))
        if not received:
            raise EOFError("the connection was closed")
        data += received
    return data


def _send_line(connection: socket.socket, session: bytes, message: Hello | Verdict) -> None:
    line = json.dumps(asdict(message)).encode() + b"\n"
    connection.sendall(line + _seal(session, type(message), line))


def _seal(session: bytes, kind: type[Hello | Verdict], line: bytes) -> bytes:
    return hmac.digest(session, kind.__name__.encode() + b"\0" + line, "sha256")


def _line(connection: socket.socket, session: bytes, kind: type[Hello | Verdict], until: float | None = None) -> bytes:
    """The other end's one line of this kind behind the proofs."""
    data = b""
    while not data.endswith(b"\n"):
        if len(data) >= _MOST_BYTES:
            raise ValueError(f"a line of more than {_MOST_BYTES} bytes")
        data += _exactly(connection, 1, until)
    if not hmac.compare_digest(_exactly(connection, _MAC, until), _seal(session, kind, data)):
        raise ValueError(f"its {kind.__name__} has another MAC than expected: it was changed on its way")
    return data


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "…"
