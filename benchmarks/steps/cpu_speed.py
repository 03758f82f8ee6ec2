"""Tokens a second on a CPU: this engine in each type, Transformers and llama.cpp, by turns.

    python -m benchmarks.steps.cpu_speed MODEL.gguf [--threads 1,2] [--requests 1,8] [--prompt 512] [--tokens 32]
        [--engines ours-float32,ours-bfloat16,ours-int4,transformers-float32,llama.cpp] [--plain FOLDER]

MODEL is a GGUF file, which all but `ours-int8` read, or a folder or YAML, which llama.cpp does not. Each engine is a
process. An engine that is not there, or refuses the model, is named and left out. llama.cpp is the package
llama-cpp-python, built for this machine. Prompts are random ids. `prompts` is their tokens a second until each request
has its first token, `decodes` the new tokens a second after that; `times` is how often an engine is as fast as the
first one, the median over rounds.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.script import greedy, names_of, parser_of, positive, positives, told_in_one_line
from mllm_compile.bench.timing.clock import Stopwatch
from mllm_compile.bench.timing.record import append_record, machine_line
from mllm_compile.bench.timing.rounds import by_turns
from mllm_compile.errors import MllmError
from mllm_compile.process.console import print_table

Prompts = list[list[int]]
# Prompts, and how many tokens each request makes → seconds until all have their first.
Generate = Callable[[Prompts, int], float]
Times = list[tuple[float, float]]  # of each round, until the first tokens and from then on, in seconds
OURS = {
    "ours-float32": {"dtype": "float32", "quantization": "dequantize"},
    "ours-bfloat16": {"dtype": "bfloat16", "quantization": "dequantize"},
    "ours-int8": {"dtype": "float32", "quantization": "int8"},
    "ours-int4": {"dtype": "float32", "quantization": "keep"},
    "ours-int4-a8": {"dtype": "float32", "quantization": "keep_a8"},
}
ENGINES = (*OURS, "transformers-float32", "transformers-bfloat16", "llama.cpp")
_VOCABULARY = 1000  # ids of prompts; fewer than any model has


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--plain", type=Path, help="the model unquantised, for ours-int8 and Transformers")
    parser.add_argument("--engines", type=names_of(ENGINES), default=list(ENGINES))
    parser.add_argument("--threads", type=positives, default=[1, 2])
    parser.add_argument("--requests", type=positives, default=[1, 8])
    parser.add_argument("--prompt", type=positive, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=positive, default=32, help="tokens that each request makes after its first")
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--json", type=Path, help="adds a line with all times to this file")
    args = parser.parse_args()
    print(machine_line("cpu"))
    figures = {}
    for threads in args.threads:
        workers = {name: Worker(name, model_of(name, args), threads, args.requests) for name in args.engines}
        running = {name: worker for name, worker in workers.items() if worker.is_ready()}
        for count in args.requests:
            takes = {name: partial(one.take, count, args.prompt, args.tokens) for name, one in running.items()}
            taken = by_turns(takes, args.rounds, warm_ups=1, swapped=True)
            base = next(iter(taken.values()), [])
            rows = [row(name, running[name].start_s, taken[name], base, count, args) for name in running]
            title = f"{threads} threads, {count} requests of {args.prompt} tokens, {args.tokens} new ones each"
            columns = ("engine", "start, s", "prompts, tok/s", "times", "decodes, tok/s", "times", "ms a step")
            print_table(sys.stdout, title, columns, rows)
            figures[f"{threads} threads, {count} requests"] = taken
        for worker in running.values():
            worker.end()
    if args.json is not None:
        append_record(args.json, __doc__ or "", args, figures, "cpu")


def model_of(name: str, args: Any) -> Path:
    is_plain = name == "ours-int8" or name.startswith("transformers-")
    model: Path = args.plain if args.plain is not None and is_plain else args.model
    return model


def row(name: str, start_s: float, taken: Times, base: Times, count: int, args: Any) -> tuple[str, ...]:
    first_s, rest_s = (median(times) for times in zip(*taken, strict=True))
    ratios = [
        [of_base / of_this for of_base, of_this in zip(*both, strict=True)] for both in zip(base, taken, strict=True)
    ]
    of_prompts, of_decodes = (f"{median(of_rounds):.2f}" for of_rounds in zip(*ratios, strict=True))
    prompts, decodes = count * args.prompt / first_s, count * args.tokens / rest_s
    step_ms = rest_s / args.tokens * 1e3
    return name, f"{start_s:.1f}", f"{prompts:.0f}", of_prompts, f"{decodes:.1f}", of_decodes, f"{step_ms:.1f}"


class Worker:
    """An engine in a process of its own.

    Attributes:
        start_s: seconds until it takes requests; of this engine warm ones.
    """

    def __init__(self, name: str, model: Path, threads: int, requests: list[int]) -> None:
        self._name = name
        settings = json.dumps([name, str(model), threads, max(requests)])
        self._command = [sys.executable, "-m", "benchmarks.steps.cpu_speed", "--worker", settings]
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._start()
        if self._said == "ready" and name in OURS:  # which may have compiled
            self.end()
            self._start()

    def _start(self) -> None:
        watch, pipe = Stopwatch(), subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, text=True, env=self._environment)
        self._said = self._answer()
        self.start_s = watch.seconds

    def is_ready(self) -> bool:
        """True if it takes requests; else it is left out, and why is printed."""
        if self._said != "ready":
            print(f"{self._name} is left out: {self._said}")
            self.end()
        return self._said == "ready"

    def take(self, count: int, prompt: int, tokens: int) -> tuple[float, float]:
        """Seconds until each of `count` requests has its first token, and from then to the last."""
        assert self._process.stdin is not None, "a pipe"
        print(json.dumps([count, prompt, tokens]), file=self._process.stdin, flush=True)
        first_s, rest_s = json.loads(self._answer())
        return first_s, rest_s

    def end(self) -> None:
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None, "a pipe"
        for line in self._process.stdout:
            if line.startswith("worker: "):
                return line.removeprefix("worker: ").strip()
        return "its process ended"


def work(name: str, model: str, threads: int, most_requests: int) -> None:
    """Runs one engine: answers each line of stdin with two times."""
    try:
        generate = _engine(name, model, threads, most_requests)
    except (ImportError, MllmError, OSError, ValueError) as error:
        print(f"worker: {' '.join(str(error).split())[:300]}", flush=True)
        return
    print("worker: ready", flush=True)
    for line in sys.stdin:
        count, length, tokens = json.loads(line)
        chance = random.Random(0)
        prompts = [[chance.randrange(_VOCABULARY) for _ in range(length)] for _ in range(count)]
        watch = Stopwatch()
        first_s = generate(prompts, tokens + 1)
        print(f"worker: {json.dumps([first_s, watch.seconds - first_s])}", flush=True)


def _engine(name: str, model: str, threads: int, most_requests: int) -> Generate:
    """
    Raises:
        ImportError: its package is not there.
        MllmError, OSError, ValueError: it does not take the model.
    """
    if name in OURS:
        return _ours(model, OURS[name])
    if name == "llama.cpp":
        return _llama_cpp(model, threads, most_requests)
    return _transformers(model, name.partition("-")[2])


def _ours(model: str, settings: Mapping[str, str]) -> Generate:
    from mllm_compile import Engine, EngineConfig

    config = EngineConfig.from_yaml(model) if model.endswith((".yaml", ".yml")) else None
    sections = {"model": {"path": model}} if config is None else config.model_dump(mode="json", exclude_unset=True)
    asked = settings if model.endswith(".gguf") else {**settings, "quantization": _of_plain(settings["quantization"])}
    sections["model"] |= asked
    sections["runtime"] = sections.get("runtime", {}) | {"device": "cpu", "enable_prefix_cache": False}
    engine = Engine(sections)

    def generate(prompts: Prompts, tokens: int) -> float:
        answers = engine.generate(prompts, greedy(tokens))
        return max(answer.metrics.time_to_first_token or 0.0 for answer in answers)

    return generate


def _of_plain(quantization: str) -> str:
    """The setting for a model that is not quantised."""
    return {"keep": "int4", "dequantize": "auto"}.get(quantization, quantization)


def _transformers(model: str, dtype: str) -> Generate:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    path = Path(model)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    options: dict[str, Any] = {"dtype": getattr(torch, dtype)}
    if path.suffix == ".gguf":
        lm = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)
    elif path.suffix in (".yaml", ".yml"):  # of random weights
        from mllm_compile import EngineConfig

        config = AutoConfig.from_pretrained(EngineConfig.from_yaml(path).model.path)
        lm = AutoModelForCausalLM.from_config(config, **options)
    else:
        lm = AutoModelForCausalLM.from_pretrained(path, **options)

    @torch.inference_mode()
    def generate(prompts: Prompts, tokens: int) -> float:
        ids, watch, times = torch.tensor(prompts), Stopwatch(), []

        def note(*_: Any) -> torch.Tensor:
            times.append(watch.seconds)
            return torch.zeros(len(prompts), dtype=torch.bool)

        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens, "stopping_criteria": [note]}
        lm.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, **lengths)
        return times[0]

    return generate


def _llama_cpp(model: str, threads: int, most_requests: int) -> Generate:
    import llama_cpp as api
    import numpy as np

    if not model.endswith(".gguf"):
        raise ValueError("it reads GGUF files alone")
    api.llama_backend_init()
    quiet = api.llama_log_callback(lambda level, text, data: None)
    api.llama_log_set(quiet, None)
    loaded = api.llama_model_load_from_file(model.encode(), api.llama_model_default_params())
    if not loaded:
        raise ValueError("it does not load the file")
    vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(loaded))

    def generate(prompts: Prompts, tokens: int) -> float:
        watch = Stopwatch()
        params = api.llama_context_default_params()
        params.n_ctx, params.n_seq_max = sum(len(one) + tokens for one in prompts) + 64 * len(prompts), most_requests
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        context = api.llama_init_from_model(loaded, params)
        batch = api.llama_batch_init(len(prompts[0]), 0, 1)

        def decode(rows: list[tuple[int, int, int, bool]]) -> None:
            """Rows are (id, position, request, whether its logits are wanted)."""
            batch.n_tokens = len(rows)
            for i, (token, position, request, is_wanted) in enumerate(rows):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = request, is_wanted
            if api.llama_decode(context, batch):
                raise RuntimeError("llama.cpp does not decode")

        def likeliest(row: int) -> int:
            return int(np.ctypeslib.as_array(api.llama_get_logits_ith(context, row), (vocab_size,)).argmax())

        try:
            newest = []
            for request, ids in enumerate(prompts):
                decode([(token, i, request, i == len(ids) - 1) for i, token in enumerate(ids)])
                newest.append(likeliest(len(ids) - 1))
            first_s = watch.seconds
            for step in range(tokens - 1):
                rows = [(token, len(prompts[i]) + step, i, True) for i, token in enumerate(newest)]
                decode(rows)
                newest = [likeliest(i) for i in range(len(rows))]
            return first_s
        finally:
            api.llama_batch_free(batch)
            api.llama_free(context)

    generate.quiet = quiet  # type: ignore[attr-defined]  # lives as long as the library calls it
    return generate


if __name__ == "__main__":
    with told_in_one_line():
        if sys.argv[1:2] == ["--worker"]:
            work(*json.loads(sys.argv[2]))
        else:
            main()
