"""Where the time of a warm start goes, stage by stage and rank by rank, over one GPU or several.

    python -m benchmarks.server.start_stages configs/qwen-8b-shape.yaml --ranks 1 2 [--repeats 3] [--timeline]

It is compiled first if necessary, once for each number of ranks. Then new processes start it by turns, each until its
engine takes requests. Seconds are from the process's begin; a rank's seconds are from then to its end of a stage. With
`--timeline` the last start of each number of ranks is drawn as well.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

from benchmarks.script import parser_of, positive
from mllm_compile.bench.timing.rounds import by_turns
from mllm_compile.process.console import print_table
from mllm_compile.process.timeline import Span, print_timeline

_START = """
import json, sys
from dataclasses import astuple
from mllm_compile import Engine, EngineConfig, MllmError
from mllm_compile.process.timeline import seconds_since_start
try:
    config = EngineConfig.from_yaml(sys.argv[1])
    runtime = config.runtime.model_copy(update={"tensor_parallel_size": int(sys.argv[2])})
    engine = Engine(config.model_copy(update={"runtime": runtime}))
except MllmError as error:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    sys.exit(2)
print(json.dumps([seconds_since_start(), [astuple(span) for span in engine.timeline.spans]]))
engine.close()
"""

Start = tuple[float, list[Span]]


def start(config: Path, num_ranks: int) -> Start:
    """Seconds until an engine is ready in a new process, and its stages."""
    command = [sys.executable, "-c", _START, str(config), str(num_ranks)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)  # it has said why
    ready, spans = json.loads(done.stdout.splitlines()[-1])
    return ready, [Span(*span) for span in spans]


def rows_of(starts: list[Start]) -> list[tuple[str, ...]]:
    """A row a stage: its name, when it began and ended, and how long it took, as medians of those that had it."""
    names = dict.fromkeys(span.name for _, spans in starts for span in spans)
    rows: list[tuple[str, ...]] = []
    for name in names:
        found = [span for _, spans in starts for span in spans if span.name == name]
        times = [[span.start_s for span in found], [span.end_s for span in found], [span.seconds for span in found]]
        rows.append((name, *(f"{statistics.median(values):.2f}" for values in times)))
    ready = [seconds for seconds, _ in starts]
    return [*rows, ("ready", "", f"{statistics.median(ready):.2f}", f"{min(ready):.2f} to {max(ready):.2f}")]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("--ranks", type=positive, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--timeline", action="store_true", help="draw the last starts")
    args = parser.parse_args()
    for count in args.ranks:
        start(args.config, count)  # compiles, measures memory, or fills the caches of files
    starts = by_turns({count: partial(start, args.config, count) for count in args.ranks}, args.repeats, warm_ups=0)
    for count, found in starts.items():
        title = f"warm starts of {count} ranks, s: medians of {args.repeats}"
        print_table(sys.stdout, title, ("stage", "from", "to", "takes"), rows_of(found))
        if args.timeline:
            print_timeline(sys.stdout, found[-1][1])


if __name__ == "__main__":
    main()
