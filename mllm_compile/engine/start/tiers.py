"""The memory behind an engine's KV cache, made of its config; an engine without it does not import this."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path

from mllm_compile.errors import ConfigError
from mllm_compile.files.byte_sizes import format_bytes
from mllm_compile.files.user_path import user_path
from mllm_compile.kv_connectors.load import connector_of
from mllm_compile.process.progress import Reporter
from mllm_compile.runtime.config_sections import RuntimeSection
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.schedule.tiers.index import Entry, TierIndex
from mllm_compile.runtime.schedule.tiers.tiers import Tiers
from mllm_compile.runtime.tiers.connector import KVConnectorError, Namespace
from mllm_compile.runtime.tiers.copies import SlotCopies
from mllm_compile.runtime.tiers.disk import DiskFiles
from mllm_compile.runtime.tiers.guarded import GuardedConnector
from mllm_compile.runtime.tiers.host_memory import check_host_memory, refused_memory
from mllm_compile.runtime.tiers.kept import KeptLedger, KeptSlots, held_bytes, held_descriptor
from mllm_compile.runtime.tiers.layout import ALIGNMENT, SlotLayout
from mllm_compile.runtime.tiers.memory_file import check_room, open_memory_file
from mllm_compile.runtime.tiers.place import Place
from mllm_compile.runtime.tiers.ranked import RankedCopies, Tell, layouts_of, share_slots, sums_of

MOST_SLOTS = 1 << 20  # where pages hold nothing, as of models without attention
_STATES = 0.5  # of the memory, of a model whose layers carry one beside attention
# Keys of `runtime` that keys and values depend on; the runtime's own key has the rest.
_OF_NUMERICS = (
    "attention_backend",
    "page_size",
    "kv_cache_dtype",
    "state_dtype",
    "deterministic",
    "any_rows",
    "without",
)


def put_tiers_behind(
    scheduler: Scheduler, runner: ModelRunner, factors: Mapping[str, str], reporter: Reporter, tell: Tell | None
) -> None:
    """Puts the memory that the config names behind a scheduler's prefix cache. Where the folder behind that cannot be
    used, a line says why, and there is none.

    Args:
        factors: of the runtime's key.
        tell: sends the other ranks a message; None: there is one rank.

    Raises:
        ConfigError: it is smaller than a page.
        DeviceMemoryError: the system has too little.
    """
    runtime = runner.config.runtime
    pages, states = layouts_of(runner, has_states=scheduler.config.num_snapshots > 0)
    size = runtime.kv_offloading_size / runtime.num_ranks  # as vLLM has it: of all ranks together
    num_slots, num_states = _slots("kv_offloading_size", size, (pages.slot_bytes, states.slot_bytes), 0, runtime)
    asks_more = runtime.kv_offloading_disk_path is not None or bool(runtime.kv_transfer_config.import_path)
    shared = None
    if tell is not None and asks_more:
        with refused_memory(int(runtime.kv_offloading_size * 2**30)):
            shared = share_slots(tell, (pages, states), (num_slots, num_states), runtime.num_ranks - 1)
    # Sums of weights are made where needed.
    namespace = cache(partial(_namespace, runner, (pages, states), factors, () if shared is None else shared.sums))
    if runtime.kv_transfer_config.names_peers:
        from mllm_compile.engine.start.peers import put_peers_behind

        put_peers_behind(scheduler, runner, (pages, states), (num_slots, num_states), namespace())
        return
    store, found, below = _store(runtime, namespace, reporter)
    with ExitStack() as opened:  # given back where the memory is refused: a second try finds them free
        if store is not None:
            opened.callback(store.close)
        kept = None
        if tell is None:
            kept = _kept(runtime, namespace, (num_slots, num_states), store, reporter)
            if kept is not None:
                opened.callback(kept.close)
            copies = SlotCopies(pages, states, num_slots, num_states, runner.device, store, kept)
        else:
            copies = RankedCopies(tell, (pages, states), (num_slots, num_states), runner.device, store, shared)
        opened.pop_all()
    indices = None
    if below is not None:
        index_of = partial(TierIndex, owns_content=not isinstance(store, GuardedConnector))
        indices = (
            index_of(below[0], partial(copies.remove, is_state=False)),
            index_of(below[1], partial(copies.remove, is_state=True)),
        )
        _fill(indices, found)
    made = secrets.token_bytes(32) if store is None else store.secret
    scheduler.use_tiers(
        Tiers(
            scheduler.pages,
            copies,
            _host((num_slots, num_states), kept, indices),
            made if kept is None else kept.secret,
            runtime.kv_offloading_min_gain,
            indices,
            runtime.kv_offloading_write_policy == "write_through",
            "connector" if isinstance(store, GuardedConnector) else "disk",
            asks_below=isinstance(store, GuardedConnector),
        )
    )


def _host(
    sizes: tuple[int, int], kept: KeptSlots | None, below: tuple[TierIndex, TierIndex] | None
) -> tuple[TierIndex, TierIndex]:
    """The indices of the host's memory, with what an engine before has left there."""
    if kept is None:
        return TierIndex(sizes[0]), TierIndex(sizes[1])
    indices = [TierIndex(size, ledger=KeptLedger(kept, kind)) for kind, size in zip((False, True), sizes, strict=True)]
    entries: dict[bool, list[Entry]] = {False: [], True: []}
    for entry, is_state in kept.entries():
        entry.is_below = below is not None and entry.key in below[is_state]
        entries[is_state].append(entry)
    for kind, index in zip((False, True), indices, strict=True):
        index.restore(sorted(entries[kind], key=lambda entry: entry.used))
    return indices[0], indices[1]


