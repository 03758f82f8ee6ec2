"""Readers of KV events as routers have them, each as strictly as it does.

Made of llm-d's `pkg/kvevents` (zmq_subscriber.go, engineadapter/vllm_msgpack.go), Dynamo's `lib/kv-router/src/zmq_wire`
(deserialize.rs, convert.rs) and the structs of vLLM 0.26's subscribers, which SGLang's typed readers share; seen in
November 2026.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Index:
    """The blocks that a router knows of: names, each with all tokens up to its end."""

    def __init__(self) -> None:
        self.paths: dict[int, tuple[Any, ...]] = {}

    def stored(self, hashes: list[int], parent: int | None, tokens: list[int], size: int, extra: list[Any]) -> None:
        path: tuple[Any, ...] = () if parent is None else self.paths[parent]
        for place, name in enumerate(hashes):
            path = (*path, (tuple(tokens[place * size : (place + 1) * size]), extra[place]))
            self.paths[name] = path

    def removed(self, hashes: list[int]) -> None:
        for name in hashes:
            del self.paths[name]  # of ours each one is known

    def prefixes(self) -> set[tuple[Any, ...]]:
        return set(self.paths.values())


class LlmD(Index):
    """Three frames; any map or array of fields, of these kinds; numbers of tokens are cut to 32 bits."""

    def __init__(self, topic: str) -> None:
        super().__init__()
        self.topic, self.last = topic, -1

    def read(self, frames: list[bytes]) -> None:
        topic, number, payload = frames
        kind, pod, model = topic.decode().split("@", 2)
        assert (kind, topic.decode()) == ("kv", self.topic) and pod and model
        sequence = int.from_bytes(number, "big")
        assert sequence == self.last + 1, "a gap: it asks for a replay"
        self.last = sequence
        batch = msgspec.msgpack.decode(payload)
        assert isinstance(batch, list) and len(batch) >= 2 and isinstance(batch[0], float)
        for event in batch[1]:
            self._apply(event)

    def _apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.paths.clear()
            return
        hashes = event["block_hashes"]
        assert all(isinstance(one, int) and 0 <= one < 1 << 64 for one in hashes)
        assert event["medium"].lower() == "gpu"
        if event["type"] == "BlockRemoved":
            self.removed(hashes)
            return
        assert event["type"] == "BlockStored"
        assert all(0 <= token < 1 << 32 for token in event["token_ids"])
        extra = event.get("extra_keys") or [None] * len(hashes)
        assert len(extra) == len(hashes)
        size, parent = event["block_size"], event.get("parent_block_hash")
        self.stored(hashes, parent, event["token_ids"], size, [one and tuple(one) for one in extra])

    def replay(self, answers: list[list[bytes]], first: int) -> None:
        """A DEALER's answers to (empty, first); the empty frame ahead is taken off."""
        assert answers[-1][1:] == [b"", b"\xff" * 8, b""]
        self.paths.clear()
        self.last = first - 1
        for answer in answers[:-1]:
            assert answer[0] == b""
            self.read(answer[1:])


class Dynamo(Index):
    """An array of exactly three; u32 tokens; names once; blocks of its own size alone; typed extra keys."""

    def __init__(self, block_size: int) -> None:
        super().__init__()
        self.block_size = block_size

    def read(self, frames: list[bytes]) -> None:
        assert len(frames) == 3 and len(frames[1]) == 8
        stamp, events, rank = msgspec.msgpack.decode(frames[2])
        assert isinstance(stamp, float) and (rank is None or isinstance(rank, int))
        for event in events:
            kind = event.pop("type")
            if kind == "AllBlocksCleared":
                self.paths.clear()
            elif kind == "BlockRemoved":
                self.removed(event["block_hashes"])
            else:
                assert kind == "BlockStored"
                self._stored(**event)

    def _stored(self, *, block_hashes, parent_block_hash, token_ids, block_size, **others) -> None:
        names = [*block_hashes, parent_block_hash]
        assert len(set(names)) == len(names), "self-referencing: it drops the event"
        assert block_size == self.block_size and len(token_ids) == block_size * len(block_hashes)
        assert all(isinstance(token, int) and 0 <= token < 1 << 32 for token in token_ids)
        for keys in others.get("extra_keys") or ():
            assert keys is None or all(isinstance(key, str) for key in keys)
        assert others["medium"] == "GPU" and isinstance(others["lora_name"], str | None)
        namespace = (others["lora_name"], others.get("cache_salt"))  # hashed into every block
        self.stored(block_hashes, parent_block_hash, token_ids, block_size, [namespace] * len(block_hashes))


class BlockStored(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, omit_defaults=True, tag=True):
    block_hashes: list[int | bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class TypedBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Typed(Index):
    """vLLM's own structs, as its example's subscriber, SGLang's and Mooncake's readers have them."""

    _decoder = msgspec.msgpack.Decoder(TypedBatch)

    def read(self, frames: list[bytes]) -> None:
        _, number, payload = frames
        assert len(number) == 8
        for event in self._decoder.decode(payload).events:
            if isinstance(event, BlockStored):
                extra = event.extra_keys or [None] * len(event.block_hashes)
                self.stored(event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size, extra)
            elif isinstance(event, BlockRemoved):
                self.removed(event.block_hashes)
            else:
                self.paths.clear()
