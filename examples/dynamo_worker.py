"""A worker of Dynamo, which routes by the engine's KV events.

    python examples/dynamo_worker.py --model CONFIG.yaml --model-name qwen3-8b

The config's `runtime.kv_events_config` turns events on. Needs the packages `ai-dynamo` and `ai-dynamo-runtime`, and the
extra `events`.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from dynamo.common.backend.engine import EngineConfig, LLMEngine, LlmRegistration
from dynamo.common.backend.publisher import ZmqSource
from dynamo.common.backend.worker import WorkerConfig

from mllm_compile import AsyncEngine, MllmError, SamplingParams

# Fields of a request by the parameter that each is.
SAMPLING = (
    "n", "temperature", "top_p", "top_k", "min_p", "seed",
    "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
STOPPING = {
    "max_tokens": "max_tokens", "min_tokens": "min_tokens", "ignore_eos": "ignore_eos",
    "stop_token_ids": "stop_token_ids", "stop_token_ids_hidden": "stop_token_ids",
}  # fmt: skip
# Options that change no token here: the frontend makes and cuts texts itself.
OF_TEXTS = {"stop", "skip_special_tokens", "return_tokens_as_token_ids"}
REASONS = {"stop": "stop", "length": "length", "abort": "cancelled", "error": "error"}


def params_of(request: Mapping[str, Any]) -> SamplingParams:
    """The parameters of a request.

    Raises:
        MllmError: it asks for what this worker does not do.
    """
    given: dict[str, Any] = {"max_tokens": None}
    for section, names in (
        ("sampling_options", dict(zip(SAMPLING, SAMPLING, strict=True))),
        ("stop_conditions", STOPPING),
        ("output_options", {}),
    ):
        for name, value in (request.get(section) or {}).items():
            if value is None or value is False or (name in OF_TEXTS):
                continue
            if name not in names:
                raise MllmError(f"{section}.{name}: expected one of {', '.join(names) or 'none'}, got {value!r}")
            if names[name] == "stop_token_ids":
                value = sorted({*given.get("stop_token_ids", ()), *value})
            given[names[name]] = max(value, 0) if name == "top_k" else value  # -1: all, as 0 is here
    if given.get("n", 1) != 1:
        raise MllmError(f"sampling_options.n: expected 1, got {given['n']}. Send a request for each")
    for name in ("multi_modal_data", "prefill_result", "encoder_result"):
        if request.get(name):
            raise MllmError(f"{name}: this worker takes texts, and computes whole requests")
    return SamplingParams(detokenize=False, **given)


class Worker(LLMEngine):
    """One engine of ours, as Dynamo drives it."""

    def __init__(self, model: str, name: str) -> None:
        self._model, self._name = model, name
        self._engine: AsyncEngine | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[Worker, WorkerConfig]:
        parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--model", required=True)
        parser.add_argument("--model-name", required=True, help="what requests name, and where the frontend finds it")
        parser.add_argument("--namespace", default="dynamo")
        parser.add_argument("--discovery-backend", default="etcd")
        asked = parser.parse_args(argv)
        config = WorkerConfig(
            namespace=asked.namespace,
            component="mllm",
            model_name=asked.model_name,
            served_model_name=asked.model_name,
            discovery_backend=asked.discovery_backend,
            use_kv_events=True,
        )
        return cls(asked.model, asked.model_name), config

    async def start(self, worker_id: int) -> EngineConfig:
        self._engine = await asyncio.to_thread(AsyncEngine, Path(self._model))
        limits = self._engine.engine.core.scheduler_config
        return EngineConfig(
            model=self._name,
            served_model_name=self._name,
            llm=LlmRegistration(
                context_length=limits.max_model_len,
                kv_cache_block_size=limits.page_size,
                total_kv_blocks=limits.usable_pages,
                max_num_seqs=limits.max_running_requests,
                max_num_batched_tokens=limits.max_num_batched_tokens,
            ),
        )

    async def kv_event_sources(self) -> list[ZmqSource]:
        """Where the engine publishes; none where its config turns no events on."""
        assert self._engine is not None, "it is started"
        config = self._engine.engine.config
        events = None if config is None else config.runtime.kv_events_config
        if events is None or not events.is_on:
            return []
        endpoint = events.endpoint.replace("*", "127.0.0.1").replace("[::]", "[::1]")
        return [ZmqSource(endpoint, events.topic)]

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        assert self._engine is not None, "it is started"
        ids, count = list(request["token_ids"]), 0
        outputs = self._engine.generate(ids, params_of(request), context.id())
        async for output in outputs:
            (choice,) = output.outputs
            count += len(choice.token_ids)
            chunk: dict[str, Any] = {"token_ids": list(choice.token_ids), "index": 0}
            if output.finished:
                if choice.finish_reason == "error":
                    raise MllmError(output.error or "the request failed")
                chunk["finish_reason"] = REASONS[choice.finish_reason or "stop"]
                chunk["completion_usage"] = {
                    "prompt_tokens": len(ids), "completion_tokens": count, "total_tokens": len(ids) + count,
                }  # fmt: skip
            yield chunk

    async def abort(self, context: Any) -> None:
        if self._engine is not None:
            await self._engine.abort(context.id())

    async def cleanup(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()


if __name__ == "__main__":
    from dynamo.common.backend.run import run

    run(Worker)
