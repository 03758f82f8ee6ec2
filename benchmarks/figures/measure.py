"""Measures shapes and engines one after another: each in a process of its own with caches of its own, within a time.

A start with empty caches, the batches of decodes and prompts, and prompts of 2,048 tokens come from one process, warm
starts from further ones with the same caches. Figures that a file has are not measured again.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures.shapes import Shape
from benchmarks.figures.sheet import COMMAND, Sheet, Work
from mllm_compile.bench import BenchmarkError
from mllm_compile.bench.limits.limits import ModelFigures
from mllm_compile.bench.measure.harness import cache_environment, counted_experts
from mllm_compile.bench.measure.results import BenchResult, Ceilings, Measurement, measurement_from_json
from mllm_compile.bench.measure.setting import Setting
from mllm_compile.bench.show.report import show_figure, work_name
from mllm_compile.process import child_python
from mllm_compile.process.group import ProcessGroup
from mllm_compile.runtime.files.json_data import from_json

PARTS = ("tpot", "prompts", "warm", "experts", "mixed")
WORKER = "benchmarks.figures.worker"
_END_S = 20.0


class OutOfTime(Exception):
    """The time that was given is over."""


@dataclass(frozen=True)
class Machine:
    """The machine, and what it could do at best with each model."""

    environment: dict[str, str]
    ceilings: Ceilings
    models: dict[str, tuple[Setting, ModelFigures]]


@dataclass(frozen=True)
class Order:
    """The things to measure, the folder of their files, and until when (time.monotonic). With `own_caches` engines
    start from the user's caches, and no start is a cold one."""

    shapes: Sequence[Shape]
    engines: Sequence[str]
    parts: Sequence[str]
    work: Work
    folder: Path
    deadline: float
    own_caches: bool = False


def measure(order: Order) -> list[str]:
    """Measures what the folder's files lack, and returns what they lack then, as text.

    Raises:
        BenchmarkError: the commit is not known, or the machine cannot be asked.
    """
    machine = _machine(order)
    if machine.environment["commit"] == "unknown":
        raise BenchmarkError("the commit of these sources is not known: name it by --commit")
    lacking: list[str] = []
    for shape in order.shapes:
        for engine in order.engines:
            name = f"{gpu_name(machine.environment['device'])}-{shape.model}-{engine}.json"
            empty = BenchResult(
                command=COMMAND,
                work=order.work.sizes(),
                model=shape.model,
                environment=machine.environment,
                ceilings=machine.ceilings,
            )
            sheet = Sheet(order.folder / name, empty, engine, order.work)
            if sheet.was_of is not None:
                _say(f"{name} is of {sheet.was_of}: it is measured anew")
            one = _One(order, machine, shape, engine, sheet)
            try:
                one.measure()
            except OutOfTime:
                _say(f"{engine} {shape.name}: the time is over")
            except BenchmarkError as error:
                _say(f"{engine} {shape.name}: {error}")
            lacking += [f"{engine} {shape.name}: {part}" for part in one.lacking()]
    return lacking


def gpu_name(device: str) -> str:
    """The device's name in the name of a file: h200 of NVIDIA H200."""
    words = device.lower().split()
    return words[1] if words[0] == "nvidia" else "cpu"


