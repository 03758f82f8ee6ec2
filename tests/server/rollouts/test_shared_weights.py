"""A trainer of the same machine holds weights out in shared memory, by handles of each wire; and single values."""

from __future__ import annotations

import base64
import io
import os
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing as torch_processes

from mllm_compile.transfer.share import SharedTensors
from mllm_compile.transfer.shared_memory import FOLDER
from tests.server.rollouts.test_wires import halves
from tests.server.rollouts.trainer import Beside, announced, changed


@dataclass
class FlattenedTensorMetadata:
    """SGLang's, as its trainers pickle it."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@pytest.fixture
def by_file():
    before = torch_processes.get_sharing_strategy()
    torch_processes.set_sharing_strategy("file_system")
    yield
    torch_processes.set_sharing_strategy(before)


def pickled(what: Any) -> str:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(what)
    return base64.b64encode(buffer.getvalue()).decode()


def by_vllm(trainer, tensors, version, **start):
    assert trainer.post("/init_weight_transfer_engine", {"init_info": {}})
    trainer.post("/start_weight_update", start)
    for some in map(dict, halves(tensors)):
        with SharedTensors(some.items()) as shared:
            trainer.post("/update_weights", {"update_info": shared.update_info})
            (name,) = {handle["cpu"]["name"] for handle in shared.update_info["ipc_handles"]}
        assert not (FOLDER / name).exists()
    trainer.post("/finish_weight_update", {"weight_version": version})


@pytest.mark.parametrize("direct", [False, True])
def test_shared_memory_makes_a_round_trip(trainer, start, direct):
    before = trainer.seen()
    by_vllm(trainer, changed(start, 11), "shared", direct=direct)
    assert trainer.seen() != before
    by_vllm(trainer, start, "back", direct=direct)
    assert trainer.seen() == before


def test_sglangs_tensors_make_a_round_trip(trainer, start, by_file):
    before = trainer.seen()
    for tensors, is_flat in ((changed(start, 12), False), (start, True)):
        for some in map(dict, halves(tensors)):
            body: dict[str, Any] = {"weight_version": "12", "flush_cache": False}
            if is_flat:
                rows, begin = [], 0
                for name, one in some.items():
                    end = begin + one.numel()
                    rows.append(FlattenedTensorMetadata(name, one.shape, one.dtype, begin, end, one.numel()))
                    begin = end
                flat = torch.cat([one.reshape(-1) for one in some.values()])
                what = {"flattened_tensor": flat, "metadata": rows}
                body["load_format"] = "flattened_bucket"
            else:
                what = [(name, one.clone()) for name, one in some.items()]
            assert trainer.post("/update_weights_from_tensor", body | {"serialized_named_tensors": [pickled(what)]})
            flat = what = None
        assert (trainer.seen() == before) == is_flat
    assert not list(FOLDER.glob(f"torch_{os.getpid()}_*"))  # the engine has let go of them


def test_what_a_sender_of_sglangs_left_is_no_half_of_another_ones_update(trainer, start, by_file):
    before = trainer.seen()

    def told(tensors):
        what = [(name, one.clone()) for name, one in tensors.items()]
        return what, {"serialized_named_tensors": [pickled(what)]}

    first, second = map(dict, halves(start))
    left, body = told({name: changed(start, 15)[name] for name in first})
    for _ in range(2):  # a client that lost the answer
        trainer.post("/update_weights_from_tensor", body)
    bodies = [told(some) for some in (first, second, first)]
    for _, body in bodies[:2]:
        for _ in range(2):
            trainer.post("/update_weights_from_tensor", body | {"weight_version": "again"})
    assert trainer.seen() == before
    trainer.post("/continue_generation")  # it would lack tensors if the last one had begun another update
    trainer.post("/update_weights_from_tensor", bodies[2][1] | {"weight_version": "half"})
    assert "lacks" in trainer.refused("/continue_generation").error["message"]
    trainer.post("/start_weight_update")
    trainer.refused("/finish_weight_update")  # nothing came
    del left, bodies, body


def test_a_bucket_of_sglangs_brings_dropped_weights_again_under_their_version(trainer, start, by_file):
    before = trainer.seen()
    what = [(name, one.clone()) for name, one in start.items()]
    bodies = [{"serialized_named_tensors": [pickled(what)], "weight_version": "same"} for _ in range(2)]
    assert bodies[0] == bodies[1], "the engine could tell them apart"
    trainer.post("/update_weights_from_tensor", bodies[0])
    trainer.post("/sleep?level=2")
    trainer.post("/wake_up")
    trainer.post("/update_weights_from_tensor", bodies[1])
    assert trainer.seen() == before
    del what


def test_tensors_that_are_refused_are_let_go_of(trainer, by_file):
    what = [("nonsense", torch.zeros(4))]
    body = {"serialized_named_tensors": [pickled(what)]}
    assert "no tensor 'nonsense'" in trainer.refused("/update_weights_from_tensor", body).error["message"]
    what = None
    assert not list(FOLDER.glob(f"torch_{os.getpid()}_*"))


def test_single_values_by_vllms_wire(trainer, start):
    before = trainer.seen()
    new = changed(start, 13)
    some = {name: one for name, one in new.items() if one.dim() == 2}
    group = trainer.join_vllm()
    for tensors in (new, start):
        places = {name: torch.arange(3, start[name].numel(), 7, dtype=torch.int32) for name in some}
        trainer.post("/start_weight_update")
        info = announced({name: tensors[name] for name in some})
        info |= {"num_updates_list": [len(one) for one in places.values()]}
        asked = Beside(trainer.post, "/update_weights", {"update_info": info})
        for name, one in places.items():
            group.broadcast(one)
            group.broadcast(tensors[name].reshape(-1)[one.long()])
        asked.wait()
        trainer.post("/finish_weight_update", {"weight_version": "sparse"})
        assert (trainer.seen() == before) == (tensors is start)


def test_memory_that_is_not_there_changes_nothing(trainer, start):
    before = trainer.seen()
    with SharedTensors(changed(start, 14).items()) as shared:
        info = shared.update_info
        (name,) = {handle["cpu"]["name"] for handle in info["ipc_handles"]}
        size = (FOLDER / name).stat().st_size

        def with_handle(**changes: Any) -> dict[str, Any]:
            handles = [*info["ipc_handles"]]
            handles[-1] = {"cpu": handles[-1]["cpu"] | changes}
            return info | {"ipc_handles": handles}

        gpu = {"11111111-2222-3333-4444-555555555555": {"handle": base64.b64encode(bytes(64)).decode(), "offset": 0}}
        wrongs = {
            "of memory of": with_handle(offset=size - 1),
            "objects with handle or name, and offset": with_handle(offset=-1),
            "is no name of shared memory": with_handle(name="../etc/passwd"),
            "its sender is gone": with_handle(name="mllm-weights-nobody's".replace("'", "")),
            "the engine is on cpu": info | {"ipc_handles": [gpu] * len(info["names"])},
            "its sum differs": info | {"sums": info["sums"] | {info["names"][0]: 1}},
            "expected one for each": info | {"ipc_handles": info["ipc_handles"][1:]},
            "opcode": info | {"ipc_handles": None, "ipc_handles_pickled": base64.b64encode(b"c").decode()},
        }
        for direct in (False, True):
            for message, wrong in wrongs.items():
                trainer.post("/start_weight_update", {"direct": direct})
                answer = trainer.refused("/update_weights", {"update_info": wrong})
                assert message in answer.error["message"] or message == "opcode", answer.error
                assert trainer.seen() == before
    trainer.post("/start_weight_update")
    answer = trainer.refused("/update_weights", {"update_info": info})  # what a sender leaves behind that has died
    assert "its sender is gone" in answer.error["message"]
    assert trainer.seen() == before
