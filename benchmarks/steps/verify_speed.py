"""Milliseconds of a verify step beside a plain decode step, and of a token at a forced acceptance length.

    python -m benchmarks.steps.verify_speed CONFIG [--requests 1,8,32,64] [--drafted 1,3,7] [--prompt 512]
        [--method suffix|dflash|mtp] [--frequent 32768]

Needs an NVIDIA GPU. An engine without speculation comes first and last, and one for each number of drafted tokens
between them. These draft by n-grams, by trees of suffixes, by the model's own layer for multi-token prediction, or by a
DFlash head of --layers layers with random weights, 32,000 tokens in its vocabulary and five layers that it reads. Their
synthetic_acceptance_length is --share of the drafted tokens and one (0.5: 2.5 tokens a step where 3 are drafted).
--frequent cuts the head that drafts to so many tokens. Only steps of these requests are captured: engines start sooner.
Prompts are random tokens. Answers of --new tokens and of half as many differ by time and by steps, and so no prompt is
in these. Prints medians of rounds, a step's ratio to the plain one, and the tokens that a step gave in truth.
"""

from __future__ import annotations

import json
import statistics
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.script import greedy, need_gpu, parser_of, positive, positives, told_in_one_line
from mllm_compile import Engine, EngineConfig
from mllm_compile.bench.timing.clock import wall_seconds
from mllm_compile.bench.timing.record import machine_line

ROUNDS = 5
_DRAFT_VOCAB = 32_000


def save_head(folder: Path, model: Path, num_layers: int) -> Path:
    """Writes config.json of a DFlash head for the model of a folder; it has no weights."""
    sizes = json.loads((model / "config.json").read_text())
    count = sizes["num_hidden_layers"]
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    layers = {name: sizes[name] for name in (*names, "vocab_size", "max_position_embeddings", "rms_norm_eps")}
    head = {
        "speculators_model_type": "dflash",
        "draft_vocab_size": _DRAFT_VOCAB,
        "block_size": 16,
        "mask_token_id": 0,
        "aux_hidden_state_layer_ids": [2 + (count - 4) * place // 4 for place in range(5)],
        "transformer_layer_config": {"model_type": "qwen3", "num_hidden_layers": num_layers, **layers},
    }
    (folder / "config.json").write_text(json.dumps(head))
    return folder


def config_of(
    config: EngineConfig,
    num_drafted: int,
    length: float,
    most: int,
    most_tokens: int,
    method: str = "ngram",
    head: Path | None = None,
    token_map: Path | None = None,
) -> EngineConfig:
    runtime = config.runtime.model_copy(update={"max_running_requests": most, "max_model_len": most_tokens})
    asked = {"method": "none"}
    if num_drafted:
        asked = {
            "method": method,
            "model": None if head is None else str(head),
            "num_speculative_tokens": num_drafted,
            "synthetic_acceptance_length": length,
            "token_map": None if token_map is None else str(token_map),
        }
    speculative = type(config.speculative).model_validate(asked)
    return config.model_copy(update={"runtime": runtime, "speculative": speculative})


@dataclass(frozen=True)
class Pace:
    """The pace of one engine and batch, without its prompts.

    Attributes:
        token_ms: milliseconds between two tokens of a request.
        step_ms: milliseconds of a step.
    """

    token_ms: float
    step_ms: float


def pace_of(engine: Engine, prompts: list[list[int]], new: int, rounds: int = ROUNDS) -> Pace:
    """The median of rounds. Steps are counted, as what is accepted is drawn."""
    paces = []
    for _ in range(rounds):
        half, whole = (_timed(engine, prompts, count) for count in (new // 2, new))
        seconds, num_steps = (both[1] - both[0] for both in zip(half, whole, strict=True))
        num_tokens = new - new // 2
        paces.append(Pace(seconds / num_tokens * 1e3, seconds / num_steps * 1e3))
    return Pace(*(statistics.median(getattr(pace, name) for pace in paces) for name in ("token_ms", "step_ms")))


def _timed(engine: Engine, prompts: list[list[int]], new: int) -> tuple[float, int]:
    """Seconds and steps of an answer of `new` tokens to each prompt."""
    before = engine.stats().steps
    seconds = wall_seconds(lambda: engine.generate(prompts, greedy(new)))
    return seconds, engine.stats().steps - before


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--requests", type=positives, default=[1, 8, 32, 64])
    parser.add_argument("--drafted", type=positives, default=[1, 3, 7])
    parser.add_argument("--prompt", type=positive, default=512)
    parser.add_argument("--new", type=positive, default=256)
    parser.add_argument("--rounds", type=positive, default=ROUNDS)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--method", choices=["ngram", "suffix", "dflash", "mtp"], default="ngram")
    parser.add_argument("--layers", type=positive, default=5)
    parser.add_argument("--frequent", type=positive, help="tokens of the head that drafts; default: all")
    arguments = parser.parse_args()
    need_gpu()
    config = EngineConfig.from_yaml(arguments.config)
    sizes = {"decode_requests": tuple(sorted(arguments.requests)), "piecewise_tokens": (512,), "mixed_tokens": ()}
    config = config.model_copy(update={"cudagraph": config.cudagraph.model_copy(update=sizes)})
    print(machine_line())
    with TemporaryDirectory() as folder:
        is_head = arguments.method == "dflash"
        head = save_head(Path(folder), Path(config.model.path), arguments.layers) if is_head else None
        frequent = None
        if arguments.frequent is not None:
            frequent = Path(folder) / "frequent.json"
            frequent.write_text(json.dumps([*range(arguments.frequent)]))
        measure(config, arguments, head, frequent)


def measure(config: EngineConfig, arguments: Namespace, head: Path | None, frequent: Path | None) -> None:
    generator = torch.Generator().manual_seed(0)
    plain: dict[int, float] = {}
    most_tokens = arguments.prompt + arguments.new + 64
    for num_drafted in [0, *arguments.drafted, 0]:
        length = 1 + arguments.share * num_drafted
        most, method = max(arguments.requests), arguments.method
        asked = config_of(config, num_drafted, length, most, most_tokens, method, head, frequent)
        with Engine(asked) as engine:
            for count in arguments.requests:
                if count * (1 + num_drafted) * (1 if head is None else 2) > 256:
                    continue  # these are not captured
                prompts = torch.randint(100, 1000, (count, arguments.prompt), generator=generator).tolist()
                engine.generate(prompts, greedy(2))  # now their prefixes are cached
                pace = pace_of(engine, prompts, arguments.new, arguments.rounds)
                if not num_drafted:
                    plain[count] = pace.step_ms
                    print(f"{count:4} requests: {pace.step_ms:.3f} ms a plain step")
                    continue
                print(
                    f"{count:4} requests, {num_drafted} drafted: {pace.step_ms:.3f} ms a step, "
                    f"{pace.step_ms / plain[count]:.3f} of a plain one; {pace.token_ms:.3f} ms a token at "
                    f"{pace.step_ms / pace.token_ms:.2f} tokens a step",
                )


if __name__ == "__main__":
    with told_in_one_line():
        main()
