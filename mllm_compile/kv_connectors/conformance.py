"""Tests a store against the interface.

    python -m mllm_compile.kv_connectors.conformance package.module.Class '{"folder": "/tmp/kv"}'

The object is its kv_connector_extra_config. It stores some values under names of its own, and removes them.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import pairwise

from mllm_compile.errors import MllmError
from mllm_compile.kv_connectors import KVConnector, KVConnectorError, Namespace, Place
from mllm_compile.kv_connectors.load import class_of
from mllm_compile.runtime.tiers.guarded import check_made

PAGE_BYTES, STATE_BYTES = 65_536, 4_096
_THREADS = 8

Open = Callable[[Namespace], KVConnector]


def check(open_store: Open) -> list[str]:
    """Checks a store.

    Args:
        open_store: makes it; called often, and closed before it is called again with the same namespace.

    Returns:
        What was found to hold, a sentence each.

    Raises:
        KVConnectorError: what does not hold: got, expected.
    """
    held = []
    for test in TESTS:
        namespace = Namespace.of({"conformance": secrets.token_hex(8)}, PAGE_BYTES, STATE_BYTES)
        test(open_store, namespace)
        held.append(test.__name__.lstrip("_").replace("_", " "))
    return held


def places_of(count: int, is_state: bool = False) -> list[Place]:
    """Places of pages, or of states, of one path."""
    keys = [secrets.token_bytes(16) for _ in range(count + 1)]
    return [
        Place(key, b"" if is_state else parent, keys[1], 64 * depth, is_state)
        for depth, (parent, key) in enumerate(pairwise(keys), start=1)
    ]


def _values_come_back_as_they_were(open_store: Open, namespace: Namespace) -> None:
    with closing(check_made(open_store(namespace))) as store:
        for is_state, size in ((False, PAGE_BYTES), (True, STATE_BYTES)):
            places = places_of(3, is_state)
            values = _stored(store, places, size)
            _expect("lookup", store.lookup(places), [True] * 3)
            _expect_values(store, places, values)
            store.remove(places)


def _values_that_are_not_there_hinder_no_others(open_store: Open, namespace: Namespace) -> None:
    with closing(open_store(namespace)) as store:
        places = places_of(3)
        values = _stored(store, places[::2], PAGE_BYTES)
        _expect("lookup", store.lookup(places), [True, False, True])
        buffers = [bytearray(PAGE_BYTES) for _ in places]
        _expect("load", store.load(places, [memoryview(one) for one in buffers]), [True, False, True])
        _expect("the bytes of load", [bytes(buffers[0]), bytes(buffers[2])] == values, True)
        store.remove(places)


def _removed_values_are_gone(open_store: Open, namespace: Namespace) -> None:
    with closing(open_store(namespace)) as store:
        places = places_of(2)
        _stored(store, places, PAGE_BYTES)
        store.remove(places[:1])
        store.remove(places[:1])
        _expect("lookup", store.lookup(places), [False, True])
        _expect("load", store.load(places[:1], [memoryview(bytearray(PAGE_BYTES))]), [False])
        store.remove(places)


def _values_are_stored_again(open_store: Open, namespace: Namespace) -> None:
    with closing(open_store(namespace)) as store:
        places = places_of(1)
        values = _stored(store, places, PAGE_BYTES)
        _expect("store", store.store(places, [memoryview(values[0])]), [True])
        _expect_values(store, places, values)
        store.remove(places)


def _memory_of_values_is_not_used_behind_store(open_store: Open, namespace: Namespace) -> None:
    with closing(open_store(namespace)) as store:
        places, value = places_of(1), bytearray(secrets.token_bytes(PAGE_BYTES))
        before = bytes(value)
        _expect("store", store.store(places, [memoryview(value)]), [True])
        value[:] = bytes(PAGE_BYTES)
        _expect_values(store, places, [before])
        store.remove(places)


def _a_page_and_the_state_behind_it_are_two_values(open_store: Open, namespace: Namespace) -> None:
    with closing(open_store(namespace)) as store:
        (page,) = places_of(1)
        state = Place(page.key, b"", page.first, page.depth, is_state=True)
        values = _stored(store, [page], PAGE_BYTES)
        _expect("lookup", store.lookup([page, state]), [True, False])
        values += _stored(store, [state], STATE_BYTES)
        _expect_values(store, [page, state], values)
        store.remove([page, state])


def _threads_call_it_at_once(open_store: Open, namespace: Namespace) -> None:
    with closing(open_store(namespace)) as store, ThreadPoolExecutor(_THREADS) as threads:

        def one(places: list[Place]) -> None:
            for _ in range(4):
                _expect_values(store, places, _stored(store, places, PAGE_BYTES))
                store.remove(places)

        for call in [threads.submit(one, places_of(2)) for _ in range(_THREADS)]:
            call.result()


def _namespaces_are_apart(open_store: Open, namespace: Namespace) -> None:
    other = Namespace.of({**namespace.facts, "other": "1"}, PAGE_BYTES, STATE_BYTES)
    with closing(open_store(namespace)) as store:
        places = places_of(1)
        _stored(store, places, PAGE_BYTES)
        with closing(open_store(other)) as beside:
            _expect("lookup in another namespace", beside.lookup(places), [False])
            beside.remove(places)
        _expect("lookup", store.lookup(places), [True])
        store.remove(places)


def _the_secret_stays_and_what_is_found_behind_a_restart_is_whole(open_store: Open, namespace: Namespace) -> None:
    with closing(open_store(namespace)) as store:
        places, secret = places_of(2), store.secret
        values = _stored(store, places, PAGE_BYTES)
    with closing(open_store(namespace)) as again:
        _expect("the secret behind a restart", again.secret == secret, True)
        there = [one for one, found in enumerate(again.lookup(places)) if found]
        _expect_values(again, [places[one] for one in there], [values[one] for one in there])
        again.remove(places)


TESTS: Sequence[Callable[[Open, Namespace], None]] = (
    _values_come_back_as_they_were,
    _values_that_are_not_there_hinder_no_others,
    _removed_values_are_gone,
    _values_are_stored_again,
    _memory_of_values_is_not_used_behind_store,
    _a_page_and_the_state_behind_it_are_two_values,
    _threads_call_it_at_once,
    _namespaces_are_apart,
    _the_secret_stays_and_what_is_found_behind_a_restart_is_whole,
)


def _stored(store: KVConnector, places: Sequence[Place], size: int) -> list[bytes]:
    """Stores random values; they."""
    values = [secrets.token_bytes(size) for _ in places]
    _expect("store", store.store(places, [memoryview(one) for one in values]), [True] * len(places))
    return values


def _expect_values(store: KVConnector, places: Sequence[Place], values: Sequence[bytes]) -> None:
    buffers = [bytearray(len(one)) for one in values]
    _expect("load", store.load(places, [memoryview(one) for one in buffers]), [True] * len(places))
    _expect("the bytes of load", [bytes(one) == value for one, value in zip(buffers, values, strict=True)],
            [True] * len(places))  # fmt: skip


def _expect(what: str, got: object, expected: object) -> None:
    """
    Raises:
        KVConnectorError: they differ.
    """
    got = list(got) if isinstance(got, Sequence) else got
    if got != expected:
        raise KVConnectorError(f"{what}: got {got}, expected {expected}")


def main(arguments: Sequence[str]) -> int:
    """Checks the store that is named, with a line for each thing."""
    if len(arguments) not in (1, 2):
        print(__doc__, file=sys.stderr)
        return 2
    try:
        options = json.loads(arguments[1]) if arguments[1:] else {}
        if not isinstance(options, dict):
            raise KVConnectorError(f"its options: got {arguments[1]}, expected an object of JSON")
        made = class_of(arguments[0])
        for sentence in check(lambda namespace: made(namespace, options)):
            print(f"holds: {sentence}")
    except (KVConnectorError, MllmError, json.JSONDecodeError) as error:
        print(f"{arguments[0]}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
