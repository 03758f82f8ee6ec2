"""Ranks of other hosts are let in with the secret and the same runtime alone; else each end says why, and ends."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mllm_compile.errors import ConfigError, DeviceError
from mllm_compile.process import shared_secret
from mllm_compile.process.timeline import Timeline
from mllm_compile.ranks import admission, node, nodes
from mllm_compile.ranks.admission import Hello, Verdict, hear, introduce, node_secret
from mllm_compile.ranks.nodes import Nodes, RemoteRank
from mllm_compile.runtime.ranks.ring import LAST, PART
from mllm_compile.runtime.ranks.sealed import ForgedFrameError, SealedConnection
from mllm_compile.runtime.ranks.sent_ring import ReceivedRing, SentRing
from tests.hang_guard import HANG_S, until

SECRET = b"a secret of two nodes"
OWN = Hello(0, 0, 2, "CPU", {"torch": "2", "weights": "abc"}, hashlib.sha256(b"program").hexdigest())
OTHER = replace(OWN, node=1, rank=1)


def nodes_of(port: int, num_nodes: int = 2, host: str = "127.0.0.1") -> Nodes:
    """Node 0, of nodes with a rank each."""
    return Nodes(host, port, {rank: rank for rank in range(1, num_nodes)}, SECRET, replace(OWN, num_nodes=num_nodes))


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture
def waiting() -> Iterator[Nodes]:
    made = nodes_of(0)
    yield made
    made.close()


class Coming(threading.Thread):
    """A rank of another host on its way, and how that ended."""

    def __init__(self, port: int, secret: bytes = SECRET, hello: Hello = OTHER) -> None:
        super().__init__(daemon=True)
        self.connection = socket.create_connection(("127.0.0.1", port))
        self.error: Exception | None = None
        self._given = secret, hello
        self.start()

    def run(self) -> None:
        try:
            hear(self.connection, introduce(self.connection, *self._given), self._given[1].rank)
        except Exception as error:
            self.error = error

    def ended(self) -> Exception | None:
        self.join(HANG_S)
        assert not self.is_alive()
        return self.error


def test_a_rank_with_the_secret_and_the_same_runtime_is_let_in_and_seen_to_end(waiting):
    coming = Coming(waiting.port)
    (rank,) = waiting.wait().values()
    assert isinstance(rank, RemoteRank) and coming.ended() is None
    assert not rank.has_ended()
    coming.connection.sendall(b"news\n")
    assert not rank.has_ended() and rank.socket.recv(5) == b"news\n"
    coming.connection.close()
    assert rank.has_ended()
    assert f"{rank.place} {rank.end_of()}" == "on node 1 (127.0.0.1) has ended: that node's command says why"
    rank.close()


def test_a_wrong_secret_is_told_to_the_node_and_node_0_waits_on_for_the_right_one(waiting):
    wrong = Coming(waiting.port, b"another secret of two")
    right: list[Coming] = []
    threading.Thread(target=lambda: (wrong.join(HANG_S), right.append(Coming(waiting.port))), daemon=True).start()
    assert list(waiting.wait()) == [1]
    assert "node 0 has another MLLM_NODES_SECRET" in str(wrong.ended())
    assert right[0].ended() is None


def test_a_stranger_at_node_0_s_address_is_told():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        coming = Coming(listener.getsockname()[1])
        connection, _ = listener.accept()
        connection.sendall(admission._ROLES.greeting + bytes(32))
        connection.recv(64)
        connection.sendall(b"\1" + bytes(32))
        assert "does not know MLLM_NODES_SECRET" in str(coming.ended())
        connection.close()
        coming = Coming(listener.getsockname()[1])
        connection, _ = listener.accept()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")
        connection.close()
        assert "node 0 did not let rank 1 in: it greets otherwise" in str(coming.ended())


@pytest.mark.parametrize(
    ("hello", "why"),
    [
        (replace(OTHER, version="0.0.1"), r"node 1 runs something else than node 0: mllm-compile is 0\.0\.1 there"),
        (replace(OTHER, torch_version="1.0"), r"torch is 1\.0 there"),
        (replace(OTHER, num_nodes=3), "runtime.nnodes is 3 there and 2 here"),
        (replace(OTHER, device="NVIDIA A100"), "the device is NVIDIA A100 there and CPU here"),
        (replace(OTHER, factors={"torch": "2", "weights": "xyz"}), "weights is xyz there and abc here"),
        (replace(OTHER, factors={**OTHER.factors, "tensor parallel": "2"}), "tensor parallel is 2 there and - here"),
        (replace(OTHER, program="0" * 64), "the program of the runtime is 0"),
        (replace(OTHER, node=0), "rank 1 of node 0 has come; expected one command for each --node-rank from 1 to 1"),
        (replace(OTHER, rank=5), "rank 5 of node 1 has come"),
    ],
)
def test_a_node_that_runs_something_else_ends_the_start_of_both_with_what_differs(waiting, hello, why):
    coming = Coming(waiting.port, hello=hello)
    with pytest.raises(DeviceError, match=why):
        waiting.wait()
    assert isinstance(error := coming.ended(), DeviceError) and why.replace("\\", "") in str(error)


def test_a_node_that_never_comes_is_named_and_those_that_came_are_told(monkeypatch):
    monkeypatch.setattr(nodes, "NODES_S", 1.0)
    own = replace(OWN, num_nodes=3)
    waiting = nodes_of(0, num_nodes=3)
    came = Coming(waiting.port, hello=replace(own, node=1, rank=1))
    stranger = socket.create_connection(("127.0.0.1", waiting.port))
    stranger.sendall(b"GET / HTTP/1.1\r\nHost: a.very.long.name.of.a.host.example.com\r\n\r\n")
    with pytest.raises(
        DeviceError, match=r"node 2 did not come to 127\.0\.0\.1:\d+ within 1 s\. .*--node-rank 2"
    ) as told:
        waiting.wait()
    assert "refused: 127.0.0.1: it does not know the secret" in str(told.value)
    assert "node 0 has given up: node 2 did not come" in str(came.ended())
    stranger.close()


def test_a_node_that_was_ended_while_it_waited_may_come_again():
    """Its command was started anew, say, before all others had come."""
    own = replace(OWN, num_nodes=3)
    waiting = nodes_of(0, num_nodes=3)
    first = [Coming(waiting.port, hello=replace(own, node=1, rank=1))]

    def come_again() -> None:
        until(lambda: waiting._came, "its first coming")
        first[0].connection.shutdown(socket.SHUT_RDWR)
        first[0].ended()
        first.extend(Coming(waiting.port, hello=replace(own, node=rank, rank=rank)) for rank in (1, 2))

    threading.Thread(target=come_again, daemon=True).start()
    came = waiting.wait()
    assert sorted(came) == [1, 2]
    assert "node 0 did not let rank 1 in" in str(first[0].ended())
    assert [one.ended() for one in first[1:]] == [None, None]
    for rank in came.values():
        rank.close()


def test_a_node_that_ends_as_it_is_let_in_is_the_groups_to_name(waiting, monkeypatch):
    def answer(connection: socket.socket, session: bytes, refusal: str | None) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    coming = Coming(waiting.port)
    monkeypatch.setattr(nodes, "answer", answer)
    (rank,) = waiting.wait().values()
    rank.close()
    assert "node 0 did not let rank 1 in" in str(coming.ended())


def test_a_node_that_proves_itself_when_node_0_has_given_up_is_told(waiting, monkeypatch):
    monkeypatch.setattr(nodes, "NODES_S", -1.0)
    late = Coming(waiting.port)  # in the listener's queue
    connection, _ = waiting._listener.accept()
    with pytest.raises(DeviceError, match="node 1 did not come"):
        waiting.wait()
    waiting._meetings.acquire()
    waiting._meet(connection, "127.0.0.1")
    assert "node 0 does not wait for ranks any more" in str(late.ended())


def test_a_connection_that_says_one_byte_at_a_time_has_no_more_time_for_it(monkeypatch):
    """Else a few of them would keep nodes out."""
    monkeypatch.setattr(admission, "HANDSHAKE_S", 0.5)
    ours, theirs = socket.socketpair()

    def trickle() -> None:
        with suppress(OSError):
            while True:
                theirs.send(b"x")
                time.sleep(0.1)

    thread = threading.Thread(target=trickle, daemon=True)
    thread.start()
    with pytest.raises(TimeoutError):
        admission.admit(ours, SECRET)
    ours.close()
    thread.join(HANG_S)
    theirs.close()


def test_an_interrupt_ends_a_node_that_waits_for_the_others():
    """Ctrl-C, or a supervisor's signal: node 0 may wait for others for minutes."""
    ended: list[bytes] = []
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def interrupt() -> None:
            connection, _ = listener.accept()
            admission.admit(connection, SECRET)
            connection.settimeout(HANG_S)
            os.kill(os.getpid(), signal.SIGINT)
            with suppress(TimeoutError):
                ended.append(connection.recv(1))
            connection.close()

        thread = threading.Thread(target=interrupt, daemon=True)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers ignore it
        try:
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                node.meet_node_0(listener.getsockname(), 0.0, SECRET, [OTHER])
            thread.join(HANG_S)
        finally:
            signal.signal(signal.SIGINT, before)
    assert ended == [b""]


@pytest.mark.parametrize("code", [0, 3])
def test_a_nodes_command_ends_with_its_ranks_and_names_the_one_that_failed(code, monkeypatch):
    codes, closed = iter([None, None, code]), []

    class Process:
        def __init__(self, rank: int, connection: socket.socket, session: bytes, folders: list[str]) -> None:
            assert session == b"session"
            self.rank, self.code = rank, None

        def has_ended(self) -> bool:
            self.code = next(codes, code) if self.code is None else self.code
            return self.code is not None

        def end_of(self) -> str:
            return f"ended with code {self.code}"

        def close(self) -> None:
            closed.append(self.rank)

    runtime = SimpleNamespace(num_ranks=2, nnodes=2, node_rank=1, device="cpu", master_addr="127.0.0.1", master_port=1)
    compiled = SimpleNamespace(
        config=SimpleNamespace(runtime=runtime), artifact=None, folder="runtime", weights_root="weights"
    )
    ours, theirs = socket.socketpair()
    monkeypatch.setenv("MLLM_NODES_SECRET", SECRET.decode())
    monkeypatch.setattr(node, "FollowerProcess", Process)
    monkeypatch.setattr(node, "load_or_compile", lambda *_: compiled)
    monkeypatch.setattr(node, "hello_of", lambda *_: OTHER)
    monkeypatch.setattr(node, "meet_node_0", lambda *_: [(ours, b"session")])
    with pytest.raises(DeviceError, match="rank 1 ended with code 3") if code else nullcontext():
        node.run_node(SimpleNamespace(), Timeline())  # type: ignore[arg-type]
    assert closed == [1] and ours.fileno() < 0, "the connection is its rank's"
    theirs.close()


