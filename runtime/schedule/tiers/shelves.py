"""The state that loads and stores of one scheduler share: indices of tiers, names of pages, counts. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field

from mllm_compile.runtime.sampling.transfer_params import KVTransferParams
from mllm_compile.runtime.schedule.pages.page_run import PageRun
from mllm_compile.runtime.schedule.pages.tables import PageTables
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.tiers.gain import Gain
from mllm_compile.runtime.schedule.tiers.index import Entry, TierIndex
from mllm_compile.runtime.schedule.tiers.ticket import TierCopies

_PIECE_BYTES = 128 << 20  # of a copy: its pages can be read when all of it has arrived


@dataclass(slots=True)
class Counts:
    """The counts of one tier, as TierFigures has them."""

    hit_tokens: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    load_seconds: float = 0.0
    store_seconds: float = 0.0
    failed_loads: int = 0


@dataclass(slots=True)
class Shelves:
    """
    Attributes:
        pages: the scheduler's.
        host, below: the indices of the host's memory and of the tier below it, of pages (False) and of states (True);
            `below` is empty without such a tier.
        counts: of the host's memory and of the tier below.
        changes: grows when pages changed hands.
        asks_below: the tier below does not tell what it has: it is asked about each request.
        asks_peers: it is other engines: a request names the one that is asked. Pages that arrived are not theirs.
        rows_to_read: gives rows of states that the step that is planned will read; a load begins before it.
    """

    pages: PageTables
    copies: TierCopies
    secret: bytes
    gain: Gain
    host: dict[bool, TierIndex]
    below: dict[bool, TierIndex]
    counts: tuple[Counts, Counts] = field(default_factory=lambda: (Counts(), Counts()))
    asks_below: bool = False
    asks_peers: bool = False
    changes: int = 0
    rows_to_read: Callable[[], Container[int]] = tuple

    def __post_init__(self) -> None:
        self.pages.cache.use_keys(self.secret)

    @property
    def page_size(self) -> int:
        return self.pages.page_size

    @property
    def piece(self) -> int:
        """Most pages of one copy."""
        return max(1, _PIECE_BYTES // max(self.copies.page_bytes, 1 << 10))

    def source_of(self, request: Request) -> KVTransferParams | None:
        """The engine that has computed a request's prompt; None: it names none."""
        asked = request.params.kv_transfer_params if self.asks_peers else None
        return asked if asked is not None and asked.do_remote_prefill else None

    def has_to_ask(self, request: Request) -> bool:
        """True if the tier below is asked about a request."""
        if not self.below or not self.copies.takes_writes:
            return False
        return self.asks_below or self.source_of(request) is not None

    @property
    def has_states(self) -> bool:
        """True of a model whose layers carry a state."""
        return self.host[True].num_slots > 0

    def keys_of(self, run: PageRun) -> list[bytes]:
        """The keys of a run's pages."""
        return self.pages.cache.use_keys(self.secret).of(run)

    def path_keys(self, run: PageRun | None) -> list[bytes]:
        """The keys of all pages of a path."""
        return [key for one in reversed(list(self.pages.cache.path_of(run))) for key in self.keys_of(one)]

    def first_of(self, run: PageRun) -> bytes:
        """The key of a path's first page."""
        return self.keys_of(list(self.pages.cache.path_of(run))[-1])[0]

    def find(self, key: bytes, is_state: bool = False) -> Entry | None:
        """The entry of a page, or of the state behind it, in the highest tier that has one."""
        found = self.host[is_state].get(key)
        return self.below[is_state].get(key) if found is None and self.below else found

    def find_path(self, keys: Sequence[bytes]) -> list[Entry]:
        """The entries of a path's pages, up to the first one that no tier has, likewise."""
        found = self.host[False].get_all(keys)
        if self.below:
            below = self.below[False]
            found = [below.get(key) if entry is None else entry for key, entry in zip(keys, found, strict=True)]
        entries: list[Entry] = []
        for entry in found:
            if entry is None:
                break
            entries.append(entry)
        return entries

    def is_below(self, entry: Entry, is_state: bool) -> bool:
        """True if the entry is one of the tier below."""
        return bool(self.below) and self.below[is_state].get(entry.key) is entry

    def indices(self) -> list[TierIndex]:
        """All of them."""
        return [*self.host.values(), *self.below.values()]
