"""Runs a model that pools on packed texts: one step from token ids to what each text asks for.

Shape legend: T tokens, S texts, W width of a hidden state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.pooling.facts import PoolingFacts
from mllm_compile.runtime.pooling.pool import activated, finished, pool
from mllm_compile.runtime.pooling.texts import PackedText, PoolingParams
from mllm_compile.runtime.program.executor import Segments
from mllm_compile.runtime.program.loaded import LoadedModel


class PoolingRunner:
    """One model on its device."""

    def __init__(self, model: LoadedModel, device: torch.device) -> None:
        if model.pooling is None:
            raise ValueError("the model pools nothing")
        self.facts: PoolingFacts = model.pooling.facts
        self._body: Any = model.executor
        self._head = model.pooling.head
        self._device = device

    def close(self) -> None:
        """Lets go of the model; nothing runs any more."""
        self._body = self._head = None

    @torch.inference_mode()
    def run(self, texts: Sequence[PackedText]) -> list[np.ndarray]:
        """The answer to each text: [D] or [labels] float32, or [n, …] for its tokens."""
        lengths = np.array([len(text.ids) for text in texts], dtype=np.int64)
        bounds = np.concatenate(([0], np.cumsum(lengths)))
        hidden = self._hidden_states(texts, lengths, bounds)
        answers: list[np.ndarray | None] = [None] * len(texts)
        for params in dict.fromkeys(text.params for text in texts):
            chosen = [index for index, text in enumerate(texts) if text.params == params]
            found = self._answers(hidden, params, bounds, chosen, [texts[index].skipped for index in chosen])
            for index, answer in zip(chosen, found, strict=True):
                answers[index] = answer
        return [answer for answer in answers if answer is not None]

    def _hidden_states(self, texts: Sequence[PackedText], lengths: np.ndarray, bounds: np.ndarray) -> torch.Tensor:
        ids = np.concatenate([text.ids for text in texts])
        inputs: dict[str, Any] = {
            "input_ids": upload(ids, self._device),
            "positions": upload(np.arange(len(ids)) - np.repeat(bounds[:-1], lengths), self._device),
            "cu_seqlens": Segments(upload(bounds.astype(np.int32), self._device), int(lengths.max())),
        }
        if self.facts.kinds:
            kinds = [np.zeros_like(text.ids) if text.kinds is None else text.kinds for text in texts]
            inputs["kinds"] = upload(np.concatenate(kinds), self._device)
        hidden: torch.Tensor = self._body.run_tower(inputs)[0]
        return hidden

    def _answers(
        self, hidden: torch.Tensor, params: PoolingParams, bounds: np.ndarray, chosen: list[int], skipped: list[int]
    ) -> Sequence[np.ndarray]:
        starts, ends = bounds[:-1][chosen], bounds[1:][chosen]
        if params.is_of_tokens:
            places = np.concatenate([np.arange(*span) for span in zip(starts, ends, strict=True)])
            rows = hidden if len(places) == len(hidden) else hidden.index_select(0, upload(places, self._device))
            has_head = self.facts.rules == ("token",)
            made = self._finished(self._through_head(rows) if has_head else rows, params)
            return np.split(made, np.cumsum(ends - starts)[:-1])
        first, last = upload(starts, self._device), upload(ends, self._device)
        left_out = upload(np.array(skipped), self._device) if any(skipped) else None
        rows = pool(hidden, first, last, params.rules, left_out)
        return list(self._finished(self._through_head(rows), params))

    def _through_head(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self._head is None else self._head.run_tower({"rows": rows})[0]

    def _finished(self, rows: torch.Tensor, params: PoolingParams) -> np.ndarray:
        if params.task in ("classify", "token_classify"):
            made = activated(rows, self.facts.activation) if params.activates else rows.float()
        else:
            made = finished(rows, params.dimensions, params.normalize)
        return made.cpu().numpy()
