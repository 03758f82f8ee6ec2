"""The devices of each engine of several, by what the driver shows this process."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from mllm_compile.config.schema import EngineConfig
from mllm_compile.config.sources import runtime_settings
from mllm_compile.errors import ConfigError
from mllm_compile.runtime.config_sections import PEER_CONNECTOR
from mllm_compile.server.options import VISIBLE

MOST = 64  # engines of a server


def devices_of(count: int, source: EngineConfig | Path) -> tuple[str | None, ...]:
    """The devices of so many engines, as CUDA_VISIBLE_DEVICES names them; None for each on a CPU.

    Args:
        source: as config_or_runtime gives it.

    Raises:
        ConfigError: there are too few, or the config does not go with several engines.
    """
    if not 1 < count <= MOST:
        raise ConfigError(f"--replicas: expected from 2 to {MOST}, got {count}")
    settings = runtime_settings(source)
    if settings is None:  # opening it says what is wrong
        return (None,) * count
    for key, what in (("kv_offloading_disk_path", "folder"), ("kv_offloading_memory_file", "file")):
        if getattr(settings, key) is not None:
            raise ConfigError(
                f"--replicas {count}: runtime.{key} is one engine's {what}. Leave it out; kv_offloading_size is each "
                "engine's"
            )
    peers = settings.kv_transfer_config
    if peers.kv_connector == PEER_CONNECTOR and peers.kv_role != "kv_consumer" and peers.kv_port:
        raise ConfigError(
            f"--replicas {count}: runtime.kv_transfer_config.kv_port is {peers.kv_port}, which one engine has. Set it "
            "to 0: each takes a free port"
        )
    elsewhere = "distributed_executor_backend ray" if settings.distributed_executor_backend == "ray" else None
    elsewhere = f"nnodes {settings.nnodes}" if settings.nnodes > 1 else elsewhere
    if elsewhere is not None:
        raise ConfigError(
            f"--replicas {count}: expected engines of this machine, got runtime.{elsewhere}. Serve each by itself "
            "behind a router"
        )
    if settings.device.startswith("cuda:") and settings.device != "cuda:0":
        raise ConfigError(
            f"--replicas {count}: each engine has GPUs of its own, got runtime.device {settings.device}. Set it to auto"
        )
    gpus = [] if settings.device == "cpu" else visible_gpus()
    if not gpus:
        return (None,) * count
    each = settings.num_ranks
    if count * each > len(gpus):
        raise ConfigError(
            f"--replicas {count}: expected {count * each} GPUs, {each} for each engine, and {len(gpus)} are visible. "
            f"Take at most {len(gpus) // each}"
        )
    return tuple(",".join(gpus[each * number : each * (number + 1)]) for number in range(count))


def visible_gpus() -> list[str]:
    """The GPUs that the driver shows this process, as CUDA_VISIBLE_DEVICES names them."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    named = os.environ.get(VISIBLE)
    names = [str(number) for number in range(count.value)] if named is None else named.split(",")
    return [name.strip() for name in names[: count.value]]
