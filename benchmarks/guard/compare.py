"""Compares this tree's stages with its base's, by turns in one run: `python -m benchmarks.guard.compare`.

Each tree has a process of its own. They time a round in turns, and what counts is the median of the ratios of
neighbours: other work on the machine comes and goes, and meets both of a pair. A stage over its threshold is measured
again: twice over it is slower.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

from pytest_benchmark.stats import Stats

from benchmarks.guard.base import NoBaseError, checked_out, find_base, slower_on_purpose
from benchmarks.guard.registry import STAGES
from benchmarks.guard.stage import Stage, environment_of
from mllm_compile.bench.timing import rounds
from mllm_compile.process.interruption import ended_by_sigterm

ROOT = Path(__file__).parents[2]
SIDE = Path(__file__).with_name("side.py")
SLOWER, FAILED, ON_PURPOSE, NEW, SAME = "SLOWER", "FAILED", "slower on purpose", "not in base: new", "ok"
RED = (SLOWER, FAILED)


class StageFailed(Exception):
    """A stage of a tree failed."""


class Side:
    """The process that times the stages of one tree."""

    def __init__(self, tree: Path, kind: str, folder: Path) -> None:
        """
        Args:
            folder: for what the stages make.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(SIDE), kind, str(folder)],
            cwd=tree,
            env=environment_of(tree, folder / "cache"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, name: str) -> None:
        """Lets it make a stage ready; `answer` is when it is."""
        self._say("ready", name)

    def seconds(self, name: str) -> float:
        """The time of one round.

        Raises:
            StageFailed: with the traceback.
        """
        self._say("time", name)
        return self.answer()

    def answer(self) -> float:
        """The seconds of what was asked.

        Raises:
            StageFailed: with the traceback.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise StageFailed(f"the process ended with code {self._process.wait()}; see its output")
        answer = json.loads(line)
        if "failed" in answer:
            raise StageFailed(answer["failed"])
        return answer["seconds"]

    def end(self) -> None:
        """Ends it, which ends what it has started."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _say(self, what: str, name: str) -> None:
        with contextlib.suppress(OSError):  # of an ended process; the answer says it
            print(what, name, file=self._process.stdin, flush=True)


@contextmanager
def sides_of(trees: Sequence[Path], kind: str) -> Iterator[list[Side]]:
    """A process for each tree."""
    with tempfile.TemporaryDirectory(prefix="mllm-bench-") as folder, ExitStack() as ends:
        sides = []
        for index, tree in enumerate(trees):
            own = Path(folder) / str(index)
            own.mkdir()
            sides.append(Side(tree, kind, own))
            ends.callback(sides[-1].end)
        yield sides


@dataclass(frozen=True)
class Verdict:
    """The outcome of a stage; statistics are None where it was not timed."""

    stage: str
    word: str
    base: Stats | None = None
    tree: Stats | None = None
    ratios: tuple[float, ...] = ()
    why: str = ""


def judge(stage: Stage, base: Side, tree: Side, on_purpose: Mapping[str, str]) -> Verdict:
    """Times a stage in both trees, and once more if it is over its threshold.

    A stage that the base cannot run is new: this tree's code runs it, and an older product may lack what that asks for.
    """
    for side in (base, tree):
        side.begin(stage.name)  # side by side, as nothing is timed yet
    missing = _failure_of(base.answer)
    if failure := _failure_of(tree.answer):
        return Verdict(stage.name, FAILED, why=failure)
    if missing:
        return Verdict(stage.name, NEW, why=missing)
    ratios: list[float] = []
    while True:
        try:
            of_base, of_tree = by_turns(stage, base, tree)
        except StageFailed as error:
            return Verdict(stage.name, FAILED, why=str(error))
        ratios.append(statistics.median(map(truediv, of_tree.data, of_base.data)))
        if ratios[-1] <= stage.threshold:
            return Verdict(stage.name, SAME, of_base, of_tree, tuple(ratios))
        if len(ratios) == 2:
            break
    reason = on_purpose.get(stage.name, "")
    return Verdict(stage.name, ON_PURPOSE if reason else SLOWER, of_base, of_tree, tuple(ratios), reason)


def _failure_of(answer: Callable[[], float]) -> str:
    try:
        answer()
    except StageFailed as error:
        return str(error)
    return ""


