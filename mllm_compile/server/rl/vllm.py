"""vLLM's development paths, as 0.33 has them: pause, weight transfer, versions, sums; and prime-rl's three.

Every call may come again: pause, resume, start and finish without effect, an announcement without a second transfer.
What is wrong for good is 4xx, as clients repeat 5xx.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec

from mllm_compile.server import adapters
from mllm_compile.server.api.errors import bad_request
from mllm_compile.server.endpoints import Endpoint
from mllm_compile.server.rl.endpoint import Asked, endpoint, refused
from mllm_compile.server.rl.rendezvous import check_folder, check_host

_MODES = ("abort", "wait", "keep", "retract")
_BUFFER_BYTES = 1 << 30  # vLLM's
_MOST_OF_LABEL = 256
_NO_RPC = (
    "methods of workers are not called by name: use /pause, /update_weights and the other paths of docs/rollouts.md"
)


class InitInfo(msgspec.Struct, kw_only=True):
    """How to join the trainer's group; without an address there is none, and weights come by handles."""

    master_address: str | None = None
    master_port: int = 0
    rank_offset: int = 0
    world_size: int = 0
    packed: bool = False
    packed_buffer_size_bytes: int = _BUFFER_BYTES
    packed_num_buffers: int = 2  # the sender's


class InitFields(msgspec.Struct, kw_only=True):
    """The fields of /init_weight_transfer_engine."""

    init_info: InitInfo


class StartFields(msgspec.Struct, kw_only=True):
    """The fields of /start_weight_update; names of a checkpoint and of modules are both taken."""

    is_checkpoint_format: bool = True
    partial: bool = False
    direct: bool = False


