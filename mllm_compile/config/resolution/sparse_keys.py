"""Models whose indexer chooses the keys of each token: texts whose keys it chooses all, and longer ones.

Up to `index_topk` tokens (DSA), or those of `index_topk_blocks` blocks, their attention is a plain one, by any kernel.
A config that asks for more gets the indexer, in plain torch.
"""

from __future__ import annotations

from mllm_compile.config.folders.model_folder import ModelFolder
from mllm_compile.config.schema_runtime import RuntimeConfig
from mllm_compile.errors import ConfigError

_PLAIN_LAYERS = ("full_attention", "sliding_attention")


def full_length(model: ModelFolder) -> int | None:
    """Tokens of the longest text whose keys its indexer chooses all; None: config.json names no indexer."""
    chosen, kinds = model.text_config_value("index_topk"), model.text_config_value("layer_types")
    blocks, size = (model.text_config_value(name) for name in ("index_topk_blocks", "index_block_size"))
    if isinstance(older := model.text_config_value("sparse_attention_config"), dict):
        blocks, size = older.get("sparse_topk_blocks", blocks), older.get("sparse_block_size", size)
    if isinstance(blocks, int) and isinstance(size, int):
        chosen = blocks * size
    chosen = _budget(model) or chosen
    all_plain = isinstance(kinds, list) and all(kind in _PLAIN_LAYERS for kind in kinds)
    return chosen if isinstance(chosen, int) and chosen > 0 and not all_plain else None


def _budget(model: ModelFolder) -> int | None:
    """Tokens of the blocks that an indexer chooses by the mean of their keys; None: it has none of this kind."""
    budget = model.text_config_value("indexer_budget")
    return budget if isinstance(budget, int) else None


def chooses_keys(max_model_len: int, model: ModelFolder) -> bool:
    """True if a text may be longer than `full_length`."""
    length = full_length(model)
    return length is not None and max_model_len > length


def check_chosen_keys(asked: RuntimeConfig, backend: str, length: int, model: ModelFolder) -> None:
    """
    Args:
        backend: that attends.
        length: the model's `full_length`.

    Raises:
        ConfigError: longer texts are asked for, and something beside them for which there is no chosen attention.
    """
    said = f"runtime.max_model_len is {asked.max_model_len}, and beyond {length} tokens an indexer chooses keys"
    shorter = f"or runtime.max_model_len: {length}"
    if _budget(model) is not None:
        raise ConfigError(
            f"{said} by means of blocks of them, which is not served. Set runtime.max_model_len: {length}, or less."
        )
    if backend != "torch":
        raise ConfigError(
            f"{said}, which the kernels of runtime.attention_backend {backend} do not. Set it to torch (slow), "
            f"{shorter}."
        )
    for key in ("tensor_parallel_size", "pipeline_parallel_size", "expert_parallel_size"):
        if getattr(asked, key) > 1:
            raise ConfigError(
                f"{said}, which one rank does alone: runtime.{key} is {getattr(asked, key)}. Set it to 1, {shorter}."
            )
    if asked.skip_compiled:
        raise ConfigError(
            f"{said}, which Transformers' own layers do not here. Leave out runtime.skip_compiled, {shorter}."
        )
