"""Serves a tiny random model of every class of Transformers that embeds or classifies texts, or notes why not.

    python -m tests.model.pooling_survey [CLASS …] [--write]

Each is compiled on the CPU in float32 with its pieces as traced, serves texts of token ids in one packed row, and is
compared with Transformers' own forward of each text alone. --write brings docs/lab/encoders.md up to date; of some
classes alone, the rows of the others stay.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

_CPU_SECONDS = 120
_BATCH = 24  # classes of one worker process
PAGE = Path(__file__).parents[2] / "docs" / "lab" / "encoders.md"
_BEGIN, _END = "<!-- survey -->", "<!-- end of survey -->"


@dataclass(frozen=True)
class PoolingOutcome:
    """The result of one class: served | wrong | refused | failed | not tried, as survey.Outcome has them."""

    name: str
    status: str
    remark: str
    error: float | None = None


def attempt(name: str, scratch: Path) -> PoolingOutcome:
    """Compiles, serves and compares one class."""
    from mllm_compile import Engine
    from mllm_compile.errors import UnsupportedModelError
    from mllm_compile.model.refusals import first_line
    from mllm_compile.process.progress import NullReporter
    from tests.model import pooling_models as models

    with tempfile.TemporaryDirectory(dir=scratch) as place:
        folder = Path(place, "model")
        try:
            model = models.save_pooling_model(name, folder)
            texts = models.texts_of(model)
            theirs = models.by_transformers(model, texts)
        except Exception as error:
            return PoolingOutcome(name, "not tried", first_line(error))
        try:
            with Engine(models.pooling_config(folder, Path(place, "cache")), reporter=NullReporter()) as engine:
                facts = engine.pooling.rules.facts
                error = models.largest_error(models.served(engine, texts), theirs)
        except UnsupportedModelError as refusal:
            return PoolingOutcome(name, "refused", str(refusal))
        except Exception as failure:
            return PoolingOutcome(name, "failed", f"{type(failure).__name__}: {first_line(failure)}")
    status = "served" if error <= models.LIMIT else "wrong"
    of_what = "" if facts.end_id is None else "; only texts that end with eos_token_id"
    return PoolingOutcome(name, status, f"{facts.task}, {facts.rules[0]}{of_what}", error)


def survey(names: Iterable[str]) -> Iterator[PoolingOutcome]:
    """All of them, in worker processes, so that none can take the others with it."""
    waiting = list(names)
    while waiting:
        batch, waiting = waiting[:_BATCH], waiting[_BATCH:]
        command = [sys.executable, "-m", "tests.model.pooling_survey", "--worker", *batch]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        worker = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        assert worker.stdout is not None, "it was asked for"
        for line in worker.stdout:
            if line.startswith("{"):
                outcome = PoolingOutcome(**json.loads(line))
                batch.remove(outcome.name)
                yield outcome
        if worker.wait() and batch:
            yield PoolingOutcome(batch[0], "failed", f"the process ended with {worker.returncode}")
            waiting = batch[1:] + waiting


def render(outcomes: Iterable[PoolingOutcome], before: str = "") -> str:
    """The table of the page; `before` has rows of classes that were not tried again."""
    rows = dict(re.findall(r"^\| (\w+) \| ([^|]+ \| .+) \|$", before, re.MULTILINE))
    rows.pop("class", None)
    for one in outcomes:
        remark = " ".join(one.remark.split()).replace("|", "/")[:160]
        what = f"{one.error:.0e}: {one.remark}" if one.error is not None else remark
        rows[one.name] = f"{one.status} | {what}"
    of_status = Counter(row.partition(" |")[0] for row in rows.values())
    shown = ", ".join(f"{count} {status}" for status, count in of_status.most_common())
    lines = [f"**Of {len(rows)} classes: {shown}.**", "", "| class | outcome | error or reason |", "|---|---|---|"]
    ordered = sorted(rows.items(), key=lambda row: (not row[1].startswith("served"), row[1].partition(" |")[0], row[0]))
    return "\n".join([*lines, *(f"| {name} | {row} |" for name, row in ordered)])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="classes of Transformers; all of them if none is given")
    parser.add_argument("--write", action="store_true", help="bring the page up to date")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        with tempfile.TemporaryDirectory() as scratch:
            for name in arguments.names:
                signal.setitimer(signal.ITIMER_PROF, _CPU_SECONDS)
                outcome = attempt(name, Path(scratch))
                signal.setitimer(signal.ITIMER_PROF, 0)
                print(json.dumps(asdict(outcome)), flush=True)
        return 0
    from tests.model.pooling_models import pooling_classes

    outcomes = []
    for outcome in survey(arguments.names or pooling_classes()):
        error = "" if outcome.error is None else f"{outcome.error:.1e}"
        print(f"{outcome.name:44} {outcome.status:10} {error:8} {outcome.remark[:220]}", flush=True)
        outcomes.append(outcome)
    if arguments.write:
        text = PAGE.read_text(encoding="utf-8")
        begin, table, end = re.split(f"(?<={_BEGIN}\n)|(?=\n{_END})", text)
        table = render(outcomes, table if arguments.names else "")
        PAGE.write_text(begin + table + end, encoding="utf-8")
    return int(any(outcome.status == "wrong" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
