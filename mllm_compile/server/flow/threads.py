"""A few threads for work that is not asyncio's, such as tokenizing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """So many threads, for one event loop. Work waits for one in its caller's task, and goes with it.

    An executor's own queue would keep what is cancelled, with all that it holds, until a thread gets there.
    """

    def __init__(self, count: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix=name)
        self._free = asyncio.Semaphore(count)

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """The result of a function. Cancelled, it ends when the function has: a thread cannot be ended."""
        async with self._free:
            done = asyncio.get_running_loop().run_in_executor(self._pool, function, *args)
            try:
                return await asyncio.shield(done)
            except asyncio.CancelledError:
                await asyncio.wait({done})
                raise
            finally:
                del done  # its exception knows this frame: together they would live until a collection
