"""A request's text in blocks: by these a router knows which engine has how much of it, and what goes on from what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 512  # bytes of a text: about two pages of 64 tokens
MOST_BLOCKS = 4096  # of a request that are looked at: 2 MiB


@dataclass(frozen=True, slots=True)
class Text:
    """A text.

    Attributes:
        blocks: the hash of each whole block, chained.
        content: its bytes; those behind the last whole block are its *tail*.
        block_bytes: of a block.
    """

    blocks: Sequence[int] = ()
    content: bytes = b""
    block_bytes: int = BLOCK

    @classmethod
    def of(cls, content: bytes) -> Text:
        """The first 2 MiB of a text."""
        content = content[: MOST_BLOCKS * BLOCK]
        blocks: list[int] = []
        chain = 0
        for start in range(0, len(content) - BLOCK + 1, BLOCK):
            chain = hash((chain, content[start : start + BLOCK]))
            blocks.append(chain)
        return cls(blocks, content)

    @property
    def tail_bytes(self) -> int:
        """Bytes of the tail, less than a block."""
        return len(self.content) - len(self.blocks) * self.block_bytes

    def hash_to(self, num_blocks: int, num_bytes: int) -> int:
        """The hash of its first blocks, at least one, and of so many bytes behind them."""
        block, start = self.blocks[num_blocks - 1], num_blocks * self.block_bytes
        return hash((block, self.content[start : start + num_bytes])) if num_bytes else block
