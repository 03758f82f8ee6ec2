"""Points FlashInfer at a folder of prebuilt kernels, so that it neither compiles nor needs nvcc."""

from __future__ import annotations

import os
from pathlib import Path


def use_kernels_from(folder: Path) -> None:
    """From now on FlashInfer loads `folder`/<kernel>/<kernel>.so where that exists, and builds what does not.

    Nothing happens where FlashInfer cannot be imported: the attention backend says what to install.
    """
    try:
        from flashinfer.jit import env
    except ImportError:
        return
    # A handle that stays open: FlashInfer loads some kernels late, from this very folder whatever its name is then.
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    # FlashInfer reads it anew for every kernel ("This helps AOT script to override envs", flashinfer/jit/env.py).
    env.FLASHINFER_AOT_DIR = Path(f"/proc/self/fd/{handle}")
