"""Compiles a model folder, serves it in a process of its own and compares every token's logits with Transformers'."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mllm_compile.compiler.load_or_compile import load_or_compile
from mllm_compile.config.schema import EngineConfig
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.state.layer import StateLayer
from tests.model.logits_server import MAX_MODEL_LEN, PAGE_SIZE, LogitsServer

# On log-probabilities, in float32. Transformers' own eager forward is up to 1e-4 from its forward in float64 (Gemma 4,
# whose attention logits are not scaled).
TOLERANCE = 3e-4
# In bfloat16 ours may be so many times as far from float32 as Transformers' own forward is.
BFLOAT16_FACTOR = 1.5


@dataclass(frozen=True)
class Comparison:
    """
    Attributes:
        error: |Δ log-probability| from Transformers in float32 over all tokens and the whole vocabulary: in float32 the
            largest, in bfloat16 the median.
        limit: the largest error allowed.
        layers: the program's attention layers.
        states: its layers with a state.
    """

    error: float
    limit: float
    layers: tuple[LayerSpec, ...]
    states: tuple[StateLayer, ...]


def compare_served_logits(
    folder: Path, scratch: Path, cache: Path, server: LogitsServer, dtype: str = "float32", backend: str = "eager"
) -> Comparison:
    """Compiles `folder` for the CPU, has `server` serve it, and compares.

    Raises:
        MllmError: it is not compiled; an UnsupportedModelError: the model is refused.
        ServingError: what was compiled does not serve in a process that has not compiled it.
    """
    sections = {
        "model": {"path": str(folder), "dtype": dtype},
        "compile": {"backend": backend},
        "runtime": {"device": "cpu", "max_model_len": MAX_MODEL_LEN, "page_size": PAGE_SIZE},
        "cache": {"dir": str(cache)},
    }
    program = load_or_compile(EngineConfig.from_dict(sections)).artifact.program
    texts, ours = server.serve(sections, scratch / f"{dtype}.safetensors")
    exact = _transformers(folder, texts, torch.float32)
    if dtype == "float32":
        worst = torch.stack([(a - b).abs().max() for a, b in zip(ours, exact, strict=True)]).max().item()
        return Comparison(worst, TOLERANCE, program.layers, program.state_layers)
    own = _of_a_token(_transformers(folder, texts, getattr(torch, dtype)), exact)
    return Comparison(_of_a_token(ours, exact), BFLOAT16_FACTOR * own, program.layers, program.state_layers)


def _of_a_token(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """Median over all tokens of the mean over the vocabulary: one that rounding sends to other experts is far off."""
    errors = (torch.cat(ours) - torch.cat(theirs)).abs().mean(-1)
    return errors.median().item()


@torch.no_grad()
def _transformers(folder: Path, texts: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    from transformers import AutoModelForCausalLM

    # Eager attention: up to Transformers 5.17, sdpa drops soft caps in silence.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    return [model(input_ids=text[None], use_cache=False).logits[0].float().log_softmax(-1) for text in texts]