def test_a_refusal_is_heard_where_a_second_rank_of_the_node_finds_nobody():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def refuse() -> None:
            connection, _ = listener.accept()
            _, session = admission.admit(connection, SECRET)
            second, _ = listener.accept()
            second.close()
            admission.answer(connection, session, "node 1 runs something else")

        threading.Thread(target=refuse, daemon=True).start()
        hellos = [OTHER, replace(OTHER, rank=2)]
        with pytest.raises(DeviceError, match="node 1 runs something else"):
            node.meet_node_0(listener.getsockname(), 0.0, SECRET, hellos)


def test_a_port_that_is_taken_and_an_address_of_another_host_are_refused_by_name():
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(DeviceError, match=rf"runtime.master_port: 127\.0\.0\.1:{port} is taken\. Set another"):
            nodes_of(port)
    with pytest.raises(DeviceError, match="cannot be had: Cannot assign requested address"):
        nodes_of(0, host="198.51.100.1")


def test_a_node_0_that_is_not_there_is_named():
    port = free_port()
    with pytest.raises(DeviceError, match=rf"node 0 was not at 127\.0\.0\.1:{port} for 300 s: Connection refused"):
        node.meet_node_0(("127.0.0.1", port), 0.0, SECRET, [OTHER])


@pytest.mark.parametrize("secret", [None, "short"])
def test_without_a_secret_nothing_is_started(secret, monkeypatch):
    monkeypatch.delenv("MLLM_NODES_SECRET", raising=False)
    if secret is not None:
        monkeypatch.setenv("MLLM_NODES_SECRET", secret)
    with pytest.raises(ConfigError, match=r"MLLM_NODES_SECRET has \d characters; expected the same 16 or more"):
        node_secret()