class UpdateInfo(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The tensors that follow."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    packed: bool | None = None
    num_updates_list: list[int] | None = None
    update_kind: str | None = None
    ipc_handles: Any = None
    ipc_handles_pickled: str | None = None
    tensor_sizes: list[int] | None = None
    sums: dict[str, int] | None = None


class UpdateFields(msgspec.Struct, kw_only=True):
    """The fields of /update_weights: vLLM's, or prime-rl's folder."""

    update_info: UpdateInfo | None = None
    weight_dir: str | None = None


class FinishFields(msgspec.Struct, kw_only=True):
    """The fields of /finish_weight_update."""

    weight_version: str | None = None


class VersionFields(msgspec.Struct, kw_only=True):
    """The fields of /update_weight_version."""

    new_version: str
    abort_all_requests: bool = False


class CheckerFields(msgspec.Struct, kw_only=True):
    """The fields of /weight_checker."""

    action: str
    baseline: dict[str, str] | None = None


class ResetFields(msgspec.Struct, kw_only=True):
    """The fields of /reset_prefix_cache: in the query as vLLM has them, or in SkyRL's body."""

    reset_running_requests: bool = False
    reset_external: bool = False


class AbortFields(msgspec.Struct, kw_only=True):
    """The fields of /abort_requests; no ids mean all."""

    request_ids: list[str] = []


class BroadcasterFields(msgspec.Struct, kw_only=True):
    """The fields of prime-rl's /init_broadcaster."""

    host: str
    port: int
    rank_offset: int
    inference_world_size: int
    timeout: int | None = None
    quantize_in_weight_transfer: bool = False


async def pause(asked: Asked) -> Any:
    mode = asked.text("mode", "abort")
    if mode not in _MODES:
        raise bad_request(f"mode: expected {', '.join(_MODES)}, got {mode[:50]!r}", "mode")
    await asked.calls.ask("pause", mode=mode, flush=asked.flag("clear_cache", default=True))
    return {"status": "paused"}


async def resume(asked: Asked) -> Any:
    await asked.calls.ask("resume")
    return {"status": "resumed"}


async def is_paused(asked: Asked) -> Any:
    return await asked.calls.ask("is_paused")


async def world_size(asked: Asked) -> Any:
    return {"world_size": 1}  # members of a group: the engine joins as one, and gives its ranks their parts


async def init_transfer(asked: Asked) -> Any:
    info = asked.read(InitFields).init_info
    if info.master_address is None:
        if info.master_port:
            raise bad_request("master_address: expected it beside master_port")
        return {"message": "Weight transfer initialized"}
    if info.packed_buffer_size_bytes < 1:
        raise bad_request(
            f"packed_buffer_size_bytes: expected at least 1, got {info.packed_buffer_size_bytes}", "init_info"
        )
    await check_host(asked.front, info.master_address)
    await asked.calls.ask(
        "join_vllm",
        host=info.master_address,
        port=info.master_port,
        rank=info.rank_offset,
        world_size=info.world_size,
        buffer_bytes=info.packed_buffer_size_bytes if info.packed else None,
    )
    return {"message": "Weight transfer initialized"}


async def start(asked: Asked) -> Any:
    fields = asked.read(StartFields)
    await asked.calls.ask("start", partial=fields.partial, direct=fields.direct)
    return {"message": "Weight update started"}


async def update(asked: Asked) -> Any:
    fields = asked.read(UpdateFields)
    if (fields.update_info is None) == (fields.weight_dir is None):
        raise bad_request("update_info: expected it, or weight_dir, and not both")
    if fields.weight_dir is not None:
        folder = check_folder(asked.front.options, "weight_dir", fields.weight_dir)
        check_label(os.path.basename(folder), "weight_dir")  # the version
        return {"status": "ok"} | await asked.calls.ask("receive_prime", path=folder)
    info = fields.update_info
    assert info is not None, "one of the two is there"
    if info.ipc_handles is not None and info.ipc_handles_pickled is not None:
        raise bad_request("ipc_handles: expected them, or ipc_handles_pickled, and not both")
    if info.update_kind not in (None, "dense", "sparse_flat"):
        raise bad_request(f"update_kind: expected dense or sparse_flat, got {info.update_kind[:50]!r}", "update_kind")
    if (info.update_kind == "sparse_flat") > (info.num_updates_list is not None):
        raise bad_request("num_updates_list: expected it beside update_kind sparse_flat", "num_updates_list")
    if info.num_updates_list is not None and (info.ipc_handles, info.ipc_handles_pickled) != (None, None):
        raise bad_request("num_updates_list: expected it without ipc_handles, as single values come over a group")
    count = await asked.calls.ask(
        "receive_vllm",
        names=info.names,
        dtypes=info.dtype_names,
        shapes=info.shapes,
        counts=info.num_updates_list,
        handles=info.ipc_handles,
        pickled=info.ipc_handles_pickled,
        sizes=info.tensor_sizes,
        sums=info.sums,
    )
    return {"message": f"{count} tensors received"}


async def finish(asked: Asked) -> Any:
    version = asked.read(FinishFields).weight_version
    check_label(version, "weight_version")
    return {"message": "Weight update finished"} | await asked.calls.ask("finish", version=version)


async def set_version(asked: Asked) -> Any:
    fields = asked.read(VersionFields)
    check_label(fields.new_version, "new_version")
    if fields.abort_all_requests:
        asked.front.dispatcher.end_aborted(None)
    await asked.calls.ask("set_version", version=fields.new_version)
    return {"success": True, "message": "", "new_version": fields.new_version, "weight_version": fields.new_version}


async def weight_info(asked: Asked) -> Any:
    return {"weight_version": await asked.calls.ask("version")}


async def weight_checker(asked: Asked) -> Any:
    fields = asked.read(CheckerFields)
    if fields.action not in ("checksum", "compare"):
        raise bad_request(f"action: expected checksum or compare, got {fields.action[:50]!r}", "action")
    if fields.action == "compare" and fields.baseline is None:
        raise bad_request("baseline: expected the checksums to compare with")
    sums = await asked.calls.ask("checksums")
    if fields.baseline is None:
        return {"checksums": sums}
    names = sums.keys() | fields.baseline.keys()
    wrong = sorted(name for name in names if sums.get(name) != fields.baseline.get(name))
    return {"match": not wrong, "mismatches": wrong}


async def reset_prefix_cache(asked: Asked) -> Any:
    fields = asked.read(ResetFields)
    if fields.reset_external or asked.flag("reset_external", default=False):
        raise bad_request("reset_external: expected false: there is no cache outside of the engine")
    retracts = fields.reset_running_requests or asked.flag("reset_running_requests", default=False)
    return {"success": await asked.calls.ask("flush", retracts=retracts)}


async def abort_requests(asked: Asked) -> Any:
    fields = asked.read(AbortFields)
    return {"aborted": asked.front.dispatcher.end_aborted(fields.request_ids or None)}


async def init_broadcaster(asked: Asked) -> Any:
    fields = asked.read(BroadcasterFields)
    if fields.quantize_in_weight_transfer:
        raise bad_request("quantize_in_weight_transfer: expected false: the engine quantises by itself")
    await check_host(asked.front, fields.host)
    await asked.calls.ask(
        "join_prime",
        host=fields.host,
        port=fields.port,
        rank=fields.rank_offset + 1,
        world_size=fields.inference_world_size + 1,
    )
    return {"status": "ok"}


def check_label(label: str | None, name: str) -> None:
    """
    Raises:
        ApiError: a version that a log line cannot hold.
    """
    if label is not None and not (1 <= len(label) <= _MOST_OF_LABEL and label.isprintable()):
        raise bad_request(f"{name}: expected 1 to {_MOST_OF_LABEL} printable characters", name)


BODIES: dict[str, type[msgspec.Struct]] = {
    "/init_weight_transfer_engine": InitFields,
    "/start_weight_update": StartFields,
    "/update_weights": UpdateFields,
    "/finish_weight_update": FinishFields,
    "/update_weight_version": VersionFields,
    "/weight_checker": CheckerFields,
    "/reset_prefix_cache": ResetFields,
    "/abort_requests": AbortFields,
    "/load_lora_adapter": adapters.LoadFields,
    "/init_broadcaster": BroadcasterFields,
}
PATHS: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/pause", endpoint(pause)),
    ("POST", "/resume", endpoint(resume)),
    ("GET", "/is_paused", endpoint(is_paused)),
    ("GET", "/get_world_size", endpoint(world_size)),
    ("POST", "/init_weight_transfer_engine", endpoint(init_transfer)),
    ("POST", "/start_weight_update", endpoint(start)),
    ("POST", "/update_weights", endpoint(update)),
    ("POST", "/finish_weight_update", endpoint(finish)),
    ("POST", "/update_weight_version", endpoint(set_version)),
    ("GET", "/weight_info", endpoint(weight_info)),
    ("POST", "/weight_checker", endpoint(weight_checker)),
    ("POST", "/reset_prefix_cache", endpoint(reset_prefix_cache)),
    ("POST", "/abort_requests", endpoint(abort_requests)),
    ("POST", "/init_broadcaster", endpoint(init_broadcaster)),
    ("POST", "/load_lora_adapter", adapters.replace),
    ("POST", "/collective_rpc", refused(_NO_RPC)),
)
