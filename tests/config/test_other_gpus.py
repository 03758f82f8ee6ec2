"""Choices for other GPUs, by torch's properties of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.resolution.device import detect_device
from mllm_compile.config.resolution.resolve import resolve
from mllm_compile.config.schema import EngineConfig
from mllm_compile.errors import DeviceError

QWEN = {"dtype": "bfloat16", "max_position_embeddings": 40960, "hidden_size": 1024}
# Compute capability and multiprocessors, from NVIDIA's tables.
PORTABLE = {
    "NVIDIA A100-SXM4-80GB": (8, 0, 108),
    "NVIDIA GeForce RTX 3090": (8, 6, 82),
    "NVIDIA L40S": (8, 9, 142),
    "NVIDIA H100 PCIe": (9, 0, 114),
    "NVIDIA H20": (9, 0, 78),
    "NVIDIA B200": (10, 0, 148),
    "NVIDIA GeForce RTX 5090": (12, 0, 170),
}
HOPPER = {"NVIDIA H100 80GB HBM3": (9, 0, 132), "NVIDIA H200": (9, 0, 132)}
TOO_OLD = {"Tesla V100-SXM2-16GB": (7, 0, 80), "Tesla T4": (7, 5, 40)}


@pytest.fixture
def machine_with(monkeypatch):
    """A torch that sees one GPU, whatever this machine has."""

    def pretend(name: str, facts: tuple[int, int, int], hip: str | None = None) -> None:
        major, minor, count = facts
        properties = SimpleNamespace(name=name, major=major, minor=minor, multi_processor_count=count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: SimpleNamespace(name=name))

    return pretend


def resolved(**sections: dict):
    config = EngineConfig.from_dict({"model": {"path": "m"}} | sections)
    return resolve(config, ModelFolder(Path("/models/m"), QWEN, ()), detect_device(config.runtime.device))


@pytest.mark.parametrize("name", PORTABLE)
def test_another_gpu_gets_the_portable_kernels_and_whole_decode_graphs(name, machine_with):
    machine_with(name, PORTABLE[name])
    config = resolved()
    assert (config.runtime.device, config.runtime.attention_backend) == ("cuda:0", "flashinfer")
    assert config.compile.split_decode and not config.compile.hopper_decode
    assert config.cudagraph.decode_requests and not config.cudagraph.mixed_tokens
    assert config.cudagraph.sample_in_graph


@pytest.mark.parametrize("name", HOPPER)
def test_a_hopper_gets_its_own(name, machine_with):
    machine_with(name, HOPPER[name])
    assert resolved().compile.hopper_decode
    assert resolved().cudagraph.mixed_tokens


@pytest.mark.parametrize("asked", ["auto", "cuda", "cuda:0"])
@pytest.mark.parametrize("name", TOO_OLD)
def test_a_gpu_without_bfloat16_is_refused_by_its_name(name, asked, machine_with):
    machine_with(name, TOO_OLD[name])
    with pytest.raises(
        DeviceError, match=rf"cuda:0 is {name} of compute capability 7\.\d; .* Set runtime\.device: cpu"
    ):
        detect_device(asked)
    assert detect_device("cpu").device == "cpu"


def test_an_amd_gpu_is_refused_by_its_name(machine_with):
    machine_with("AMD Instinct MI300X", (9, 4, 304), hip="6.4")
    with pytest.raises(DeviceError, match=r"cuda:0 is AMD Instinct MI300X, and this torch is built for ROCm"):
        detect_device("auto")
