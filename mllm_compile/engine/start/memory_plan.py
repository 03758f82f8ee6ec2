"""The number of KV pages that a device was found to hold, kept beside the runtime: a later start need not measure.

Measuring takes a run of the largest batch and a trial capture of graphs: seconds. A stored number holds for the same
settings on the same device with as much memory free before anything is loaded; otherwise it is measured again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from mllm_compile.runtime.files.json_data import from_json
from mllm_compile.runtime.runner_config import RunnerConfig
from mllm_compile.version import __version__

# Change of the free memory that is ignored: the driver and other processes' contexts. The share of memory that
# mem_fraction_static leaves alone is several times that.
_SLACK = 0.01


@dataclass(frozen=True)
class MemoryPlan:
    """
    Attributes:
        settings: the settings that decide the number, as text.
        free_bytes: free on the device before anything was loaded; 0 where nothing is planned (a CPU).
        total_bytes: the device's memory.
        num_pages: with the dummy page.
    """

    settings: Mapping[str, str]
    free_bytes: int
    total_bytes: int
    num_pages: int = 0

    def to_json(self) -> dict[str, Any]:
        return {
            "settings": dict(self.settings),
            "free_bytes": self.free_bytes,
            "total_bytes": self.total_bytes,
            "num_pages": self.num_pages,
        }

    def pages_from(self, stored: Any) -> int | None:
        """The number of pages that a stored plan (to_json) gives now; None: measure.

        Args:
            stored: whatever was read; None where nothing was stored.
        """
        try:
            plan = from_json(MemoryPlan, stored)
        except ValueError:
            return None
        if not self.free_bytes or plan.settings != self.settings:
            return None
        return None if abs(self.free_bytes - plan.free_bytes) > _SLACK * self.total_bytes else plan.num_pages


def situation(config: RunnerConfig, free_bytes: int | None = None) -> MemoryPlan:
    """The inputs of a plan: settings, and memory as it is now.

    Args:
        free_bytes: as it was ahead of what this engine has taken already; None: it has taken nothing.
    """
    device = torch.device(config.runtime.device)
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)
    free = free if free_bytes is None else free_bytes
    settings = {field.name: str(getattr(config, field.name)) for field in fields(config) if field.name != "num_pages"}
    return MemoryPlan(settings | {"version": __version__}, free, total)
