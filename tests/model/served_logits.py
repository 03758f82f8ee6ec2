"""Serves a model folder with the real runtime and compares every token's logits with Transformers'.

Three steps over one paged cache: a prefill of five requests packed into one batch, the longest cut short; a mixed step
(four decodes and the rest of that prompt); a decode step of all. The texts are random, the same for every model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.schema import EngineConfig
from mllm_compile.engine.assemble import runner_config
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.model_runner import ModelRunner
from mllm_compile.store.source import ArtifactSource
from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN

PROMPT_LENGTHS = (1, 2, 5, 23, 53)
# New tokens of each request in each step.
STEPS = ((1, 2, 5, 23, 30), (1, 1, 1, 1, 23), (1, 1, 1, 1, 1))
_MAX_MODEL_LEN, _PAGE_SIZE = 64, 4
_PAGES_OF_A_REQUEST = _MAX_MODEL_LEN // _PAGE_SIZE


@dataclass(frozen=True)
class Comparison:
    """max |Δ log-probability| over all tokens and the whole vocabulary, and the program's attention layers."""

    worst_error: float
    layers: tuple[LayerSpec, ...]
    num_distinct_pieces: int


def compare_served_logits(folder: Path, cache: Path) -> Comparison:
    """Compiles `folder` (float32, CPU, pieces run as traced), serves, and compares.

    Raises:
        MllmError: the model is refused.
    """
    config = EngineConfig.from_dict(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "compile": {"backend": "eager"},
            "runtime": {"device": "cpu", "max_model_len": _MAX_MODEL_LEN, "page_size": _PAGE_SIZE},
            "cache": {"dir": str(cache)},
        }
    )
    compiled = load_or_compile(config)
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
    ours = _serve(runner, texts, generator)
    theirs = _transformers(folder, texts)
    runner.shutdown()
    program = compiled.artifact.program
    worst = max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))
    return Comparison(worst, program.layers, len(program.piece_ids()))


def _serve(runner: ModelRunner, texts: list[torch.Tensor], generator: torch.Generator) -> list[torch.Tensor]:
    """Log-probabilities [tokens, V] of each text."""
    rows = torch.arange(1, len(texts) + 1)
    table = runner.req_to_token_pool.req_to_token
    pages = 1 + torch.randperm(_PAGES_OF_A_REQUEST * len(texts), generator=generator).view(len(texts), -1)
    table[rows] = (pages[:, :, None] * _PAGE_SIZE + torch.arange(_PAGE_SIZE)).flatten(1).int()
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


@torch.no_grad()
def _transformers(folder: Path, texts: list[torch.Tensor]) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    # Eager attention: up to Transformers 5.17, sdpa drops soft caps in silence.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return [model(input_ids=text[None], use_cache=False).logits[0].float().log_softmax(-1) for text in texts]
