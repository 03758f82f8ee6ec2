"""Runs what was compiled of a model that pools before it is published: packed texts against Transformers' own forward
of each alone.

A model that mixes neighbours outside of attention, or counts positions otherwise, gives other hidden states there.
Where attention has windows or a bias, one of the texts is longer than most of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.check.bounds import TOLERANCE, hint
from mllm_compile.check.compiled import linked_of_folder
from mllm_compile.check.kernels import relative_errors
from mllm_compile.check.weights import program_weights
from mllm_compile.errors import CompileError, UnsupportedModelError
from mllm_compile.model.attention_hook import attention_implementation
from mllm_compile.model.pooling.build import body_of
from mllm_compile.model.pooling.trace import arguments_besides_ids
from mllm_compile.model.random_weights import materialise
from mllm_compile.model.refusals import first_line, refusing
from mllm_compile.runtime.pooling.graphs import can_capture
from mllm_compile.runtime.pooling.pool import pool
from mllm_compile.runtime.program.executor import ProgramExecutor
from mllm_compile.runtime.program.link import current_device
from mllm_compile.runtime.program.linked_steps import Segments
from mllm_compile.runtime.program.steps import PackedAttentionStep

if TYPE_CHECKING:
    from mllm_compile.compiler.lowered import Lowered
    from mllm_compile.model.hf_model import HFModel
    from mllm_compile.runtime.pooling.facts import PoolingFacts

_LENGTHS = (5, 1, 3)
_LONG = 150  # beyond the distances that T5's bias tells apart


def check_pooling(lowered: Lowered, folder: Path, piece_suffix: str, device: str) -> None:
    """Compares hidden states of each token, and of a model with a head each text's scores.

    Args:
        lowered: small real parameters replace its model's fake ones here.
        folder: the runtime's, with its pieces and its CUDA kernels.
        piece_suffix: which of a piece's files to run.
        device: where to run.

    Raises:
        UnsupportedModelError: they are not Transformers'.
        CompileError: what was compiled does not run.
    """
    hf_model, program = lowered.hf_model, lowered.program
    model_type, pooling = hf_model.model.config.model_type, program.pooling
    if pooling is None:
        raise ValueError("the program pools nothing")
    texts = _Texts(lowered, pooling.facts, device)
    with current_device(torch.device(device)), torch.no_grad():
        by_name = materialise(hf_model, device)
        linked = linked_of_folder(program, folder, piece_suffix, torch.device(device))
        with refusing(f"{model_type!r} does not run"):
            hidden, scores = texts.of_transformers(hf_model.model)
        try:
            weights = program_weights(by_name, program, lowered, 0)
            body = ProgramExecutor(program, linked.pieces, weights)
            ours = body.run_tower(texts.inputs())[0]
            captured = body.run_tower(texts.inputs(is_captured=True))[0] if can_capture(program) else ours
            of_head = None
            if pooling.head is not None:
                weights = program_weights(by_name, pooling.head, lowered.of_head[0], 0)
                head = ProgramExecutor(pooling.head, linked.pieces, weights)
                rules = pooling.facts.rules
                rows = (
                    ours
                    if rules == ("token",)
                    else pool(ours, texts.bounds[:-1].long(), texts.bounds[1:].long(), rules)
                )
                of_head = head.run_tower({"rows": rows})[0]
        except Exception as failure:
            raise CompileError(
                f"what was compiled of {model_type!r} does not run: {first_line(failure)}.{hint(lowered)}"
            ) from failure
    _compare(lowered, "hidden states", ours, hidden)
    _compare(lowered, "hidden states of captured steps", captured, hidden)
    if of_head is not None and scores is not None:
        _compare(lowered, "scores", of_head, scores)


def _compare(lowered: Lowered, what: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    model_type, limit = lowered.hf_model.model.config.model_type, TOLERANCE[lowered.hf_model.model.dtype]
    if ours.shape == theirs.shape and theirs.shape[-1] == 1:  # one score a row may be near zero
        error = ((ours - theirs).float().norm() / theirs.float().norm()).item()
    else:
        error = relative_errors(ours, theirs).max().item() if ours.shape == theirs.shape else float("inf")
    if not error <= limit:
        raise UnsupportedModelError(
            f"{model_type!r} would not be served right: with {len(_LENGTHS)} texts in one row its {what} are off by "
            f"{error:.2g} from Transformers' (limit {limit:g}). Usual causes: neighbours that are mixed outside of "
            f"attention, or positions other than position_ids.{hint(lowered, ' Or a pass')}"
        )


class _Texts:
    """Texts of a few tokens, and what Transformers makes of each alone."""

    def __init__(self, lowered: Lowered, facts: PoolingFacts, device: str) -> None:
        sizes = lowered.hf_model.sizes()
        self._facts, self._device = facts, device
        steps = [step for step in lowered.program.steps if isinstance(step, PackedAttentionStep)]
        has_far = any(step.bias or step.window_left > 0 for step in steps)
        lengths = (*_LENGTHS, min(_LONG, sizes.context_len)) if has_far else _LENGTHS
        generator = torch.Generator().manual_seed(0)
        paddings = _paddings(lowered.hf_model)
        ids = torch.tensor([one for one in range(sizes.vocab_size) if one not in paddings])
        draws = [torch.randint(0, len(ids), (length,), generator=generator) for length in lengths]
        self._ids = [ids[draw].to(device) for draw in draws]
        if facts.end_id is not None:
            self._ids = [torch.cat([one[:-1], one.new_tensor([facts.end_id])]) for one in self._ids]
        self._kinds = [torch.arange(length, device=device) % max(1, facts.kinds) for length in lengths]
        ends = torch.tensor(lengths).cumsum(0)
        self.bounds = torch.cat([torch.zeros(1, dtype=ends.dtype), ends]).int().to(device)

    def inputs(self, is_captured: bool = False) -> dict[str, Any]:
        """The packed row; of a step that is captured attention is told of rows alone."""
        lengths = [len(ids) for ids in self._ids]
        edges = torch.tensor(lengths, device=self._device)
        rows = torch.stack([self.bounds[:-1].long(), self.bounds[1:].long()]).repeat_interleave(edges, 1)
        return {
            "input_ids": torch.cat(self._ids),
            "positions": torch.cat([torch.arange(len(ids), device=self._device) for ids in self._ids]),
            "kinds": torch.cat(self._kinds),
            "cu_seqlens": Segments(self.bounds, max(lengths), rows, is_captured),
        }

    def of_transformers(self, model: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Hidden states [T, W], and scores [S or T, labels] of a classifier."""
        for implementation in ("eager", "sdpa"):
            try:
                with attention_implementation(model, implementation):
                    return self._of_each(model)
            except UnsupportedModelError:
                raise
            except Exception:  # not every model has eager attention
                if implementation == "sdpa":
                    raise
        raise AssertionError("one of the two is the last")

    def _of_each(self, model: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        body = body_of(model)
        always, hidden, scores = arguments_besides_ids(body), [], []
        for ids, kinds in zip(self._ids, self._kinds, strict=True):
            said: dict[str, Any] = {"input_ids": ids[None]}
            if self._facts.kinds:
                said["token_type_ids"] = kinds[None]
            hidden.append(body(**said, **always)[0][0])
            if self._facts.labels:
                logits = model(**said).logits
                scores.append(logits[0] if logits.dim() == 3 else logits)
        return torch.cat(hidden), torch.cat(scores) if scores else None


def _paddings(hf_model: HFModel) -> set[int]:
    """The tokens by which some models find a text's ends, or count positions."""
    found = {getattr(module, "padding_idx", None) for module in hf_model.model.modules()}
    found.add(getattr(hf_model.text_config, "pad_token_id", None))
    return {one for one in found if isinstance(one, int)}
