"""Names of cached pages: a page with all that is before it has one key, wherever it is kept.

A page's key is a hash over its parent's key and its own tokens; the first parent's is a hash over what else changes
keys and values. The hash has a secret: a name proves no guessed prompt, and collisions cannot be prepared. Free of
torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from hashlib import blake2b

import numpy as np

from mllm_compile.runtime.schedule.pages.page_run import PageRun

KEY_BYTES = 16


class PageKeys:
    """Makes keys, of 16 bytes each.

    Args:
        secret: up to 64 bytes; keys of another secret have nothing in common.
        page_size: tokens of a page.
    """

    def __init__(self, secret: bytes, page_size: int) -> None:
        self.secret, self._page_bytes = secret, 8 * page_size

    def root(self, salt: Hashable) -> bytes:
        """The parent of first pages under a salt."""
        return blake2b(repr(salt).encode(errors="surrogatepass"), digest_size=KEY_BYTES, key=self.secret).digest()

    def chain(self, parent: bytes, token_ids: Sequence[int] | np.ndarray) -> list[bytes]:
        """The keys of full pages of `token_ids` [n], which follow the page `parent`."""
        data, size, secret = memoryview(np.asarray(token_ids, dtype=np.int64).tobytes()), self._page_bytes, self.secret
        keys = []
        for start in range(0, len(data) - size + 1, size):
            page = blake2b(parent, digest_size=KEY_BYTES, key=secret)
            page.update(data[start : start + size])
            parent = page.digest()
            keys.append(parent)
        return keys

    def of(self, run: PageRun) -> list[bytes]:
        """The keys of a run's pages, which the run keeps."""
        missing, at = [], run
        while at.keys is None and at.parent is not None:
            missing.append(at)
            at = at.parent
        for one in reversed(missing):
            one.keys = self.chain(self.parent_of(one), one.token_ids)
        return run.keys or []

    def parent_of(self, run: PageRun) -> bytes:
        """The key that the run's first page follows."""
        before = run.parent
        if before is None:
            raise ValueError("a root has no pages, and no keys")
        return self.root(before.key) if before.parent is None else self.of(before)[-1]  # a root's key is its salt
