"""Two ends that hand pages over, without engines: what arrives is what was there, whatever happens on the way."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import numpy as np
import pytest

from mllm_compile.errors import ConfigError, RequestError
from mllm_compile.kv_connectors.peers import frames, giver, memory, taker
from mllm_compile.kv_connectors.peers.giver import Giver, Port
from mllm_compile.kv_connectors.peers.meeting import VARIABLE, deadline, peer_secret
from mllm_compile.kv_connectors.peers.memory import LentMemory, borrow
from mllm_compile.kv_connectors.peers.nixl import NixlLender, NixlReader
from mllm_compile.kv_connectors.peers.rules import PeerRules
from mllm_compile.kv_connectors.peers.taker import PeerStore
from mllm_compile.runtime.config_sections import KVTransferSection
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.transfer_params import KVTransferParams
from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.tiers.connector import Namespace
from mllm_compile.runtime.tiers.host_memory import HostMemory
from mllm_compile.runtime.tiers.place import Place
from tests.hang_guard import HANG_S, until
from tests.kv_connectors.peers.relay import TO_GUEST, TO_HOST, Relay, relay_to

SECRET, PAGE_SIZE, PAGE_BYTES, NUM_PAGES = b"a secret of peers", 4, 4096, 3
FACTS = {"model": "tiny", "runtime.page_size": "4", "sums of weights": "7" * 200}
KEYS = [bytes([number]) * 16 for number in range(NUM_PAGES)]
PLACES = [Place(key, b"", KEYS[0], (number + 1) * PAGE_SIZE, False) for number, key in enumerate(KEYS)]


@dataclass
class FakeHandOver:
    """The entries of an engine that has stored all that it promised."""

    entries: dict[bytes, Entry] = field(default_factory=dict)
    got: list[bytes] = field(default_factory=list)

    def wait_for(self, keys: list[bytes], within_s: float) -> None:
        pass

    def find(self, key: bytes, is_state: bool) -> Entry | None:
        return self.entries.get(key)

    def fetched(self, key: bytes, is_state: bool) -> None:
        self.got.append(key)


@dataclass
class Prefill:
    """The end that has pages."""

    handover: FakeHandOver
    values: np.ndarray
    port: int
    engine_id: str = "prefill"

    def source(self, port: int | None = None, **changes: object) -> KVTransferParams:
        given = {"remote_engine_id": self.engine_id, "remote_block_ids": tuple(range(NUM_PAGES))} | changes
        where = {"remote_host": "127.0.0.1", "remote_port": port or self.port}
        return KVTransferParams(do_remote_prefill=True, **where, **given)  # type: ignore[arg-type]


def namespace(**changes: str) -> Namespace:
    return Namespace.of(FACTS | changes, PAGE_BYTES, 0)


@contextmanager
def prefill(is_lent: bool = False, by_nixl: bool = False) -> Iterator[Prefill]:
    import torch

    host = HostMemory([NUM_PAGES * PAGE_BYTES], torch.device("cpu"), is_lent=is_lent)
    values = host.data.numpy().reshape(NUM_PAGES, PAGE_BYTES)
    values[:] = np.random.default_rng(0).integers(0, 256, values.shape)
    handover = FakeHandOver({key: Entry(key, b"", KEYS[0], 4, number) for number, key in enumerate(KEYS)})
    port = Port("127.0.0.1", 0)
    lent = None if host.file is None else LentMemory(host.file)

    def offset_of(value: np.ndarray) -> int:
        return int(value.ctypes.data) - host.data.data_ptr()

    nixl = NixlLender(host.data.numpy()) if by_nixl else None
    content = lambda slot, _: values[slot], lent, offset_of, nixl
    given = Giver(port, SECRET, "prefill", namespace(), handover, *content)  # type: ignore[arg-type]
    try:
        yield Prefill(handover, values, port.number)
    finally:
        given.close()
        host.close()


@contextmanager
def store(
    timeout_s: float = 30.0, secret: bytes = SECRET, nixl: NixlReader | None = None, **facts: str
) -> Iterator[PeerStore]:
    made = PeerStore(secret, b"k" * 32, namespace(**facts), PAGE_SIZE, timeout_s, nixl)
    try:
        yield made
    finally:
        made.close()


def fetched(fetches: PeerStore, source: KVTransferParams) -> list[np.ndarray | None]:
    """The pages that arrive."""
    found = fetches.lookup_at(source, PLACES)
    buffers = [np.zeros(PAGE_BYTES, dtype=np.uint8) for _ in PLACES]
    loaded = fetches.load(PLACES, [one.data for one in buffers])
    assert all(is_there for is_there, is_loaded in zip(found, loaded, strict=True) if is_loaded)
    return [one if is_loaded else None for one, is_loaded in zip(buffers, loaded, strict=True)]


def num_right(arrived: list[np.ndarray | None], has: Prefill) -> int:
    """How many pages arrived; none is another one."""
    for page, expected in zip(arrived, has.values, strict=True):
        assert page is None or np.array_equal(page, expected)
    return sum(page is not None for page in arrived)


@pytest.mark.parametrize("is_lent", [False, True])
def test_pages_arrive_as_they_were_and_count_as_fetched(is_lent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_lent:
        monkeypatch.setattr(taker, "_received", None)  # not over the connection
    with prefill(is_lent) as has, store() as fetches:
        assert num_right(fetched(fetches, has.source()), has) == NUM_PAGES
        until(lambda: len(has.handover.got) == NUM_PAGES)
        del has.handover.entries[KEYS[1]]
        assert [page is None for page in fetched(fetches, has.source())] == [False, True, False]
        assert fetches.lookup_at(has.source(remote_block_ids=(2,)), PLACES) == [False, False, True]
        assert fetches.lookup(PLACES) == [False] * NUM_PAGES


@pytest.mark.parametrize("is_lent", [False, True])
def test_a_slot_that_gets_another_content_meanwhile_does_not_arrive(is_lent: bool) -> None:
    with prefill(is_lent) as has, store() as fetches:
        found = has.handover.find

        def find(key: bytes, is_state: bool) -> Entry | None:
            entry = found(key, is_state)
            if key == KEYS[1] and entry is not None:  # given up as soon as it was found
                has.handover.entries[key] = Entry(key, b"", KEYS[0], 4, 0)
            return entry

        has.handover.find = find  # type: ignore[method-assign]
        assert [page is None for page in fetched(fetches, has.source())] == [False, True, False]


def test_a_slot_that_gets_another_content_while_it_is_sent_costs_its_page_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with prefill() as has, store() as fetches:
        expected, sum_of = has.values.copy(), frames.sum_of

        def sum_of_then_overwritten(key: bytes, value: memoryview) -> int:
            told = sum_of(key, value)
            if key == KEYS[1] and has.handover.entries.pop(key, None) is not None:
                has.values[1] = 0
            return told

        monkeypatch.setattr(frames, "sum_of", sum_of_then_overwritten)
        arrived = fetched(fetches, has.source())
        assert [page is None for page in arrived] == [False, True, False]
        assert all(np.array_equal(arrived[number], expected[number]) for number in (0, 2))
        assert fetches.lookup_at(has.source(), PLACES) == [True, False, True]  # it is not left alone
    assert not caplog.text


def test_the_memory_of_an_engine_that_has_ended_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taker, "_LOOK_S", 0.01)
    with store() as fetches:
        with prefill(is_lent=True) as has:
            assert num_right(fetched(fetches, has.source()), has) == NUM_PAGES
            (peer,) = fetches._peers.values()
            peer.look()
            assert peer._memory is not None  # of one that is there it stays
        until(lambda: peer._memory is None and not peer._idle)


def messages_of(relay: Relay) -> list[tuple[str, int]]:
    """Where the bytes of each message begin that pass in a fetch."""
    ends: list[tuple[str, int]] = []

    def note(direction: str, at: int, data: bytes) -> bytes:
        ends.append((direction, at))
        return data

    relay.change = note
    return ends


def test_a_connection_that_is_cut_at_any_message_costs_pages_and_gives_no_wrong_one() -> None:
    with prefill() as has, relay_to(has.port) as relay:
        ends = messages_of(relay)
        with store() as fetches:
            assert num_right(fetched(fetches, has.source(relay.port)), has) == NUM_PAGES
        chance, arrived = Random(7), []
        begins = {direction: sorted({at for one, at in ends if one == direction}) for direction in (TO_HOST, TO_GUEST)}
        spots = [(direction, at) for direction, found in begins.items() for at in found]
        for direction, found in begins.items():
            spots += [(direction, chance.randrange(low, high)) for low, high in pairwise(found)]
        for where, place in spots:

            def cut(direction: str, at: int, data: bytes, where: str = where, place: int = place) -> bytes | None:
                if direction == where and at + len(data) > place:
                    return None
                return data

            relay.change = cut
            with store() as fetches:
                arrived.append(num_right(fetched(fetches, has.source(relay.port)), has))
        # A connection that was used before is made anew once, and may come through then.
        assert len(arrived) >= 10 and 0 in arrived and set(arrived) <= {0, NUM_PAGES}
        relay.change = lambda direction, at, data: data
        with store() as fetches:
            assert num_right(fetched(fetches, has.source(relay.port)), has) == NUM_PAGES


def test_a_changed_byte_anywhere_gives_no_wrong_page() -> None:
    with prefill() as has, relay_to(has.port) as relay:
        with store() as fetches:
            fetched(fetches, has.source(relay.port))
        sizes, chance = dict(relay.passed), Random(3)
        spots = [(TO_GUEST, chance.randrange(sizes[TO_GUEST])) for _ in range(16)]
        spots += [(TO_HOST, chance.randrange(sizes[TO_HOST])) for _ in range(8)]
        for where, place in spots:

            def change(direction: str, at: int, data: bytes, where: str = where, place: int = place) -> bytes:
                if direction == where and at <= place < at + len(data):
                    changed = bytearray(data)
                    changed[place - at] ^= 1
                    return bytes(changed)
                return data

            relay.change = change
            with store(timeout_s=0.5) as fetches:
                arrived = num_right(fetched(fetches, has.source(relay.port)), has)
                assert where == TO_HOST or arrived < NUM_PAGES


def test_an_engine_that_says_nothing_costs_its_time_once(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, prefill() as has, store(timeout_s=0.2) as fetches:
        source = has.source(silent.getsockname()[1])
        for _ in range(3):
            assert fetched(fetches, source) == [None] * NUM_PAGES
        silent.settimeout(0)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):  # it was left alone behind the first time
            silent.accept()
        assert num_right(fetched(fetches, has.source()), has) == NUM_PAGES  # others are asked
    assert caplog.text.count("hands nothing over, so prompts are computed: timed out") == 1


def test_an_engine_that_falls_silent_costs_its_time_once() -> None:
    with prefill() as has, relay_to(has.port) as relay, store() as fetches:
        assert num_right(fetched(fetches, has.source(relay.port)), has) == NUM_PAGES
        (peer,) = fetches._peers.values()
        peer._timeout_s = 0.2
        greeted: list[int] = []

        def say_nothing(direction: str, at: int, data: bytes) -> bytes:
            if direction == TO_GUEST and not at:
                greeted.append(len(data))
            return b""

        relay.change = say_nothing
        assert fetched(fetches, has.source(relay.port)) == [None] * NUM_PAGES
        assert not greeted  # no second connection


def test_a_silent_address_costs_its_time_once_whatever_engines_a_client_names_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, prefill() as has, store(timeout_s=0.2) as fetches:
        for number in range(3):
            source = has.source(silent.getsockname()[1], remote_engine_id=f"made up {number}")
            assert fetched(fetches, source) == [None] * NUM_PAGES
        silent.settimeout(0)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):
            silent.accept()
        fetches._timeout_s = HANG_S
        # One that answers, and is another engine, costs those who name the right one nothing.
        assert fetched(fetches, has.source(remote_engine_id="made up")) == [None] * NUM_PAGES
        assert num_right(fetched(fetches, has.source()), has) == NUM_PAGES


def test_an_engine_that_comes_again_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(taker, "_REST_S", 0.0)
    with prefill() as has, relay_to(has.port) as relay, store() as fetches:
        relay.change = lambda *_: None
        assert fetched(fetches, has.source(relay.port)) == [None] * NUM_PAGES
        relay.change = lambda direction, at, data: data
        assert num_right(fetched(fetches, has.source(relay.port)), has) == NUM_PAGES


@pytest.mark.parametrize(
    ("facts", "changes", "secret", "why"),
    [
        ({"runtime.page_size": "8"}, {}, SECRET, "runtime.page_size is 4 there and 8 here"),
        ({"model": "other"}, {}, SECRET, "model is tiny there and other here"),
        ({"dtype": "bfloat16"}, {}, SECRET, "dtype is nothing there and bfloat16 here"),
        ({"sums of weights": "8" * 200}, {}, SECRET, "sums of weights is #"),
        ({}, {"remote_engine_id": "another"}, SECRET, "engine another is not here any more: prefill is"),
        ({}, {}, b"another secret", f"it has another {VARIABLE}"),
    ],
)
def test_an_engine_that_does_not_fit_is_named(facts, changes, secret, why, caplog) -> None:
    with prefill() as has, store(secret=secret, **facts) as fetches:
        assert fetched(fetches, has.source(**changes)) == [None] * NUM_PAGES
    assert why in caplog.text


def test_who_listens_without_the_secret_gets_no_question(caplog: pytest.LogCaptureFixture) -> None:
    with prefill() as has, store(timeout_s=0.5) as fetches, relay_to(has.port) as relay:
        relay.change = lambda direction, at, data: bytes(len(data)) if direction == TO_GUEST and at > 40 else data
        assert fetched(fetches, has.source(relay.port)) == [None] * NUM_PAGES
    assert "hands nothing over" in caplog.text


def test_strangers_at_the_port_get_nothing_and_stop_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = Random(5)
    with prefill() as has, store() as fetches:
        with monkeypatch.context() as strangers:
            strangers.setattr(giver, "_MEETING_S", 0.2)
            for _ in range(30):
                with socket.create_connection(("127.0.0.1", has.port)) as stranger:
                    stranger.sendall(chance.randbytes(chance.choice([1, 64, 80, 5000])))
                    stranger.settimeout(HANG_S)
                    greeting = 10 + 32
                    said = b""
                    while data := _received(stranger):
                        said += data
                    assert len(said) <= greeting + 1  # the greeting, and no
        assert num_right(fetched(fetches, has.source()), has) == NUM_PAGES
    until(lambda: not any(one.name.startswith("mllm-kv") for one in threading.enumerate()), "the port's threads end")


def test_strangers_that_say_nothing_keep_no_engine_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giver, "_MOST_STRANGERS", 4)
    monkeypatch.setattr(giver, "_MOST_CONNECTIONS", 8)
    with prefill() as has, ExitStack() as opened, store() as fetches:
        for _ in range(40):
            opened.enter_context(socket.create_connection(("127.0.0.1", has.port)))
        assert num_right(fetched(fetches, has.source()), has) == NUM_PAGES


def test_a_peer_that_reads_slowly_has_bounded_time_for_all_values_together(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 4096
    with prefill() as has, store() as fetches:
        fetches.lookup_at(has.source(), PLACES)
        monkeypatch.setattr(giver, "_MEETING_S", 0.5)
        monkeypatch.setattr(frames, "_SLOWEST", 1e12)
        (peer,) = fetches._peers.values()
        with peer._idle.pop() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            frames.ask(connection, frames.LOAD, False, KEYS[:1] * count, deadline(HANG_S))
            passed = 0
            while any(one.name == "mllm-kv-give" for one in threading.enumerate()):
                passed += len(_received(connection))
                assert passed < count * PAGE_BYTES // 2
                time.sleep(0.02)


def test_memory_is_lent_again_when_there_were_too_many_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals, accept = [OSError(errno.EMFILE, "too many open files")], socket.socket.accept

    def refused_once(listener: socket.socket) -> tuple[socket.socket, object]:
        if listener.family == socket.AF_UNIX and refusals:
            raise refusals.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", refused_once)
    monkeypatch.setattr(memory, "_ANSWER_S", HANG_S)
    with prefill(is_lent=True) as has, store() as fetches:
        assert num_right(fetched(fetches, has.source()), has) == NUM_PAGES
        (peer,) = fetches._peers.values()
        assert peer._memory is not None and not refusals


def _received(stranger: socket.socket) -> bytes:
    try:
        return stranger.recv(1 << 16)
    except ConnectionError:
        return b""


def test_a_peer_that_asks_otherwise_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that knows the secret cannot have more said than it may ask for, nor memory read elsewhere."""
    questions = [b"\x09\0\0\1" + KEYS[0], b"\1\2\0\1" + KEYS[0], b"\1\0\xff\xff", b"\4\0\0\1", b"\3\0\0\1" + KEYS[0]]
    with prefill() as has:
        for question in questions:
            with store() as fetches:
                fetches.lookup_at(has.source(), PLACES)
                (peer,) = fetches._peers.values()
                connection = peer._idle.pop()
                connection.sendall(question)
                connection.settimeout(10)
                assert _received(connection) == b""
                connection.close()
        with store() as fetches:
            assert num_right(fetched(fetches, has.source()), has) == NUM_PAGES