def by_turns(stage: Stage, base: Side, tree: Side) -> tuple[Stats, Stats]:
    """The times of both trees, which go first in turns."""
    takes = {side: partial(side.seconds, stage.name) for side in (base, tree)}
    times = rounds.by_turns(takes, stage.rounds, warm_ups=0, swapped=True)
    of_base, of_tree = Stats(), Stats()
    for side, stats in ((base, of_base), (tree, of_tree)):
        for seconds in times[side]:
            stats.update(seconds)
    return of_base, of_tree


def show(verdict: Verdict) -> None:
    """Prints a stage's line as soon as it is known."""
    times = (" " * 9 if stats is None else f"{show_time(stats.median):>9}" for stats in (verdict.base, verdict.tree))
    ratios = ", then ".join(f"{ratio:.2f}" for ratio in verdict.ratios)
    word = verdict.word + (f" ({_last_line(verdict.why)})" if verdict.why else "")
    print(f"  {verdict.stage:<18} {' -> '.join(times)}  {ratios:>6}  {word}", flush=True)


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""


def show_time(seconds: float) -> str:
    """The time in the unit that reads best."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def as_record(verdicts: Sequence[Verdict], base: str) -> dict[str, Any]:
    """Both trees' times as pytest-benchmark's JSON has them, for `pytest-benchmark compare --group-by=group`."""
    benchmarks = [
        {
            "group": one.stage,
            "name": name,
            "fullname": f"{one.stage}[{name}]",
            "params": None,
            "param": None,
            "extra_info": {"verdict": one.word},
            "options": {},
            "stats": {field: getattr(stats, field) for field in Stats.fields} | {"iterations": 1, "data": stats.data},
        }
        for one in verdicts
        for name, stats in (("base", one.base), ("tree", one.tree))
        if stats is not None
    ]
    return {
        "machine_info": {},
        "commit_info": {"base": base},
        "benchmarks": benchmarks,
        "datetime": datetime.now(UTC).isoformat(),
        "version": "5.0.0",
    }


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.guard.compare", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--base", help="a commit to compare with, in place of the merge base with main")
    parser.add_argument("--base-dir", type=Path, help="a folder with another tree to compare with")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree that is judged (default: this one)")
    parser.add_argument("--only", help="stages, separated by commas")
    parser.add_argument("--kind", choices=list(STAGES), default="cpu")
    parser.add_argument("--json", type=Path, help="also write the times here, as pytest-benchmark does")
    options = parser.parse_args(arguments)
    stages = {stage.name: stage for stage in STAGES[options.kind]}
    names = options.only.split(",") if options.only else list(stages)
    if unknown := [name for name in names if name not in stages]:
        parser.error(f"--only: {', '.join(unknown)}; expected some of {', '.join(stages)}")
    try:
        if options.kind == "gpu" and not _has_gpu():
            raise NoBaseError("there is no NVIDIA GPU here, whose stages could be compared; on a CPU: make bench.")
        with ExitStack() as ends:
            on_purpose: dict[str, str] = {}
            if options.base_dir is not None:
                base, what = options.base_dir.resolve(), f"the folder {options.base_dir}"
                if not (base / "mllm_compile").is_dir():
                    raise NoBaseError(f"{base} has no mllm_compile: expected the root of another tree of this project.")
            else:
                commit, told = find_base(options.tree, options.base)
                on_purpose = slower_on_purpose(options.tree, commit)
                base, what = ends.enter_context(checked_out(options.tree, commit)), f"{commit[:12]}, {told}"
            print(f"compared with {what}: its time -> this tree's, and the ratio", flush=True)
            of_base, of_tree = ends.enter_context(sides_of((base, options.tree.resolve()), options.kind))
            verdicts = []
            for name in names:
                verdicts.append(judge(stages[name], of_base, of_tree, on_purpose))
                show(verdicts[-1])
    except NoBaseError as error:
        print(error, file=sys.stderr)
        return 2
    return _told(verdicts, what, options.json)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _told(verdicts: Sequence[Verdict], base: str, record: Path | None) -> int:
    """Writes the record and returns the exit code. A run that compared nothing is a failure."""
    if record is not None:
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(json.dumps(as_record(verdicts, base), indent=1) + "\n", encoding="utf-8")
    for one in verdicts:
        if one.word == FAILED:
            print(f"{one.stage}: {one.why}", file=sys.stderr)
    if all(one.word == NEW for one in verdicts):
        print("the base has none of these stages: nothing was compared", file=sys.stderr)
        return 2
    return 1 if any(one.word in RED for one in verdicts) else 0


if __name__ == "__main__":
    with ended_by_sigterm():  # which removes the base's folder
        code = main(sys.argv[1:])
    sys.exit(code)
