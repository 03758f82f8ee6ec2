"""Measures what quantised weights cost the embedded model, against float32 on the sources of Python modules.

    python -m tests.quantised_numerics [SCHEME …]

For each scheme of linears' weights: perplexity, and over the model's distributions the mean and largest KL divergence
from those in float32, and how often the most probable token is the same. Activations are float32, but for "… by fp8",
where what linears read is rounded to fp8 with a scale a token, or one for 128 inputs, as quantise_activations has it.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import MXFP4, NVFP4, WeightScheme, quantised_as
from tests.tiny_model import TINY

CONTEXT = 512  # tokens of a text
EVERY = 4  # of so many tokens one's distribution is compared
MOST_TEXTS = 24

BY_FP8 = " by fp8"  # how those end whose inputs are too
# The schemes of a weight of so many inputs, and the mean KL divergence that each must not exceed.
SCHEMES: dict[str, tuple[Callable[[int], WeightScheme], float]] = {
    "fp8": (lambda columns: quantised_as("fp8", columns), 2e-3),
    "fp8, a scale for 128 inputs": (lambda columns: WeightScheme("fp8", min(128, columns)), 2e-3),
    "fp8 by fp8": (lambda columns: quantised_as("fp8", columns), 5e-3),
    "fp8, a scale for 128 inputs, by fp8": (lambda columns: WeightScheme("fp8", min(128, columns)), 5e-3),
    "int4": (lambda columns: quantised_as("int4", columns), 3e-2),
    "int4 with zero points": (lambda columns: WeightScheme("int4", min(128, columns), torch.float16, True), 3e-2),
    "mxfp4": (lambda columns: MXFP4, 3e-2),
    "nvfp4": (lambda columns: NVFP4, 3e-2),
}


class Cost(NamedTuple):
    """A scheme's cost."""

    perplexity: float
    mean_kl: float
    largest_kl: float
    same_choice: float


def sources() -> str:
    """The sources of some Python modules."""
    names = ("argparse", "asyncio", "decimal", "fractions", "ipaddress", "logging", "pathlib", "statistics", "zipfile")
    texts = []
    for name in names:
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None, name
        texts.append(Path(spec.origin).read_text(encoding="utf-8"))
    return "\n".join(texts)


def token_rows() -> torch.Tensor:
    """[texts, CONTEXT] ids."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(TINY, local_files_only=True)
    ids = torch.tensor(tokenizer.encode(sources()))
    count = min(len(ids) // CONTEXT, MOST_TEXTS)
    return ids[: count * CONTEXT].view(count, CONTEXT)


def with_scheme(model: Any, make: Callable[[int], WeightScheme], rounds_inputs: bool) -> Any:
    """A copy whose linears, the head apart, have what their quantised weights stand for; `rounds_inputs`: read what
    quantised inputs stand for."""
    changed = copy.deepcopy(model)
    for name, module in changed.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weight = module.weight.data
            scheme = make(weight.shape[1])
            tensors = quantised(weight, scheme)
            module.weight.data = dequantised(tensors, scheme.kind, scheme.group, weight.shape[1], weight.dtype)
            if rounds_inputs:
                module.register_forward_pre_hook(lambda module, args, of=scheme: (rounded(args[0], of),))
    return changed


def rounded(x: torch.Tensor, scheme: WeightScheme) -> torch.Tensor:
    """x [..., K] after quantisation token by token."""
    tensors = quantised(x.flatten(0, -2), scheme)
    return dequantised(tensors, scheme.kind, scheme.group, x.shape[-1], x.dtype).view(x.shape)


@torch.inference_mode()
def distributions(model: Any, rows: torch.Tensor) -> tuple[float, torch.Tensor]:
    """The perplexity of the texts, and log-probabilities [n, V] of every so many tokens."""
    total, kept = 0.0, []
    for row in rows:
        logprobs = model(row[None]).logits[0].float().log_softmax(-1)
        total -= logprobs[:-1].gather(1, row[1:, None]).sum().item()
        kept.append(logprobs[::EVERY])
    return math.exp(total / (rows.numel() - len(rows))), torch.cat(kept)


def costs(names: list[str]) -> tuple[float, dict[str, Cost]]:
    """The perplexity in float32, and what each scheme costs."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, local_files_only=True).eval()
    rows = token_rows()
    exact, theirs = distributions(model, rows)
    found = {}
    for name in names:
        perplexity, ours = distributions(with_scheme(model, SCHEMES[name][0], name.endswith(BY_FP8)), rows)
        divergence = (theirs.exp() * (theirs - ours)).sum(-1)
        same = (theirs.argmax(-1) == ours.argmax(-1)).float().mean().item()
        found[name] = Cost(perplexity, divergence.mean().item(), divergence.max().item(), same)
    return exact, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scheme", nargs="*", help=f"of {', '.join(map(repr, SCHEMES))}")
    asked = parser.parse_args().scheme or list(SCHEMES)
    if unknown := [name for name in asked if name not in SCHEMES]:
        parser.error(f"{unknown[0]!r} is no scheme; known: {', '.join(map(repr, SCHEMES))}")
    exact, found = costs(asked)
    print(f"float32: perplexity {exact:.3f}")
    for name, cost in found.items():
        limit = SCHEMES[name][1]
        print(
            f"{name}: perplexity {cost.perplexity:.3f} ({cost.perplexity / exact - 1:+.2%}), KL {cost.mean_kl:.1e} "
            f"(limit {limit:.0e}), at most {cost.largest_kl:.1e}; the same choice {cost.same_choice:.1%}"
        )
    if any(cost.mean_kl > SCHEMES[name][1] for name, cost in found.items()):
        raise SystemExit("a scheme is further from float32 than it may be")


if __name__ == "__main__":
    main()