def test_an_offset_beyond_the_memory_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with prefill(is_lent=True) as has, store() as fetches:
        monkeypatch.setattr(Giver, "_places", lambda *_: frames.PLACE_HEAD.pack(1, 1 << 60) * NUM_PAGES)
        assert fetched(fetches, has.source()) == [None] * NUM_PAGES


def test_memory_is_lent_to_who_has_the_pass_word_once_and_is_not_written() -> None:
    file = os.memfd_create("lent", os.MFD_ALLOW_SEALING)
    os.ftruncate(file, 4096)
    lent = LentMemory(file)
    try:
        with pytest.raises(ValueError, match="could shrink"):
            borrow(lent.name, lent.pass_word())
        with pytest.raises((EOFError, OSError)):
            borrow(lent.name, "0" * 32)
    finally:
        lent.close()
        os.close(file)
    with prefill(is_lent=True) as has, store() as fetches:
        fetched(fetches, has.source())
        (peer,) = fetches._peers.values()
        assert peer._memory is not None and not peer._memory.flags.writeable
    assert memory._MOST_PASS_WORDS


def test_a_port_that_is_taken_and_a_secret_that_is_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    is_taken = pytest.raises(ConfigError, match=r"is taken. Set kv_ip .* and kv_port to a free port")
    with socket.create_server(("127.0.0.1", 0)) as taken, is_taken:
        Port("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match="cannot be had"):
        Port("192.0.2.1", 0)
    monkeypatch.setenv(VARIABLE, "short")
    with pytest.raises(ConfigError, match=f"{VARIABLE} has 5 characters; expected the same 16 or more"):
        peer_secret()


@pytest.mark.parametrize(
    ("role", "asked", "why"),
    [
        (None, {"do_remote_decode": True}, "this engine hands no pages over"),
        ("kv_consumer", {"do_remote_decode": True}, r"do_remote_decode: expected false: .* is kv_consumer"),
        ("kv_producer", {"do_remote_prefill": True}, r"do_remote_prefill: expected false: .* is kv_producer"),
        ("kv_both", {"do_remote_prefill": True, "remote_host": "10.0.0.9"}, r"expected one of 127\.0\.0\.0/8"),
        ("kv_both", {"do_remote_prefill": True, "remote_host": "metadata.internal"}, r"got metadata\.internal"),
        ("kv_both", {"do_remote_decode": True, "prompt_logprobs": 1}, "prompt_logprobs: expected none beside"),
    ],
)
def test_requests_that_do_not_fit_the_role_are_refused(role, asked, why) -> None:
    section = KVTransferSection() if role is None else KVTransferSection(kv_connector="PeerConnector", kv_role=role)
    params, rest = dict(asked), {"prompt_logprobs": asked.get("prompt_logprobs")}
    params.pop("prompt_logprobs", None)
    if params.get("do_remote_prefill"):
        given = {"remote_engine_id": "a", "remote_block_ids": [0], "remote_host": "127.0.0.1", "remote_port": 5}
        params = given | params
    with pytest.raises(RequestError, match=why):
        PeerRules.of(section).check(SamplingParams(kv_transfer_params=params, **rest))


def test_hosts_are_names_addresses_and_networks() -> None:
    rules = PeerRules("kv_both", ("10.1.0.7/16", "prefill.local", "::1"))
    assert [rules.allows(one) for one in ("10.1.2.3", "10.2.0.1", "prefill.local", "::1", "prefill.locals")] == [
        True,
        False,
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("yes", "kv_transfer_params: expected an object"),
        ({"do_remote_decode": 1}, r"do_remote_decode: expected true or false, got 1"),
        ({"remote_rank": 1}, "expected members of"),
        ({"do_remote_prefill": True}, r"remote_engine_id: expected it beside do_remote_prefill"),
        ({"do_remote_prefill": True, "do_remote_decode": True}, "expected false beside do_remote_prefill"),
        ({"remote_port": 0}, "an integer from 1 to 65535"),
        ({"remote_host": "a b"}, "an address or a name"),
        ({"remote_engine_id": "a\nerror: all is lost"}, "characters that can be printed"),
        ({"remote_block_ids": [1, 1]}, "ascending numbers"),
        ({"remote_block_ids": [[0]]}, "ascending numbers"),
        ({"tp_size": 2}, "tensor ranks are not handed over"),
    ],
)
def test_parameters_are_checked(given, why) -> None:
    with pytest.raises(RequestError, match=why):
        SamplingParams(kv_transfer_params=given)


def test_parameters_that_ask_for_nothing_are_none() -> None:
    vllms = {"do_remote_decode": False, "do_remote_prefill": False, "remote_engine_id": None, "remote_port": None}
    assert SamplingParams(kv_transfer_params=vllms).kv_transfer_params is None
    assert SamplingParams(kv_transfer_params={}).kv_transfer_params is None
    first = vllms | {"do_remote_decode": True, "remote_block_ids": None, "remote_host": None}
    asked = SamplingParams(kv_transfer_params=first).kv_transfer_params
    assert asked is not None and asked.to_wire() == {"do_remote_decode": True, "do_remote_prefill": False}
