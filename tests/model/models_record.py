"""The record behind docs/lab/models.md: what was seen of each architecture, as JSON beside the page.

The survey writes what it has tried on a CPU. GPU tests write a line for each model that passed (note_on_gpu), into the
file that MLLM_MODELS_SEEN names; `python -m tests.model.survey --seen FILE` takes these lines into the record.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.model.survey import Outcome

SEEN_FILE = "MLLM_MODELS_SEEN"


@dataclass(frozen=True)
class SeenOnGpu:
    """A small model that was served right on a GPU in bfloat16.

    Attributes:
        architecture: Transformers' model_type.
        variant: what its config has besides; "" for nothing.
        attention: what attended.
        prompts, answers: the mean error of log-probabilities, ours and Transformers' forward's in bfloat16.
        gpu, torch, transformers: what it ran on.
        date: ISO.
    """

    architecture: str
    variant: str
    attention: str
    prompts: tuple[float, float]
    answers: tuple[float, float]
    gpu: str
    torch: str
    transformers: str
    date: str


@dataclass(frozen=True)
class Record:
    """
    Attributes:
        date, transformers, torch, python: of the last run on the CPU.
        outcomes: of all architectures, each with each compile backend that it was tried with.
        on_gpu: by architecture and variant.
    """

    date: str
    transformers: str
    torch: str
    python: str
    outcomes: tuple[Outcome, ...] = ()
    on_gpu: tuple[SeenOnGpu, ...] = field(default=())

    @classmethod
    def of_here(cls, outcomes: Iterable[Outcome], on_gpu: Iterable[SeenOnGpu] = ()) -> Record:
        """Today's results with the installed versions."""
        import platform

        import torch
        import transformers

        today = datetime.date.today().isoformat()
        versions = transformers.__version__, torch.__version__, platform.python_version()
        return cls(today, *versions, tuple(outcomes), tuple(on_gpu))

    @classmethod
    def read(cls, path: Path) -> Record:
        """Reads the record of a page."""
        from tests.model.survey import Outcome

        said = json.loads(beside(path).read_text(encoding="utf-8"))
        said["outcomes"] = tuple(Outcome(**one) for one in said["outcomes"])
        said["on_gpu"] = tuple(_seen(one) for one in said["on_gpu"])
        return cls(**said)

    def with_outcomes(self, outcomes: Iterable[Outcome]) -> Record:
        """The same with these in place of what was seen of them before.

        Raises:
            ValueError: they were seen with other versions: then all have to be.
        """
        here = Record.of_here(outcomes, self.on_gpu)
        if (here.transformers, here.torch) != (self.transformers, self.torch):
            raise ValueError(
                f"the record is of Transformers {self.transformers} and torch {self.torch}, here are "
                f"{here.transformers} and {here.torch}: try all architectures, naming none"
            )
        by_job = {one.job: one for one in (*self.outcomes, *here.outcomes)}
        return Record.of_here(by_job.values(), self.on_gpu)

    def with_seen(self, lines: Iterable[str]) -> Record:
        """The same with what GPU tests have noted."""
        by_variant = {(one.architecture, one.variant): one for one in self.on_gpu}
        for line in lines:
            one = _seen(json.loads(line))
            by_variant[one.architecture, one.variant] = one
        return Record(self.date, self.transformers, self.torch, self.python, self.outcomes, tuple(by_variant.values()))

    def write(self, path: Path) -> None:
        """Writes the record of a page, a line for each entry."""
        outcomes = sorted(self.outcomes, key=lambda one: one.job)
        on_gpu = sorted(self.on_gpu, key=lambda one: (one.architecture, one.variant))
        said = {name: getattr(self, name) for name in ("date", "transformers", "torch", "python")}
        parts = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in said.items()]
        for name, entries in (("outcomes", outcomes), ("on_gpu", on_gpu)):
            lines = ",\n".join(json.dumps(asdict(entry), ensure_ascii=False) for entry in entries)  # type: ignore[call-overload]
            parts.append(f"{json.dumps(name)}: [\n{lines}\n]")
        beside(path).write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


def beside(page: Path) -> Path:
    """The file of a page's record."""
    return page.with_suffix(".json")


def note_on_gpu(
    architecture: str, variant: str, attention: str, prompts: tuple[float, float], answers: tuple[float, float]
) -> None:
    """Appends a line to the file that MLLM_MODELS_SEEN names, if it does."""
    import torch
    import transformers

    path = os.environ.get(SEEN_FILE)
    if path is None:
        return
    here = torch.cuda.get_device_name(), torch.__version__, transformers.__version__
    today = datetime.date.today().isoformat()
    seen = SeenOnGpu(architecture, variant, attention, prompts, answers, *here, today)
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(seen)) + "\n")


def _seen(said: dict) -> SeenOnGpu:
    return SeenOnGpu(**said | {"prompts": tuple(said["prompts"]), "answers": tuple(said["answers"])})
