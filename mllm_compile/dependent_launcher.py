"""AOTInductor's kernels by programmatic dependent launch: Inductor generates the waits, but launches without them.

Up to torch 2.13 `triton.enable_pdl` puts the two instructions into Inductor's kernels and its Python launcher uses
them; the C++ launcher that AOTInductor writes into a package calls cuLaunchKernel, which has no attributes (a comment
in torch/_inductor/runtime/triton_heuristics.py says that it lacks cuLaunchKernelEx). This can go when it has it.
"""

from __future__ import annotations

import re
from typing import Any

_LAUNCH = re.compile(r"CUDA_DRIVER_CHECK\(cuLaunchKernel\(\s*func, gridX, gridY, gridZ,.*?\)\);", re.DOTALL)
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
    and ours with runtime/dependent_launch.py. Kernels of libraries are launched by those, as ever.

    Returns:
        False where the GPU is older than Hopper, or the launcher is not the one that is known: nothing has changed.
    """
    import torch
    from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides

    if torch.version.hip is not None or torch.cuda.get_device_capability()[0] < 9:
        return False
    plain = CUDADeviceOpOverrides.kernel_driver
    if getattr(plain, "is_dependent", False):
        return True

    def kernel_driver(self: Any) -> str:
        return _LAUNCH.sub(_DEPENDENT_LAUNCH, plain(self))

    if len(_LAUNCH.findall(plain(CUDADeviceOpOverrides()))) != 1:
        return False
    kernel_driver.is_dependent = True  # type: ignore[attr-defined]
    CUDADeviceOpOverrides.kernel_driver = kernel_driver  # type: ignore[method-assign]
    return True
