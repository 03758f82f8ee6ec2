"""Endpoints about a server for its operators: its load, its model and version, and its interface."""

from __future__ import annotations

import dataclasses
from typing import Any

from mllm_compile.server.endpoints import Answer
from mllm_compile.server.flow.writer import Send
from mllm_compile.server.front import Front
from mllm_compile.server.http import Receive, Scope, respond_json
from mllm_compile.server.rl.rendezvous import backend_of
from mllm_compile.version import __version__

# Of ServeOptions: keys, and where things are on this machine.
NOT_TOLD = {"api_keys", "ssl_certfile", "ssl_keyfile", "uds", "model", "otlp_traces_endpoint"}


def load(front: Front) -> Answer:
    """The requests in work, by vLLM's name, and of them those that have no slot yet."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await respond_json(send, load_of(front))

    return answer


def load_of(front: Front) -> dict[str, int]:
    """An engine's requests in work."""
    running, waiting = front.dispatcher.num_running(), front.num_waiting
    load = len(front.dispatcher.jobs) + len(front.pooling)
    return {"server_load": load, "running": running + len(front.pooling), "waiting": waiting}


def server_info(front: Front) -> Answer:
    """The version, the settings, and the config of the engine as it was resolved."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        told = {name: value for name, value in dataclasses.asdict(front.options).items() if name not in NOT_TOLD}
        info: dict[str, Any] = {"version": __version__, "state": front.readiness()[1]["state"], "server": told}
        info["engine"] = engine_info(front)
        facts = front.supervisor.facts
        if facts is not None and front.options.enable_rl:
            info["vllm_config"] = {  # what clients of vLLM's weight transfer look at
                "weight_transfer_config": {"backend": backend_of(facts)},
                "model_config": {"dtype": f"torch.{facts.hello.dtype}"},
            }
        await respond_json(send, info)

    return answer


def engine_info(front: Front) -> dict[str, Any] | None:
    """An engine's model, limits and config; None: none was ready yet."""
    if front.supervisor.facts is None:
        return None
    hello = front.supervisor.facts.hello
    return {
        "model": front.names.cards(),
        "device": hello.device,
        "dtype": hello.dtype,
        "max_model_len": hello.max_model_len,
        "max_running_requests": hello.max_running_requests,
        "kv_tokens": hello.kv_tokens,
        "fingerprint": hello.fingerprint,
        "start_seconds": hello.seconds,
        "config": hello.config,
    }
