"""Weights that a model lends to a head: its embeddings and head, where the head's files lack them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.folders.speculators import head_type
from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.runtime.weights.file_names import name_from
from mllm_compile.runtime.weights.header import read_header

if TYPE_CHECKING:
    from mllm_compile.checkpoint.planned_tensor import PlannedTensor
    from mllm_compile.checkpoint.quantised import CheckpointTensors

_EMBEDDING, _HEAD = "embed_tokens.weight", "lm_head.weight"  # as heads name them
_PART_OF_VOCABULARY = "d2t"


def with_lender(head: ModelFolder, model: ModelFolder) -> ModelFolder:
    """The folder of a drafter, with the model that lends it what its files lack, if any.

    Raises:
        CheckpointError: a file is damaged.
    """
    if head_type(head.config) is None or not head.weight_files:
        return head
    return replace(head, lender=model) if _lacking(head) else head


def _lacking(head: ModelFolder) -> list[str]:
    """The names of weights that a head's files lack and a model may lend: no head of some tokens alone."""
    names = {name for file in head.weight_files for name in read_header(file).tensors}
    wanted = [_EMBEDDING] if _PART_OF_VOCABULARY in names else [_EMBEDDING, _HEAD]
    return [name for name in wanted if name not in names]


def with_lent(
    config: ResolvedConfig, head: ModelFolder, tensors: CheckpointTensors
) -> tuple[CheckpointTensors, dict[str, PlannedTensor]]:
    """The tensors of a checkpoint, those that may be lent among them; and what is lent, by the head's keys.

    Raises:
        CheckpointError, UnsupportedModelError: the model that lends cannot be read, as when it is compiled itself.
    """
    lender = head.lender
    if lender is None:
        return tensors, {}
    from mllm_compile.checkpoint.plan import read_checkpoint, untie_stored_apart
    from mllm_compile.checkpoint.tensors import read_model_tensors
    from mllm_compile.model.hf_model import build_on_meta

    main = build_on_meta(lender.path, getattr(torch, config.model.dtype), config.model.trust_remote_code)
    # Their files are named from the head's folder, as its own are.
    index = {name: name_from(head.path, lender.path / file) for name, file in lender.weight_map.items()}
    of_model = read_model_tensors(replace(lender, path=head.path, weight_map=index))
    untie_stored_apart(of_model, main.model)
    table = read_checkpoint(of_model, main.model)
    names = dict(zip((_EMBEDDING, _HEAD), main.embedding_and_head(), strict=True))
    lent = {key: table[names[key]] for key in _lacking(head)}
    return replace(tensors, stored={**of_model.stored, **tensors.stored}), lent
