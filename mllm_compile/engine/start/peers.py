"""Prefill apart from decode: the memory behind a KV cache that other engines read, or that is filled from theirs.

An engine of another config does not import this.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from contextlib import ExitStack
from typing import TypeVar

from mllm_compile.errors import ConfigError
from mllm_compile.kv_connectors.peers.giver import Giver, Port
from mllm_compile.kv_connectors.peers.meeting import peer_secret, secret_of_keys
from mllm_compile.kv_connectors.peers.memory import LentMemory
from mllm_compile.kv_connectors.peers.nixl import NixlLender, NixlReader
from mllm_compile.kv_connectors.peers.taker import PeerStore
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.schedule.tiers.handover import Whereabouts
from mllm_compile.runtime.schedule.tiers.index import TierIndex
from mllm_compile.runtime.schedule.tiers.tiers import Tiers
from mllm_compile.runtime.tiers.connector import Namespace
from mllm_compile.runtime.tiers.copies import SlotCopies
from mllm_compile.runtime.tiers.layout import SlotLayout

T = TypeVar("T")

_MOST_KNOWN = 1 << 20  # pages of others, of which it is known where they are


def put_peers_behind(
    scheduler: Scheduler,
    runner: ModelRunner,
    layouts: tuple[SlotLayout, SlotLayout],
    sizes: tuple[int, int],
    namespace: Namespace,
) -> None:
    """Puts memory behind a scheduler's prefix cache, which engines hand prompts over by.

    Args:
        layouts, sizes: of pages and of states: of a slot, and how many slots there are.
        namespace: what pages depend on.

    Raises:
        ConfigError: there is no secret, or the port is not to be had.
        DeviceMemoryError: the system has too little.
    """
    runtime = runner.config.runtime
    asked, secret = runtime.kv_transfer_config, peer_secret()
    gives, takes = asked.kv_role != "kv_consumer", asked.kv_role != "kv_producer"
    keys, engine_id = secret_of_keys(secret), secrets.token_hex(8)
    with ExitStack() as opened:
        port = Port(asked.kv_ip, asked.kv_port) if gives else None
        if port is not None:
            opened.callback(port.socket.close)
        by_nixl = asked.transport == "nixl"
        most_bytes = max(namespace.page_bytes, namespace.state_bytes)
        reader = _by_nixl(lambda: NixlReader(most_bytes)) if by_nixl and takes else None
        store = PeerStore(secret, keys, namespace, runtime.page_size, asked.timeout_s, reader) if takes else None
        copies = SlotCopies(*layouts, *sizes, runner.device, store, is_lent=gives)
        opened.callback(copies.close)
        # Pages may hold nothing, as of models without attention: their keys lead to states all the same.
        known = [TierIndex(_MOST_KNOWN if size else 0, owns_content=False) for size in sizes]
        tiers = Tiers(
            scheduler.pages,
            copies,
            (TierIndex(sizes[0]), TierIndex(sizes[1])),
            keys,
            runtime.kv_offloading_min_gain,
            below=(known[0], known[1]) if takes else None,
            name_below="peers",
            asks_peers=takes,
            hands_over=None if port is None else (Whereabouts(engine_id, asked.kv_ip, port.number), asked.hold_s),
        )
        if port is not None and tiers.handover is not None:
            memory = None if copies.file is None else LentMemory(copies.file)
            nixl = _by_nixl(lambda: NixlLender(copies.memory)) if by_nixl else None
            content = copies.value_of, memory, copies.offset_of, nixl
            giver = Giver(port, secret, engine_id, namespace, tiers.handover, *content)
            tiers.handover.on_close = giver.close
        opened.pop_all()
    scheduler.use_tiers(tiers)


def _by_nixl(make: Callable[[], T]) -> T:
    try:
        return make()
    except OSError as error:
        raise ConfigError(
            f"runtime.kv_transfer_config.kv_connector_extra_config.transport is nixl: {error}. Set auto: the memory "
            "itself on one host and TCP between hosts."
        ) from error
