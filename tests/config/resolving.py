"""A config resolved for a device, as tests ask for it."""

from __future__ import annotations

from pathlib import Path

from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.resolution.device import DeviceInfo
from mllm_compile.config.resolution.resolve import resolve
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.config.schema import EngineConfig

CPU = DeviceInfo("cpu", "x86_64")
H200 = DeviceInfo("cuda:0", "NVIDIA H200", has_flashinfer=True, is_hopper=True)
A100 = DeviceInfo("cuda:0", "NVIDIA A100", has_flashinfer=True)
ONE_SIZE = {"deterministic": True, "without": ["any_rows"]}
QWEN = {"dtype": "bfloat16", "max_position_embeddings": 40960}


def resolved(device: DeviceInfo = CPU, config_json: dict | None = None, **sections: dict) -> ResolvedConfig:
    config = EngineConfig.from_dict({"model": {"path": "m"}} | sections)
    return resolve(config, ModelFolder(Path("/models/m"), QWEN if config_json is None else config_json, ()), device)


OF_TIERS = {
    "kv_offloading_size": 1.5,
    "kv_offloading_min_gain": 0.0,
    "kv_offloading_memory_file": "/dev/shm/kv",
    "kv_offloading_disk_path": "/tmp/kv",
    "kv_offloading_disk_size": 3.0,
    "kv_offloading_write_policy": "write_back",
    "kv_load_failure_policy": "recompute",
}
