"""The changes to Inductor that let kernels start early: still what they were written for, in the torch that is here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.virtualized import V

from mllm_compile.inductor.compile_piece import inductor_options
from mllm_compile.inductor.patches import early_launch, hidden_waits

DECIDES = early_launch._DECIDES_TO_WAIT


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts Inductor's own launcher and waits back after the test."""
    monkeypatch.setattr(CUDADeviceOpOverrides, "kernel_driver", CUDADeviceOpOverrides.kernel_driver)
    monkeypatch.setattr(TritonKernel, DECIDES, getattr(TritonKernel, DECIDES))
    return monkeypatch


def use_on(driver: pytest.MonkeyPatch, capability: tuple[int, int]) -> bool:
    driver.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    return early_launch.use_dependent_launch()


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


def waits(kernel_ahead: Any) -> list[str]:
    """Code that Inductor writes before it reads data that `kernel_ahead` has not written."""
    lines: list[str] = []
    kernel = SimpleNamespace(
        _enable_pdl_codegen=lambda: True,
        inside_reduction=False,
        GDC_WAIT="wait",
        current_node=SimpleNamespace(mutation_renames={}),
    )
    scheduler = SimpleNamespace(previous_node=kernel_ahead)
    with V.set_graph_handler(SimpleNamespace(scheduler=scheduler)), V.set_kernel_handler(kernel):
        getattr(TritonKernel, DECIDES)(kernel, SimpleNamespace(writeline=lines.append), "read")
    assert scheduler.previous_node is kernel_ahead
    return lines


def test_kernels_wait_before_they_read_what_the_one_ahead_has_nothing_to_do_with(driver):
    ahead = SimpleNamespace(read_writes=SimpleNamespace(writes=[SimpleNamespace(name="another")], reads=[]))
    assert waits(ahead) == [], "Inductor does so itself: the change is not needed any more"
    assert use_on(driver, (9, 0))
    assert waits(ahead) == ["wait"]
    assert waits(None) == ["wait"]


def test_waits_that_are_not_known_leave_everything_alone(driver):
    driver.delattr(TritonKernel, DECIDES)
    plain = CUDADeviceOpOverrides().kernel_driver()
    assert not use_on(driver, (9, 0))
    assert CUDADeviceOpOverrides().kernel_driver() == plain


def test_no_piece_gets_a_template_whatever_the_environment_asks_for(monkeypatch):
    monkeypatch.setattr(early_launch, "use_dependent_launch", lambda: True)
    options = inductor_options("cuda:0")
    for name in ("max_autotune", "max_autotune_gemm"):
        assert options[name] is False
        assert isinstance(getattr(torch._inductor.config, name), bool), "Inductor still has it"


def test_kernels_are_analysed_without_their_waits(monkeypatch):
    name = next(n for n in ("identify_accessed_tensors", "identify_mutated_tensors") if hasattr(triton_kernel_wrap, n))
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(triton_kernel_wrap, name, lambda kernel, kwargs, *rest: seen.append(kwargs))
    for _ in range(2):
        hidden_waits.hide_waits_from_analysis()
    getattr(triton_kernel_wrap, name)("ours", {"x": 1, "EARLY": True}, {})
    getattr(triton_kernel_wrap, name)("another", {"x": 1}, {})
    assert seen == [{"x": 1, "EARLY": False}, {"x": 1}]
