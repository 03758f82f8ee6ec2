"""Compares a run of the benchmarks with the baseline of this kind of machine: `python -m tests.benchmarks.compare`.

Machines are noisy and differ, so no time is compared with a time of another run. Each benchmark also times a reference
operation between its rounds; what is compared is the ratio of the two, best times both. A ratio that has
grown by more than the threshold is a regression, and so is a benchmark that the baseline has and the run lacks.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mllm_compile.process.console import print_table

BASELINES = Path(__file__).parent / "baselines"
# How much a ratio may grow. On two CPU cores with a load of 7, runs of one commit differed by up to 1.4.
THRESHOLDS = {"cpu": 1.5, "cuda": 1.2}

REGRESSED, MISSING, NEW, FASTER, SAME = "REGRESSED", "MISSING", "new", "faster", "ok"


@dataclass(frozen=True)
class Timing:
    """Best seconds of a benchmark and of its reference operation in the same run."""

    seconds: float
    reference_s: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.reference_s


@dataclass(frozen=True)
class Line:
    """One benchmark's verdict; `timing` or `baseline` (a ratio) is None where there is none."""

    name: str
    timing: Timing | None
    baseline: float | None
    verdict: str

    @property
    def change(self) -> float | None:
        """Ratio over the baseline's; 1 is no change."""
        return None if self.timing is None or self.baseline is None else self.timing.ratio / self.baseline


def timings_of(run: Mapping[str, Any]) -> dict[str, Timing]:
    """Name → timing, from pytest-benchmark's JSON."""
    timings = {}
    for entry in run["benchmarks"]:
        about = entry["extra_info"]
        timings[entry["name"]] = Timing(entry["stats"]["min"] / about["iterations"], about["reference_s"])
    return timings


def compare(timings: Mapping[str, Timing], baseline: Mapping[str, float], threshold: float) -> list[Line]:
    """One line for each benchmark of either, in the run's order.

    Args:
        timings: of the run.
        baseline: name → ratio.
        threshold: how many times the baseline's a ratio may be.
    """
    lines = [
        Line(name, timing, baseline.get(name), _verdict(timing, baseline.get(name), threshold))
        for name, timing in timings.items()
    ]
    lines += [Line(name, None, ratio, MISSING) for name, ratio in baseline.items() if name not in timings]
    return lines


def _verdict(timing: Timing, baseline: float | None, threshold: float) -> str:
    if baseline is None:
        return NEW
    change = timing.ratio / baseline
    return REGRESSED if change > threshold else FASTER if change < 1 / threshold else SAME


def has_regressed(lines: Sequence[Line]) -> bool:
    return any(line.verdict in (REGRESSED, MISSING) for line in lines)


def print_lines(lines: Sequence[Line]) -> None:
    rows = []
    for line in lines:
        time = "-" if line.timing is None else show_time(line.timing.seconds)
        ratio = "-" if line.timing is None else f"{line.timing.ratio:.3g}"
        baseline = "-" if line.baseline is None else f"{line.baseline:.3g}"
        change = "-" if line.change is None else f"{line.change - 1:+.0%}"
        rows.append((line.name, time, ratio, baseline, change, line.verdict))
    print_table(sys.stdout, "benchmarks", ("benchmark", "best", "× reference", "baseline", "change", ""), rows)


def show_time(seconds: float) -> str:
    """In the unit that reads best."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.compare", description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path, help="what pytest --benchmark-json wrote")
    parser.add_argument("--save", action="store_true", help="make this run the baseline of its kind of machine")
    parser.add_argument("--baselines", type=Path, default=BASELINES, help="folder of the baselines")
    options = parser.parse_args(arguments)

    run = json.loads(options.run.read_text(encoding="utf-8"))
    timings = timings_of(run)
    kind = run["machine_info"]["kind"]
    path = options.baselines / f"{kind}.json"
    if options.save:
        ratios = {name: float(f"{timing.ratio:.4g}") for name, timing in timings.items()}
        path.write_text(json.dumps(_baseline(run, ratios), indent=1) + "\n", encoding="utf-8")
    if not path.exists():
        print_lines(compare(timings, {}, 1.0))
        print(f"no baseline for machines of the kind {kind}: nothing to compare with. `make bench-save` makes one.")
        return 0
    threshold = THRESHOLDS["cpu" if kind.startswith("cpu") else "cuda"]
    lines = compare(timings, json.loads(path.read_text(encoding="utf-8"))["ratios"], threshold)
    print_lines(lines)
    print(f"kind {kind}; a ratio of more than {threshold} times the baseline's is a regression ({path})")
    return 1 if has_regressed(lines) else 0


def _baseline(run: Mapping[str, Any], ratios: Mapping[str, float]) -> dict[str, Any]:
    return {"date": run["datetime"][:10], "commit": run["commit_info"].get("id", "unknown")[:12], "ratios": ratios}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
