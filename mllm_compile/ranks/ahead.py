"""Followers' processes that are started ahead of a group, so that they have imported what they need when it is known
what they load: an engine resolves its config and reads or compiles its runtime meanwhile. Free of torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mllm_compile.config.schema import EngineConfig

if TYPE_CHECKING:
    from mllm_compile.ranks.launch_local import LocalRank


class RanksAhead:
    """The processes that no group has taken yet, by rank."""

    def __init__(self) -> None:
        self._waiting: dict[int, LocalRank] = {}

    def start(self, num_ranks: int) -> None:
        """Starts the followers of so many ranks; none where there is no room: the group says so."""
        from mllm_compile.ranks.launch_local import LocalRank

        with suppress(OSError):
            for rank in range(1, num_ranks):
                self._waiting[rank] = LocalRank(rank)

    def take(self, rank: int) -> LocalRank | None:
        """The process of a rank, which is the caller's now; None: there is none that runs."""
        process = self._waiting.pop(rank, None)
        if process is not None and process.has_ended():
            process.close()
            return None
        return process

    def close(self) -> None:
        """Ends those that were not taken."""
        while self._waiting:
            self._waiting.popitem()[1].close()


@contextmanager
def ranks_ahead(source: EngineConfig | Path) -> Iterator[RanksAhead]:
    """Starts what the engine of a config will need, and ends what it did not take."""
    ranks = RanksAhead()
    try:
        if isinstance(source, EngineConfig) and source.runtime.distributed_executor_backend == "mp":
            num_ranks = max(source.runtime.tensor_parallel_size, source.runtime.expert_parallel_size)
            if num_ranks > 1:
                ranks.start(num_ranks)
        yield ranks
    finally:
        ranks.close()
