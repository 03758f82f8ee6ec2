"""Publishes events over ZMQ as vLLM does: a PUB socket for each rank, and a ROUTER that sends past batches again.

One thread names blocks, encodes and sends. Others only put news into a bounded list, and never wait: a
slow subscriber misses batches, as the numbers of those that it gets show. News that find the list full are lost; all
blocks are then told as cleared, so that no router believes in blocks that are gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from typing import Any

import zmq

from mllm_compile.errors import ConfigError
from mllm_compile.kv_events.blocks import Blocks
from mllm_compile.kv_events.news import Gone, News
from mllm_compile.kv_events.wire import Batch, encode
from mllm_compile.runtime.config_sections import KVEventsSection

logger = logging.getLogger("mllm_compile.kv_events")

_END = (-1).to_bytes(8, "big", signed=True)
_CLOSE_S = 2.0


class _Rank:
    """The sockets, the blocks and the past batches of a rank; for the publisher's thread."""

    def __init__(self, context: zmq.Context[Any], settings: KVEventsSection, rank: int) -> None:
        self._number = rank
        self._topic = settings.topic.encode()
        self.blocks = Blocks()
        self._past: deque[tuple[int, bytes]] = deque(maxlen=settings.buffer_steps)
        self._next = 0
        self._pub = context.socket(zmq.PUB)
        self._pub.set_hwm(settings.hwm)
        self.replay: zmq.Socket[Any] | None = None
        _open(self._pub, at_rank(settings.endpoint, rank), "endpoint", binds=_binds(settings.endpoint))
        if settings.replay_endpoint is not None:
            self.replay = context.socket(zmq.ROUTER)
            self.replay.sndhwm = settings.buffer_steps + 1  # a whole answer: what is beyond is dropped
            _open(self.replay, at_rank(settings.replay_endpoint, rank), "replay_endpoint", binds=True)

    def publish(self, news: list[News]) -> None:
        events = self.blocks.events_of(news)
        if not events:
            return
        number, self._next = self._next, self._next + 1
        payload = encode(Batch(time.time(), events, self._number))
        self._past.append((number, payload))
        self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))

    def send_again(self) -> None:
        """Answers one request for past batches: (reader, delimiter or none, first number)."""
        assert self.replay is not None, "asked of a rank without a socket for it"
        frames = self.replay.recv_multipart(zmq.NOBLOCK)
        if len(frames) not in (2, 3) or frames[1:-1] not in ([], [b""]) or len(frames[-1]) != 8:
            logger.warning("a request for past KV events has frames of %s bytes; expected 8", [len(f) for f in frames])
            return
        first, head = int.from_bytes(frames[-1], "big"), frames[:-1]
        for number, payload in self._past:
            if number >= first:
                self.replay.send_multipart((*head, self._topic, number.to_bytes(8, "big"), payload))
        self.replay.send_multipart((*head, b"", _END, b""))

    def close(self) -> None:
        self._pub.close(linger=0)
        if self.replay is not None:
            self.replay.close(linger=0)


class KVEventPublisher:
    """Publishes until `close`; `take` is for any thread.

    Args:
        num_ranks: each has its own prefix cache, and its ports.

    Raises:
        ConfigError: an endpoint cannot be had.
    """

    def __init__(self, settings: KVEventsSection, num_ranks: int = 1) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._most = settings.max_queue_size
        self._ranks: list[_Rank] = []
        try:
            for rank in range(num_ranks):
                self._ranks.append(_Rank(self._context, settings, rank))
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._news: deque[tuple[int, list[News]]] = deque()
        self._has_lost = False
        self._is_over = False
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="mllm-kv-events", daemon=True)
        self._thread.start()

    def take(self, rank: int, news: list[News]) -> None:
        """Has news published; waits for nothing."""
        if len(self._news) >= self._most:
            self._has_lost = True
            return
        self._news.append((rank, news))
        os.eventfd_write(self._bell, 1)

    def engine_is_gone(self) -> None:
        """Says that the blocks of all ranks are gone, with their engine."""
        for rank in range(len(self._ranks)):
            self.take(rank, [Gone()])

    def close(self) -> None:
        """Publishes what there is, and closes the sockets; once."""
        self._is_over = True
        os.eventfd_write(self._bell, 1)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            os.close(self._bell)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._bell, zmq.POLLIN)
        readers = {rank.replay: rank for rank in self._ranks if rank.replay is not None}
        for socket in readers:
            poller.register(socket, zmq.POLLIN)
        while not (self._is_over and not self._news):
            for socket, _ in poller.poll():
                if socket == self._bell:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._bell)
                    self._publish_all()
                else:
                    self._answer(readers[socket])
        for rank in self._ranks:
            rank.close()
        self._context.term()

    def _publish_all(self) -> None:
        while self._news:
            if self._has_lost:
                self._news.clear()
                self._has_lost = False
                logger.warning("news of KV pages came faster than they could be published: all blocks are told as gone")
                for rank in self._ranks:
                    rank.publish([Gone()])
                return
            number, news = self._news.popleft()
            try:
                self._ranks[number].publish(news)
            except Exception:  # the thread goes on, and nobody believes in what it has not told
                logger.exception("KV events of a step were not published: all blocks are told as gone")
                self._ranks[number].publish([Gone()])

    @staticmethod
    def _answer(rank: _Rank) -> None:
        try:
            rank.send_again()
        except Exception:
            logger.exception("past KV events were not sent again")


def at_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a rank: its port is `rank` higher, as vLLM has it."""
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}_dp{rank}"
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}"


def _binds(endpoint: str) -> bool:
    """True if subscribers connect to it; else it is a subscriber's own, as vLLM has it."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _open(socket: zmq.Socket[Any], endpoint: str, key: str, binds: bool) -> None:
    socket.ipv6 = "::" in endpoint
    try:
        if binds:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"runtime.kv_events_config.{key}: {endpoint} cannot be had ({error.strerror}). Take another, such as "
            "tcp://*:5557"
        ) from None
