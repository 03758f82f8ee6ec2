"""Frames between the front and the engine's process: whole, in order, and the sender never waits."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from mllm_compile.server.wire import channel as channels
from mllm_compile.server.wire.channel import Channel
from tests.hang_guard import HANG_S

LARGE = 3 << 20  # more than the kernel keeps
SHORT_S = 0.01


@pytest.fixture
def pair() -> Iterator[tuple[Channel, Channel]]:
    ends = [Channel(end) for end in socket.socketpair()]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


def read_all(channel: Channel, count: int) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < count and not channel.is_over:
        frames += channel.wait(HANG_S)
    return frames


def test_frames_come_whole_and_in_order(pair):
    left, right = pair
    sent = [b"", b"x", b"yz" * 1000, bytes(range(256))]
    for frame in sent:
        left.send(frame)
    assert read_all(right, len(sent)) == sent
    right.send(b"back")
    assert read_all(left, 1) == [b"back"]


def test_nobody_waits_for_a_reader_that_takes_nothing(pair):
    left, right = pair
    sent = [bytes([number]) * LARGE for number in range(4)] + [b"last"]
    for frame in sent:
        left.send(frame)  # would hang here
    assert read_all(right, len(sent)) == sent
    left.send(b"after")
    assert read_all(right, 1) == [b"after"]


def test_the_beginning_of_a_frame_is_not_copied_again_with_each_of_its_parts(pair):
    """A tokenizer's files are some tens of MiB, and come in hundreds of parts: it took seconds of the front."""
    left, right = pair
    left.send(b"x" * LARGE)
    right.wait(HANG_S)
    beginning = right._received
    assert right.wait(HANG_S) == [] and right._received is beginning
    assert read_all(right, 1) == [b"x" * LARGE]
    assert right._received is beginning and not beginning


def test_several_threads_send_frames_that_stay_whole(pair):
    left, right = pair
    frames = [bytes([number]) * 50_000 for number in range(4)]
    threads = [threading.Thread(target=lambda frame=frame: [left.send(frame) for _ in range(50)]) for frame in frames]
    for thread in threads:
        thread.start()
    got = read_all(right, 200)
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(frames * 50)


def test_what_was_sent_before_the_end_is_read_and_then_it_is_over(pair):
    left, right = pair
    right.send(b"never read")
    left.send(b"news")
    left.close(linger_s=HANG_S)
    assert read_all(right, 1) == [b"news"]
    while not right.is_over:
        assert right.wait(HANG_S) == []
    right.send(b"to nobody")


def test_a_close_lets_what_is_kept_go_out(pair):
    left, right = pair
    left.send(bytes(LARGE))
    left.send(b"last")
    closing = threading.Thread(target=left.close, args=(HANG_S,))
    closing.start()
    assert read_all(right, 2) == [bytes(LARGE), b"last"]
    closing.join()


def test_a_close_ends_the_thread_that_waits_for_the_reader(pair):
    left, _ = pair
    left.send(bytes(LARGE))
    left.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "mllm-channel"]


def test_a_wait_ends_without_a_frame(pair):
    assert pair[0].wait(SHORT_S) == []
    assert not pair[0].is_over


def test_frames_are_bounded(pair, monkeypatch):
    left, right = pair
    monkeypatch.setattr(channels, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match="at most 100 bytes, got 101"):
        left.send(bytes(101))
    left.send(bytes(100))
    assert read_all(right, 1) == [bytes(100)]
    left._socket.sendall(struct.pack("=I", 101))
    assert right.wait(HANG_S) == []
    assert right.is_over


def test_frames_that_a_full_socket_does_not_take_at_once_are_all_sent():
    """uvloop makes a socket that it watches one which does not wait."""
    end, other = socket.socketpair()
    end.setblocking(False)
    sender, receiver = Channel(end), Channel(other)
    frames = [bytes([number]) * 60_000 for number in range(40)]
    for frame in frames:
        sender.send(frame)
    found: list[bytes] = []
    while len(found) < len(frames):
        found += receiver.wait(HANG_S)
        assert not receiver.is_over
    assert found == frames
    sender.close(linger_s=HANG_S)
    receiver.close()
