"""The changes to Inductor that let kernels start early: still what they were written for, in the torch that is here."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

from mllm_compile import dependent_launcher


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts Inductor's own launcher back after the test."""
    monkeypatch.setattr(CUDADeviceOpOverrides, "kernel_driver", CUDADeviceOpOverrides.kernel_driver)
    return monkeypatch


def use_on(driver: pytest.MonkeyPatch, capability: tuple[int, int]) -> bool:
    driver.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    return dependent_launcher.use_dependent_launch()


@pytest.mark.parametrize("times", [1, 2])
def test_on_hopper_packages_launch_with_the_attribute(driver, times):
    assert all(use_on(driver, (9, 0)) for _ in range(times))
    source = CUDADeviceOpOverrides().kernel_driver()
    assert source.count("cuLaunchKernelEx(&config, func, args, nullptr)") == 1
    assert "cuLaunchKernel(" not in source
    for name in ("gridX", "gridY", "gridZ", "numWarps", "sharedMemBytes", "stream", "args"):
        assert name in source.partition("launchKernel(")[2], f"the launcher has no {name} any more"


def test_an_older_gpu_keeps_the_plain_launcher(driver):
    plain = CUDADeviceOpOverrides().kernel_driver()
    assert not use_on(driver, (8, 0))
    assert CUDADeviceOpOverrides().kernel_driver() == plain


def test_a_launcher_that_is_not_known_is_left_alone(driver):
    driver.setattr(CUDADeviceOpOverrides, "kernel_driver", lambda self: "launched in some other way")
    assert not use_on(driver, (9, 0))
    assert CUDADeviceOpOverrides().kernel_driver() == "launched in some other way"


def test_kernels_are_analysed_without_their_waits(monkeypatch):
    name = next(n for n in ("identify_accessed_tensors", "identify_mutated_tensors") if hasattr(triton_kernel_wrap, n))
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(triton_kernel_wrap, name, lambda kernel, kwargs, *rest: seen.append(kwargs))
    for _ in range(2):
        dependent_launcher.hide_waits_from_analysis()
    getattr(triton_kernel_wrap, name)("ours", {"x": 1, "EARLY": True}, {})
    getattr(triton_kernel_wrap, name)("another", {"x": 1}, {})
    assert seen == [{"x": 1, "EARLY": False}, {"x": 1}]
