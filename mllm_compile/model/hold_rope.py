"""Holds RoPE that follows the longest text of a batch (`dynamic`, `longrope`) where it is constant.

Transformers computes other frequencies for a whole batch once one of its texts is longer than what the model was first
trained on. Up to that length (config/rope_limit.py) they are constant. It bounds max_model_len, so that no request can
change another, and hold_rope takes the computation out of the model that is traced.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from mllm_compile.config.rope_limit import RopeLimit, rope_limit
from mllm_compile.errors import UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from mllm_compile.config.model_folder import ModelFolder

_HELD = "held"  # a rope_type that Transformers does nothing for in a forward


def hold_rope(model: PreTrainedModel) -> None:
    """Makes every rotary embedding of `model` keep the frequencies that it has now: those of short texts.

    Raises:
        UnsupportedModelError: an embedding's own forward asks for more than those.
    """
    limit = _limit_of(model.config)
    embeddings = [module for module in model.modules() if isinstance(getattr(module, "rope_type", None), str | dict)]
    if limit is not None and not embeddings:
        raise _refusal(limit.rope_type, "no module of the model names it")
    for module in embeddings:
        said: Any = module.rope_type
        of_layers = said if isinstance(said, dict) else {"": said}
        following = [kind for kind in of_layers.values() if kind == "longrope" or "dynamic" in str(kind)]
        if not following:
            continue
        own_names = inspect.unwrap(type(module).forward).__code__.co_names
        if read := sorted({"config", "rope_type", "rope_init_fn"} & set(own_names)):
            raise _refusal(following[0], f"{type(module).__name__}.forward reads {', '.join(read)}")
        held = {layer: _HELD if kind in following else kind for layer, kind in of_layers.items()}
        module.rope_type = held if isinstance(said, dict) else held[""]  # type: ignore[assignment]


def check_rope_limit(folder: ModelFolder, config: PreTrainedConfig) -> None:
    """Checks that the limit that resolve.py reads in config.json is the one of Transformers' config.

    Raises:
        UnsupportedModelError: it is not.
    """
    in_file, known = rope_limit(folder.text_config_value), _limit_of(config)
    if known is not None and in_file != known:
        raise _refusal(
            known.rope_type, f"it is constant for {known.max_positions} positions, which config.json does not say"
        )


def _limit_of(config: PreTrainedConfig) -> RopeLimit | None:
    text_config = config.get_text_config(decoder=True)

    def look_up(*names: str) -> Any:
        values = (getattr(text_config, name, None) for name in names)
        return next((value for value in values if value is not None), None)

    return rope_limit(look_up)


def _refusal(rope_type: str, why: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"rope_type {rope_type!r} depends on the longest position in the batch, so one request would change another; "
        f"and here it cannot be held at what it is for short texts: {why}. Set a static rope_type in the model's "
        "config.json."
    )
