"""agents_speed: calls of a trace on our engine, and the same ones on vLLM, which is a stand-in here."""

from __future__ import annotations

import json
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.benchmarks.test_mistakes import run
from tests.tiny_model import tiny_config

CALLS = [
    {"id": f"{session}{turn}", "session": session, "parent": None, "fork": False, "after": [], "pause_s": 0.0,
     "keep": 2 * turn, "append": [{"role": "user", "tokens": 12, "seed": 7 + turn}], "out_tokens": 3, "reply_seed": 1}
    for session in "ab" for turn in range(2)
]  # fmt: skip


class StandIn:
    """vLLM's AsyncLLM, as far as the script asks it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments, self.prompts, self.is_over = arguments, list[list[int]](), False

    async def generate(self, prompt: dict[str, list[int]], params: SimpleNamespace, name: str) -> Any:
        self.prompts.append(prompt["prompt_token_ids"])
        yield SimpleNamespace(num_cached_tokens=4, outputs=[SimpleNamespace(token_ids=[1] * params.max_tokens)])

    def shutdown(self) -> None:
        self.is_over = True


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """Stand-ins of vLLM that the script has made."""
    found: list[StandIn] = []

    def make(arguments: dict[str, Any]) -> StandIn:
        found.append(StandIn(arguments))
        return found[-1]

    names = ("vllm", "vllm.engine", "vllm.engine.arg_utils", "vllm.v1", "vllm.v1.engine", "vllm.v1.engine.async_llm")
    modules = {name: ModuleType(name) for name in (*names, "vllm.sampling_params")}
    contents = {
        "vllm": {"SamplingParams": SimpleNamespace, "LLM": object, "__version__": "0", "__spec__": object()},
        "vllm.engine.arg_utils": {"AsyncEngineArgs": dict},
        "vllm.v1.engine.async_llm": {"AsyncLLM": SimpleNamespace(from_engine_args=make)},
        "vllm.sampling_params": {"RequestOutputKind": SimpleNamespace(FINAL_ONLY=2)},
    }
    for name, module in modules.items():
        vars(module).update(contents.get(name, {}))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "mllm_compile.bench.adapters.vllm_engine", raising=False)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")  # as the script sets it
    return found


def test_both_engines_have_the_same_calls(eager_cache, tmp_path, monkeypatch, capsys, made):
    config, trace = tmp_path / "tiny.json", tmp_path / "calls.jsonl"
    tiny = tiny_config(eager_cache, compile={"backend": "eager"}, runtime={"max_model_len": 64})
    config.write_text(json.dumps(tiny.model_dump(mode="json")))
    trace.write_text("\n".join(map(json.dumps, CALLS)))
    options = "--engines mllm,vllm --total-tokens 64 --host-gib 0.001 --seconds 60"
    with pytest.raises(SystemExit) as ended:
        run("steps.agents_speed", monkeypatch, str(config), str(trace), *options.split())
    assert not ended.value.code
    said = capsys.readouterr().out
    for what in ("without", "with the memory", "vLLM without its offload", "vLLM, 0.001 GiB of its offload"):
        assert re.search(rf"(?m)^{what}: 4 calls in 60 s, cached \d", said), said
    assert len(re.findall(r"over time: \d+\.\d\d x (mllm|vllm)'s with 0(\.001)? GiB", said)) == 3
    assert [one.arguments.get("kv_offloading_size") for one in made] == [None, 0.001]
    for one in made:
        assert one.is_over
        assert one.arguments["num_gpu_blocks_override"] == 64 // 16
        assert one.arguments["max_model_len"] == 64
        assert sorted(map(len, one.prompts)) == [12, 12, 27, 27]


def test_vllm_that_is_not_there_is_told_ahead_of_all_runs(tmp_path, monkeypatch, capsys):
    trace = tmp_path / "calls.jsonl"
    trace.write_text(json.dumps(CALLS[0]))
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SystemExit, match="2"):
        run("steps.agents_speed", monkeypatch, "configs/tiny.yaml", str(trace), "--engines", "mllm,vllm")
    assert "error: --engines names vllm, which is not installed: pip install vllm" in capsys.readouterr().err


def test_steps_of_an_engine_that_shows_none_are_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("steps.agents_speed", monkeypatch, "configs/tiny.yaml", __file__, "--engines", "served", "--steps")
    assert "--steps: steps of mllm alone are seen" in capsys.readouterr().err
