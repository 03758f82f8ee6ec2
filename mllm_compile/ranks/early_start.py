"""Followers' processes that are started ahead of what needs them: they import and meet while an engine imports,
resolves its config, and reads or compiles its runtime. Free of torch, until they meet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from mllm_compile.config.schema import EngineConfig
from mllm_compile.config.schema_runtime import MAX_RANKS
from mllm_compile.config.sources import runtime_settings
from mllm_compile.errors import MllmError
from mllm_compile.process.timeline import Timeline

if TYPE_CHECKING:
    from mllm_compile.ranks.group import RankGroup
    from mllm_compile.ranks.launch_local import LocalRank


class EarlyRanks:
    """The processes that no group has taken yet, by rank, and the group that no engine has.

    Attributes:
        has_nodes: some ranks are on other hosts, which come when the runtime is there: then none meet early.
        free_bytes: of rank 0's GPU before they met; None: they have not, or on a CPU.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, LocalRank] = {}
        self._group: RankGroup | None = None
        self._device = ""  # as runtime.device
        self._num_stages = 1
        self.has_nodes = False
        self.free_bytes: int | None = None

    def start(self, num_ranks: int, device: str, num_stages: int = 1) -> None:
        """Starts the followers of so many ranks; none where there is no room: the group says so.

        Args:
            device: as runtime.device.
            num_stages: of the pipeline that they are.
        """
        from mllm_compile.ranks.launch_local import LocalRank

        self._device, self._num_stages = device, num_stages
        with suppress(OSError):
            for rank in range(1, num_ranks):
                self._waiting[rank] = LocalRank(rank)

    def meet(self, timeline: Timeline) -> None:
        """Has those that were started meet from now on, where there is a device for each. A faulty config is refused
        where it is resolved.

        Args:
            timeline: as RankGroup takes it.
        """
        if not self._waiting or self.has_nodes:
            return
        import torch

        from mllm_compile.config.resolution.device import check_gpus, detect_device
        from mllm_compile.ranks.group import RankGroup
        from mllm_compile.ranks.launch_local import LocalLauncher

        num_ranks = len(self._waiting) + 1
        with suppress(MllmError), timeline.stage("start ranks"):
            device = detect_device(self._device).device
            if device != "cpu":
                check_gpus(device, num_ranks)
                self.free_bytes = torch.cuda.mem_get_info(device)[0]
            self._group = RankGroup(num_ranks, self._num_stages, device, LocalLauncher(self.take), timeline)

    def take(self, rank: int) -> LocalRank | None:
        """The process of a rank, which is the caller's now, or None if none runs."""
        process = self._waiting.pop(rank, None)
        if process is not None and process.has_ended():
            process.close()
            return None
        return process

    def take_group(self, num_ranks: int, num_stages: int, device: str) -> RankGroup | None:
        """The group of ranks that meet, which is the caller's now, or None.

        Args:
            num_ranks, num_stages, device: of the runtime, which may not be what was asked for: a folder that was told
                of another group has been changed since.
        """
        group, self._group = self._group, None
        if group is not None and (group.size, group.num_stages, group.device) != (num_ranks, num_stages, device):
            group.close()
            return None
        return group

    def close(self) -> None:
        """Ends those that were not taken."""
        if self._group is not None:
            self._group.close()
        while self._waiting:
            self._waiting.popitem()[1].close()


@contextmanager
def early_ranks(source: EngineConfig | Path) -> Iterator[EarlyRanks]:
    """Starts what the engine of a config or of a runtime's folder will need, and ends what it did not take."""
    ranks = EarlyRanks()
    try:
        asked = runtime_settings(source)
        is_here = asked is not None and asked.distributed_executor_backend == "mp"
        if asked is not None and is_here and 1 < asked.num_ranks <= MAX_RANKS:
            ranks.start(asked.num_ranks // asked.nnodes, asked.device, asked.pipeline_parallel_size)
            ranks.has_nodes = asked.nnodes > 1
        yield ranks
    finally:
        ranks.close()
