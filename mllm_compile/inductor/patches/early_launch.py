"""Launches AOTInductor's kernels by programmatic dependent launch: Inductor generates the waits, but launches without.

Up to torch 2.13 `triton.enable_pdl` puts the two instructions into Inductor's kernels, and its Python launcher uses
them. The C++ launcher in AOTInductor's packages calls cuLaunchKernel, which has no attributes (a comment in
torch/_inductor/runtime/triton_heuristics.py says that it lacks cuLaunchKernelEx). This can go when it has it.
"""

from __future__ import annotations

import re
from typing import Any

_LAUNCH = re.compile(r"CUDA_DRIVER_CHECK\(cuLaunchKernel\(\s*func, gridX, gridY, gridZ,.*?\)\);", re.DOTALL)
_DECIDES_TO_WAIT = "_handle_pdl_before_access"  # of Inductor's TritonKernel, torch 2.11 to 2.13
_DEPENDENT_LAUNCH = """
                CUlaunchAttribute attribute = {};
                attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
                attribute.value.programmaticStreamSerializationAllowed = 1;
                CUlaunchConfig config = {};
                config.gridDimX = gridX;
                config.gridDimY = gridY;
                config.gridDimZ = gridZ;
                config.blockDimX = 32 * numWarps;
                config.blockDimY = 1;
                config.blockDimZ = 1;
                config.sharedMemBytes = sharedMemBytes;
                config.hStream = stream;
                config.attrs = &attribute;
                config.numAttrs = 1;
                CUDA_DRIVER_CHECK(cuLaunchKernelEx(&config, func, args, nullptr));"""


def use_dependent_launch() -> bool:
    """Makes the packages that this process compiles launch each kernel before its predecessor has ended.

    Every Triton kernel of a package must wait itself: Inductor's do with `triton.enable_pdl`, which the caller sets,
    and ours with runtime/ops/dependent_launch.py. Kernels of libraries are launched by those, as ever.

    Returns:
        False where the GPU is older than Hopper, or launcher or waits are not those that are known: nothing has
        changed.
    """
    import torch
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
    from torch._inductor.codegen.triton import TritonKernel

    if torch.version.hip is not None or torch.cuda.get_device_capability()[0] < 9:
        return False
    plain = CUDADeviceOpOverrides.kernel_driver
    if getattr(plain, "is_dependent", False):
        return True
    if not hasattr(TritonKernel, _DECIDES_TO_WAIT):
        return False

    def kernel_driver(self: Any) -> str:
        return _LAUNCH.sub(_DEPENDENT_LAUNCH, plain(self))

    if len(_LAUNCH.findall(plain(CUDADeviceOpOverrides()))) != 1:
        return False
    kernel_driver.is_dependent = True  # type: ignore[attr-defined]
    CUDADeviceOpOverrides.kernel_driver = kernel_driver  # type: ignore[method-assign]
    _wait_before_all_reads(TritonKernel)
    return True


def _wait_before_all_reads(kernel_class: Any) -> None:
    """Has Inductor's kernels wait before their first read or write of any tensor.

    It writes no wait before an access to what the kernel ahead has not touched: it counts on that kernel having waited
    for all earlier ones. Linears of ours let the next kernel in before they have (runtime/ops/stream_linear/lanes.cu).
    Inductor's templates do not wait at all: inductor/compile_piece.py leaves them out.
    """
    from torch._inductor.virtualized import V

    plain = getattr(kernel_class, _DECIDES_TO_WAIT)

    def decide(self: Any, *args: Any, **options: Any) -> None:
        scheduler = V.graph.scheduler
        if scheduler is None:
            return plain(self, *args, **options)
        ahead, scheduler.previous_node = scheduler.previous_node, None  # as of the first kernel of a package
        try:
            plain(self, *args, **options)
        finally:
            scheduler.previous_node = ahead

    setattr(kernel_class, _DECIDES_TO_WAIT, decide)
