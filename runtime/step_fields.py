"""The arrays of a step: their names, their dtypes, and what each is for.

step/plan.py fills them on the host; one upload makes of them the tensors that the model and the sampler read. A new one
is a line here. Imports no torch. The names are SGLang's and vLLM's: memory_pool.py says what a row, a slot and a page
are, and docs/glossary.md has all words.

Shape legend: T tokens of the step, R rows that attention sees, S rows of logits that are sampled, N prompt positions
that are scored, P pages that are new, Q sampled requests of a verify step, K most tokens of a draft.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass, field, fields
from operator import attrgetter
from typing import Generic, TypeVar

Array = TypeVar("Array")  # np.ndarray on the host (of any integer type), torch.Tensor on the device

_INT32 = {"dtype": "int32"}


@dataclass(slots=True, eq=False, kw_only=True)
class StepFields(Generic[Array]):
    """The inputs of every step, and what a step that is no plain decode needs beside them. int64 unless _INT32."""

    input_ids: Array  # [T]; on the host 0 for decodes: theirs are on the device
    positions: Array  # [T]
    out_cache_loc: Array  # [T]
    req_pool_indices: Array  # [R]
    seq_lens: Array = field(metadata=_INT32)  # [R]

    num_new: Array | None = field(default=None, metadata=_INT32)  # [R], in EXTEND
    prefix_lens: Array | None = field(default=None, metadata=_INT32)  # [R], in EXTEND
    rope_lens: Array | None = None  # [T], with prompts of a model whose frequencies follow it; 0 of decodes
    adapter_slots: Array | None = field(default=None, metadata=_INT32)  # [T], where some request has an adapter
    logits_indices: Array | None = None  # sampled rows of T, in EXTEND; all rows otherwise
    sampled_rows: Array | None = None  # [S], where they are not req_pool_indices
    sampled_positions: Array | None = field(default=None, metadata=_INT32)  # [S], where they are not seq_lens
    scored_indices: Array | None = None  # [N] of T, in EXTEND; all rows otherwise
    prompt_targets: Array | None = None  # [N]
    run_indices: Array | None = (
        None  # [Q, K + 1], flattened: of S, each request's tokens, its last one again behind them
    )
    draft_ids: Array | None = None  # [Q, K], flattened: NO_TOKEN behind a draft
    page_places: Array | None = None  # [P] of ReqToTokenPool.write_page_slots
    page_slots: Array | None = field(default=None, metadata=_INT32)  # [P, page size], flattened

    @property
    def sampled(self) -> tuple[Array, Array]:
        """The rows that are sampled and the positions of their tokens, [S] each."""
        rows = self.req_pool_indices if self.sampled_rows is None else self.sampled_rows
        return rows, self.seq_lens if self.sampled_positions is None else self.sampled_positions

    def inputs(self) -> dict[str, Array]:
        """The fields that every step has, by name."""
        return dict(zip(INPUTS, _get_inputs(self), strict=True))

    def others(self) -> dict[str, Array]:
        """The further fields of this step, by name."""
        return {name: value for name, value in zip(_OTHERS, _get_others(self), strict=True) if value is not None}


DTYPES: dict[str, str] = {item.name: item.metadata.get("dtype", "int64") for item in fields(StepFields)}
INPUTS = tuple(item.name for item in fields(StepFields) if item.default is MISSING)
_OTHERS = tuple(name for name in DTYPES if name not in INPUTS)
_get_inputs, _get_others = attrgetter(*INPUTS), attrgetter(*_OTHERS)
