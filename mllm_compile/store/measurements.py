"""Measurements of a device, beside the runtime that they were made with: one sealed file a device.

Keyed by the device's name and memory: an H100 and an H200 run the same code, but hold different numbers of KV pages. A
CPU's name has its cores. A damaged file counts as none: its values are measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mllm_compile.errors import ArtifactError
from mllm_compile.files.sealed_json import unseal, write_sealed
from mllm_compile.files.trusted_folder import TrustedFolder
from mllm_compile.runtime.files.json_data import from_json

if TYPE_CHECKING:
    from mllm_compile.config.resolved import ResolvedConfig

MEASURED = "measured"  # the folder of a runtime
_MOST_STARTS = 8  # configs that one runtime keeps the last start of
_MAX_BYTES = 4 << 20


@dataclass(frozen=True)
class DeviceKey:
    """The device that a measurement holds for."""

    name: str
    memory_bytes: int

    @property
    def file_name(self) -> str:
        slug = re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-").lower() or "device"
        return f"{slug}-{hashlib.sha256(f'{self.name} {self.memory_bytes}'.encode()).hexdigest()[:8]}.json"


def device_key(device: str) -> DeviceKey:
    """The key of `cpu` or `cuda:N` on this machine."""
    import torch

    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        return DeviceKey(properties.name, properties.total_memory)
    from mllm_compile.runtime.device.cpu_threads import cpu_model, usable_cores

    return DeviceKey(f"{cpu_model()}, {usable_cores()} cores", 0)


@dataclass(frozen=True)
class _Measurement:
    """The content of a file."""

    device: DeviceKey
    values: dict[str, Any]


def read_measured(folder: Path, key: DeviceKey) -> dict[str, Any]:
    """The values stored for the device: {} where nothing (usable) was.

    Args:
        folder: the runtime's `measured` folder; it may be missing.
    """
    found = _read(folder, key.file_name)
    return found.values if found is not None and found.device == key else {}


def read_all_measured(folder: Path) -> list[tuple[DeviceKey, dict[str, Any]]]:
    """Every device's values, for `inspect`."""
    found = [_read(folder, path.name) for path in sorted(folder.glob("*.json"))]
    return [(measurement.device, measurement.values) for measurement in found if measurement is not None]


def _read(folder: Path, name: str) -> _Measurement | None:
    try:
        return from_json(_Measurement, unseal(TrustedFolder(folder).read(name, max_bytes=_MAX_BYTES), folder / name))
    except (ArtifactError, ValueError):
        return None


def write_measured(folder: Path, key: DeviceKey, values: Mapping[str, Any]) -> None:
    """Stores the device's values in place of what was stored; what cannot be written is measured again next time."""
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o755, exist_ok=True)
        write_sealed(folder / key.file_name, {"device": asdict(key), "values": dict(values)})


def serving_settings(config: ResolvedConfig) -> dict[str, Any]:
    """The settings that decide what one runtime holds in memory on a device."""
    return config.model_dump(mode="json", include={"runtime", "cudagraph"})


def start_with(values: Mapping[str, Any], config: ResolvedConfig) -> dict[str, Any]:
    """The values that the last start with this config left (with_start): {} if there was none."""
    settings = serving_settings(config)
    return next((start for start in _starts(values) if start.get("settings") == settings), {})


def with_start(values: Mapping[str, Any], config: ResolvedConfig, start: Mapping[str, Any]) -> dict[str, Any]:
    """The values with this start in place of an earlier one with the same config; the last few configs are kept."""
    settings = serving_settings(config)
    others = [other for other in _starts(values) if other.get("settings") != settings]
    return {**values, "starts": [*others[1 - _MOST_STARTS :], {"settings": settings, **start}]}


def _starts(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The stored starts, the latest last; none where something else was stored under their name."""
    starts = values.get("starts")
    return [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []
