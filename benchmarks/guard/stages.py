"""The stages that a CPU times, from the trace to the server's front.

They run in either tree, so each imports the product within, and names no more of it than it needs.
"""

from __future__ import annotations

import copy
import http.client
import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from subprocess import DEVNULL, PIPE, Popen
from typing import Any

from benchmarks.guard.launches import launches
from benchmarks.guard.stage import Round, Stage, Tree, cpu_clock

REQUESTS = 256
STREAMS, STREAM_TOKENS = 24, 24
_TRACED_LAYERS = 2
_READY_S = 300.0


def embedded() -> dict[str, Any]:
    """A config of the embedded model, its pieces as traced: no C++ is compiled."""
    import mllm_compile.model

    folder = Path(mllm_compile.model.__file__).parent / "tiny"
    return {
        "model": {"path": str(folder), "dtype": "float32"},
        "compile": {"backend": "eager"},
        "runtime": {"device": "cpu", "max_model_len": 512, "max_running_requests": 32},
    }


def embedded_runtime(tree: Tree) -> Path:
    """The config of the embedded model, whose runtime is compiled."""
    from mllm_compile import EngineConfig
    from mllm_compile.compiler.load_or_compile import load_or_compile

    path = tree.config("embedded", embedded())
    load_or_compile(EngineConfig.from_yaml(path))
    return path


def _built(tree: Tree, num_layers: int) -> tuple[Any, Any]:
    """The resolved config and the model on meta, with the embedded one's first layers."""
    from mllm_compile import EngineConfig
    from mllm_compile.compiler.lowering import build_model
    from mllm_compile.compiler.target import find_target
    from mllm_compile.process.progress import NullReporter

    config = embedded()
    source = json.loads((Path(config["model"]["path"]) / "config.json").read_text(encoding="utf-8"))
    folder = tree.folder / f"{num_layers}-layers"
    folder.mkdir(exist_ok=True)
    source |= {"num_hidden_layers": num_layers, "layer_types": ["full_attention"] * num_layers}
    (folder / "config.json").write_text(json.dumps(source), encoding="utf-8")
    config["model"] |= {"path": str(folder), "load_format": "dummy"}
    target = find_target(EngineConfig.from_yaml(tree.config(folder.name, config)))
    return target.config, build_model(target.config, target.model, NullReporter())


def trace(tree: Tree) -> Round:
    """Tracing of two layers; building them on meta is not counted."""
    from mllm_compile.model.trace import trace_model

    def fresh() -> tuple[Any]:
        return (_built(tree, _TRACED_LAYERS)[1].hf_model,)

    return Round(lambda hf_model: trace_model(hf_model, "cpu", 8192), fresh)


def passes(tree: Tree) -> Round:
    """All passes over a trace of the embedded model's layers, and the program of what they leave."""
    from mllm_compile.compiler.lowering import rewrite
    from mllm_compile.model.trace import trace_model

    config, built = _built(tree, 4)
    traced = trace_model(built.hf_model, "cpu", 8192)

    def fresh() -> tuple[Any]:
        return (replace(traced, graph_module=copy.deepcopy(traced.graph_module)),)

    return Round(lambda graph: rewrite(config, built, graph), fresh)


def scheduler_step(tree: Tree) -> Round:
    """80 steps of 256 decoding requests: each comes to the ends of five pages."""
    import numpy as np

    from mllm_compile.runtime.sampling.params import SamplingParams
    from mllm_compile.runtime.schedule.config import SchedulerConfig
    from mllm_compile.runtime.schedule.request import Request
    from mllm_compile.runtime.schedule.scheduler import Scheduler

    limits = {"max_running_requests": REQUESTS, "max_num_batched_tokens": 8192, "max_model_len": 65536}
    scheduler = Scheduler(SchedulerConfig(**limits, page_size=16, num_pages=REQUESTS * 512 + 1))
    for index in range(REQUESTS):
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        scheduler.add(Request(request_id=str(index), prompt_token_ids=[index + 1] * 16, params=params))

    def steps(count: int = 80) -> None:
        for _ in range(count):
            batch = scheduler.schedule()
            scheduler.update(batch, np.full(batch.num_requests, 7, dtype=np.int64))

    steps(1)
    return Round(steps)


def sampler(tree: Tree) -> Round:
    """32 rows of 32,000 tokens, greedy, by temperature, and with top_p."""
    import torch

    from mllm_compile.runtime.sampling.params import SamplingParams
    from mllm_compile.runtime.sampling.sampler import Sampler
    from mllm_compile.runtime.sampling.state import SamplingState

    vocab, rows = 32_000, 32
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0)) * 2
    states = []
    for params in ({"temperature": 0.0}, {"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.9}):
        state = SamplingState(rows + 3, vocab, "cpu")
        for row in range(rows):
            state.set_request(1 + row, SamplingParams(**params), (3, 4, 5), 1000 + row)
        states.append(state)
    of_rows, positions = torch.arange(1, rows + 1), torch.arange(rows)

    def draw() -> None:
        for state in states:
            Sampler()(logits, state, of_rows, state.flags, positions)

    return Round(draw)


def detokenizer(tree: Tree) -> Round:
    """Text of 3,000 tokens, which come one by one."""
    from mllm_compile.text.detokenizer import Detokenizer
    from mllm_compile.text.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(Path(embedded()["model"]["path"]))
    assert tokenizer is not None
    ids = tokenizer.encode("Return a new list containing the items of the mapping, in the order of their keys. " * 200)

    def push() -> None:
        text = Detokenizer(tokenizer, ids[:8])
        for token in ids[8:3008]:
            text.push([token])

    return Round(push)


def server_front(tree: Tree) -> Round:
    """The front's process: streams of token ids, and chats that are answered whole."""
    import mllm_compile.server.front  # noqa: F401 - a tree without a server has no such stage

    path = tree.once(embedded_runtime)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-P", "-m", "mllm_compile", "serve", str(path), "--port", str(port), "--quiet"]
    process = Popen(command, stdout=DEVNULL, stderr=DEVNULL)
    tree.ending.callback(process.wait)
    tree.ending.callback(process.terminate)  # so that its engine's process ends too
    _wait_until_ready(process, port)
    ids = {"prompt": list(range(2, 66)), "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
    chat = {"messages": [{"role": "user", "content": "What does shutil.copytree do?"}], "max_tokens": 1}
    requests = [("/v1/completions", ids), ("/v1/chat/completions", chat)]

    def ask() -> None:
        threads = [
            threading.Thread(target=_answer, args=(port, *request)) for request in requests for _ in range(STREAMS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return Round(ask, clock=cpu_clock(process.pid))


def _answer(port: int, path: str, body: dict[str, Any]) -> bytes:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_READY_S)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        data = answer.read()
        assert answer.status == 200, data
        return data
    finally:
        connection.close()


def _wait_until_ready(process: Popen[bytes], port: int) -> None:
    until = time.monotonic() + _READY_S
    while process.poll() is None and time.monotonic() < until:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.2)
    raise RuntimeError(f"the server is not ready; its exit code is {process.poll()}")


# A process that has torch imported, and forks for each start: a start's CPU time without `import torch`.
STARTS = """
import os, sys, time
import torch
def start():
    from mllm_compile import Engine, SamplingParams
    with Engine(sys.argv[1]) as engine:
        params = SamplingParams(max_tokens=1, ignore_eos=True, temperature=0)
        (output,) = engine.generate([[5] * 32], params, progress=False)
        assert len(output.token_ids) == 1
for _ in sys.stdin:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            start()
            os.write(write, repr(time.process_time()).encode())
        finally:
            os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    print(os.read(read, 100).decode(), flush=True)
    os.close(read)
"""


def warm_start(tree: Tree) -> Round:
    """A start with everything compiled, to its first token, in a process that has imported torch alone."""
    process = tree.python(STARTS, str(tree.once(embedded_runtime)), stdin=PIPE, stdout=PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    taken = 0.0

    def start() -> None:
        nonlocal taken
        print(file=process.stdin, flush=True)
        taken += float(process.stdout.readline())

    return Round(start, clock=lambda: taken)


def decode_step(tree: Tree) -> Round:
    """8 decode steps of 8 requests of the embedded model, from the scheduler to the tokens."""
    from mllm_compile import EngineConfig
    from mllm_compile.engine.start.assemble import assemble
    from mllm_compile.process.progress import NullReporter
    from mllm_compile.runtime.sampling.params import SamplingParams
    from mllm_compile.runtime.schedule.request import Request

    parts = assemble(EngineConfig.from_yaml(tree.once(embedded_runtime)), NullReporter())
    tree.ending.callback(parts.shutdown)
    step = _steps_of(parts)

    def begin() -> tuple[Any, ...]:
        """Fresh requests, so that every round has the same lengths."""
        params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=False)
        requests = [
            Request(request_id=str(index), prompt_token_ids=[5 + index] * 64, params=params) for index in range(8)
        ]
        for request in requests:
            parts.scheduler.add(request)
        while not all(request.output_token_ids for request in requests):
            step()
        return (requests,)

    def steps(requests: list[Any]) -> None:
        for _ in range(8):
            step()
        for request in requests:
            parts.scheduler.abort(request)

    return Round(steps, begin)


def _steps_of(parts: Any) -> Callable[[], None]:
    def step() -> None:
        planned = parts.scheduler.schedule()
        parts.scheduler.update(planned, parts.step_runner.submit(planned).wait().token_ids)

    return step


STAGES = (
    Stage("trace", trace, rounds=4),
    Stage("passes", passes, rounds=8),
    Stage("scheduler step", scheduler_step, rounds=24),
    Stage("sampler", sampler, rounds=16),
    Stage("detokenizer", detokenizer, rounds=24),
    Stage("server front", server_front, rounds=6),
    Stage("warm start", warm_start, rounds=5),
    Stage("decode step", decode_step, rounds=12),
    Stage("launches", launches, rounds=24),
)
