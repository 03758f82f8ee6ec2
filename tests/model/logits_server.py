"""A process that only serves: it opens runtimes that another one has compiled, and writes the logits of texts.

It imports neither Transformers nor a compiler, as a start that finds a runtime does not; what works only where those
are imported fails here. One JSON request a line: {"config": …, "out": a file for the tensors}; one answer a line.

Three steps over one paged cache. First a prefill of five requests packed into one batch, the longest cut short. Then a
mixed step (four decodes and the rest of that prompt). Then a decode step of all. The texts are random, the same for
every model.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.schema import EngineConfig
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.store.source import ArtifactSource, runner_config
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN

PROMPT_LENGTHS = (1, 2, 5, 23, 53)
# New tokens of each request in each step.
STEPS = ((1, 2, 5, 23, 30), (1, 1, 1, 1, 23), (1, 1, 1, 1, 1))
MAX_MODEL_LEN, PAGE_SIZE = 64, 4
_PAGES_OF_A_REQUEST = MAX_MODEL_LEN // PAGE_SIZE
_NOT_HERE = ("transformers", "torch._dynamo", "torch._inductor")


class ServingError(Exception):
    """The compiled model does not serve."""


class LogitsServer:
    """The process, from the other side."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.model.logits_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def serve(self, config: dict[str, Any], out: Path) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Token ids [tokens] and log-probabilities [tokens, V] of each text.

        Raises:
            ServingError: naming the error's type.
        """
        assert self._process.stdin is not None and self._process.stdout is not None, "they were asked for"
        print(json.dumps({"config": config, "out": str(out)}), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline() or '{"error": "the process that serves has ended"}')
        if "error" in answer:
            raise ServingError(answer["error"])
        tensors = load_file(out)
        texts = range(len(PROMPT_LENGTHS))
        return [tensors[f"ids.{text}"] for text in texts], [tensors[f"logprobs.{text}"] for text in texts]

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anybody prints is no answer
    for line in sys.stdin:
        request = json.loads(line)
        answer = {}
        try:
            _serve_runtime(request["config"], Path(request["out"]))
        except Exception as error:
            answer["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        print(json.dumps(answer), file=answers, flush=True)


def _serve_runtime(config: dict[str, Any], out: Path) -> None:
    compiled = load_or_compile(EngineConfig.from_dict(config))
    if not compiled.was_cached:
        raise ServingError("the runtime that was compiled is not found again")
    num_pages = 1 + _PAGES_OF_A_REQUEST * len(PROMPT_LENGTHS)
    runner = ModelRunner(
        replace(runner_config(compiled.config), num_pages=num_pages), ArtifactSource(compiled, NullReporter())
    )
    runner.initialize()
    generator = torch.Generator().manual_seed(1)
    texts = [
        torch.randint(0, min(FIRST_SPECIAL_TOKEN, runner.vocab_size), (sum(new),), generator=generator)
        for new in zip(*STEPS, strict=True)
    ]
    logprobs = _serve(runner, texts, generator)
    runner.shutdown()
    imported = [name for name in _NOT_HERE if name in sys.modules]
    if imported:
        raise ServingError(f"a start that found its runtime imported {', '.join(imported)}")
    tensors = {f"ids.{text}": ids for text, ids in enumerate(texts)}
    save_file(tensors | {f"logprobs.{text}": values for text, values in enumerate(logprobs)}, out)


def _serve(runner: ModelRunner, texts: list[torch.Tensor], generator: torch.Generator) -> list[torch.Tensor]:
    """Log-probabilities [tokens, V] of each text."""
    rows = torch.arange(1, len(texts) + 1)
    table = runner.req_to_token_pool.req_to_token
    pages = 1 + torch.randperm(_PAGES_OF_A_REQUEST * len(texts), generator=generator).view(len(texts), -1)
    table[rows] = (pages[:, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten(1).int()
    done = [0] * len(texts)
    logits: list[list[torch.Tensor]] = [[] for _ in texts]
    for new in STEPS:
        spans = [slice(start, start + count) for start, count in zip(done, new, strict=True)]
        prefix, count = torch.tensor(done, dtype=torch.int32), torch.tensor(new, dtype=torch.int32)
        ids = torch.cat([text[span] for text, span in zip(texts, spans, strict=True)])
        slots = torch.cat([table[row, span] for row, span in zip(rows, spans, strict=True)]).long()
        if max(new) == 1:
            batch = runner.prepare_forward_batch_decode(ids, rows, prefix + count, slots)
        else:
            num_decodes = sum(n == 1 for n in new) if any(done) else 0
            batch = runner.prepare_forward_batch_extend(
                ids, rows, prefix + count, count, prefix, slots, num_decodes=num_decodes
            )
        # In another order: a gather that a pass has moved to where tokens depend on each other is seen.
        batch.logits_indices = torch.randperm(len(ids), generator=generator)
        with torch.inference_mode():
            of_rows = runner.forward(batch).next_token_logits
            parts = of_rows[batch.logits_indices.argsort()].split(list(new))
        for request, part in enumerate(parts):
            logits[request].append(part)
            done[request] += new[request]
    return [torch.cat(parts).float().log_softmax(-1) for parts in logits]


if __name__ == "__main__":
    main()
