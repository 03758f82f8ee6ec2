"""A model's layer for multi-token prediction (MTP) as a model of its own, which drafts for it.

It reads the model's hidden states beside tokens, and gives logits and hidden states of its own. It is built as
Transformers' MtpModel builds it: norms of both, a projection of the two beside each other, one of the model's decoder
layers and a norm. Embedding and head are the model's. Of several such layers each is a model: the next one reads the
hidden states of the one before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.modeling_outputs import CausalLMOutput

from mllm_compile.checkpoint.plan import read_part
from mllm_compile.checkpoint.planned_tensor import PlannedTensor
from mllm_compile.checkpoint.quantised import CheckpointTensors
from mllm_compile.errors import CheckpointError, UnsupportedModelError
from mllm_compile.model.hf_model import HFModel, compute_constants
from mllm_compile.model.hidden_states import LAST
from mllm_compile.model.older_prediction import conversions_of, run_layer
from mllm_compile.model.positions_hook import position_offset
from mllm_compile.model.refusals import refusing
from mllm_compile.model.rope_hook import follow_rope

EMBEDDING, HEAD = "embed_tokens.weight", "shared_head.weight"
_OF_ITS_OWN = re.compile(r"^mtp\.")  # others number the layer behind the model's own
_COPIES = r"(^|\.)(embed_tokens\.weight|shared_head\.head\.weight)$"  # of the model's, in some checkpoints


class PredictionModel(MtpModel):
    """A prediction layer as a causal LM: token ids and hidden states → logits."""

    _keys_to_ignore_on_load_unexpected = [_COPIES]  # noqa: RUF012  # Transformers' attribute

    def __init__(self, main_model: PreTrainedModel, number: int, count: int) -> None:
        """Args: number: of the layer, among `count`."""
        super().__init__(main_model, count)
        self._number = number
        for other in {*range(count)} - {number}:
            self.layers[other] = torch.nn.Identity()
        # Transformers' rules go by the name of its own class.
        self.weight_conversions = conversions_of(MtpModel(main_model, count), main_model, count)

    def get_decoder(self) -> torch.nn.Module:
        """The module that gives what the head reads."""
        decoder: torch.nn.Module = self.shared_post_norm if self.use_shared_post_norm else self.layers[self._number]
        return decoder

    def get_input_embeddings(self) -> torch.nn.Module:
        embedding: torch.nn.Module = self.embed_tokens
        return embedding

    def get_output_embeddings(self) -> torch.nn.Module:
        head: torch.nn.Module = self.shared_head
        return head

    def forward(  # type: ignore[override]  # not Transformers' loop over tokens
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        hidden_states: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **said: Any,
    ) -> CausalLMOutput:
        """
        Args:
            input_ids: [1, T]; position_ids: [1, T], or None: from 0 on.
            hidden_states: [1, T, hidden]; None: made up, to see what attention sees.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        if hidden_states is None:
            hidden_states = self.embed_tokens(input_ids)
        hidden_states = run_layer(self, self._number, hidden_states, position_ids, input_ids)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        return CausalLMOutput(logits=self._project_to_logits(hidden_states[:, kept, :]))


def build_prediction(main: HFModel, number: int) -> HFModel:
    """A prediction layer of a model on meta, on meta too.

    Args:
        number: of the layer, from 0 on.

    Raises:
        UnsupportedModelError: the model has none, or one that is not built.
    """
    model_type = main.model.config.model_type
    count = max(_num_layers(main), number + 1)
    if not _num_layers(main):
        raise UnsupportedModelError(
            f"speculative.method is mtp, and config.json of this {model_type!r} model names no layer for multi-token "
            "prediction (num_nextn_predict_layers). Use another method."
        )
    building = refusing(f"the prediction layer of {model_type!r} models cannot be built")
    with building, _with_layers(main, count), torch.device("meta"), _default_dtype(main.model.dtype):
        model: Any = PredictionModel(main.model, number, count)
    model.eval().requires_grad_(False)
    constants, unknown, tables = compute_constants(model)
    rope, of_rope = follow_rope(model)
    built = HFModel(model, constants | of_rope, unknown, position_offset(model), tables, rope)
    return replace(built, hidden_states=(LAST,))


def read_prediction(
    tensors: CheckpointTensors, main: HFModel, built: HFModel, table: Mapping[str, PlannedTensor], number: int
) -> dict[str, PlannedTensor]:
    """Says for each key of a prediction layer what of the model's checkpoint fills it.

    Args:
        table: the same of the model.
        number: of the layer.

    Raises:
        CheckpointError: the checkpoint lacks the layer, or a part of it.
        UnsupportedModelError: Transformers would compute a tensor from others while loading.
    """
    names = [name for name in tensors.planned if is_of_prediction(main, name, number)]
    if not names:
        raise CheckpointError(
            "speculative.method is mtp, and the checkpoint has no tensors of a layer for multi-token prediction. Take "
            "one that has them, or use another method."
        )
    shared = dict(zip((EMBEDDING, HEAD), main.embedding_and_head(), strict=True))
    return read_part(tensors, names, {key: table[name] for key, name in shared.items()}, built.model)


def is_of_prediction(main: HFModel, name: str, number: int) -> bool:
    """True if a tensor of the model's checkpoint has this name for a part of such a prediction layer."""
    if _OF_ITS_OWN.search(name):
        found = re.search(r"\.layers\.(\d+)\.", name)
        return found is None or int(found[1]) == number
    return re.search(rf"(^|\.)layers\.{main.text_config.num_hidden_layers + number}\.", name) is not None


def _num_layers(main: HFModel) -> int:
    """Prediction layers that the model may have; some configs do not say it, but the code leaves their weights out."""
    named: int | None = getattr(main.text_config, "num_mtp_layers", None)
    ignored = main.model._keys_to_ignore_on_load_unexpected or ()
    return named or int(any(pattern.startswith(("^mtp", "mtp")) for pattern in ignored))


@contextmanager
def _with_layers(main: HFModel, count: int) -> Iterator[None]:
    """Within the context the model's config says of prediction layers what Transformers asks it."""
    config: Any = main.text_config
    kinds = getattr(config, "layer_types", None)
    said: dict[str, Any] = {"num_mtp_layers": count}
    if kinds is not None and getattr(config, "mtp_layer_types", None) is None:
        said["mtp_layer_types"] = ["full_attention"] * count
    if getattr(config, "mlp_layer_types", None) is not None and getattr(config, "mtp_mlp_layer_types", None) is None:
        said["mtp_mlp_layer_types"] = ["sparse"] * count
    before = {name: getattr(config, name) for name in said if hasattr(config, name)}
    try:
        for name, value in said.items():
            setattr(config, name, value)
        yield
    finally:
        for name in said:
            setattr(config, name, before[name]) if name in before else delattr(config, name)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
