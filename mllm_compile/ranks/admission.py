"""How a rank of another host is let in: each end proves that it knows the secret, then says what it would run.

The secret is MLLM_NODES_SECRET of both hosts; process/shared_secret.py has the proofs. By the session's key all that
comes behind has a MAC (runtime/ranks/sealed.py). Nothing is encrypted, and NCCL's and gloo's own connections have
neither: the network between nodes has to be private.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from mllm_compile.errors import DeviceError
from mllm_compile.process.shared_secret import Roles, prove_to_guest, prove_to_host, read_line, secret_of, send_line
from mllm_compile.version import __version__

VARIABLE = "MLLM_NODES_SECRET"
HANDSHAKE_S = 10.0  # each end waits so long for all of the other's words
_ROLES = Roles(b"mllm-node 2\n", guest=b"node", host=b"rank 0")


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
    return secret_of(VARIABLE, "runtime.nnodes is more than 1", "on each node, by which nodes know each other")


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
    session = prove_to_guest(connection, secret, _ROLES, until)
    if session is None:
        raise WrongSecretError("it does not know the secret")
    hello = read_line(connection, session, Hello, until)
    connection.settimeout(None)
    return hello, session


def answer(connection: socket.socket, session: bytes, refusal: str | None) -> None:
    """Tells the other end whether it is let in."""
    send_line(connection, session, Verdict(refusal))


def introduce(connection: socket.socket, secret: bytes, hello: Hello) -> bytes:
    """Another host's end, ahead of `hear`: the session's key.

    Raises:
        WrongSecretError: one end does not know the other's secret.
        DeviceError: rank 0 is gone, or is no rank 0.
    """
    until = time.monotonic() + HANDSHAKE_S
    connection.settimeout(HANDSHAKE_S)
    with _told(hello.rank):
        proven, session = prove_to_host(connection, secret, _ROLES, until)
        if proven == "guest has another":
            raise WrongSecretError(f"node 0 has another {VARIABLE}. Set the same on each node.")
        if proven == "host has another":
            raise WrongSecretError(f"who listens at node 0's address does not know {VARIABLE}. Look who does.")
        send_line(connection, session, hello)
        connection.settimeout(None)
    return session


def hear(connection: socket.socket, session: bytes, rank: int, within_s: float | None = None) -> None:
    """Waits until a rank of another host is let in, which is when all nodes have come.

    Raises:
        DeviceError: rank 0 refuses it, is gone, or says nothing within that time.
    """
    until = None if within_s is None else time.monotonic() + within_s
    with _told(rank):
        verdict = read_line(connection, session, Verdict, until)
    if verdict.refusal is not None:
        raise DeviceError(verdict.refusal)


@contextmanager
def _told(rank: int) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, ValueError) as error:
        raise DeviceError(f"node 0 did not let rank {rank} in: {error}. Look at what node 0 says.") from error


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "…"
