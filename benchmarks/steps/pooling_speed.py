"""How many tokens of texts a second are embedded, beside Transformers on the same device, by turns.

    OMP_NUM_THREADS=1 python -m benchmarks.steps.pooling_speed MODEL_FOLDER [--texts 128] [--batch 32] [--onnx FILE]
    python -m benchmarks.steps.pooling_speed configs/shapes/bert-base --dummy --device cuda:0 --lengths 32,128,512

Without --lengths texts have 4 to 60 random tokens, most of them few; with it all texts of a table are equally long, and
a step's own time is told too. Transformers runs sorted batches, padded to the longest, and one padded batch; both pool
as the model's files say means. vLLM comes behind them, pools as it does by default, and is asked with --lengths alone.
On a CPU the seconds of this process alone count. Largest differences from our numbers are printed where the weights are
real. An ONNX file has the inputs input_ids and attention_mask [S, T].
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModel

from benchmarks.script import mistake, names_of, parser_of, positive, positives, told_in_one_line
from benchmarks.tiers.vllm_answers import need_vllm
from benchmarks.told_kernels import tell_kernels
from mllm_compile import Engine
from mllm_compile.bench.measure.setting import Setting
from mllm_compile.bench.timing.clock import cpu_seconds, wall_seconds
from mllm_compile.runtime.pooling.texts import PackedText, PoolingParams

SHORTEST, LONGEST, FIRST_TOKEN = 4, 60, 1000
ENGINES = ("mllm", "transformers", "vllm")
Way = Callable[[], Any]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=positive, default=128, help="without --lengths")
    parser.add_argument("--batch", type=positive, default=32, help="texts of Transformers' batches")
    parser.add_argument("--onnx", type=Path, help="the same model, for onnxruntime with one thread")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", help="float32 on a CPU, else bfloat16")
    parser.add_argument("--dummy", action="store_true", help="random weights; the folder has a config.json alone")
    parser.add_argument("--lengths", type=positives, help="tokens of each text, a table each")
    parser.add_argument("--tokens", type=positive, default=65536, help="of all texts together, with --lengths")
    parser.add_argument("--step", type=positive, help="most tokens of a step")
    parser.add_argument("--graphs", type=positives, help="tokens of captured steps; by default the config's")
    parser.add_argument("--kernels", type=positive, help="of a step that are told, those of most time, with --lengths")
    parser.add_argument("--engines", type=names_of(ENGINES), default=["mllm", "transformers"], help=", ".join(ENGINES))
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    args = parser.parse_args()
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    load_format = "dummy" if args.dummy else "auto"
    config: dict[str, Any] = {
        "model": {"path": str(args.model), "dtype": dtype, "task": "embed", "load_format": load_format},
        "compile": {"backend": args.backend},
        "cudagraph": {"piecewise_tokens": args.graphs} if args.graphs else {},
        "runtime": {"device": args.device} | ({"max_num_batched_tokens": args.step} if args.step else {}),
    }
    if "vllm" in args.engines:
        need_vllm()
        if args.lengths is None:
            mistake("--engines names vllm, which is measured with --lengths alone")
    if "mllm" in args.engines:
        model = theirs(args, getattr(torch, dtype)) if "transformers" in args.engines else None
        with Engine(config) as engine:
            if args.lengths is None:
                measure(engine, model, ragged(args.texts), args)
            for length in args.lengths or ():
                of_length(engine, model, length, args)
    if "vllm" in args.engines:
        of_vllm(args, dtype)


def theirs(args: argparse.Namespace, dtype: torch.dtype) -> Any:
    """Transformers' model, with SDPA."""
    if not args.dummy:
        return AutoModel.from_pretrained(args.model, dtype=dtype).to(args.device).eval()
    with torch.device(args.device):
        return AutoModel.from_config(AutoConfig.from_pretrained(args.model), dtype=dtype).eval()


def ragged(count: int) -> list[list[int]]:
    draws = random.Random(0)
    lengths = [min(LONGEST, SHORTEST + int(draws.expovariate(1 / 14))) for _ in range(count)]
    return drawn(lengths)


def drawn(lengths: Sequence[int]) -> list[list[int]]:
    draws = random.Random(1)
    return [[draws.randrange(FIRST_TOKEN, 2 * FIRST_TOKEN) for _ in range(length)] for length in lengths]


def measure(engine: Engine, model: Any, texts: list[list[int]], args: argparse.Namespace) -> None:
    ways: dict[str, Way] = {
        "packed": lambda: np.stack([one.outputs.embedding for one in engine.embed(texts, normalize=True)]),
    }
    for what, size in ((f"sorted batches of {args.batch}", args.batch), ("one batch", len(texts))):
        if model is not None:
            ways[f"Transformers, {what}"] = partial(in_batches, model, texts, size, args.device)
    if args.onnx is not None:
        session = OnnxModel(args.onnx)
        for size in (8, args.batch, 1):
            ways[f"onnxruntime, sorted batches of {size}"] = partial(in_batches, session, texts, size, "cpu")
    results = {name: way() for name, way in ways.items()}  # the warm-up
    errors = {name: float(np.abs(one - results["packed"]).max()) for name, one in results.items()}
    tell(ways, "packed", sum(map(len, texts)), args, {} if args.dummy else errors)


