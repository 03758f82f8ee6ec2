"""The hook into sparse attention whose indexer chooses the keys of each token: within it every key is chosen.

An indexer chooses the `index_topk` keys of the largest scores (DSA), or the `topk_blocks` blocks. Of a text that is no
longer than these it chooses all, and the attention is a plain one: so such models are served up to that length, which
is their context (HFModel.context_len). An indexer of the third kind makes a mask of its choice (Qwen4's).
The check of the trace asks Transformers whether the indexers choose so (model/mask_probe.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from mllm_compile.model.positions_hook import arguments_of
from mllm_compile.model.replaced_methods import with_forwards
from mllm_compile.runtime.attention.layer import KeyChoice

# Arguments of indexers of single keys, of blocks by their best key, and of blocks by the mean of their keys.
_TOLD = ["hidden_states", "q_resid", "position_embeddings", "attention_mask", "position_ids", "past_key_values"]
_TOLD_OF_BLOCKS = ["hidden_states", "position_embeddings", "past_key_values", "position_ids"]
_TOLD_OF_MEANS = ["hidden_states", "position_embeddings", "attention_mask", "past_key_values"]
# Attributes of an indexer that say its choice, as KeyChoice has it.
OF_KEYS = ("index_topk",)
OF_BLOCKS = ("topk_blocks", "block_size", "local_blocks")
OF_MEANS = ("token_budget",)
_KINDS = ((OF_KEYS, _TOLD), (OF_BLOCKS, _TOLD_OF_BLOCKS), (OF_MEANS, _TOLD_OF_MEANS))


class EveryKey:
    """Stands for a mask of attention, for parts of one, and for keys that are chosen: nothing is hidden."""

    dtype = torch.bool

    def __getitem__(self, index: Any) -> EveryKey:
        return self

    def __and__(self, other: Any) -> Any:
        return other

    __rand__ = __and__


EVERY_KEY = EveryKey()


def choice_of(model: torch.nn.Module) -> KeyChoice | None:
    """The choice of the indexers of `model`, the least where they differ; None: it has none."""
    choices = (KeyChoice(*(getattr(one, name) for name in settings_of(one))) for one in indexers_of(model))
    return min(choices, default=None)


def indexers_of(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The indexers of `model`."""
    return (module for module in model.modules() if _is_indexer(module))


def settings_of(module: torch.nn.Module) -> tuple[str, ...]:
    """The attributes of a module that say what it chooses; () of one that is no indexer."""
    for names, told in _KINDS:
        if all(type(getattr(module, name, None)) is int for name in names) and arguments_of(module) == told:
            return names
    return ()


@contextmanager
def choosing_every_key(model: torch.nn.Module) -> Iterator[None]:
    """Within the context attention with an indexer is told no mask, and its indexer chooses EVERY_KEY."""
    with attending_to_every_key(model), with_forwards(dict.fromkeys(indexers_of(model), _choose_every_key)):
        yield


@contextmanager
def attending_to_every_key(model: torch.nn.Module) -> Iterator[None]:
    """Within the context attention with an indexer is told no mask."""
    attentions = (module for module in model.modules() if _is_attention(module))
    with with_forwards({module: partial(_attend_to_every_key, type(module).forward, module) for module in attentions}):
        yield


@contextmanager
def keeping_masks(model: torch.nn.Module) -> Iterator[None]:
    """Within the context masks of attention are not changed by indexers that do; the self-check runs these."""
    changing = (module for module in indexers_of(model) if settings_of(module) == OF_MEANS)
    with with_forwards(dict.fromkeys(changing, _choose_every_key)):
        yield


def _is_indexer(module: torch.nn.Module) -> bool:
    return bool(settings_of(module))


def _is_attention(module: Any) -> bool:
    """True for attention with an indexer, or with the choice of an earlier layer's indexer."""
    if not hasattr(module, "indexer"):
        return False
    return _is_indexer(module.indexer) if module.indexer is not None else "prev_topk_indices" in arguments_of(module)


def _choose_every_key(*args: Any, **kwargs: Any) -> EveryKey:
    return EVERY_KEY


def _attend_to_every_key(own: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
    return own(module, *args, **kwargs | {"attention_mask": EVERY_KEY})
