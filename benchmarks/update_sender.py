"""A process that shares random tensors with an engine of this machine, as a trainer would; for update_speed.py.

It reads a line of JSON, shapes by name, the dtype and the device; writes the object for /update_weights; and keeps the
tensors until its input ends.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence

import torch

from mllm_compile.transfer.share import SharedTensors


def random_tensors(
    shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device, *, on_host: bool = False
) -> dict[str, torch.Tensor]:
    """Random tensors, made on a device; there, or on the host."""
    made = ((name, torch.randn(tuple(shape), dtype=dtype, device=device) * 0.02) for name, shape in shapes.items())
    return {name: one.cpu() if on_host else one for name, one in made}


def main() -> None:
    """Shares them."""
    shapes, dtype, device = json.loads(sys.stdin.readline())
    with SharedTensors(random_tensors(shapes, getattr(torch, dtype), torch.device(device)).items()) as shared:
        print(json.dumps(shared.update_info), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