class _One:
    """The measuring of one engine and shape."""

    def __init__(self, order: Order, machine: Machine, shape: Shape, engine: str, sheet: Sheet) -> None:
        self._order, self._machine, self._shape, self._engine, self._sheet = order, machine, shape, engine, sheet
        self._setting, self._figures = machine.models[str(shape.config)]
        self._left_out: set[int] = set()

    def lacking(self) -> list[str]:
        """Parts that the file lacks."""
        lacks = [f"tpot b={batch}" for batch in self._batches()]
        lacks += self._throughputs()
        lacks += ["warm starts"] if self._lacks_warm() else []
        return lacks + (["experts"] if self._lacks_experts() else [])

    def measure(self) -> None:
        """All that the file lacks."""
        if self._batches() or self._throughputs() or self._lacks_warm():
            if self._order.own_caches:
                self._measure_engine(None)
            else:
                with tempfile.TemporaryDirectory(prefix="mllm-figures-") as folder:
                    self._measure_engine(Path(folder))
        if self._lacks_experts():
            self._count_experts()

    def _measure_engine(self, caches: Path | None) -> None:
        batches, throughputs = self._batches(), self._throughputs()
        for message in self._start(caches, batches=batches, parts=throughputs):
            if "ready" in message:
                self._sheet.begin(message["version"], message["settings"])
                if caches is not None:
                    self._take_start("cold", message)
            elif "left out" in message:
                self._left_out.add(message["left out"])
            else:
                self._take([measurement_from_json(line) for line in message["lines"]])
        while self._lacks_warm():
            for message in self._start(caches, batches=[], parts=[]):
                self._sheet.begin(message["version"], message["settings"])
                self._take_start("warm", message)

    def _start(self, caches: Path | None, **job: Any) -> Iterator[dict[str, Any]]:
        """None: the user's caches."""
        setting, environment = self._setting, None
        if caches is not None:
            setting = setting.changed("cache", dir=str(caches / "mllm_compile"))
            environment = cache_environment(caches)
        work = self._order.work
        sizes = {"latency": asdict(work.latency), "throughput": asdict(work.throughput)}
        job |= {"task": "engine", "engine": self._engine, "setting": asdict(setting)} | sizes
        return findings(job, self._order.deadline, environment)

    def _count_experts(self) -> None:
        latency = self._order.work.latency
        job = {
            "task": "experts",
            "setting": asdict(self._setting),
            "batches": list(latency.batches),
            "prompt_len": latency.input_len,
            "steps": latency.output_len - 1,
        }
        for message in findings(job, self._order.deadline):
            counted = counted_experts(self._figures, latency.batches, message["shares"])
            few = self._sheet.count_experts(counted, self._figures, self._machine.ceilings)
            self._left_out |= set(few)
            _say(f"{self._shape.name}: {', '.join(map(str, counted))}; batches of too few: {few}")

    def _take_start(self, kind: str, message: dict[str, Any]) -> None:
        seconds = {f"start {kind}": message["first token"], f"ready {kind}": message["ready"]}
        self._take([Measurement.of(name, "s", [value]) for name, value in seconds.items()])

    def _take(self, lines: list[Measurement]) -> None:
        for line in self._sheet.add(lines, self._figures, self._machine.ceilings):
            share = "" if line.share_of_limit is None else f", {line.share_of_limit:.0%} of the limit"
            what = f"{work_name(line)} {show_figure(line.median)} {line.unit}{share}, spread {line.spread:.1%}"
            _say(f"{self._engine} {self._shape.name}: {what}")

    def _batches(self) -> list[int]:
        if "tpot" not in self._order.parts:
            return []
        measured = {batch for name, batch in self._sheet.lines if name == "tpot"} | self._left_out
        return [batch for batch in self._order.work.latency.batches if batch not in measured]

    def _throughputs(self) -> list[str]:
        work = self._order.work.throughput
        names = {"prompts": work.prefill_name, "mixed": work.mixed_name}
        return [
            part for part, name in names.items() if part in self._order.parts and (name, None) not in self._sheet.lines
        ]

    def _lacks_warm(self) -> bool:
        starts = self._sheet.lines.get(("start warm", None))
        taken = 0 if starts is None else len(starts.samples)
        return "warm" in self._order.parts and taken < self._order.work.warm_starts

    def _lacks_experts(self) -> bool:
        is_asked = "experts" in self._order.parts and self._engine == "mllm"
        return is_asked and self._figures.num_experts > 1 and not self._sheet.has_experts


def _machine(order: Order) -> Machine:
    sources = [str(shape.config) for shape in order.shapes]
    sizes = {"largest_batch": order.work.largest_batch, "longest_request": order.work.longest_request}
    first, *models = findings({"task": "probe", "sources": sources} | sizes, order.deadline)
    return Machine(
        first["environment"],
        Ceilings(**first["ceilings"]),
        {one["source"]: (Setting(**one["setting"]), from_json(ModelFigures, one["figures"])) for one in models},
    )


def findings(
    job: dict[str, Any], deadline: float, environment: dict[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """The findings of a process of the worker, as it has them. It ends with the last one, and all that it started.

    Raises:
        OutOfTime: the deadline came first.
        BenchmarkError: the process failed.
    """
    if _left(deadline) == 0.0:
        raise OutOfTime
    with tempfile.NamedTemporaryFile("w", prefix="mllm-figures-", suffix=".json") as file:
        json.dump(job, file)
        file.flush()
        command = child_python.command(WORKER, file.name)
        process = ProcessGroup(command, stdout=subprocess.PIPE, env=child_python.environment() | (environment or {}))
        try:
            for message in _messages(process.stdout, deadline):
                if "error" in message:
                    raise BenchmarkError(message["error"])
                if "end" in message:
                    break
                yield message
            else:
                raise BenchmarkError(f"its process ended with code {process.wait()}; see its output")
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            _say("the process did not end by itself")
        finally:
            _end(process)


def _messages(stream: Any, deadline: float) -> Iterator[dict[str, Any]]:
    rest = b""
    while select.select([stream], [], [], _left(deadline))[0]:
        read = os.read(stream.fileno(), 1 << 16)
        if not read:
            return
        *lines, rest = (rest + read).split(b"\n")
        yield from map(json.loads, lines)
    raise OutOfTime


def _left(deadline: float) -> float | None:
    """Seconds until then; None: there is no end."""
    return None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())


def _end(process: ProcessGroup) -> None:
    """Ends it and all that it started: by SIGTERM, behind which it removes what it made, then by force."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
    process.kill_group()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
