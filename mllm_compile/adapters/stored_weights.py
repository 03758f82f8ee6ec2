"""Reads weights that adapters change as the checkpoint has them, whatever memory makes of them, or as updates do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from mllm_compile.errors import EnginePausedError
from mllm_compile.runtime.lora.target import LoraTarget
from mllm_compile.runtime.updates.live import LiveWeights
from mllm_compile.runtime.weights.loader import allocate_weights, load_weights
from mllm_compile.runtime.weights.spec import WeightPart, WeightSpec
from mllm_compile.runtime.weights.views import ViewStep, view_shape


class StoredWeights:
    """The weights of an engine's targets.

    Args:
        specs: what fills the program's weights, of each rank.
        folder: of the files.
        live: gives this rank's weights; None: they are never updated, or gone with their engine.
        staying: tells if there is memory behind them, which then stays meanwhile.
    """

    def __init__(
        self,
        specs: Sequence[Iterable[WeightSpec]],
        folder: Path,
        targets: Mapping[str, LoraTarget],
        live: Callable[[], LiveWeights | None],
        staying: Callable[[], AbstractContextManager[bool]] = lambda: nullcontext(True),
    ) -> None:
        self._specs = [{spec.name: spec for spec in of_rank} for of_rank in specs]
        self._folder, self._targets, self._live, self._staying = folder, targets, live, staying

    def read(self, weight: str, start: int, rows: int) -> torch.Tensor | None:
        """Rows [start, start + rows) of a target's weight on the CPU, of any floating type.

        None: no file has it in rows; or it was updated, and is quantised or over several ranks.

        Raises:
            CheckpointError: a file is missing or is not what the model was compiled for.
            EnginePausedError: it was updated, and is asleep.
        """
        target = self._targets[weight]
        sides = (target.outputs, target.output_ranges), (target.inputs, target.input_ranges)
        (all_rows, of_rows), (columns, of_columns) = sides[::-1] if target.kind == "embedding" else sides
        live = self._live()
        if live is not None and target.stored_in in live.written:
            return None if of_rows or of_columns else self._updated(live, target, start, rows, columns)
        if not of_rows and not of_columns:
            return self._of_rank(0, target, start, rows, columns)
        whole = torch.empty(rows, columns)
        for rank in range(len(self._specs)):
            own_rows = of_rows[rank] if of_rows else ((0, all_rows),)
            own_columns = of_columns[rank] if of_columns else ((0, columns),)
            own_start, width = 0, sum(length for _, length in own_columns)
            for first, count in own_rows:
                begin, end = max(first, start), min(first + count, start + rows)
                if begin < end:
                    part = self._of_rank(rank, target, own_start + begin - first, end - begin, width)
                    if part is None:
                        return None
                    places = [torch.arange(at, at + length) for at, length in own_columns]
                    whole[begin - start : end - start, torch.cat(places)] = part
                own_start += count
        return whole

    def _of_rank(self, rank: int, target: LoraTarget, start: int, rows: int, columns: int) -> torch.Tensor | None:
        """Likewise, of the part of a rank, in float32."""
        spec = self._specs[rank].get(target.stored_in)
        if spec is None:
            return None
        parts = list(_parts(spec, target.stored_start + start, rows))
        shapes = [view_shape(part.shape, part.steps) for part in parts]
        if sum(map(math.prod, shapes)) != rows * columns or any(not part.file or part.factor for part in parts):
            return None
        wanted = WeightSpec(target.weight, (rows, columns), torch.float32, tuple(parts))
        found = allocate_weights([wanted], "cpu")
        load_weights([wanted], found, self._folder)
        return found[target.weight]

    def _updated(
        self, live: LiveWeights, target: LoraTarget, start: int, rows: int, columns: int
    ) -> torch.Tensor | None:
        """Likewise, of a weight in memory that is one rank's, in its type."""
        spec = self._specs[0][target.stored_in]
        if len(spec.shape) != 2 or spec.shape[1] != columns or any(part.kept or part.factor for part in spec.parts):
            return None
        with self._staying() as is_awake:
            if not is_awake:
                raise EnginePausedError(
                    f"{target.weight} was updated and is asleep, and an adapter's copy of it is compared with it. Load "
                    "the adapter again after wake_up."
                )
            return live.rows(spec.name, target.stored_start + start, rows).cpu()


def _parts(spec: WeightSpec, start: int, rows: int) -> Iterator[WeightPart]:
    """The parts of a weight that fill these rows, as plain numbers."""
    for part in spec.parts:
        (count, *others) = view_shape(part.shape, part.steps)
        first, last = max(start, part.start), min(start + rows, part.start + count)
        if first < last and len(others) == 1:
            cut: tuple[ViewStep, ...] = (("narrow", 0, first - part.start, last - first),)
            steps = part.steps if last - first == count else (*part.steps, *cut)
            yield replace(part, start=first - start, steps=steps, kept=None)
