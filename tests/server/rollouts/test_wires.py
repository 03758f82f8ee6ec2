"""Each wire replaces the weights of a running server and puts the first ones back: answers are as before."""

from __future__ import annotations

import pickle
from itertools import count

import pytest
import torch

from tests.server.harness import eventually
from tests.server.rollouts.trainer import (
    PROMPT,
    Beside,
    Group,
    announced,
    as_bytes,
    by_layer,
    changed,
    chunks,
    free_port,
    write_folder,
)

BUFFER_BYTES = 1 << 20  # small, so that a small model makes several chunks
_numbers = count()


def by_vllm(trainer, group, tensors, version, buffer_bytes):
    trainer.post("/pause?mode=keep")
    trainer.post("/start_weight_update", {"is_checkpoint_format": True})
    asked = Beside(trainer.post, "/update_weights", {"update_info": announced(tensors)})
    if buffer_bytes is None:
        for tensor in tensors.values():
            group.broadcast(tensor)
    else:
        for some in chunks(tensors, buffer_bytes):
            group.broadcast(as_bytes(some))
    asked.wait()
    trainer.post("/finish_weight_update", {"weight_version": version})
    trainer.post("/resume")


@pytest.mark.parametrize(
    "buffer_bytes", [BUFFER_BYTES, pytest.param(None, marks=pytest.mark.slow)], ids=["packed", "one by one"]
)
def test_vllms_wire_makes_a_round_trip(trainer, start, buffer_bytes):
    before = trainer.seen()
    info = trainer.server.get("/server_info?config_format=json").json["vllm_config"]
    assert info == {"weight_transfer_config": {"backend": "gloo"}, "model_config": {"dtype": "torch.float32"}}
    assert trainer.server.get("/get_world_size").json == {"world_size": 1}
    group = trainer.join_vllm(buffer_bytes)
    by_vllm(trainer, group, changed(start, 1), "one", buffer_bytes)
    assert trainer.seen() != before
    assert trainer.sample()["weight_versions"] == [{"version": "one", "start": 0, "end": 8}]
    assert trainer.server.get("/weight_info").json == {"weight_version": "one"}
    by_vllm(trainer, group, start, "back", buffer_bytes)
    assert trainer.seen() == before


def test_what_was_received_is_not_awaited_again(trainer, start):
    """A client that lost the answer repeats its call; nobody broadcasts then."""
    group = trainer.join_vllm()
    trainer.post("/start_weight_update")
    trainer.post("/start_weight_update")
    body = {"update_info": announced(start)}
    asked = Beside(trainer.post, "/update_weights", body)
    for some in chunks(start, BUFFER_BYTES):
        group.broadcast(as_bytes(some))
    asked.wait()
    trainer.post("/update_weights", body)
    trainer.post("/update_weights", {"update_info": {"names": [], "dtype_names": [], "shapes": []}})
    first = trainer.post("/finish_weight_update", {"weight_version": "twice"})
    again = trainer.post("/finish_weight_update", {"weight_version": "twice"})
    assert first["epoch"] == again["epoch"]
    assert trainer.server.post("/finish_weight_update", {"weight_version": "other"}).status == 409


def test_a_refused_announcement_leaves_every_weight_as_it_was(trainer, start):
    sums = trainer.post("/weight_checker", {"action": "checksum"})["checksums"]
    before = trainer.seen()
    name, tensor = next((name, one) for name, one in start.items() if one.dim() == 2)
    wrongs = [
        {"names": [name], "dtype_names": ["float32"], "shapes": [[tensor.shape[0] + 1, tensor.shape[1]]]},
        {"names": ["nonsense"], "dtype_names": ["float32"], "shapes": [[1]]},
        {"names": [name], "dtype_names": ["float33"], "shapes": [list(tensor.shape)]},
        {"names": [name, name], "dtype_names": ["float32"] * 2, "shapes": [list(tensor.shape)] * 2},
        {"names": [name], "dtype_names": [], "shapes": []},
        {"names": [name], "dtype_names": ["float32"], "shapes": [[-1, 4]]},
    ]
    for wrong in wrongs:
        trainer.post("/start_weight_update")
        trainer.refused("/update_weights", {"update_info": wrong})
        trainer.post("/finish_weight_update")
    assert trainer.post("/weight_checker", {"action": "compare", "baseline": sums}) == {"match": True, "mismatches": []}
    assert trainer.seen() == before


