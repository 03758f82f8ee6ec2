"""examples/dynamo_worker.py: the engine's own tokens and events, by Dynamo's interface.

With Dynamo's packages its own classes are the base; without them stand-ins of the same fields, as seen in 1.6.1.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import runpy
import sys
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mllm_compile import Engine, MllmError, SamplingParams
from tests.tiny_model import tiny_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "dynamo_worker.py"
PROMPT = list(range(3, 60))


@dataclass
class Context:
    name: str

    def id(self) -> str:
        return self.name


def stand_ins() -> dict[str, ModuleType]:
    registration = "context_length kv_cache_block_size total_kv_blocks max_num_seqs max_num_batched_tokens"
    worker = "namespace component model_name served_model_name discovery_backend use_kv_events"
    classes = {
        "engine": {
            "LLMEngine": object,
            "EngineConfig": make_dataclass("EngineConfig", ["model", "served_model_name", "llm"]),
            "LlmRegistration": make_dataclass("LlmRegistration", registration.split()),
        },
        "publisher": {"ZmqSource": make_dataclass("ZmqSource", ["endpoint", "topic"])},
        "worker": {"WorkerConfig": make_dataclass("WorkerConfig", worker.split())},
    }
    modules = {name: ModuleType(name) for name in ("dynamo", "dynamo.common", "dynamo.common.backend")}
    for name, found in classes.items():
        modules[f"dynamo.common.backend.{name}"] = module = ModuleType(name)
        vars(module).update(found)
    return modules


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    try:
        is_there = importlib.util.find_spec("dynamo.common.backend.engine") is not None
    except ModuleNotFoundError:
        is_there = False
    for name, module in {} if is_there else stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    return runpy.run_path(str(EXAMPLE))


def test_a_worker_gives_the_engines_tokens_and_tells_where_its_events_are(example, eager_cache, tmp_path):
    events = {"enable_kv_cache_events": True, "endpoint": f"ipc://{tmp_path}/e", "topic": "kv@w@tiny"}
    config = tiny_config(eager_cache, compile={"backend": "eager"}, runtime={"kv_events_config": events})
    (path := tmp_path / "tiny.yaml").write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
    request = {
        "token_ids": PROMPT,
        "sampling_options": {"temperature": 0.0, "top_k": -1, "n": 1, "top_p": None},
        "stop_conditions": {"max_tokens": 9, "ignore_eos": True, "stop": ["x"], "stop_token_ids_hidden": None},
    }

    async def served() -> tuple[Any, list[dict[str, Any]], list[Any], list[dict[str, Any]]]:
        worker, asked = await example["Worker"].from_args(["--model", str(path), "--model-name", "tiny"])
        assert (asked.model_name, asked.namespace, asked.use_kv_events) == ("tiny", "dynamo", True)
        try:
            told = await worker.start(1)
            chunks = [chunk async for chunk in worker.generate(request, Context("a"))]
            endless = {**request, "stop_conditions": {"ignore_eos": True}}
            cut = []
            async for chunk in worker.generate(endless, Context("b")):
                cut.append(chunk)
                if len(cut) == 1:
                    await worker.abort(Context("b"))
            return told, chunks, await worker.kv_event_sources(), cut
        finally:
            await worker.cleanup()
            await worker.cleanup()

    told, chunks, sources, cut = asyncio.run(served())
    with Engine(str(path)) as engine:
        params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        expected = engine.generate(PROMPT, params)[0].outputs[0].token_ids
        limits = engine.core.scheduler_config
    assert [token for chunk in chunks for token in chunk["token_ids"]] == list(expected)
    assert chunks[-1]["finish_reason"] == "length"
    assert chunks[-1]["completion_usage"] == {"prompt_tokens": 57, "completion_tokens": 9, "total_tokens": 66}
    assert cut[-1]["finish_reason"] == "cancelled"
    assert (told.llm.kv_cache_block_size, told.llm.total_kv_blocks) == (limits.page_size, limits.usable_pages)
    assert [(one.endpoint, one.topic) for one in sources] == [(events["endpoint"], "kv@w@tiny")]


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"sampling_options": {"n": 2}}, "n: expected 1, got 2"),
        ({"sampling_options": {"guided_decoding": {"json": {}}}}, "guided_decoding: expected one of n, temperature"),
        ({"output_options": {"logprobs": 3}}, "logprobs: expected one of none"),
        (
            {"stop_conditions": {"max_thinking_tokens": 5}},
            "max_thinking_tokens: expected one of max_tokens, min_tokens",
        ),
        ({"prefill_result": {"a": 1}}, "prefill_result"),
    ],
)
def test_what_a_worker_does_not_do_is_refused_by_name(example, request_, said):
    with pytest.raises(MllmError, match=said):
        example["params_of"](request_)
