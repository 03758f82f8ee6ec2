"""A process with random tensors for an engine of this machine, as a trainer would have them; for update_speed.py.

It reads a line of JSON: shapes by name, the dtype, the device and a port. Without a port it shares the tensors: it
writes the object for /update_weights, and keeps them until its input ends. With a port it is the first of a group of
two over NCCL: each further line of its input has it send all of them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch

from mllm_compile.transfer.share import SharedTensors


def random_tensors(
    shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device, *, on_host: bool = False
) -> dict[str, torch.Tensor]:
    """Random tensors, made on a device; there, or on the host."""
    made = ((name, torch.randn(tuple(shape), dtype=dtype, device=device) * 0.02) for name, shape in shapes.items())
    return {name: one.cpu() if on_host else one for name, one in made}


GROUP = "update speed"  # of the two


def send(tensors: Mapping[str, torch.Tensor], port: int) -> None:
    """Sends them through the group as often as a line comes."""
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    wait = timedelta(seconds=60)
    store, _, _ = next(rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=wait))
    backend, prefixed = c10d.Backend("nccl"), c10d.PrefixStore(GROUP, store)
    group, _ = c10d._new_process_group_helper(2, 0, [], backend, prefixed, group_name=GROUP, timeout=wait)
    for _line in sys.stdin:
        for tensor in tensors.values():
            group.broadcast([tensor])
        torch.cuda.synchronize()


def main() -> None:
    """Shares or sends them."""
    shapes, dtype, device, port = json.loads(sys.stdin.readline())
    if torch.device(device).type == "cuda":
        torch.cuda.set_device(device)
    tensors = random_tensors(shapes, getattr(torch, dtype), torch.device(device))
    if port is not None:
        send(tensors, port)
        return
    with SharedTensors(tensors.items()) as shared:
        print(json.dumps(shared.update_info), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
