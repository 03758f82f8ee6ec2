"""Measures what the server's front takes of a processor for each text that is embedded over HTTP. No model runs.

Run: OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 python -m benchmarks.server.texts_cost MODEL_FOLDER

A request has so many texts of so many words, and its answer so many numbers a text. Each part is CPU time of the
process, the least of several rounds: a shared machine makes the others longer.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.script import parser_of, positive, told_in_one_line
from mllm_compile.bench.timing.clock import cpu_seconds
from mllm_compile.engine.pooling.texts import TextReader
from mllm_compile.runtime.pooling.facts import PoolingFacts
from mllm_compile.runtime.pooling.texts import PoolingParams
from mllm_compile.server.api.fields import read_fields
from mllm_compile.server.pooling import answers
from mllm_compile.server.pooling.calls import answers_of, pool_command
from mllm_compile.server.pooling.fields import EmbeddingFields
from mllm_compile.server.wire.messages import Pooled
from mllm_compile.text.tokenizer import load_tokenizer

WORDS = [
    *("the", "man", "woman", "bridge", "river", "train", "history", "music", "violin"),
    *("food", "morning", "rain", "roof", "house", "village", "dog", "never", "book"),
]
ROUNDS = 7


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path, help="a folder with a tokenizer")
    parser.add_argument("--texts", type=positive, default=64, help="of a request")
    parser.add_argument("--words", type=positive, default=30, help="of a text")
    parser.add_argument("--numbers", type=positive, default=768, help="of an embedding")
    parser.add_argument("--requests", type=positive, default=40, help="of a round")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    if tokenizer is None:
        raise SystemExit(f"{args.model} has no tokenizer")
    facts = PoolingFacts(task="embed", rules=("mean",), width=args.numbers, outputs=args.numbers)
    reader = TextReader(tokenizer, facts, tokenizer.vocab_size, 4 * args.words)
    draws = random.Random(0)
    texts = [" ".join(draws.choice(WORDS) for _ in range(args.words)) for _ in range(args.texts)]
    body, read = json.dumps({"model": "m", "input": texts}).encode(), reader.read(texts)
    made = np.random.default_rng(0).standard_normal((args.texts, args.numbers)).astype(np.float32)
    event, params = (
        Pooled(1, [[args.numbers]] * args.texts, made.tobytes()),
        PoolingParams(task="embed", rules=("mean",)),
    )

    def answer(encoding: str | None) -> bytes:
        rows = [{"index": at, "embedding": answers.numbers(one, encoding)} for at, one in enumerate(made)]
        return msgspec.json.encode({"data": rows, "usage": answers.usage(answers.num_tokens(read))})

    print(f"{args.texts} texts of {len(read[0].ids)} tokens, {args.numbers} numbers each; us of a processor for a text")
    parts: dict[str, Callable[[], Any]] = {
        "fields of the body": lambda: read_fields(EmbeddingFields, body),
        "texts to token ids": lambda: reader.read(texts),
        "command to the engine": lambda: pool_command(1, read, params, 0),
        "arrays of its answer": lambda: answers_of(event),
        "answer in base64": lambda: answer("base64"),
        "answer as numbers": lambda: answer(None),
    }
    for name, part in parts.items():
        seconds = min(cpu_seconds(lambda part=part: [part() for _ in range(args.requests)]) for _ in range(ROUNDS))
        print(f"{name:24} {1e6 * seconds / args.requests / args.texts:8.1f}", flush=True)


if __name__ == "__main__":
    with told_in_one_line():
        main()
