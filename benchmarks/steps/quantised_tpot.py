"""Milliseconds of a decode step and of a prefill by how many bits weights and the KV cache have, with their limits.

    python -m benchmarks.steps.quantised_tpot [CONFIG.yaml] [--variants bf16,fp8,fp8-kv,int4,…] [--batch 1,8,64,256]
        [--input-len 512] [--output-len 129] [--repeats 1] [--prefill] [--start]

For each variant `mllm-compile bench latency` runs on the config with the variant's `model.quantization`,
`model.lm_head_quantization` and `runtime.kv_cache_dtype`; by default the config is Qwen3-8B's shape with random
weights. --prefill runs `bench throughput` too, for its prefill of 32 prompts of 2048 tokens. --start starts fresh
processes from the compiled runtimes, and gives the seconds from the first line to the first token of each. Each variant
compiles the model first, where no runtime of it is there yet.

Needs an NVIDIA GPU for its default config, no GPU for a small one. On a CPU name the sizes of its work as well, as
`configs/tiny.yaml --batch 1,4 --input-len 32 --output-len 9` does.
"""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from benchmarks.script import names_of, parser_of, positive, positives, told_in_one_line
from mllm_compile import EngineConfig
from mllm_compile.bench.measure.harness import (
    FIRST_TOKENS,
    probe_machine,
    run_latency,
    run_process,
    run_throughput,
)
from mllm_compile.bench.measure.results import Measurement
from mllm_compile.bench.measure.workloads import LatencyWork, ThroughputWork

# model.quantization, model.lm_head_quantization and runtime.kv_cache_dtype
VARIANTS: dict[str, tuple[str, str, str]] = {
    "bf16": ("auto", "none", "auto"),
    "fp8": ("fp8", "none", "auto"),
    "fp8-head": ("fp8", "fp8", "auto"),
    "fp8-kv": ("fp8", "none", "fp8_e4m3"),
    "int4": ("int4", "none", "auto"),
    "int4-head": ("int4", "int4", "auto"),
    "int4-head-fp8": ("int4", "fp8", "auto"),
}


def config_of(source: Path, variant: str, folder: Path) -> Path:
    """Writes the config with the variant's types."""
    sections: dict[str, Any] = yaml.safe_load(source.read_text())
    quantization, of_head, kv_cache_dtype = VARIANTS[variant]
    model = dict(sections["model"])
    if model["path"].startswith("."):
        model["path"] = str((source.parent / model["path"]).resolve())
    sections["model"] = model | {"quantization": quantization, "lm_head_quantization": of_head}
    sections["runtime"] = sections.get("runtime", {}) | {"kv_cache_dtype": kv_cache_dtype}
    path = folder / f"{source.stem}-{variant}.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def shown(line: Measurement) -> str:
    limit = "" if line.limit is None else f" ({line.limit:.2f})"
    return f"{line.median:.2f}{limit}"


def start_seconds(path: Path, work: LatencyWork) -> list[float]:
    """Seconds of two fresh processes, with the runtime that the work has left."""
    setting = probe_machine(str(path), max(work.batches), work.longest_request).setting
    job = {"engine": "mllm", "setting": asdict(setting)}
    return [run_process(FIRST_TOKENS, job)["first token"] for _ in range(2)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", nargs="?", type=Path, default=Path("configs/qwen-8b-shape.yaml"))
    parser.add_argument("--variants", type=names_of(VARIANTS), default=",".join(VARIANTS))
    parser.add_argument("--batch", type=positives, default="1,8,64,256")
    parser.add_argument("--input-len", type=positive, default=512)
    parser.add_argument("--output-len", type=positive, default=129)
    parser.add_argument("--repeats", type=positive, default=1)
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--start", action="store_true")
    options = parser.parse_args()
    EngineConfig.from_yaml(options.config)  # says what is wrong with it
    sizes = {"input_len": options.input_len, "output_len": options.output_len, "repeats": options.repeats}
    work = LatencyWork(batches=tuple(options.batch), **sizes)
    with tempfile.TemporaryDirectory() as name:
        for variant in options.variants:
            path = config_of(options.config, variant, Path(name))
            result = run_latency(str(path), ["mllm"], work)
            for run in result.runs:
                for line in run.measurements:
                    print(f"{variant:14}{line.name:8}{line.batch:5} {shown(line)} {line.unit}")
            if options.start:
                seconds = ", ".join(f"{one:.2f}" for one in start_seconds(path, work))
                print(f"{variant:14}start {seconds} s")
            if options.prefill:
                many = ThroughputWork(mixed_requests=1, mixed_range=(8, 16), repeats=options.repeats)
                for run in run_throughput(str(path), ["mllm"], many).runs:
                    for line in run.measurements:
                        print(f"{variant:14}{line.name} {shown(line)} {line.unit}")


if __name__ == "__main__":
    with told_in_one_line():
        main()
