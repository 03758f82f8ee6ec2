"""The part of the host's memory that other engines may fetch: the prompts that were computed for them.

A request that another engine will go on with *promises* its prompt's pages when it ends. They are published and stored
as any others; an engine that asks for them waits until that is over. From then on others go before them when memory is
short, until they were fetched or their time is over: nothing is held for ever. Promises are made and kept by the
engine's thread; other threads ask. Free of torch.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mllm_compile.runtime.sampling.transfer_params import MOST_TEXT, KVTransferParams
from mllm_compile.runtime.schedule.pages.page_run import PageRun, Salt
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.tiers.index import Entry
from mllm_compile.runtime.schedule.tiers.shelves import Shelves
from mllm_compile.runtime.schedule.tiers.stores import Stores


def _nothing() -> None:
    """The default of an optional callback."""


class Whereabouts(NamedTuple):
    """The place where other engines ask.

    Attributes:
        engine_id: of this one, from its start to its end.
    """

    engine_id: str
    host: str
    port: int


@dataclass(slots=True, eq=False)
class _Promise:
    """A prompt whose pages are not all stored.

    Attributes:
        token_ids: [n] int64, by the prefix cache's keys.
        keys: of its full pages.
        run: the end of its path in the prefix cache, once it was looked for.
    """

    token_ids: np.ndarray
    salt: Salt
    keys: list[bytes]
    run: PageRun | None = None
    has_begun: bool = False


class HandOver:
    """
    Args:
        where: other engines ask.
        hold_s: seconds that a promised page stays ahead of others, unless it is fetched.

    Attributes:
        on_close: called by `close`, which waits for it.
    """

    def __init__(self, shelves: Shelves, stores: Stores, where: Whereabouts, hold_s: float) -> None:
        self._shelves, self._stores, self._where, self._hold_s = shelves, stores, where, hold_s
        self._promises: list[_Promise] = []
        self._pending: Counter[bytes] = Counter()  # keys that are promised and not stored; guarded by the condition
        self._changed = threading.Condition()
        self._fetched: deque[tuple[bytes, bool]] = deque()
        self._is_open = True
        self.on_close: Callable[[], None] = _nothing

    # --- the engine's thread ------------------------------------------------------------------------------------------

    @property
    def has_more(self) -> bool:
        """`begin` would begin with a promise."""
        return any(not one.has_begun for one in self._promises)

    def promise(self, request: Request, token_ids: np.ndarray, salt: Salt) -> None:
        """Promises the full pages of a prompt that was computed, and notes in its request where they are.

        Args:
            token_ids: [n] int64, by the prefix cache's keys.
        """
        chain, keys = self._shelves.pages.cache.use_keys(self._shelves.secret), list[bytes]()
        if self._is_open:
            keys = chain.chain(chain.root(salt), token_ids)
        if keys:
            with self._changed:
                self._pending.update(keys)
            self._promises.append(_Promise(token_ids, salt, keys))
        request.kv_transfer = KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id=self._where.engine_id,
            remote_request_id=request.request_id[:MOST_TEXT] or None,
            remote_block_ids=tuple(range(len(keys))),
            remote_host=self._where.host,
            remote_port=self._where.port,
            tp_size=1,
        )

    def begin(self) -> None:
        """Has what was promised stored, where it is not; ahead of Stores.begin."""
        while self._fetched:
            key, is_state = self._fetched.popleft()
            entry = self._shelves.host[is_state].get(key)
            if entry is not None:
                entry.until = 0.0
        for promise in self._promises:
            if promise.has_begun:
                continue
            promise.has_begun = True
            cache = self._shelves.pages.cache
            promise.run, _ = cache.match_prefix(promise.token_ids, promise.salt)
            if promise.run is not None:
                self._stores.stored(promise.run)
                for run in cache.path_of(promise.run):
                    if run in cache.states:
                        self._stores.state_kept(run)

    def settle(self) -> None:
        """Ends the wait for what is stored, or will not be; behind Stores.begin."""
        for promise in list(self._promises):
            if promise.has_begun and not self._stores.is_storing(promise.run, promise.keys):
                self._promises.remove(promise)
                until = time.monotonic() + self._hold_s
                for index in self._shelves.host.values():
                    for key in promise.keys:
                        entry = index.get(key)
                        if entry is not None:
                            entry.until = until
                self._stored(promise.keys)

    def _stored(self, keys: Sequence[bytes]) -> None:
        with self._changed:
            self._pending.subtract(keys)
            for key in keys:
                if self._pending[key] <= 0:
                    del self._pending[key]
            self._changed.notify_all()

    def close(self) -> None:
        """Hands nothing over from now on: what is stored is of other weights, or goes. Once, or often."""
        with self._changed:
            self._is_open = False
            self._pending.clear()
            self._changed.notify_all()
        on_close, self.on_close = self.on_close, _nothing
        on_close()

    # --- other threads ------------------------------------------------------------------------------------------------

    def wait_for(self, keys: Sequence[bytes], within_s: float) -> None:
        """Waits until none of these pages is on its way, or that long."""
        with self._changed:
            self._changed.wait_for(lambda: not any(key in self._pending for key in keys), within_s)

    def find(self, key: bytes, is_state: bool) -> Entry | None:
        """The entry of a page, or of the state behind it.

        Its slot may get another content at any time: what was read of it counts if `find` gives the same entry behind.
        """
        return self._shelves.host[is_state].get(key) if self._is_open else None

    def fetched(self, key: bytes, is_state: bool) -> None:
        """Notes that an engine has it: it stays as long as any other."""
        self._fetched.append((key, is_state))
