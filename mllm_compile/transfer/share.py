"""A trainer's side: holds tensors out to an engine of this machine, for the handles of /update_weights."""

from __future__ import annotations

import base64
import os
import secrets
from collections.abc import Iterable
from typing import Any, Self

import torch

from mllm_compile.runtime.cuda.driver import handle_of
from mllm_compile.runtime.weights.sums import weight_sums
from mllm_compile.transfer.handles import CPU, NO_MEMORY
from mllm_compile.transfer.opened import key_of
from mllm_compile.transfer.shared_memory import FOLDER


class SharedTensors:
    """Tensors that an engine reads where they are on a GPU (CUDA IPC); those of a CPU are copied to shared memory.

    They stay as they are until `close`, which comes behind the engine's answer.

    Args:
        tensors: by name; contiguous, all on one device.

    Attributes:
        update_info: the object for /update_weights, with a sum of each tensor, which the engine compares.

    Raises:
        DeviceError: a GPU's memory cannot be shared; that of expandable segments never can.
    """

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._tensors = {name: tensor.detach().contiguous() for name, tensor in tensors}
        self._file: str | None = None
        some = list(self._tensors.values())
        is_cuda = bool(some) and some[0].is_cuda
        if is_cuda:
            torch.cuda.synchronize(some[0].device)
        self.update_info: dict[str, Any] = {
            "names": list(self._tensors),
            "dtype_names": [str(one.dtype).removeprefix("torch.") for one in some],
            "shapes": [list(one.shape) for one in some],
            "ipc_handles": [_cuda(one) for one in some] if is_cuda else self._copied(some),
            "sums": weight_sums(self._tensors),
        }

    def _copied(self, tensors: list[torch.Tensor]) -> list[dict[str, Any]]:
        name, begin, handles = f"mllm-weights-{secrets.token_hex(8)}", 0, []
        file = os.open(FOLDER / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        self._file = name
        try:
            for tensor in tensors:
                handles.append({CPU: {"name": name, "offset": begin}})
                view = tensor.reshape(-1).view(torch.uint8).numpy().data
                while len(view):
                    written = os.pwrite(file, view, begin)
                    begin, view = begin + written, view[written:]
        except BaseException:
            self.close()
            raise
        finally:
            os.close(file)
        return handles

    def close(self) -> None:
        """Lets go of the tensors. May be called again."""
        self._tensors = {}
        if self._file is not None:
            (FOLDER / self._file).unlink(missing_ok=True)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


def _cuda(tensor: torch.Tensor) -> dict[str, Any]:
    if not tensor.numel():
        return {key_of(tensor.device): {"handle": base64.b64encode(NO_MEMORY.handle).decode()}}
    handle, offset = handle_of(tensor)
    return {key_of(tensor.device): {"handle": base64.b64encode(handle).decode(), "offset": offset}}