def test_a_sender_that_leaves_in_the_middle_changes_nothing(trainer, start):
    before = trainer.seen()
    group = trainer.join_vllm()
    trainer.post("/start_weight_update")
    asked = Beside(trainer.server.post, "/update_weights", {"update_info": announced(changed(start, 9))})
    group.broadcast(as_bytes(next(chunks(changed(start, 9), BUFFER_BYTES))))
    del group  # its sockets close
    answer = asked.wait()
    assert (answer.status, answer.error["code"]) == (400, "weight_update")
    assert "sender is gone" in answer.error["message"]
    assert trainer.seen() == before
    trainer.refused("/update_weights", {"update_info": announced(start)})  # there is neither an update nor a group


@pytest.mark.slow
def test_a_trainer_that_leaves_behind_any_message_changes_nothing(trainer, start):
    before, new = trainer.seen(), changed(start, 10)
    sent = [as_bytes(some) for some in chunks(new, 3 * BUFFER_BYTES)]
    assert len(sent) > 2
    for done in range(-2, len(sent) + 1):
        group = trainer.join_vllm(3 * BUFFER_BYTES)
        if done > -2:
            trainer.post("/start_weight_update")
        if done >= 0:
            asked = Beside(trainer.server.post, "/update_weights", {"update_info": announced(new)})
            for some in sent[:done]:
                group.broadcast(some)
        is_received = done == len(sent)
        if is_received:
            assert asked.wait().status == 200
        del group  # its sockets close
        if done >= 0 and not is_received:
            assert asked.wait().error["code"] == "weight_update"
        assert trainer.seen() == before
    by_vllm(trainer, trainer.join_vllm(), new, "new", BUFFER_BYTES)  # what the last one left is not half of it
    assert trainer.seen() != before
    by_vllm(trainer, trainer.join_vllm(), start, "back", BUFFER_BYTES)
    assert trainer.seen() == before


def test_a_trainer_that_breaks_off_in_a_pause_holds_no_other_one(trainer, start):
    before = trainer.seen()
    name, tensor = next(iter(start.items()))
    group, held = trainer.join_vllm(), long(trainer, 100)
    trainer.post("/pause?mode=keep")
    trainer.post("/start_weight_update")
    wrong = {"names": [name], "dtype_names": ["float32"], "shapes": [[len(tensor) + 1]]}
    trainer.refused("/update_weights", {"update_info": wrong})
    assert trainer.refused("/update_weights", {"update_info": announced(start)}).status == 409  # it is over
    del group  # it is gone, and leaves the engine paused
    answer = Beside(trainer.server.post, "/inference/v1/generate", {"token_ids": PROMPT}).wait()
    assert (answer.status, answer.error["code"]) == (503, "paused")
    assert "an update of its weights broke off" in answer.error["message"]
    restore(trainer, start)
    trainer.post("/resume")
    assert len(held.wait()["choices"][0]["token_ids"]) == 100
    assert trainer.seen() == before


def test_prime_rls_folders_make_a_round_trip(trainer, start, weights_folder):
    before = trainer.seen()
    for number, tensors in ((1, changed(start, 2)), (2, start)):
        folder = write_folder(tensors, weights_folder / f"prime_{number}")
        trainer.post("/pause?mode=keep&clear_cache=false")
        trainer.post("/update_weights", {"weight_dir": str(folder)})
        trainer.post("/resume")
        trainer.post("/resume")
        assert (trainer.seen() == before) == (number == 2)
        assert trainer.sample()["weight_versions"][0]["version"] == f"prime_{number}"


