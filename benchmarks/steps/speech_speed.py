"""Milliseconds from a window of sound to its first token, and of a decode step beside what its bytes take to read.

    python -m benchmarks.steps.speech_speed configs/shapes/whisper-large-v3 --dummy [--device cuda:0] [--windows 1,8]

A window is noise, as long as the model's. First tokens are asked for one after another, each of a window that is new.
Decodes of so many windows run together; a step is what an answer takes longer for more tokens. It reads the decoder's
weights once, and of each window the keys and values of its states. With --kernels the kernels of a step are told too.
"""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from benchmarks.script import greedy, parser_of, positive, positives, told_in_one_line
from benchmarks.told_kernels import tell_kernels
from mllm_compile import Engine
from mllm_compile.bench.limits.ceilings import measure_ceilings
from mllm_compile.bench.timing.clock import Stopwatch
from mllm_compile.media.log_mel import LogMel

FEW, START = 9, 4  # tokens of a short answer; and those that a decoder begins with
STEPS = 40  # that are traced


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--dummy", action="store_true", help="random weights")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--windows", type=positives, default=[1, 8, 32], help="that are decoded together")
    parser.add_argument("--tokens", type=positive, default=200, help="of an answer")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--layers", type=positive, help="of encoder and decoder; by default all")
    parser.add_argument("--backend", default="inductor", choices=("inductor", "eager"))
    parser.add_argument("--mode", default="auto", help="cudagraph.mode")
    parser.add_argument("--kernels", type=positive, default=0, help="of a step that are told, those of most time")
    args = parser.parse_args()
    told, device = AutoConfig.from_pretrained(args.model), torch.device(args.device)
    if args.layers:  # of random weights
        told.encoder_layers = told.decoder_layers = args.layers
        args.model = Path(tempfile.mkdtemp())
        told.save_pretrained(args.model)
    config: dict[str, Any] = {
        "model": {"path": str(args.model), "dtype": args.dtype} | ({"load_format": "dummy"} if args.dummy else {}),
        "runtime": {"device": args.device, "max_running_requests": max(args.windows)},
        "compile": {"backend": args.backend},
        "cudagraph": {"mode": args.mode, "decode_requests": args.windows} if args.mode != "none" else {"mode": "none"},
    }
    ceilings = measure_ceilings(device, getattr(torch, args.dtype))
    with Engine(config) as engine:
        assert engine.decoder is not None
        if isinstance(engine.decoder.log_mel, str):
            raise SystemExit(engine.decoder.log_mel)
        windows, prompt = Windows(engine.decoder.log_mel), list(range(START))

        def seconds(count: int, tokens: int) -> float:
            given = [
                {"encoder_prompt": {"multi_modal_data": {"audio": windows.new()}}, "decoder_prompt": prompt}
                for _ in range(count)
            ]
            watch = Stopwatch()
            outputs = engine.generate(given, greedy(tokens))
            taken = watch.seconds
            if error := next((output.error for output in outputs if output.error), None):
                raise SystemExit(error)
            return taken

        first = [seconds(1, 1) for _ in range(args.rounds + 1)][1:]
        of_host = [windows.seconds() for _ in range(args.rounds)]
        print(
            f"sound to first token: {1e3 * statistics.median(first):.1f} ms ({1e3 * min(first):.1f} to "
            f"{1e3 * max(first):.1f}); {1e3 * statistics.median(of_host):.1f} of it the log-mel on the host",
        )
        for count in args.windows:
            step = statistics.median(
                (seconds(count, args.tokens) - seconds(count, FEW)) / (args.tokens - FEW) for _ in range(3)
            )
            limit = bytes_of_step(told, count, getattr(torch, args.dtype)) / ceilings.read_bytes_s
            print(
                f"{count} windows: step {1e3 * step:.3f} ms, limit {1e3 * limit:.3f}, {limit / step:.0%} of it, "
                f"{count / step:,.0f} tokens/s",
            )
            if args.kernels:
                tell_kernels(partial(seconds, count), FEW, STEPS, args.kernels)


def bytes_of_step(told: Any, windows: int, dtype: torch.dtype) -> int:
    """Bytes that a decode step reads: weights of layers and head, and keys and values of the windows' states."""
    width, layers = told.d_model, told.decoder_layers
    weights = layers * (4 * width**2 + 2 * width**2 + 2 * width * told.decoder_ffn_dim) + told.vocab_size * width
    return (weights + windows * layers * 2 * told.max_source_positions * width) * dtype.itemsize


class Windows:
    """Sounds of a window each, no two alike."""

    def __init__(self, log_mel: LogMel) -> None:
        self._log_mel, self._random = log_mel, np.random.default_rng(0)

    def new(self) -> np.ndarray:
        """[N] float32."""
        return self._random.standard_normal(self._log_mel.samples, dtype=np.float32) / 8

    def seconds(self) -> float:
        """The seconds that one window of mel bins takes."""
        sound, watch = self.new(), Stopwatch()
        self._log_mel.window(sound)
        return watch.seconds


if __name__ == "__main__":
    with told_in_one_line():
        main()
