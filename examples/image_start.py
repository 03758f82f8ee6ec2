"""Seconds that images add to a warm start: of a model with a tower, beside one of text alone whose text is as large.

    python examples/image_start.py configs/qwen3-vl-8b-shape.yaml configs/qwen-8b-shape.yaml [--repeats 3]

Each is compiled once if necessary. Then new processes start them by turns, each until its engine takes requests; the
seconds are from the process's first line, and of each stage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from mistakes import positive

from mllm_compile.process.console import print_table

_START = """
import time
first_line = time.perf_counter()
import json, sys
from mllm_compile import Engine, EngineConfig
engine = Engine(EngineConfig.from_yaml(sys.argv[1]))
print(json.dumps({"ready": time.perf_counter() - first_line} | dict(engine.timeline.stages)))
engine.close()
"""


def start(config: Path) -> dict[str, float]:
    """Seconds until an engine is ready in a new process, and of its stages."""
    done = subprocess.run([sys.executable, "-c", _START, str(config)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"error: {config} does not start")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("images", type=Path, help="a config of a model with a tower")
    parser.add_argument("text", type=Path, help="a config of the same without one")
    parser.add_argument("--repeats", type=positive, default=3)
    args = parser.parse_args()
    configs = (args.images, args.text)
    for config in configs:
        start(config)
    starts = [[start(config) for config in configs] for _ in range(args.repeats)]
    medians = [
        {name: statistics.median(one[place][name] for one in starts) for name in starts[0][place]} for place in (0, 1)
    ]
    names = dict.fromkeys(name for seconds in medians for name in seconds)
    rows = [(name, *(f"{seconds[name]:.3f}" if name in seconds else "" for seconds in medians)) for name in names]
    print_table(sys.stdout, f"warm starts, s: medians of {args.repeats}", ("", "with images", "text alone"), rows)


if __name__ == "__main__":
    main()
