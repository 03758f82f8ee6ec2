"""The description of the interface for programs, as OpenAPI 3.1: paths, and the fields of their requests.

Types come from the fields' classes, and from SamplingParams where it checks a value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, get_type_hints

import msgspec

from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.server.endpoints import Answer
from mllm_compile.server.flow.job import JSON
from mllm_compile.server.flow.writer import Send
from mllm_compile.server.http import Receive, Scope, respond
from mllm_compile.version import __version__

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")},
        }
    },
}


def document(routes: Iterable[tuple[str, str]], bodies: Mapping[str, type[msgspec.Struct]]) -> dict[str, Any]:
    """The description.

    Args:
        routes: method and path of each.
        bodies: the fields of requests, by path.
    """
    (_, schemas) = msgspec.json.schema_components(list(bodies.values()), ref_template="#/components/schemas/{name}")
    sampling = _sampling_types()
    for schema in schemas.values():
        for name, value in schema.get("properties", {}).items():
            if set(value) <= {"default"} and name in sampling:  # of any type: SamplingParams checks it
                value |= sampling[name]
    paths: dict[str, Any] = {}
    for method, path in routes:
        operation: dict[str, Any] = {
            "operationId": re.sub(r"\W+", "_", f"{method}{path}").strip("_").lower(),
            "responses": {
                "200": {"description": "the answer"},
                "default": {"description": "an error", "content": _json({"$ref": "#/components/schemas/Error"})},
            },
        }
        named = re.findall(r"\{(\w+)(?::path)?\}", path)
        operation |= {"parameters": [_parameter(name) for name in named]} if named else {}
        if path in bodies:
            kind = getattr(bodies[path], "content_type", "application/json")
            content = {kind: {"schema": {"$ref": f"#/components/schemas/{bodies[path].__name__}"}}}
            operation["requestBody"] = {"required": True, "content": content}
        paths.setdefault(path.replace(":path", ""), {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "mllm-compile", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": _ERROR}},
    }


def openapi(routes: Iterable[tuple[str, str]], bodies: Mapping[str, type[msgspec.Struct]]) -> Answer:
    """The endpoint of the description, which is made once."""
    made = msgspec.json.encode(document(routes, bodies))

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, made, headers=JSON)

    return answer


def _sampling_types() -> dict[str, dict[str, Any]]:
    hints = get_type_hints(SamplingParams)
    hints.pop("structured_outputs")  # an object over HTTP
    return {name: msgspec.json.schema(hint | None) for name, hint in hints.items()}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _parameter(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