def test_a_folder_that_is_not_whole_is_refused_for_good(trainer, start, weights_folder, tmp_path):
    before = trainer.seen()
    half = dict(list(start.items())[: len(start) // 2])
    wrongs = {
        "has no file STABLE": write_folder(start, weights_folder / "unmarked", is_stable=False),
        "lacks": write_folder(half, weights_folder / "half"),
        "is no folder": weights_folder / "nothing",
        "is below no folder of --rl-folder": write_folder(start, tmp_path / "elsewhere"),
    }
    for message, folder in wrongs.items():
        assert message in trainer.refused("/update_weights", {"weight_dir": str(folder)}).error["message"]
    trainer.refused("/update_weights", {"weight_dir": f"{weights_folder}/../.."})
    assert trainer.seen() == before


def test_prime_rls_broadcast_makes_a_round_trip(trainer, start, weights_folder):
    before = trainer.seen()
    port = free_port()
    body = {"host": "127.0.0.1", "port": port, "rank_offset": 0, "inference_world_size": 1, "timeout": 60}
    asked = Beside(trainer.post, "/init_broadcaster", body)
    group = Group(port)
    assert asked.wait() == {"status": "ok"}

    def number(value):
        group.broadcast(torch.tensor([value], dtype=torch.int64))

    body = {"weight_dir": str(weights_folder / "step_1")}
    asked = Beside(trainer.refused, "/update_weights", body)
    number(0)  # a checkpoint of nothing: what follows is not refused for it
    assert "lacks" in asked.wait().error["message"]
    for tensors in (changed(start, 3), start):
        asked = Beside(trainer.post, "/update_weights", body)
        groups = by_layer(tensors)
        number(len(groups))
        for one in groups:
            rows = [(name, tensor.shape, tensor.numel()) for name, tensor in one.items()]
            table = pickle.dumps({next(iter(one.values())).dtype: rows})
            number(len(table))
            group.broadcast(torch.frombuffer(bytearray(table), dtype=torch.uint8))
            group.broadcast(torch.cat([tensor.reshape(-1) for tensor in one.values()]))
        asked.wait()
        assert (trainer.seen() == before) == (tensors is start)


@pytest.mark.parametrize("is_flat", [pytest.param(False, marks=pytest.mark.slow), True])
def test_sglangs_wire_makes_a_round_trip(trainer, start, weights_folder, is_flat):
    before = trainer.seen()
    name, port = f"pp_{next(_numbers)}", free_port()
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    asked = Beside(trainer.post, "/init_weights_update_group", body | {"group_name": name, "backend": "gloo"})
    group = Group(port, name)
    asked.wait()
    trainer.post("/pause_generation", {"mode": "in_place"})
    assert trainer.server.get("/flush_cache").status == 200
    for some in (dict(part) for part in halves(changed(start, 4))):
        told = announced(some)
        bucket = {"names": told["names"], "dtypes": told["dtype_names"], "shapes": told["shapes"], "group_name": name}
        bucket |= {"load_format": "flattened_bucket"} if is_flat else {}
        asked = Beside(trainer.post, "/update_weights_from_distributed", bucket | {"weight_version": "7"})
        for tensor in [as_bytes(list(some.values()))] if is_flat else some.values():
            group.broadcast(tensor)
        assert asked.wait()["success"]  # a client that lost the answer asks again, of the last bucket too
        assert trainer.post("/update_weights_from_distributed", bucket | {"weight_version": "7"})["success"]
    trainer.post("/continue_generation")
    answer = trainer.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}})
    assert answer["meta_info"]["weight_version"] == "7"
    assert trainer.seen() != before
    folder = write_folder(start, weights_folder / f"disk_{name}", is_stable=False)
    trainer.post("/update_weights_from_disk", {"model_path": str(folder), "weight_version": "disk"})
    assert trainer.seen() == before
    assert trainer.post("/destroy_weights_update_group", {"group_name": name})["success"]
    assert not trainer.post("/destroy_weights_update_group", {"group_name": name})["success"]


