"""A trainer's side of the wires: HTTP, other weights, and groups over gloo where trainers have NCCL."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from tests.hang_guard import HANG_S
from tests.server.harness import Answer, Server

PROMPT = [1, 5, 9, 14, 3, 27]
Tensors = Mapping[str, torch.Tensor]


class Beside:
    """A call in a thread: the server answers inside the collective that the caller enters."""

    def __init__(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._result: Any = None

        def run() -> None:
            self._result = call(*args, **kwargs)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def wait(self) -> Any:
        self._thread.join(HANG_S)
        assert not self._thread.is_alive(), "the server did not answer"
        return self._result


def first_weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in sorted(folder.glob("*.safetensors")) for name, one in load_file(file).items()}


def changed(tensors: Tensors, seed: int) -> dict[str, torch.Tensor]:
    """Weights as after a large step of training; equal seeds give equal bytes."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.02 * tensor.std().nan_to_num(1.0) * torch.randn(tensor.shape, generator=generator)
        for name, tensor in sorted(tensors.items())
    }


def write_folder(tensors: Tensors, folder: Path, *, is_stable: bool = True) -> Path:
    folder.mkdir(parents=True)
    save_file({name: one.contiguous() for name, one in tensors.items()}, folder / "model.safetensors")
    if is_stable:
        (folder / "STABLE").touch()
    return folder


def announced(tensors: Tensors) -> dict[str, list[Any]]:
    return {
        "names": list(tensors),
        "dtype_names": [str(one.dtype).removeprefix("torch.") for one in tensors.values()],
        "shapes": [list(one.shape) for one in tensors.values()],
    }


def chunks(tensors: Tensors, most: int) -> Iterator[list[torch.Tensor]]:
    """vLLM's rule: a chunk ends with the tensor that takes it beyond `most` bytes."""
    taken: list[torch.Tensor] = []
    for tensor in tensors.values():
        taken.append(tensor)
        if sum(one.nbytes for one in taken) > most:
            yield taken
            taken = []
    if taken:
        yield taken


def as_bytes(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([one.contiguous().reshape(-1).view(torch.uint8) for one in tensors])


def by_layer(tensors: Tensors) -> list[dict[str, torch.Tensor]]:
    """prime-rl's groups: weights of no layer, then a group a layer."""
    groups: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        found = re.search(r"\.layers\.(\d+)\.", name)
        groups.setdefault(-1 if found is None else int(found[1]), {})[name] = tensor
    return [groups[number] for number in sorted(groups)]


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


class Group:
    """The trainer's end of a group of two.

    Args:
        name: of a group with the keys of torch's named ones, as SGLang's trainers make them.
    """

    def __init__(self, port: int, name: str | None = None) -> None:
        wait = timedelta(seconds=HANG_S)
        if name is not None:
            self._group = _named(port, name, wait)
            return
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=True, timeout=wait)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("weights", store), 0, 2, wait)
        self._group.allreduce([torch.zeros(1)]).wait()  # as PyNccl does once it has joined

    def broadcast(self, tensor: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor], options).wait()


def _named(port: int, name: str, wait: timedelta) -> Any:
    from torch.distributed import distributed_c10d as c10d

    store, _, _ = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=wait))
    store.set_timeout(wait)
    prefixed = c10d.PrefixStore(name, store)
    group, _ = c10d._new_process_group_helper(2, 0, [], c10d.Backend("gloo"), prefixed, group_name=name, timeout=wait)
    return group


class Trainer:
    """The calls of a trainer to one server."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def post(self, path: str, body: Any = None) -> Any:
        """The answer's JSON; anything but 200 fails the test."""
        answer = self.server.post(path, body)
        assert answer.status == 200, answer.body
        return answer.json

    def refused(self, path: str, body: Any = None) -> Answer:
        answer = self.server.post(path, body)
        assert 400 <= answer.status < 500, answer.body
        return answer

    def sample(self, **fields: Any) -> dict[str, Any]:
        sampling = {"temperature": 1.0, "seed": 7, "max_tokens": 8, "logprobs": 0, "ignore_eos": True}
        body = {"token_ids": PROMPT, "sampling_params": sampling, **fields}
        return self.post("/inference/v1/generate", body)["choices"][0]

    def seen(self) -> tuple[list[int], list[float]]:
        choice = self.sample()
        return choice["token_ids"], [one["logprob"] for one in choice["logprobs"]["content"]]

    def join_vllm(self, buffer_bytes: int | None = 1 << 20) -> Group:
        port = free_port()
        info: dict[str, Any] = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
        if buffer_bytes is not None:
            info |= {"packed": True, "packed_buffer_size_bytes": buffer_bytes}
        asked = Beside(self.post, "/init_weight_transfer_engine", {"init_info": info})
        group = Group(port)
        asked.wait()
        return group
