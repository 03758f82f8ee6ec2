"""Events over real ZMQ sockets."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from mllm_compile.errors import ConfigError
from mllm_compile.kv_events.installed import make_publisher
from mllm_compile.kv_events.news import NO_PAGE, Origin, Removed, Stored
from mllm_compile.runtime.config_sections import KVEventsSection, KVTransferSection
from tests.engine.cases import params
from tests.fakes import fake_engine
from tests.hang_guard import HANG_S, until

zmq = pytest.importorskip("zmq")
at_rank = pytest.importorskip("mllm_compile.kv_events.publisher").at_rank
ORIGIN = Origin(b"r" * 16, b"secret")


@pytest.fixture
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("e", numbered=True)  # a socket's path has at most 107 bytes


def section(folder, **changes):
    given = {"endpoint": f"ipc://{folder}/p", "replay_endpoint": f"ipc://{folder}/r", "topic": "kv@pod@m", **changes}
    return KVEventsSection(enable_kv_cache_events=True, **given)


@pytest.fixture
def publisher(folder):
    publisher = make_publisher(section(folder), 2)
    yield publisher
    publisher.close()


class Subscriber:
    """Connected once it has heard a first batch."""

    def __init__(self, folder, publisher, rank=0, hwm=0) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.rcvhwm = hwm
        self.socket.subscribe(b"kv@")
        self.socket.connect(at_rank(f"ipc://{folder}/p", rank))
        pages = iter(range(1000, 9000))

        def heard():
            publisher.take(rank, [stored(next(pages))])
            return self.socket.poll(20)

        until(heard, "a subscriber's first batch")

    def read(self):
        assert self.socket.poll(HANG_S * 1000)
        topic, number, payload = self.socket.recv_multipart()
        return topic, int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)

    def read_until(self, kind):
        while True:
            _, number, (_, events, _) = self.read()
            if events[0]["type"] == kind:
                return number, events

    def close(self):
        self.context.destroy(linger=0)


@pytest.fixture
def subscriber(folder, publisher):
    subscriber = Subscriber(folder, publisher)
    yield subscriber
    subscriber.close()


def stored(page, parent=NO_PAGE):
    tokens = np.full(4, page, np.int64).tobytes()
    return Stored(parent, np.array([page], np.int32).tobytes(), tokens, ORIGIN if parent == NO_PAGE else None)


def removed(page):
    return Removed(np.array([page], np.int32).tobytes())


def replayed(folder, first):
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.connect(f"ipc://{folder}/r")
        socket.send_multipart([b"", first.to_bytes(8, "big", signed=first < 0)])
        found = []
        while True:
            assert socket.poll(HANG_S * 1000)
            empty, topic, number, payload = socket.recv_multipart()
            if number == b"\xff" * 8:
                assert (empty, topic, payload) == (b"", b"", b"")
                return found
            found.append((topic, int.from_bytes(number, "big"), payload))
    finally:
        context.destroy(linger=0)


def test_batches_are_numbered_from_zero_without_gaps(publisher, subscriber, folder):
    publisher.take(0, [removed(7777)])  # nobody knows of it: no batch
    for page in range(1, 6):
        publisher.take(0, [stored(page)])
    publisher.take(0, [removed(3)])
    number, events = subscriber.read_until("BlockRemoved")
    assert len(events[0]["block_hashes"]) == 1
    past = replayed(folder, 0)
    assert [number for _, number, _ in past] == list(range(number + 1))
    assert {topic for topic, _, _ in past} == {b"kv@pod@m"}


def test_a_replay_begins_where_it_is_asked_to(publisher, subscriber, folder):
    publisher.take(0, [stored(1)])
    publisher.engine_is_gone()
    number, _ = subscriber.read_until("AllBlocksCleared")
    assert [found for _, found, _ in replayed(folder, number - 1)] == [number - 1, number]
    assert replayed(folder, number + 5) == []


def test_a_malformed_request_is_passed_over(publisher, folder):
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(f"ipc://{folder}/r")
    for frames in ([b""], [b"", b"short"], [b"x", b"", b"12345678", b"1"], [b"12345678" * 1000]):
        socket.send_multipart(frames)
    publisher.take(0, [stored(1)])
    until(lambda: len(replayed(folder, 0)) == 1, "the batch among the past ones")
    context.destroy(linger=0)


def test_past_batches_are_bounded(folder):
    publisher = make_publisher(section(folder, buffer_steps=3), 1)
    try:
        for page in range(1, 10):
            publisher.take(0, [stored(page)])
        until(lambda: [number for _, number, _ in replayed(folder, 0)] == [6, 7, 8], "the last three batches")
    finally:
        publisher.close()


def test_each_rank_has_ports_of_its_own(publisher, folder):
    subscriber = Subscriber(folder, publisher, rank=1)
    publisher.take(0, [stored(1)])
    publisher.take(1, [stored(2)])
    publisher.engine_is_gone()
    _, events = subscriber.read_until("AllBlocksCleared")
    assert events
    subscriber.close()
    assert at_rank("tcp://*:5557", 3) == "tcp://*:5560"


def test_a_subscriber_that_never_reads_holds_nobody_up(folder):
    publisher = make_publisher(section(folder, hwm=2), 1)
    slow = Subscriber(folder, publisher, hwm=1)
    try:
        for page in range(1, 3000):
            publisher.take(0, [stored(page)])
            publisher.take(0, [removed(page)])
        until(lambda: replayed(folder, 5990), "the last batches")
    finally:
        slow.close()
        publisher.close()


def test_news_that_find_the_list_full_clear_all_blocks(folder):
    publisher = make_publisher(section(folder, max_queue_size=4), 1)
    subscriber = Subscriber(folder, publisher)
    stopped = threading.Event()
    publish, rank = publisher._ranks[0].publish, publisher._ranks[0]
    rank.publish = lambda news: (stopped.wait(HANG_S), publish(news))
    try:
        for page in range(1, 20):
            publisher.take(0, [stored(page)])
        stopped.set()
        subscriber.read_until("AllBlocksCleared")
        publisher.take(0, [stored(40, parent=19)])  # behind what is lost
        publisher.take(0, [stored(41)])
        _, events = subscriber.read_until("BlockStored")
        assert events[0]["token_ids"] == [41] * 4
    finally:
        stopped.set()
        subscriber.close()
        publisher.close()


def test_an_engines_events_end_with_what_it_caches(publisher, subscriber):
    with fake_engine() as engine:
        engine.watch_pages(publisher.take)
        engine.generate([list(range(1, 33))], params())
        _, events = subscriber.read_until("BlockStored")
        while events[0]["token_ids"][:4] != [1, 2, 3, 4]:
            _, events = subscriber.read_until("BlockStored")
        assert events[0]["token_ids"][:32] == list(range(1, 33))
        engine.flush_prefix_cache()
        subscriber.read_until("AllBlocksCleared")


def test_an_engine_publishes_by_itself_until_it_is_closed(folder):
    transfer = KVTransferSection()
    runtime = SimpleNamespace(
        kv_events_config=section(folder), kv_transfer_config=transfer, expert_parallel_size=1, routed_experts=False
    )
    config = SimpleNamespace(runtime=runtime, lora=SimpleNamespace(adapters={}, of_sounds=""))
    for _ in range(2):  # the endpoints can be had again
        with fake_engine(config=config) as engine:
            engine.generate([list(range(1, 33))], params())
            until(lambda: replayed(folder, 0), "the first batch")
            (_, number, payload), *_ = replayed(folder, 0)
            assert number == 0 and msgspec.msgpack.decode(payload)[1][0]["token_ids"][:32] == list(range(1, 33))


def test_a_taken_endpoint_is_refused(publisher, folder):
    with pytest.raises(ConfigError, match=r"runtime.kv_events_config.endpoint: tcp://\*:1\d+ cannot be had"):
        context = zmq.Context()
        other = context.socket(zmq.PUB)
        port = other.bind_to_random_port("tcp://*", min_port=10000, max_port=19999)
        try:
            make_publisher(section(folder, endpoint=f"tcp://*:{port}"), 1)
        finally:
            context.destroy(linger=0)


def test_missing_packages_are_named_with_the_command(monkeypatch, folder):
    monkeypatch.setattr("mllm_compile.kv_events.installed.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs pyzmq, msgspec, not installed: pip install 'mllm-compile\[events\]'"):
        make_publisher(section(folder), 1)
