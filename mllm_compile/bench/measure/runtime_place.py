"""The place of a benchmark's runtime and its device: findings are kept there, for the runtime's page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from mllm_compile.store.measurements import MEASURED, DeviceKey, device_key, read_measured, write_measured

if TYPE_CHECKING:
    from mllm_compile.bench.measure.setting import Setting


@dataclass(frozen=True)
class RuntimePlace:
    """A runtime's folder, and the device that it ran on; goes from a worker process to its parent as JSON."""

    folder: str
    device: DeviceKey

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of dataclasses.asdict."""
        return cls(data["folder"], DeviceKey(**data["device"]))

    def remember(self, values: Mapping[str, Any]) -> None:
        """Puts values beside the runtime in place of those of the same names, where the folder can be written."""
        folder = Path(self.folder) / MEASURED
        write_measured(folder, self.device, read_measured(folder, self.device) | dict(values))


def runtime_place(setting: Setting) -> RuntimePlace:
    """The place of the compiled runtime that a setting's config serves from. Asks the device for its name."""
    from mllm_compile.compiler.target import find_target

    target = find_target(setting.engine_config())
    return RuntimePlace(str(target.folder), device_key(target.config.runtime.device))
