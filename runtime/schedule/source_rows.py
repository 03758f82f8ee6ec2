"""The pages of what requests' encoder has read: keys and values that their decoders attend to, of an encoder-decoder.

A request's source has a row of its own, behind all rows of requests. Its pages are taken whole when the request is
admitted, and given back with its row. They are pages as others are. The prefix cache knows them by the source's digest:
requests with one source share them, and the encoder reads it once. They are in the cache from the admission on: the
encoder writes them ahead of the step, and steps run in order. A step that fails takes them out. Other models' requests
have none, and nothing is done here. Free of torch.
"""

from __future__ import annotations

from collections.abc import Iterable

from mllm_compile.runtime.schedule.pages.page_run import Salt
from mllm_compile.runtime.schedule.pages.tables import PageTables
from mllm_compile.runtime.schedule.request import Request


class SourceRows:
    """The rows behind `num_rows` rows of requests."""

    def __init__(self, pages: PageTables, num_rows: int, shares_pages: bool) -> None:
        self._pages, self._first, self._shares = pages, num_rows, shares_pages
        self._to_encode: dict[Request, Salt] = {}  # of the step that is being planned
        self._salts: dict[Request, Salt] = {}  # by which the cache knows those that it has

    def attach(self, row: int, request: Request, salt: Salt) -> int:
        """Begin a request's row with its source's pages in the cache, locked; returns the pages that it lacks, which
        are all or none. Undo it with release."""
        source = request.source
        if source is None:
            return 0
        count = self._pages.pages_for(source.length)
        if not self._shares:
            return count
        keys = source.keys(count * self._pages.page_size)
        found = self._pages.attach_prefix(self._first + row, keys, _of_sources(salt))
        if found < count:  # the cache gives up a path's end first
            self._pages.release(self._first + row)
            return count
        return 0

    def take(self, row: int, request: Request, salt: Salt, count: int) -> None:
        """Give the row `count` pages, which are available, for the encoder to write; without any it has them."""
        source = request.source
        if source is None:
            return
        own, salt = self._first + row, _of_sources(salt)
        if self._shares:
            self._salts[request] = salt
        if not count:
            self._pages.write_prefix(own)
            return
        self._pages.grow(own, count)
        self._to_encode[request] = salt
        if self._shares:
            num_tokens = count * self._pages.page_size
            self._pages.publish(own, source.keys(num_tokens), num_tokens, salt)

    def num_encoded(self, request: Request) -> int:
        """States of a request's source that the encoder makes in the step that is being planned."""
        return 0 if request.source is None or request not in self._to_encode else request.source.length

    def take_encoded(self) -> tuple[Request, ...]:
        """The requests whose sources are to be read ahead of the step that was planned."""
        encoded = tuple(self._to_encode)
        self._to_encode.clear()
        return encoded

    def forget(self, requests: Iterable[Request]) -> None:
        """Take the sources of requests out of the cache: what the encoder wrote may be wrong."""
        for request in requests:
            if request.source is not None and (salt := self._salts.pop(request, None)) is not None:
                self._pages.forget(request.source.keys(self._pages.page_size), salt)

    def release(self, row: int, request: Request) -> None:
        """Give the row's pages back: shared ones stay in the cache. Those of a broken request are cleared."""
        if request.source is None:
            return
        if self._to_encode.pop(request, None) is not None:  # nobody will write them
            self.forget((request,))
        if request.is_broken:
            self.forget((request,))
            self._pages.discard(self._first + row)
        else:
            self._pages.release(self._first + row)
        self._salts.pop(request, None)

    def private_pages(self, row: int) -> int:
        """Pages that come back for certain once a row is released."""
        own = self._first + row
        return self._pages.private_pages(own) if own < len(self._pages.num_pages) else 0


def _of_sources(salt: Salt) -> Salt:
    return ("source", *salt)