def test_a_hello_of_other_fields_or_too_long_is_no_rank(waiting):
    secret, refused = SECRET, []
    for said in (json.dumps({"node": 1}).encode() + b"\n", b"x" * (1 << 17)):
        ours, theirs = socket.socketpair()

        def introduce_badly(connection: socket.socket = theirs, text: bytes = said) -> None:
            greeting = shared_secret.read_exactly(connection, len(admission._ROLES.greeting) + 32)
            nonce = bytes(32)
            connection.sendall(nonce + shared_secret._proof(secret, b"node", greeting[-32:], nonce))
            shared_secret.read_exactly(connection, 33)
            session = shared_secret._proof(secret, b"session", nonce, greeting[-32:])
            with suppress(OSError):
                connection.sendall(text + shared_secret.seal(session, Hello, text))

        threading.Thread(target=introduce_badly, daemon=True).start()
        with pytest.raises(ValueError) as told:
            admission.admit(ours, secret)
        refused.append(str(told.value))
        ours.close()
    assert refused[0] == "expected a key 'device' in Hello"
    assert "a line of more than 65536 bytes" in refused[1]


def sealed_pair() -> tuple[SealedConnection, SealedConnection]:
    """Rank 0's end and the other."""
    ours, theirs = socket.socketpair()
    return SealedConnection(ours, b"session", is_rank_0=True), SealedConnection(theirs, b"session", is_rank_0=False)


def test_messages_arrive_in_parts_and_frames_are_bounded():
    ours, theirs = sealed_pair()
    sent, received = SentRing(None, [ours], most_bytes=100), ReceivedRing(theirs, most_bytes=100)
    sent.write_message([memoryview(bytes(range(200))), memoryview(b"end")], lambda: None)
    assert received.next() == bytearray(range(200)) + b"end"
    received.done()
    assert not sent.is_read
    sent.heard(0, received.num_read)
    assert sent.is_read and sent.beats.tolist() == [1]
    sent.end()
    assert received.next() is None
    ours.send(9, b"")
    with pytest.raises(ValueError, match="a frame of kind 9"):
        received.next()
    ours.send(PART, bytes(101))
    with pytest.raises(ForgedFrameError, match="has 101 bytes; expected at most 100"):
        received.next()
    ours, theirs = sealed_pair()
    ours.socket.sendall((5).to_bytes(8, "big") + bytes([LAST]) + bytes(16) + b"ab")
    ours.socket.close()
    with pytest.raises(EOFError, match="the other end is gone"):
        ReceivedRing(theirs, most_bytes=100).next()
    theirs.socket.close()


def test_a_frame_larger_than_the_sockets_buffer_is_sent_whole():
    ours, theirs = sealed_pair()
    data = os.urandom(3 << 20)
    thread = threading.Thread(target=ours.send, args=(LAST, data), daemon=True)
    thread.start()
    assert theirs.receive(len(data)) == (LAST, data)
    thread.join(HANG_S)
    ours.socket.close()
    theirs.socket.close()


@pytest.mark.parametrize("what", ["changed", "kind", "repeated", "left out", "sent back", "of another session"])
@pytest.mark.parametrize("waits", [True, False])
def test_a_frame_that_another_has_touched_is_refused(what, waits):
    """One between both ends sees the frames, and may send what it likes."""
    ours, theirs = sealed_pair()
    (near, far), frames = socket.socketpair(), []
    reader = SealedConnection(far, b"session", is_rank_0=what == "sent back")
    for data in (b"first", b"second"):
        ours.send(LAST, data)
        frames.append(theirs.socket.recv(100))
    kept, other = frames
    if what == "changed":
        other = other[:-1] + b"x"
    elif what == "kind":
        other = other[:8] + bytes([PART]) + other[9:]
    elif what == "repeated":
        other = kept
    elif what == "left out":
        kept = b""
    elif what == "of another session":
        reader = SealedConnection(far, b"another", is_rank_0=False)
    near.sendall(kept + other)
    with pytest.raises(ForgedFrameError, match=r"frame \d has another MAC than expected"):
        for _ in range(2):
            if waits:
                reader.receive(100)
            else:
                list(reader.arrived(100))
    for one in (ours.socket, theirs.socket, near, far):
        one.close()


@pytest.mark.parametrize("message", [OTHER, Verdict("node 1 runs something else")])
def test_a_hello_or_a_verdict_that_another_has_changed_is_refused(message):
    ours, theirs = socket.socketpair()
    shared_secret.send_line(ours, b"session", message)
    said = theirs.recv(1 << 16)
    ours.sendall(said)
    assert shared_secret.read_line(theirs, b"session", type(message)) == message
    ours.sendall(said.replace(b"1", b"7", 1))
    with pytest.raises(ValueError, match=f"its {type(message).__name__} has another MAC"):
        shared_secret.read_line(theirs, b"session", type(message))
    ours.close()
    theirs.close()