def _kept(
    runtime: RuntimeSection,
    namespace: Callable[[], Namespace],
    sizes: tuple[int, int],
    store: DiskFiles | GuardedConnector | None,
    reporter: Reporter,
) -> KeptSlots | None:
    """Memory for these slots that outlives this process: a named file, or what the one that has started it holds."""
    asked = runtime.kv_offloading_memory_file
    path = None if asked is None else user_path(asked)
    given = held_descriptor() if path is None else None
    if runtime.skip_compiled or (path is None and given is None):
        return None
    needed = KeptSlots.bytes_of(namespace(), *sizes)
    secret = None if store is None else store.secret
    with ExitStack() as opened:
        try:
            if path is not None:
                given = open_memory_file(path)
                opened.callback(os.close, given)  # the slots have one of their own
                check_room(path, given, needed)
            assert given is not None
            check_host_memory(max(0, needed - held_bytes(given)))
            with refused_memory(needed):
                return KeptSlots(given, namespace(), *sizes, secret=secret, is_bounded=path is not None)
        except KVConnectorError as error:
            key = "" if path is None else "runtime.kv_offloading_memory_file: "
            reporter.announce(f"prefixes in the host's memory do not outlive this engine: {key}{error}")
            return None


def _store(
    runtime: RuntimeSection,
    namespace_of: Callable[[], Namespace],
    reporter: Reporter,
) -> tuple[DiskFiles | GuardedConnector | None, list[Place], tuple[int, int] | None]:
    """The store behind the host's memory, what it is known to have, used last at the end, and how many pages and
    states of it are known at most; None where no store serves."""
    path, asked = runtime.kv_offloading_disk_path, runtime.kv_transfer_config
    if path is None and not asked.import_path:
        return None, [], None
    namespace = namespace_of()
    try:
        if path is None:
            store = connector_of(asked, namespace)
            return store, [], (MOST_SLOTS if namespace.page_bytes else 0, MOST_SLOTS if namespace.state_bytes else 0)
        size, num_bytes = runtime.kv_offloading_disk_size, (namespace.page_bytes, namespace.state_bytes)
        sizes = _slots("kv_offloading_disk_size", size, num_bytes, ALIGNMENT, runtime)
        files = DiskFiles(Path(user_path(path)), namespace, int(size * 2**30))
        try:
            return files, [place for place, _ in sorted(files.places(), key=lambda found: found[1])], sizes
        except KVConnectorError:
            files.close()
            raise
    except KVConnectorError as error:
        reporter.announce(
            f"runtime.{'kv_transfer_config' if path is None else 'kv_offloading_disk_path'} is not used: {error}"
        )
        return None, [], None


def _slots(key: str, gib: float, slot_bytes: tuple[int, int], more: int, runtime: RuntimeSection) -> tuple[int, int]:
    """Slots of pages and of states, of so many bytes and `more` beside each, in so much memory."""
    of_page, of_state = slot_bytes
    num_bytes, page_bytes, state_bytes = int(gib * 2**30), of_page + more, of_state + more
    has_states = bool(of_state)
    of_states = int(num_bytes * _STATES) if of_page else num_bytes
    num_states = of_states // state_bytes if has_states else 0
    rest = num_bytes - num_states * state_bytes
    num_slots = rest // page_bytes if of_page else MOST_SLOTS
    if not num_slots or (has_states and not num_states):
        least = page_bytes + (max(page_bytes, 2 * state_bytes) if has_states else 0)
        state = f", a state {format_bytes(of_state)}" if has_states else ""
        raise ConfigError(
            f"runtime.{key} is {format_bytes(num_bytes)}, and a page of runtime.page_size: {runtime.page_size} tokens "
            f"takes {format_bytes(of_page)}{state}. Set it to {least / 2**30:.3g} or more, in GiB."
        )
    return num_slots, num_states


def _namespace(
    runner: ModelRunner,
    layouts: tuple[SlotLayout, SlotLayout],
    factors: Mapping[str, str],
    sums_of_others: Sequence[bytes],
) -> Namespace:
    """All that keys and values depend on, besides tokens and salts.

    Args:
        sums_of_others: of the weights of ranks whose shares values have, too.
    """
    sums = [sorted(one.items()) for one in sums_of(runner)]
    settings = {f"runtime.{name}": str(getattr(runner.config.runtime, name)) for name in _OF_NUMERICS}
    shapes = [[section.num_bytes for section in layout.sections] for layout in layouts]
    facts = {**factors, **settings, "sums of weights": str(sums), "shapes": str(shapes)}
    if sums_of_others:
        facts["sums of other ranks"] = " ".join(one.hex() for one in sums_of_others)
    num_bytes = [(1 + len(sums_of_others)) * layout.slot_bytes for layout in layouts]
    return Namespace.of(facts, num_bytes[0], num_bytes[1])


def _fill(below: tuple[TierIndex, TierIndex], places: Iterable[Place]) -> None:
    """Lists files, those used last at the end; the first ones go where there are too many."""
    for place in places:
        index = below[place.is_state]
        for slot in index.take(1):
            index.put(Entry(place.key, place.parent, place.first, place.depth, slot))