def halves(tensors):
    items = list(tensors.items())
    return items[: len(items) // 2], items[len(items) // 2 :]


def test_a_bucket_without_a_group_leaves_no_update_open(trainer):
    trainer.post("/pause_generation", {"mode": "in_place"})
    bucket = {"names": [], "dtypes": [], "shapes": [], "group_name": "nobody's"}
    assert trainer.refused("/update_weights_from_distributed", bucket).status == 409
    trainer.post("/continue_generation")


@pytest.mark.slow
def test_half_an_update_by_buckets_cannot_be_left_behind(trainer, start):
    before = trainer.seen()
    name, port = f"pp_{next(_numbers)}", free_port()
    body = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    asked = Beside(trainer.post, "/init_weights_update_group", body | {"group_name": name, "backend": "gloo"})
    group = Group(port, name)
    asked.wait()
    first, second = halves(changed(start, 5))
    trainer.post("/pause_generation")
    for some, ends in ((dict(first), False), (dict(second), True)):
        told = announced(some)
        bucket = {"names": told["names"], "dtypes": told["dtype_names"], "shapes": told["shapes"], "group_name": name}
        asked = Beside(trainer.post, "/update_weights_from_distributed", bucket | {"load_format": "flattened_bucket"})
        group.broadcast(as_bytes(list(some.values())))
        asked.wait()
        if not ends:
            assert "lacks" in trainer.refused("/continue_generation").error["message"]
    trainer.post("/continue_generation")
    assert trainer.seen() != before
    trainer.post("/start_weight_update")
    trainer.refused("/finish_weight_update")  # nothing came
    restore(trainer, start)
    assert trainer.seen() == before


def restore(trainer, start):
    """The first weights by vLLM's wire, into the update that is open."""
    group = trainer.join_vllm()
    trainer.post("/start_weight_update")
    asked = Beside(trainer.post, "/update_weights", {"update_info": announced(start)})
    for some in chunks(start, BUFFER_BYTES):
        group.broadcast(as_bytes(some))
    asked.wait()
    trainer.post("/finish_weight_update")


def long(trainer, most, **fields):
    """A call for many tokens, once they are being made."""
    sampling = {"max_tokens": most, "ignore_eos": True, "temperature": 1.0, "seed": 1}
    asked = Beside(trainer.post, "/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling, **fields})
    eventually(lambda: trainer.server.get("/load").json["running"] == 1, "it runs")
    return asked


def test_a_pause_that_keeps_what_runs_changes_no_token(trainer):
    whole = long(trainer, 60).wait()["choices"][0]["token_ids"]
    asked = long(trainer, 60)
    trainer.post("/pause?mode=keep")
    trainer.post("/pause?mode=keep")
    paused = trainer.server.get("/is_paused").json
    assert (paused["is_paused"], paused["state"]) == (True, "paused") and paused["seconds"] >= 0
    eventually(lambda: trainer.server.figure("mllm:held_seconds") > 0, "a trainer that died is seen")
    newcomer = Beside(trainer.sample)
    trainer.post("/resume")
    assert len(newcomer.wait()["token_ids"]) == 8
    assert asked.wait()["choices"][0]["token_ids"] == whole
    eventually(lambda: trainer.server.figure("mllm:held_seconds") == 0, "steps run")


def test_what_a_pause_or_a_call_ends_has_its_tokens_so_far(trainer):
    asked = long(trainer, 490)
    trainer.post("/pause?mode=abort")
    (choice,) = asked.wait()["choices"]
    assert choice["finish_reason"] == "abort"
    assert len(choice["token_ids"]) == len(choice["logprobs"] or choice["token_ids"])
    refused = trainer.server.post("/inference/v1/generate", {"token_ids": PROMPT})
    assert (refused.status, refused.error["code"]) == (503, "paused")
    trainer.post("/resume")
    trainer.post("/resume")
    asked = long(trainer, 490, request_id="mine")
    assert trainer.post("/abort_requests", {"request_ids": ["mine", "other", "mine"]}) == {"aborted": ["mine"]}
    assert asked.wait()["choices"][0]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/pause?mode=never", None, 400, "mode: expected abort, wait, keep, retract, got 'never'"),
        ("/pause?clear_cache=maybe", None, 400, "clear_cache: expected true or false"),
        ("/update_weights", {}, 400, "update_info: expected it, or weight_dir"),
        ("/update_weights", {"update_info": {"ipc_handles": []}}, 400, "names"),
        (
            "/update_weights",
            {
                "update_info": {
                    "names": [],
                    "dtype_names": [],
                    "shapes": [],
                    "ipc_handles": [],
                    "ipc_handles_pickled": "",
                }
            },
            400,
            "and not both",
        ),
        (
            "/update_weights",
            {"update_info": {"names": [], "dtype_names": [], "shapes": [], "update_kind": "sparse_flat"}},
            400,
            "num_updates_list",
        ),
        (
            "/update_weights",
            {
                "update_info": {
                    "names": [],
                    "dtype_names": [],
                    "shapes": [],
                    "num_updates_list": [],
                    "ipc_handles": [],
                }
            },
            400,
            "without ipc_handles",
        ),
        (
            "/update_weights",
            {"update_info": {"names": [], "dtype_names": [], "shapes": []}},
            409,
            "/start_weight_update",
        ),
        ("/init_weight_transfer_engine", {"init_info": {"master_port": 5}}, 400, "master_address"),
        (
            "/init_weight_transfer_engine",
            {"init_info": {"master_address": "127.0.0.1", "packed": True, "packed_buffer_size_bytes": -1}},
            400,
            "expected at least 1, got -1",
        ),
        ("/update_weight_version", {"new_version": ""}, 400, "new_version: expected 1 to 256"),
        ("/weight_checker", {"action": "reset"}, 400, "action: expected checksum or compare"),
        ("/sleep?level=3", None, 400, "level: expected 0, 1, 2, got '3'"),
        ("/sleep?mode=stop", None, 400, "mode: expected one of abort, wait, keep, retract, got 'stop'"),
        ("/wake_up?tags=cuda_graph", None, 400, "tags: expected a list of weights, kv_cache, scheduling"),
        ("/release_memory_occupation", {"tags": ["cuda_graph"]}, 400, "captured graphs stay in memory"),
        ("/release_memory_occupation", {"tags": []}, 400, "tags: expected a list of"),
        ("/collective_rpc", {"method": "x"}, 400, "methods of workers are not called by name"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["eA=="]}, 400, "no pickle of plain data"),
        ("/reset_prefix_cache?reset_external=true", None, 400, "no cache outside"),
        ("/reset_prefix_cache", {"reset_external": True}, 400, "no cache outside"),
        ("/fetch_weights", {"target_version": 3}, 400, "deltas are not read"),
        ("/start_draft_weight_update", None, 400, "a draft model's weights are not updated"),
        (
            "/update_weights_from_distributed",
            {"names": [], "dtypes": [], "shapes": []},
            409,
            "/init_weights_update_group",
        ),
        ("/pause_generation", {"mode": "keep"}, 400, "mode: expected abort, in_place, retract"),
    ],
)
def test_a_wrong_call_is_refused_by_its_name(trainer, path, body, status, message):
    answer = trainer.server.post(path, body)
    assert answer.status == status
    assert message in answer.error["message"]
    assert trainer.server.get("/is_paused").json == {"is_paused": False}


def test_strangers_hosts_are_not_joined(trainer):
    info = {"master_address": "192.0.2.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    answer = trainer.server.post("/init_weight_transfer_engine", {"init_info": info})
    assert (answer.status, answer.error["code"]) == (403, "host_not_allowed")
    nccl = {**info, "master_address": "127.0.0.1", "backend": "nccl"}
    assert "backend: expected gloo" in trainer.refused("/init_weights_update_group", nccl).error["message"]


def test_a_label_may_change_without_weights(trainer):
    trainer.post("/update_weight_version", {"new_version": "label"})
    assert trainer.sample()["weight_versions"] == [{"version": "label", "start": 0, "end": 8}]
    assert trainer.server.get("/get_weight_version").json == {"weight_version": "label"}
    assert trainer.post("/reset_prefix_cache") == {"success": True}