def of_length(engine: Engine, model: Any, length: int, args: argparse.Namespace) -> None:
    """Texts of one length: the whole call, a step alone, and Transformers by batches of as many tokens."""
    step = engine.config.runtime.max_num_batched_tokens
    texts = drawn([length] * max(1, args.tokens // length))
    runner: Any = engine.pooling.core._runner
    asked = PoolingParams("embed", ("mean",), True)
    packed = [PackedText(np.array(ids), asked) for ids in texts[: max(1, step // length)]]
    of_step, total = len(packed) * length, len(texts) * length
    few = packed[: max(1, 32 // max(1, length // 32))]
    ways: dict[str, tuple[Way, int]] = {
        "embed": (lambda: engine.embed(texts, normalize=True), total),
        f"a step of {of_step} tokens": (lambda: runner.run(packed), of_step),
        f"a step of {len(few) * length} tokens": (lambda: runner.run(few), len(few) * length),
    }
    for count, chosen in ((len(packed), texts), (len(few), texts[: len(few)])):
        if model is not None:
            way = partial(in_batches, model, chosen, count, args.device)
            ways[f"Transformers, batches of {count * length} tokens"] = way, len(chosen) * length
    print(f"{length} tokens a text:")
    for name, (way, tokens) in ways.items():
        tell_rate(name, way, tokens, args.rounds)
    if args.kernels:
        print(f"  kernels of a step of {of_step} tokens:")
        tell_kernels(lambda count: [runner.run(packed) for _ in range(count)], 2, 10, args.kernels)


def of_vllm(args: argparse.Namespace, dtype: str) -> None:
    """Whole calls of vLLM with texts of each length."""
    from mllm_compile.bench.adapters.vllm_engine import VllmTexts

    setting = Setting(
        source="",
        changes={},
        model_folder=str(args.model),
        dtype=dtype,
        device=args.device,
        random_weights=args.dummy,
        max_model_len=max(args.lengths),
        vocab_size=2 * FIRST_TOKEN,
        trust_remote_code=False,
    )
    engine = VllmTexts(setting)
    for length in args.lengths:
        texts = drawn([length] * max(1, args.tokens // length))
        print(f"{length} tokens a text:")
        tell_rate("vLLM's embed", partial(engine.embed, texts), len(texts) * length, args.rounds)
    engine.close()


def tell_rate(name: str, way: Way, tokens: int, rounds: int) -> None:
    way(), way()
    seconds = sorted(wall_seconds(way) for _ in range(rounds))
    middle = statistics.median(seconds)
    spread = (seconds[-1] - seconds[0]) / middle
    print(f"  {name}: {middle * 1e3:.2f} ms, {tokens / middle:,.0f} tokens/s, spread {spread:.0%}", flush=True)


class OnnxModel:
    """Transformers' model as onnxruntime has it, called likewise."""

    def __init__(self, path: Path) -> None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(str(path), options)

    def __call__(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[torch.Tensor]:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        given = {"input_ids": input_ids.numpy(), "attention_mask": mask.numpy()}
        return (torch.from_numpy(self._session.run(None, given)[0]),)


def tell(ways: dict[str, Way], own: str, tokens: int, args: argparse.Namespace, errors: dict[str, float]) -> None:
    seconds_of = cpu_seconds if args.device == "cpu" else wall_seconds
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            taken[name].append(seconds_of(way))
    for name, seconds in taken.items():
        ratio = statistics.median(other / mine for other, mine in zip(seconds, taken[own], strict=True))
        rate = tokens / statistics.median(seconds)
        error = f", largest difference {errors[name]:.0e}" if name in errors else ""
        print(f"{name}: {rate:,.0f} tokens/s, {ratio:.2f} x our time{error}")


@torch.inference_mode()
def in_batches(model: Any, texts: Sequence[Sequence[int]], batch: int, device: str) -> np.ndarray:
    """Embeddings [S, D] by Transformers' own forward of padded batches."""
    order = sorted(range(len(texts)), key=lambda at: -len(texts[at])) if batch < len(texts) else list(range(len(texts)))
    found: list[np.ndarray] = []
    for start in range(0, len(texts), batch):
        chosen = order[start : start + batch]
        longest = max(len(texts[at]) for at in chosen)
        rows = np.zeros((len(chosen), longest), dtype=np.int64)
        for row, at in enumerate(chosen):
            rows[row, : len(texts[at])] = texts[at]
        ids, mask = (torch.from_numpy(one).to(device) for one in (rows, (rows > 0).astype(np.int64)))
        has_padding = bool((rows == 0).any())
        hidden = model(input_ids=ids, attention_mask=mask if has_padding else None)[0].float()
        means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        found.append(torch.nn.functional.normalize(means, dim=-1).cpu().numpy())
    back = np.argsort(np.array(order))
    return np.concatenate(found)[back]


if __name__ == "__main__":
    with told_in_one_line():
        main()
