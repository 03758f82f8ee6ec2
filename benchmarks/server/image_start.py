"""Seconds that images add to a warm start: of one runtime, with its programs for images and without them.

    python -m benchmarks.server.image_start configs/qwen3-vl-8b-shape.yaml [--repeats 3]

It is compiled once if necessary. Then new processes start it by turns, each until its engine takes requests; seconds
are from the process's begin, and of each stage. Without images the tower's weights are read all the same.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.script import parser_of, positive, told_in_one_line
from mllm_compile import EngineConfig
from mllm_compile.bench.timing.rounds import by_turns
from mllm_compile.process.console import print_table

_START = """
import json, sys
from mllm_compile import Engine, EngineConfig
from mllm_compile.process.timeline import seconds_since_start
from mllm_compile.runtime.program.spec import Program
if sys.argv[2] == "without":
    read = Program.from_json
    Program.from_json = staticmethod(lambda data: read(data | {"media": None}))
engine = Engine(EngineConfig.from_yaml(sys.argv[1]))
print(json.dumps({"ready": seconds_since_start()} | dict(engine.timeline.stages)))
engine.close()
"""


def start(config: Path, images: str) -> dict[str, float]:
    """Seconds until an engine is ready in a new process, and of its stages."""
    command = [sys.executable, "-c", _START, str(config), images]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"error: {config} does not start {images} images")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path, help="of a model with a tower")
    parser.add_argument("--repeats", type=positive, default=3)
    args = parser.parse_args()
    EngineConfig.from_yaml(args.config)  # says what is wrong with it
    ways = ("with", "without")
    start(args.config, "with")  # compiles, or fills the caches of files
    starts = by_turns({way: partial(start, args.config, way) for way in ways}, args.repeats, warm_ups=0)
    medians = [{name: statistics.median(one[name] for one in starts[way]) for name in starts[way][0]} for way in ways]
    names = dict.fromkeys(name for seconds in medians for name in seconds)
    rows = [(name, *(f"{seconds[name]:.3f}" if name in seconds else "" for seconds in medians)) for name in names]
    print_table(sys.stdout, f"warm starts, s: medians of {args.repeats}", ("", "with images", "without"), rows)


if __name__ == "__main__":
    with told_in_one_line():
        main()
