"""Weights from another process: CUDA IPC on one GPU, NCCL from a second one; answers equal a fresh start's."""

from __future__ import annotations

import base64
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mllm_compile import Engine
from mllm_compile.errors import MllmError, TransferError, WeightUpdateError
from mllm_compile.transfer.transfers import Transfers
from tests.e2e.test_weight_updates import answers, write_changed
from tests.gpu.test_weight_updates import PROMPTS, config_of
from tests.model.tiny_configs import save_tiny_model
from tests.model.tiny_configs import tiny_config as shape_of
from tests.server.rollouts.trainer import Beside, as_bytes, chunks, free_port

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
BUFFER_BYTES = 1 << 16


class Trainer:
    """A process with a folder's weights on a GPU: it writes what an engine is told, and ends with its input."""

    def __init__(self, form: str, device: int, folders: list[Path], port: int = 0) -> None:
        command = [sys.executable, "-m", "tests.gpu.test_weight_transfers", form, str(device), str(port)]
        self.process = subprocess.Popen(
            [*command, *map(str, folders)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
        )

    def told(self) -> Any:
        assert self.process.stdout is not None
        return pickle.load(self.process.stdout)

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    save_tiny_model(shape_of("qwen3"), root / "first")
    return [root / "first", write_changed(root / "first", root / "second")]


@pytest.fixture(scope="module")
def engine(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    config = config_of(folders[0], tmp_path_factory.mktemp("cache"), "auto")
    # Updates under graphs are tested alone. For pieces as traced FlashInfer would compile kernels for minutes.
    config |= {"compile": {"backend": "eager"}, "cudagraph": {"mode": "none"}}
    config["runtime"] |= {"attention_backend": "torch", "mem_fraction_static": 0.1}  # trainers are on the GPU too
    with Engine(config) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: Engine, folders: list[Path]) -> list[Any]:
    found = []
    for folder in (folders[1], folders[0]):
        engine.update_weights_from_folder(folder)
        found.append(answers(engine, PROMPTS))
    assert found[0] != found[1]
    return found


def receive(engine: Engine, transfers: Transfers, info: dict[str, Any], direct: bool = False) -> None:
    """As the server's calls do."""
    if not engine.weights.is_open:
        engine.weights.start(direct=direct)
        transfers.started()
    if "serialized" in info:
        transfers.receive_given(info["serialized"])
    else:
        transfers.receive_vllm(
            info["names"],
            info["dtype_names"],
            info["shapes"],
            handles=info.get("ipc_handles"),
            pickled=info.get("ipc_handles_pickled"),
            sizes=info.get("tensor_sizes"),
            sums=info.get("sums"),
        )


FORMS = (("json", False), ("json", True), ("pickled", False), ("packed", True), ("sglang", False), ("flat", True))


@pytest.mark.parametrize(("form", "direct"), FORMS)
def test_handles_of_another_process(engine, folders, expected, form, direct):
    trainer = Trainer(form, 0, [folders[1], folders[0]])
    transfers = Transfers(engine.weights)
    for answer in expected:
        for info in trainer.told():
            receive(engine, transfers, info, direct)
        engine.weights.finish()
        trainer.go()
        assert answers(engine, PROMPTS) == answer
    left = trainer.told()
    assert left < 1 << 20, f"the trainer could not free {left} bytes"
    trainer.go()
    assert trainer.process.wait() == 0


def test_wrong_handles_change_nothing(engine, folders, expected):
    trainer = Trainer("json", 0, [folders[1]])
    (info,) = trainer.told()
    (key,) = info["ipc_handles"][0]
    transfers = Transfers(engine.weights)

    def refused(error: type[MllmError], message: str, **changes: Any) -> None:
        for direct in (False, True):
            with pytest.raises(error, match=message):
                receive(engine, transfers, info | changes, direct)
            assert answers(engine, PROMPTS) == expected[1]

    def last(key: str, **changes: Any) -> list[Any]:
        (one,) = info["ipc_handles"][-1].values()
        return [*info["ipc_handles"][:-1], {key: one | changes}]

    refused(WeightUpdateError, "of memory of", ipc_handles=last(key, offset=1 << 40))
    refused(WeightUpdateError, "the engine is on", ipc_handles=last("11111111-2222-3333-4444-555555555555"))
    garbage = base64.b64encode(bytes(range(64))).decode()
    refused(TransferError, "cannot be opened", ipc_handles=last(key, handle=garbage))
    trainer.kill()
    refused(TransferError, "cannot be opened")


@needs_two
@pytest.mark.parametrize(("form", "direct"), [("vllm", True), ("torch", False)])
def test_nccl_from_another_gpu(engine, folders, expected, form, direct):
    port = free_port()
    trainer = Trainer(form, 1, [folders[1], folders[0]], port)
    transfers = Transfers(engine.weights)
    if form == "vllm":
        transfers.join_vllm("127.0.0.1", port, 1, 2, BUFFER_BYTES)
    else:
        transfers.join_named("group", "127.0.0.1", port, 1, 2, "nccl")
    for answer in expected:
        info = trainer.told()
        engine.weights.start(direct=direct)
        transfers.started()
        row = info["names"], info["dtype_names"], info["shapes"]
        trainer.go()
        if form == "vllm":
            transfers.receive_vllm(*row)
        else:
            transfers.receive_bucket("group", *row, is_flat=False)
        engine.weights.finish()
        assert answers(engine, PROMPTS) == answer
    trainer.process.wait()


@needs_two
@pytest.mark.parametrize("direct", [False, True])
def test_a_sender_over_nccl_that_dies(engine, folders, expected, direct, monkeypatch):
    monkeypatch.setattr("mllm_compile.transfer.transfers._SILENCE_S", 5.0)
    port = free_port()
    trainer = Trainer("dies", 1, [folders[1]], port)
    transfers = Transfers(engine.weights)
    transfers.join_vllm("127.0.0.1", port, 1, 2, BUFFER_BYTES)
    info = trainer.told()
    engine.weights.start(direct=direct)
    transfers.started()
    asked = Beside(refused_by, transfers, info)
    trainer.go()
    assert isinstance(asked.wait(), TransferError)
    assert engine.state == ("torn" if direct else "running")
    if direct:
        engine.update_weights_from_folder(folders[0])
    assert answers(engine, PROMPTS) == expected[1]


def refused_by(transfers: Transfers, info: dict[str, Any]) -> MllmError | None:
    try:
        transfers.receive_vllm(info["names"], info["dtype_names"], info["shapes"])
    except MllmError as error:
        return error
    return None


@needs_two
def test_another_gpus_memory_is_refused_by_name(engine, folders, expected):
    trainer = Trainer("json", 1, [folders[1]])
    (info,) = trainer.told()
    with pytest.raises(WeightUpdateError, match="and the engine is on"):
        receive(engine, Transfers(engine.weights), info)
    own = str(torch.cuda.get_device_properties(0).uuid)
    lying = [{own: one} for handle in info["ipc_handles"] for one in handle.values()]
    with pytest.raises(MllmError, match=r"the handle is of GPU|cannot be opened"):
        receive(engine, Transfers(engine.weights), info | {"ipc_handles": lying})
    trainer.kill()
    assert answers(engine, PROMPTS) == expected[1]


# The trainer's process ------------------------------------------------------------------------------------------------


def told_of(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtype_names": [str(one.dtype).removeprefix("torch.") for one in tensors.values()],
        "shapes": [list(one.shape) for one in tensors.values()],
    }


def infos(form: str, tensors: dict[str, torch.Tensor], kept: list[Any]) -> list[dict[str, Any]]:
    """The calls that tell of tensors that the trainer shares; `kept` keeps them."""
    import io
    from multiprocessing.reduction import ForkingPickler

    from torch.multiprocessing.reductions import reduce_tensor

    from mllm_compile.transfer.opened import key_of
    from mllm_compile.transfer.share import SharedTensors
    from tests.server.rollouts.test_shared_weights import FlattenedTensorMetadata

    def encoded(data: bytes) -> str:
        return base64.b64encode(data).decode()

    def forked(what: Any) -> str:
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(what)
        return encoded(buffer.getvalue())

    told, key = told_of(tensors), key_of(next(iter(tensors.values())).device)
    if form == "json":
        kept.append(SharedTensors(tensors.items()))
        return [kept[-1].update_info]
    if form == "pickled":
        kept += tensors.values()
        handles: Any = [{key: reduce_tensor(one)[1]} for one in tensors.values()]
        return [told | {"ipc_handles_pickled": encoded(pickle.dumps(handles))}]
    if form == "packed":
        found = []
        for some in chunks(tensors, BUFFER_BYTES):
            kept.append(as_bytes(some))
            names = [name for name, one in tensors.items() if any(one is other for other in some)]
            part = told_of({name: tensors[name] for name in names})
            handles = {key: reduce_tensor(kept[-1])}
            sizes = {"tensor_sizes": [one.nbytes for one in some]}
            found.append(part | sizes | {"ipc_handles_pickled": encoded(pickle.dumps(handles))})
        return found
    if form == "sglang":
        kept += tensors.values()
        return [{"serialized": forked(list(tensors.items()))}]
    rows, begin = [], 0
    for name, one in tensors.items():
        rows.append(FlattenedTensorMetadata(name, one.shape, one.dtype, begin, begin + one.numel(), one.numel()))
        begin += one.numel()
    kept.append(torch.cat([one.reshape(-1) for one in tensors.values()]))
    return [{"serialized": forked({"flattened_tensor": kept[-1], "metadata": rows})}]


class Sender:
    """The trainer's end of a group of two over NCCL: vLLM's, or torch's own."""

    def __init__(self, form: str, port: int) -> None:
        import torch.distributed as dist

        from mllm_compile.transfer.nccl_group import NcclGroup

        wait = timedelta(seconds=60)
        self._torch: Any = None
        if form == "torch":
            from torch.distributed import distributed_c10d as c10d

            store, _, _ = next(c10d.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=wait))
            backend, prefixed = c10d.Backend("nccl"), c10d.PrefixStore("group", store)
            self._torch, _ = c10d._new_process_group_helper(
                2, 0, [], backend, prefixed, group_name="group", timeout=wait
            )
            return
        from mllm_compile.runtime.collectives.nccl_library import UniqueId, check, library

        made = UniqueId()
        check(library().ncclGetUniqueId(made), "an id")
        named = type("ncclUniqueId", (UniqueId,), {"__module__": "__main__"})
        sys.modules["__main__"].ncclUniqueId = named  # type: ignore[attr-defined]
        store = dist.TCPStore("127.0.0.1", port, 2, is_master=True, timeout=wait, wait_for_workers=False)
        store.set("broadcast_from/0/0", pickle.dumps(named.from_buffer_copy(made)))
        self._store = store
        self._group = NcclGroup(lambda: bytes(made), 0, 2, torch.device("cuda", torch.cuda.current_device()), 60, 60)
        self._group.add_one()

    def broadcast(self, tensor: torch.Tensor) -> None:
        if self._torch is None:
            self._group.begin(tensor)()
        else:
            self._torch.broadcast([tensor]).wait()
            torch.cuda.synchronize()


def main(form: str, device: str, port: str, *folders: str) -> None:
    torch.cuda.set_device(int(device))
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print
    sender = Sender(form, int(port)) if form in ("vllm", "torch", "dies") else None

    def tell(what: Any) -> None:
        pickle.dump(what, out)
        out.flush()
        sys.stdin.readline()

    for folder in folders:
        tensors = {
            name: one.cuda()
            for path in sorted(Path(folder).glob("*.safetensors"))
            for name, one in load_file(path).items()
        }
        if sender is None:
            kept: list[Any] = []
            tell(infos(form, tensors, kept))
            del kept
            continue
        tell(told_of(tensors))
        for some in [[one] for one in tensors.values()] if form == "torch" else chunks(tensors, BUFFER_BYTES):
            sender.broadcast(as_bytes(some))
            if form == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
    if sender is None:
        del tensors
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        tell(torch.cuda.memory_allocated())


if __name__ == "__main__":
    main(*sys.argv[1:])
