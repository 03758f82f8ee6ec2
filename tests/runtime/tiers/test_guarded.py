"""A store of others that fails, hangs or lies costs its values alone."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from mllm_compile.runtime.tiers.connector import KVConnectorError, Namespace
from mllm_compile.runtime.tiers.guarded import GuardedConnector
from mllm_compile.runtime.tiers.place import Place
from tests.kv_connectors import broken_stores

PLACES = [Place(bytes([number]) * 16, b"p" * 16, b"f" * 16, 64, is_state=False) for number in range(2)]
DATA = np.arange(2048, dtype=np.uint16).view(np.uint8)


def guarded(name: str, options: Mapping[str, object] | None = None, timeout_s: float = 60.0) -> GuardedConnector:
    broken_stores.SHARED.clear()
    namespace = Namespace.of({}, DATA.nbytes, 0)
    return GuardedConnector(getattr(broken_stores, name), namespace, options or {}, timeout_s, name)


def loaded(store: GuardedConnector) -> tuple[list[bool], list[np.ndarray]]:
    found = [np.zeros_like(DATA) for _ in PLACES]
    return store.load(PLACES, [one.data for one in found]), found


def test_a_value_comes_back_and_one_that_is_damaged_is_removed(caplog: pytest.LogCaptureFixture) -> None:
    store = guarded("MemoryStore")
    assert store.store(PLACES, [DATA.data, DATA.data]) == [True, True]
    held = broken_stores.SHARED[Namespace.of({}).name]
    damaged = bytearray(held[PLACES[0].name])
    damaged[-1] ^= 8
    held[PLACES[0].name] = bytes(damaged)
    flags, (first, second) = loaded(store)
    assert flags == [False, True]
    assert not first.any() and (second == DATA).all()
    assert store.lookup(PLACES) == [False, True]
    assert "came back damaged" in caplog.text


def test_a_value_of_another_place_is_not_taken() -> None:
    store = guarded("MemoryStore")
    store.store(PLACES[:1], [DATA.data])
    held = broken_stores.SHARED[Namespace.of({}).name]
    held[PLACES[1].name] = held[PLACES[0].name]
    assert loaded(store)[0] == [True, False]


def test_a_value_of_another_model_is_not_taken_from_a_store_that_mixes_them_up() -> None:
    guarded("ForgetsNamespaces").store(PLACES, [DATA.data] * 2)
    other = Namespace.of({"model": "another"}, DATA.nbytes, 0)
    store = GuardedConnector(broken_stores.ForgetsNamespaces, other, {}, 60.0, "a store")
    assert store.lookup(PLACES) == [True, True]
    assert loaded(store)[0] == [False, False]


def test_errors_of_calls_are_lines_and_the_store_stays(caplog: pytest.LogCaptureFixture) -> None:
    store = guarded("Raises")
    assert store.lookup(PLACES) == [False, False]
    assert loaded(store)[0] == [False, False]
    assert store.store(PLACES, [DATA.data] * 2) == [False, False]
    assert store.takes_writes
    assert "Raises: lookup failed: RuntimeError: no route" in caplog.text


@pytest.mark.parametrize("at", ["lookup", "load", "store"])
def test_a_call_that_hangs_ends_the_use_of_the_store(at: str, caplog: pytest.LogCaptureFixture) -> None:
    store = guarded("Hangs", {"at": at}, timeout_s=0.05)
    calls = {"lookup": lambda: store.lookup(PLACES), "load": lambda: loaded(store)[0]}
    calls["store"] = lambda: store.store(PLACES, [DATA.data] * 2)
    assert calls[at]() == [False, False]
    assert not store.takes_writes
    assert [calls[name]() for name in calls] == [[False, False]] * 3, "at once"
    assert caplog.text.count("is not used any more") == 1
    store.close()


def test_flags_of_another_length_are_none(caplog: pytest.LogCaptureFixture) -> None:
    store = guarded("StopsAtTheFirstMiss")
    assert store.lookup(PLACES) == [False, False]
    assert "lookup gave 0 flags for 2 values" in caplog.text


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("IsOfAnotherVersion", "its version is 2, expected 1"),
        ("HasAShortSecret", "16 to 64 bytes"),
        ("Lacks", "it lacks lookup"),
        ("Refuses", "no server at 10.0.0.1:7"),
    ],
)
def test_a_store_that_cannot_be_used_says_why(name: str, message: str) -> None:
    with pytest.raises(KVConnectorError, match=message):
        guarded(name)
