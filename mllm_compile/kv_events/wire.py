"""vLLM's KV events as msgpack: a batch is an array, each event in it a map with its `type` (vLLM 0.26 and later).

Optional keys that say nothing are left out. docs/sessions.md says which routers read which of them.
"""

from __future__ import annotations

import msgspec

GPU, HOST, DISK = "GPU", "CPU", "STORAGE"


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Blocks that follow each other, and can be found from now on; tokens are of all of them."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None  # what a block's tokens do not say, by block
    cache_salt: str | None = None  # as SGLang has it


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    """Blocks that this medium holds no more."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, tag=True):
    """No block is held any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class Batch(msgspec.Struct, array_like=True):
    """The events of a step of one rank."""

    ts: float  # seconds since 1970
    events: list[Event]
    data_parallel_rank: int


_encoder = msgspec.msgpack.Encoder()


def encode(batch: Batch) -> bytes:
    return _encoder.encode(batch)
