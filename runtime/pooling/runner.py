"""Runs a model that pools on packed texts: one step from token ids to what each text asks for.

A step is launched without a wait for the device; its answers are on their way to the host behind it, so the next step
may be launched before they are read.

Shape legend: T tokens, S texts, W width of a hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.pooling.facts import PoolingFacts
from mllm_compile.runtime.pooling.graphs import ENDS, STARTS, TextGraphs, body_inputs, can_capture, step_rows
from mllm_compile.runtime.pooling.pool import activated, finished, pool
from mllm_compile.runtime.pooling.texts import PackedText, PoolingParams
from mllm_compile.runtime.program.executor import ProgramExecutor
from mllm_compile.runtime.program.linked_steps import Segments
from mllm_compile.runtime.program.loaded import LoadedModel

Answers = list[np.ndarray]


class PoolingRunner:
    """One model on its device."""

    def __init__(self, model: LoadedModel, device: torch.device, graph_tokens: Sequence[int] = ()) -> None:
        """
        Args:
            graph_tokens: tokens of the steps that are captured as CUDA graphs, ascending.

        Raises:
            DeviceMemoryError: the graphs do not fit.
        """
        if model.pooling is None:
            raise ValueError("the model pools nothing")
        self.facts: PoolingFacts = model.pooling.facts
        self._body = cast(ProgramExecutor, model.executor)
        self._head = model.pooling.head
        self._device = device
        self.graphs: TextGraphs | None = None
        if graph_tokens and can_capture(self._body.program):
            with torch.inference_mode():
                self.graphs = TextGraphs(self._body, graph_tokens, bool(self.facts.kinds), device)

    def close(self) -> None:
        """Lets go of the model; nothing runs any more."""
        self._body, self._head, self.graphs = cast(Any, None), None, None

    @property
    def is_asynchronous(self) -> bool:
        """True if a step that is launched runs beside the host."""
        return self._device.type == "cuda"

    def run(self, texts: Sequence[PackedText]) -> Answers:
        """The answer to each text: [D] or [labels] float32, or [n, …] for its tokens."""
        return self.launch(texts).answers()

    @torch.inference_mode()
    def launch(self, texts: Sequence[PackedText]) -> BegunTexts:
        """Queues a step.

        Texts of equal lengths are side by side: a CPU computes their attention in one call.
        """
        lengths = np.array([len(text.ids) for text in texts], dtype=np.int64)
        order = np.argsort(lengths, kind="stable")
        texts, lengths = [texts[place] for place in order], lengths[order]
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        hidden = self._hidden_states(texts, lengths, bounds)
        places: dict[PoolingParams, list[int]] = {}
        for place, text in enumerate(texts):
            places.setdefault(text.params, []).append(place)
        parts = [
            self._part(hidden, params, bounds, order, np.array(chosen), [texts[place].skipped for place in chosen])
            for params, chosen in places.items()
        ]
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return BegunTexts(parts, len(texts), event)

    def _hidden_states(self, texts: Sequence[PackedText], lengths: np.ndarray, bounds: np.ndarray) -> torch.Tensor:
        ids = np.concatenate([text.ids for text in texts])
        kinds = None
        if self.facts.kinds and any(text.kinds is not None for text in texts):
            kinds = np.concatenate([np.zeros_like(text.ids) if text.kinds is None else text.kinds for text in texts])
        size = None if self.graphs is None else self.graphs.size_for(len(ids))
        rows = step_rows(ids, lengths, bounds, kinds, size or len(ids))
        if self.graphs is not None and size is not None:
            return self.graphs.replay(rows)
        given = upload(rows, self._device)
        own = upload(bounds.astype(np.int32), self._device)
        segments = Segments(own, int(lengths.max()), given[STARTS : ENDS + 1])
        hidden: torch.Tensor = self._body.run_tower(body_inputs(given, segments, bool(self.facts.kinds)))[0]
        return hidden

    def _part(
        self,
        hidden: torch.Tensor,
        params: PoolingParams,
        bounds: np.ndarray,
        order: np.ndarray,
        chosen: np.ndarray,
        skipped: list[int],
    ) -> _Part:
        starts, ends = bounds[:-1][chosen], bounds[1:][chosen]
        if params.is_of_tokens:
            places = np.concatenate([np.arange(*span) for span in zip(starts, ends, strict=True)])
            is_whole = np.array_equal(places, np.arange(len(hidden)))
            rows = hidden if is_whole else hidden.index_select(0, upload(places, self._device))
            has_head = self.facts.rules == ("token",)
            made = self._finished(self._through_head(rows) if has_head else rows, params)
            return _Part(order[chosen], made, np.cumsum(ends - starts)[:-1])
        first, last = upload(starts, self._device), upload(ends, self._device)
        left_out = upload(np.array(skipped), self._device) if any(skipped) else None
        rows = pool(hidden, first, last, params.rules, left_out)
        return _Part(order[chosen], self._finished(self._through_head(rows), params))

    def _through_head(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._head is None else self._head.run_tower({"rows": rows})[0]

    def _finished(self, rows: torch.Tensor, params: PoolingParams) -> torch.Tensor:
        """The answers on the host, once what is queued now is over."""
        if params.task in ("classify", "token_classify"):
            made = activated(rows, self.facts.activation) if params.activates else rows.float()
        else:
            made = finished(rows, params.dimensions, params.normalize)
        if not made.is_cuda:
            return made
        on_host = torch.empty(made.shape, dtype=made.dtype, pin_memory=True)
        return on_host.copy_(made, non_blocking=True)


@dataclass(frozen=True, eq=False)
class _Part:
    """The answers to texts that ask for the same.

    Attributes:
        places: [n] int64, of the texts in the step as it was asked for.
        made: [n, D], or [tokens, D], on the host.
        splits: [n - 1] int64, where the tokens of the next text begin; None: an answer is a row.
    """

    places: np.ndarray
    made: torch.Tensor
    splits: np.ndarray | None = None

    def answers(self) -> Sequence[np.ndarray]:
        made = self.made.numpy().copy()  # pinned memory is the allocator's again
        return list(made) if self.splits is None else np.split(made, self.splits)


@dataclass(frozen=True, eq=False)
class BegunTexts:
    """A step that is queued.

    Attributes:
        parts: the answers, once `event` has come; None: they are there.
        count: of texts.
    """

    parts: Sequence[_Part]
    count: int
    event: torch.cuda.Event | None

    def is_over(self) -> bool:
        """True if the answers are there."""
        return self.event is None or self.event.query()

    def answers(self) -> Answers:
        """Waits for them; in the order of the texts."""
        if self.event is not None:
            self.event.synchronize()
        found: dict[int, np.ndarray] = {}
        for part in self.parts:
            found.update(zip(part.places.tolist(), part.answers(), strict=True))
        return [found[place] for place in range(self.count)]
