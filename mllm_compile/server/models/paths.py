"""The paths of a server of several engines.

Whatever acts on one engine goes to the front of the one that the request means. What is about the server is answered
here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from mllm_compile.server.about import NOT_TOLD, engine_info, load_of
from mllm_compile.server.api import anthropic_answers
from mllm_compile.server.api.errors import ApiError, openai_refusal
from mllm_compile.server.api.fields import read_object
from mllm_compile.server.audio import endpoints as audio
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
from mllm_compile.server.models.engines import EnginesFront
from mllm_compile.server.models.figures import figures
from mllm_compile.server.telemetry.metrics import CONTENT_TYPE
from mllm_compile.version import __version__

Own = Callable[[EnginesFront[Any], Answer], Answer]  # the second: of /openapi.json
Routes = tuple[tuple[str, str, Endpoint], ...]


def answers_of(server: EnginesFront[Any], routes: Routes, description: Answer) -> list[tuple[str, str, Answer]]:
    """Method, path and answer of each path of a server of one model.

    Args:
        description: of /openapi.json.
    """
    return [
        (
            method,
            path,
            OF_SERVER[path](server, description) if path in OF_SERVER else _of_engine(server, method, path, endpoint),
        )
        for method, path, endpoint in routes
    ]


def _of_engine(server: EnginesFront[Any], method: str, path: str, endpoint: Endpoint) -> Answer:
    answers = {name: endpoint(engine.front) for name, engine in server.engines.items()}
    bodies = server.forms if path in audio.BODIES else server.bodies
    refusal = anthropic_answers.refusal if path.startswith("/v1/messages") else openai_refusal

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if method != "POST":
                engine = server.engine_of_query(scope)
            else:
                with server.memory.share() as share:
                    body = await bodies.read(receive, share)
                    engine = server.engine_of_body(scope, path, body)
                receive = _again(body, receive)
        except ClientGoneError:
            return
        except ApiError as error:
            server.refused(error, path, client_of(scope))
            await respond_error(send, error, refusal(error))
            return
        with server.serving(engine):
            await answers[engine.name](scope, receive, send)

    return answer


def _again(body: bytes, receive: Receive) -> Receive:
    """A body that has been read, and then what follows it."""
    told: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> dict[str, Any]:
        return told.pop() if told else await receive()

    return replay


# Of the server -------------------------------------------------------------------------------------------------------


def _told(tell: Callable[[EnginesFront[Any], Scope], Any]) -> Own:
    """The answer that `tell` gives, or raises."""

    def own(server: EnginesFront[Any], description: Answer) -> Answer:
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


def _health(server: EnginesFront[Any], scope: Scope) -> tuple[int, dict[str, Any]]:
    is_well, state = server.health()
    return 200 if is_well else 503, state


def _readiness(server: EnginesFront[Any], scope: Scope) -> tuple[int, dict[str, Any]]:
    is_ready, state = server.readiness()
    return 200 if is_ready else 503, state


def _models(server: EnginesFront[Any], scope: Scope) -> dict[str, Any]:
    return {"object": "list", "data": server.cards()}


def _model(server: EnginesFront[Any], scope: Scope) -> dict[str, Any]:
    return server.card(scope["path_params"]["name"])


def _load(server: EnginesFront[Any], scope: Scope) -> dict[str, Any]:
    loads = {name: load_of(one.front) for name, one in server.engines.items()}
    return {"server_load": sum(one.pop("server_load") for one in loads.values()), f"{server.kind}s": loads}


def _server_info(server: EnginesFront[Any], scope: Scope) -> dict[str, Any]:
    options = dataclasses.asdict(server.options)
    return {
        "version": __version__,
        "state": server.readiness()[1]["state"],
        "server": {name: value for name, value in options.items() if name not in NOT_TOLD},
        "devices": server.devices(),
        f"{server.kind}s": {
            name: {"state": one.state, "failure": one.front.supervisor.failure, "engine": engine_info(one.front)}
            for name, one in server.engines.items()
        },
    }


def _metrics(server: EnginesFront[Any], description: Answer) -> Answer:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await respond(send, figures(server), headers=[(b"content-type", CONTENT_TYPE.encode())])

    return answer


def _abort(server: EnginesFront[Any], description: Answer) -> Answer:
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
        fronts = [one.front for one in server.engines.values()]
        await respond_json(send, {"aborted": [name for front in fronts for name in front.dispatcher.abort(asked)]})

    return answer


def _of_any(endpoint: Endpoint) -> Own:
    """The answer of the first engine's front, as all have the same."""
    return lambda server, description: endpoint(server.first.front)


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
