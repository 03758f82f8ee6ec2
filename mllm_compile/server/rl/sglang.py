"""SGLang's paths, as slime and verl call them: weights in buckets or from a folder, pause, cache.

Its updates have no begin and no end. Here the first bucket begins one, and the bucket that makes it whole ends it, so
that no request sees a mix; /continue_generation refuses to leave one behind that lacks tensors.
"""

from __future__ import annotations

from typing import Any

import msgspec

from mllm_compile.server.api.errors import bad_request
from mllm_compile.server.endpoints import Endpoint
from mllm_compile.server.rl.endpoint import Asked, endpoint
from mllm_compile.server.rl.rendezvous import check_folder, check_host
from mllm_compile.server.rl.vllm import check_label

_MODES = {"abort": "abort", "in_place": "keep", "retract": "retract"}
_FLAT = "flattened_bucket"


class PauseGenerationFields(msgspec.Struct, kw_only=True):
    """The fields of /pause_generation."""

    mode: str = "abort"


class AbortRequestFields(msgspec.Struct, kw_only=True):
    """The fields of /abort_request."""

    rid: str | None = None
    abort_all: bool = False


class DiskFields(msgspec.Struct, kw_only=True):
    """The fields of /update_weights_from_disk."""

    model_path: str
    weight_version: str | None = None
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    is_async: bool = False


class GroupFields(msgspec.Struct, kw_only=True):
    """The fields of /init_weights_update_group."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class NameFields(msgspec.Struct, kw_only=True):
    """The fields of /destroy_weights_update_group."""

    group_name: str = "weight_update_group"


class BucketFields(msgspec.Struct, kw_only=True):
    """The fields of /update_weights_from_distributed."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    weight_version: str | None = None
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


class TensorFields(msgspec.Struct, kw_only=True):
    """The fields of /update_weights_from_tensor: pickles, which are read by their opcodes, one for each rank."""

    serialized_named_tensors: list[str]
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False


async def pause(asked: Asked) -> Any:
    mode = asked.read(PauseGenerationFields).mode
    if mode not in _MODES:
        raise bad_request(f"mode: expected {', '.join(_MODES)}, got {mode[:50]!r}", "mode")
    await asked.calls.ask("pause", mode=_MODES[mode], flush=False)
    return {"message": "Generation paused successfully.", "status": "ok"}


async def resume(asked: Asked) -> Any:
    await asked.calls.ask("continue")
    return {"message": "Generation continued successfully.", "status": "ok"}


async def flush_cache(asked: Asked) -> Any:
    await asked.calls.ask("flush")
    return {"success": True, "message": "Cache flushed."}


async def abort(asked: Asked) -> Any:
    fields = asked.read(AbortRequestFields)
    if not fields.abort_all and not fields.rid:
        raise bad_request("rid: expected it, or abort_all: true")
    return {"aborted": asked.front.dispatcher.end_aborted(None if fields.abort_all else [fields.rid or ""])}


async def from_disk(asked: Asked) -> Any:
    fields = asked.read(DiskFields)
    if fields.load_format not in (None, "auto", "safetensors"):
        raise bad_request(f"load_format: expected safetensors, got {fields.load_format[:50]!r}", "load_format")
    check_label(fields.weight_version, "weight_version")
    folder = check_folder(asked.front.options, "model_path", fields.model_path)
    await _end_and_flush(asked, fields.abort_all_requests, fields.flush_cache)
    await asked.calls.ask("folder", path=folder, version=fields.weight_version, is_marked=False)
    return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


async def init_group(asked: Asked) -> Any:
    fields = asked.read(GroupFields)
    await check_host(asked.front, fields.master_address, fields.backend)
    await asked.calls.ask(
        "join_named",
        name=fields.group_name,
        host=fields.master_address,
        port=fields.master_port,
        rank=fields.rank_offset,
        world_size=fields.world_size,
        backend=fields.backend,
    )
    return {"success": True, "message": "Succeeded to initialize custom process group."}


async def destroy_group(asked: Asked) -> Any:
    was_there = await asked.calls.ask("leave_named", name=asked.read(NameFields).group_name)
    return {"success": was_there, "message": "" if was_there else "there was no such group"}


async def from_distributed(asked: Asked) -> Any:
    fields = asked.read(BucketFields)
    if fields.load_format not in (None, _FLAT):
        raise bad_request(f"load_format: expected {_FLAT}, got {fields.load_format[:50]!r}", "load_format")
    check_label(fields.weight_version, "weight_version")
    await _end_and_flush(asked, fields.abort_all_requests, fields.flush_cache)
    await asked.calls.ask(
        "receive_bucket",
        group=fields.group_name,
        names=fields.names,
        dtypes=fields.dtypes,
        shapes=fields.shapes,
        is_flat=fields.load_format == _FLAT,
        version=fields.weight_version,
    )
    return {"success": True, "message": "Succeeded to update parameter online."}


async def from_tensor(asked: Asked) -> Any:
    fields = asked.read(TensorFields)
    if fields.load_format not in (None, _FLAT):
        raise bad_request(f"load_format: expected {_FLAT}, got {fields.load_format[:50]!r}", "load_format")
    if not fields.serialized_named_tensors:
        raise bad_request("serialized_named_tensors: expected one for each rank, got none", "serialized_named_tensors")
    check_label(fields.weight_version, "weight_version")
    await _end_and_flush(asked, fields.abort_all_requests, fields.flush_cache)
    pickled = fields.serialized_named_tensors[0]  # whole tensors: the engine gives its ranks their parts
    await asked.calls.ask("receive_given", pickled=pickled, version=fields.weight_version)
    return {"success": True, "message": "Success"}


async def _end_and_flush(asked: Asked, ends: bool, flushes: bool) -> None:
    """Ends running requests and flushes cached prefixes, where an update asks for it."""
    if ends:
        asked.front.dispatcher.end_aborted(None)
    if flushes:
        await asked.calls.ask("flush")


async def version(asked: Asked) -> Any:
    return {"weight_version": await asked.calls.ask("version")}


async def health(asked: Asked) -> Any:
    return asked.front.health()[1]


BODIES: dict[str, type[msgspec.Struct]] = {
    "/pause_generation": PauseGenerationFields,
    "/abort_request": AbortRequestFields,
    "/update_weights_from_disk": DiskFields,
    "/init_weights_update_group": GroupFields,
    "/destroy_weights_update_group": NameFields,
    "/update_weights_from_distributed": BucketFields,
    "/update_weights_from_tensor": TensorFields,
}
PATHS: tuple[tuple[str, str, Endpoint], ...] = (
    ("POST", "/pause_generation", endpoint(pause)),
    ("POST", "/continue_generation", endpoint(resume)),
    ("GET", "/flush_cache", endpoint(flush_cache)),
    ("POST", "/flush_cache", endpoint(flush_cache)),
    ("POST", "/abort_request", endpoint(abort)),
    ("POST", "/update_weights_from_disk", endpoint(from_disk)),
    ("POST", "/init_weights_update_group", endpoint(init_group)),
    ("POST", "/destroy_weights_update_group", endpoint(destroy_group)),
    ("POST", "/update_weights_from_distributed", endpoint(from_distributed)),
    ("POST", "/update_weights_from_tensor", endpoint(from_tensor)),
    ("GET", "/get_weight_version", endpoint(version)),
    ("GET", "/health_generate", endpoint(health)),
)
