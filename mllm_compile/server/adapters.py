"""The endpoints that load and unload adapters, with vLLM's bodies and answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from mllm_compile.server.api.errors import ApiError, bad_request
from mllm_compile.server.api.fields import read_fields
from mllm_compile.server.endpoints import Answer, ToldBytes, from_body
from mllm_compile.server.flow.memory import Share
from mllm_compile.server.front import Front

logger = logging.getLogger("mllm_compile.server")

_TEXT = (b"content-type", b"text/plain; charset=utf-8")
_MOST_OF_PATH = 4096  # characters
_NOT_ALLOWED = "serve with --allow-runtime-lora, and an API key or on this machine alone"
_NOT_OPEN = "unsupported_endpoint"


class LoadFields(msgspec.Struct, kw_only=True):
    """The fields of /v1/load_lora_adapter."""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None
    model: str | None = None  # where a server has several


class UnloadFields(msgspec.Struct, kw_only=True):
    """The fields of /v1/unload_lora_adapter; vLLM's number of an adapter is passed over."""

    lora_name: str
    lora_int_id: int | None = None
    model: str | None = None  # as of LoadFields


def load(front: Front) -> Answer:
    """Loads an adapter from a folder of the server's machine."""
    return _loading(front, always_replaces=False)


def replace(front: Front) -> Answer:
    """Likewise, in the place of one of that name, as prime-rl's and SkyRL's servers do."""
    return _loading(front, always_replaces=True)


def _loading(front: Front, *, always_replaces: bool) -> Answer:
    async def change(body: bytes) -> tuple[str, list[str]]:
        fields, unknown = read_fields(LoadFields, body)
        if not fields.lora_name or not fields.lora_path:
            raise bad_request("Both 'lora_name' and 'lora_path' must be provided.", "lora_name")
        if len(fields.lora_path) > _MOST_OF_PATH or "\0" in fields.lora_path:
            raise bad_request(f"lora_path: expected a path of up to {_MOST_OF_PATH} characters")
        await front.facts(fields.model)
        if fields.lora_name in front.names.own:
            raise bad_request(f"lora_name: {fields.lora_name} is the model's own name; give the adapter another")
        replaces = always_replaces or bool(fields.load_inplace)
        await front.adapter_changes.load(fields.lora_name, fields.lora_path, replace=replaces)
        return f"Success: LoRA adapter '{fields.lora_name}' added successfully.", unknown

    return _changing(front, change)


def unload(front: Front) -> Answer:
    """Takes an adapter's name back; its requests are answered to their end."""

    async def change(body: bytes) -> tuple[str, list[str]]:
        fields, unknown = read_fields(UnloadFields, body)
        await front.facts(fields.model)
        if front.names.adapter(fields.lora_name) is None:
            message = f"The lora adapter '{fields.lora_name[:200]}' cannot be found."
            raise ApiError(404, message, param="lora_name", code="model_not_found")
        await front.adapter_changes.unload(fields.lora_name)
        return f"Success: LoRA adapter '{fields.lora_name}' removed successfully.", unknown

    return _changing(front, change)


def _changing(front: Front, change: Callable[[bytes], Coroutine[Any, Any, tuple[str, list[str]]]]) -> Answer:
    async def told(body: bytes, client: str, share: Share) -> ToldBytes:
        if not front.options.allow_runtime_lora:
            raise ApiError(403, f"adapters are as the server was started with: {_NOT_ALLOWED}", code=_NOT_OPEN)
        text, unknown = await change(body)
        logger.info("%s client %s", text, client)
        return text.encode(), unknown

    return from_body(front, told, [_TEXT])
