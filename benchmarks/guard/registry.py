"""The stages by the kind of machine that times them."""

from __future__ import annotations

from benchmarks.guard import gpu_stages, stages
from benchmarks.guard.stage import Stage

STAGES: dict[str, tuple[Stage, ...]] = {"cpu": stages.STAGES, "gpu": gpu_stages.STAGES}
