"""The paths of a server of several models.

Whatever acts on one engine goes to the front of the model that the request names: a POST in its body, others in
their query. What is about the server is answered here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qs

import msgspec

from mllm_compile.server.about import NOT_TOLD, engine_info
from mllm_compile.server.api import anthropic_answers
from mllm_compile.server.api.errors import ApiError, bad_request, openai_refusal
from mllm_compile.server.api.fields import members_of, read_object
from mllm_compile.server.endpoints import Answer, Endpoint, page, request_ids, version
from mllm_compile.server.flow.writer import Send
from mllm_compile.server.http import (
    ClientGoneError,
    Receive,
    Scope,
    client_of,
    respond,
    respond_error,
    respond_json,
)
from mllm_compile.server.models.figures import figures
from mllm_compile.server.models.front import ModelsFront
from mllm_compile.server.models.tenant import Tenant
from mllm_compile.server.telemetry.metrics import CONTENT_TYPE
from mllm_compile.version import __version__

_MOST_OF_QUERY = 4096  # bytes
_OF_ADAPTERS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")
Own = Callable[[ModelsFront, Answer], Answer]  # the second: of /openapi.json
Routes = tuple[tuple[str, str, Endpoint], ...]


def answers_of(server: ModelsFront, routes: Routes, description: Answer) -> list[tuple[str, str, Answer]]:
    """Method, path and answer of each path of a server of one model.

    Args:
        description: of /openapi.json.
    """
    return [
        (
            method,
            path,
            OF_SERVER[path](server, description) if path in OF_SERVER else _of_model(server, method, path, endpoint),
        )
        for method, path, endpoint in routes
    ]


def _of_model(server: ModelsFront, method: str, path: str, endpoint: Endpoint) -> Answer:
    answers = {name: endpoint(tenant.front) for name, tenant in server.tenants.items()}
    refusal = anthropic_answers.refusal if path.startswith("/v1/messages") else openai_refusal

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if method != "POST":
                tenant = server.find(_model_of_query(scope))
            else:
                with server.memory.share() as share:
                    body = await server.bodies.read(receive, share)
                    tenant = _tenant_of(server, path, body)
                receive = _again(body, receive)
        except ClientGoneError:
            return
        except ApiError as error:
            server.refused(error, path, client_of(scope))
            await respond_error(send, error, refusal(error))
            return
        await answers[tenant.name](scope, receive, send)

    return answer


def _model_of_query(scope: Scope) -> str | None:
    query = parse_qs(scope.get("query_string", b"")[:_MOST_OF_QUERY].decode("latin-1"))
    return query["model"][-1] if "model" in query else None


def _tenant_of(server: ModelsFront, path: str, body: bytes) -> Tenant:
    members = members_of(body)
    tenant = server.find(_text_of(members, "model"))
    if path in _OF_ADAPTERS:
        server.check_adapter_name(tenant, _text_of(members, "lora_name"))
    return tenant


def _text_of(members: Mapping[str, msgspec.Raw], name: str) -> Any:
    """A member's value; None: it is not there."""
    try:
        return msgspec.json.decode(members[name], type=str | None) if name in members else None
    except msgspec.MsgspecError:
        raise bad_request(f"{name}: expected a text", name) from None


def _again(body: bytes, receive: Receive) -> Receive:
    """A body that has been read, and then what follows it."""
    told: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> dict[str, Any]:
        return told.pop() if told else await receive()

    return replay


# Of the server -------------------------------------------------------------------------------------------------------


def _told(tell: Callable[[ModelsFront, Scope], Any]) -> Own:
    """The answer that `tell` gives, or raises."""

    def own(server: ModelsFront, description: Answer) -> Answer:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            try:
                told = tell(server, scope)
            except ApiError as error:
                await respond_error(send, error)
                return
            status, data = told if isinstance(told, tuple) else (200, told)
            await respond_json(send, data, status)

        return answer

    return own


def _health(server: ModelsFront, scope: Scope) -> tuple[int, dict[str, Any]]:
    is_well, state = server.health()
    return 200 if is_well else 503, state


def _readiness(server: ModelsFront, scope: Scope) -> tuple[int, dict[str, Any]]:
    is_ready, state = server.readiness()
    return 200 if is_ready else 503, state


def _cards(tenant: Tenant) -> list[dict[str, Any]]:
    return [card | {"state": tenant.state} for card in tenant.front.names.cards()]


def _models(server: ModelsFront, scope: Scope) -> dict[str, Any]:
    return {"object": "list", "data": [card for one in server.tenants.values() for card in _cards(one)]}


def _model(server: ModelsFront, scope: Scope) -> dict[str, Any]:
    name = scope["path_params"]["name"]
    tenant = server.find(name)
    return next(card for card in _cards(tenant) if card["id"] == name)


def _load(server: ModelsFront, scope: Scope) -> dict[str, Any]:
    models = {
        name: {"running": one.front.dispatcher.num_running(), "waiting": one.front.admission.waiting}
        for name, one in server.tenants.items()
    }
    return {"server_load": sum(len(one.front.dispatcher.jobs) for one in server.tenants.values()), "models": models}


def _server_info(server: ModelsFront, scope: Scope) -> dict[str, Any]:
    options = dataclasses.asdict(server.options)
    return {
        "version": __version__,
        "state": server.readiness()[1]["state"],
        "server": {name: value for name, value in options.items() if name not in NOT_TOLD},
        "devices": {one.name: {"bytes": one.num_bytes, "given_bytes": one.given_bytes} for one in server.brokers},
        "models": {
            name: {"state": one.state, "failure": one.front.supervisor.failure, "engine": engine_info(one.front)}
            for name, one in server.tenants.items()
        },
    }


def _metrics(server: ModelsFront, description: Answer) -> Answer:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, figures(server), headers=[(b"content-type", CONTENT_TYPE.encode())])

    return answer


def _abort(server: ModelsFront, description: Answer) -> Answer:
    """Requests' ids are of no model: each front is asked."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with server.memory.share() as share:
                asked = request_ids(read_object(await server.bodies.read(receive, share)))
        except ClientGoneError:
            return
        except ApiError as error:
            server.refused(error, scope["path"], client_of(scope))
            await respond_error(send, error)
            return
        fronts = [one.front for one in server.tenants.values()]
        await respond_json(send, {"aborted": [name for front in fronts for name in front.dispatcher.abort(asked)]})

    return answer


def _of_any(endpoint: Endpoint) -> Own:
    """The answer of the first model's front, as all have the same."""
    return lambda server, description: endpoint(next(iter(server.tenants.values())).front)


OF_SERVER: Mapping[str, Own] = {
    "/": _of_any(page),
    "/version": _of_any(version),
    "/health": _told(_health),
    "/ready": _told(_readiness),
    "/ping": _told(_readiness),
    "/v1/models": _told(_models),
    "/v1/models/{name:path}": _told(_model),
    "/load": _told(_load),
    "/server_info": _told(_server_info),
    "/metrics": _metrics,
    "/v1/abort": _abort,
    "/openapi.json": lambda server, description: description,
}
