"""How many tokens of ragged short texts a second are embedded on a CPU, beside Transformers' padded batches, by turns.

    OMP_NUM_THREADS=1 python -m benchmarks.steps.pooling_speed MODEL_FOLDER [--texts 128] [--batch 32]

Texts have 4 to 60 random tokens, most of them few. Transformers runs them in batches as sentence-transformers does,
sorted by length and padded to the longest of a batch, and in one padded batch unsorted; both pool as the model's files
say means. Largest differences from our numbers are printed too.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModel

from benchmarks.script import parser_of, positive, told_in_one_line
from mllm_compile import Engine
from mllm_compile.bench.timing.clock import wall_seconds

SHORTEST, LONGEST, FIRST_TOKEN = 4, 60, 1000


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=positive, default=128)
    parser.add_argument("--batch", type=positive, default=32, help="texts of Transformers' batches")
    parser.add_argument("--rounds", type=positive, default=7)
    args = parser.parse_args()
    draws = random.Random(0)
    lengths = [min(LONGEST, SHORTEST + int(draws.expovariate(1 / 14))) for _ in range(args.texts)]
    texts = [[draws.randrange(FIRST_TOKEN, 2 * FIRST_TOKEN) for _ in range(length)] for length in lengths]
    model = AutoModel.from_pretrained(args.model).eval()
    with Engine({"model": {"path": str(args.model), "dtype": "float32"}, "runtime": {"device": "cpu"}}) as engine:
        measure(engine, model, texts, args)


def measure(engine: Engine, model: torch.nn.Module, texts: list[list[int]], args: argparse.Namespace) -> None:
    ways: dict[str, Callable[[], np.ndarray]] = {
        "packed": lambda: np.stack([one.outputs.embedding for one in engine.embed(texts, normalize=True)]),
        f"Transformers, sorted batches of {args.batch}": lambda: in_batches(model, texts, args.batch),
        "Transformers, one batch": lambda: in_batches(model, texts, len(texts)),
    }
    results = {name: way() for name, way in ways.items()}  # the warm-up
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            taken[name].append(wall_seconds(way))
    tokens, ours = sum(map(len, texts)), taken["packed"]
    for name, seconds in taken.items():
        ratio = statistics.median(other / own for other, own in zip(seconds, ours, strict=True))
        error = float(np.abs(results[name] - results["packed"]).max())
        rate = tokens / statistics.median(seconds)
        print(f"{name}: {rate:,.0f} tokens/s, {ratio:.2f} x our time, largest difference {error:.0e}", flush=True)


@torch.inference_mode()
def in_batches(model: torch.nn.Module, texts: Sequence[Sequence[int]], batch: int) -> np.ndarray:
    """Embeddings [S, D] by Transformers' own forward of padded batches."""
    order = sorted(range(len(texts)), key=lambda at: -len(texts[at])) if batch < len(texts) else list(range(len(texts)))
    found: dict[int, np.ndarray] = {}
    for start in range(0, len(texts), batch):
        chosen = order[start : start + batch]
        longest = max(len(texts[at]) for at in chosen)
        ids = torch.tensor([[*texts[at], *[0] * (longest - len(texts[at]))] for at in chosen])
        mask = torch.tensor([[1] * len(texts[at]) + [0] * (longest - len(texts[at])) for at in chosen])
        hidden = model(input_ids=ids, attention_mask=mask)[0]
        means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        rows = torch.nn.functional.normalize(means, dim=-1).numpy()
        found |= dict(zip(chosen, rows, strict=True))
    return np.stack([found[at] for at in range(len(texts))])


if __name__ == "__main__":
    with told_in_one_line():
        main()
