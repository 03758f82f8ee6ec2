"""Tiny random models that pool, of any class of Transformers, and their hidden states and scores by Transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.model.tiny_configs import FIRST_SPECIAL_TOKEN, WINDOW, tiny_config

# In one row; the longest is longer than windows, and than the distances that T5's bias tells apart.
LENGTHS = (7, 1, 150, 4, 25)
LABELS = 3
LIMIT = 1e-4
# What DeBERTa's checkpoints have, and its configs by default do not.
RELATIVE: dict[str, Any] = {"relative_attention": True, "pos_att_type": "p2c|c2p", "position_biased_input": False}
_OF_TYPE: dict[str, dict[str, Any]] = {
    "albert": {"embedding_size": 32},
    "big_bird": {"attention_type": "original_full"},
    "convbert": {"embedding_size": 32},
    "deberta": RELATIVE,
    "deberta-v2": RELATIVE | {"position_buckets": 16, "norm_rel_ebd": "layer_norm", "share_att_key": True},
    "distilbert": {"dim": 64, "hidden_dim": 96},
    "modernbert": {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2},
    "rembert": {"input_embedding_size": 32},
    "roc_bert": {"pronunciation_embed_dim": 16, "shape_embed_dim": 16, "pronunciation_vocab_size": 128}
    | {"shape_vocab_size": 128},
    "xmod": {"default_language": "en_XX"},
}


def pooling_classes() -> list[str]:
    """The classes of Transformers that embed or classify texts: base models of those with a masked LM's or a text
    encoder's head, and all classifiers of sequences and tokens."""
    from transformers.models.auto import modeling_auto as auto

    bases = {*auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, *auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES}
    found = [_first(auto.MODEL_MAPPING_NAMES[name]) for name in sorted(bases) if name in auto.MODEL_MAPPING_NAMES]
    found += [_first(name) for name in auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES.values()]
    found += [_first(name) for name in auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()]
    found += [_first(name) for name in auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES.values()]
    return list(dict.fromkeys(found))


def _first(names: Any) -> str:
    return names if isinstance(names, str) else names[0]


def save_pooling_model(class_name: str, folder: Path, **changes: Any) -> Any:
    """Writes a random float32 model of a class in Hugging Face's format; returns it.

    Raises:
        Exception: whatever the config's or the class's checks say of small sizes.
    """
    import transformers

    model_class = getattr(transformers, class_name)
    kind = model_class.config_class.model_type
    own = model_class.config_class().to_dict()
    told = dict(_OF_TYPE.get(kind, {})) | ({"is_decoder": False} if "is_decoder" in own else {})
    if "For" in class_name:
        told["num_labels"] = LABELS
    config = tiny_config(kind, **told | changes)
    torch.manual_seed(0)
    model = model_class._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif parameter.is_floating_point():
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def texts_of_ids(lengths: Sequence[int] = LENGTHS, end: int | None = None) -> list[list[int]]:
    """Texts as token ids, none of them special but the last, where it is told."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(3, FIRST_SPECIAL_TOKEN, (length,), generator=generator).tolist() for length in lengths]
    return drawn if end is None else [[*text[:-1], end] for text in drawn]


def texts_of(model: Any) -> list[list[int]]:
    """Texts that a model takes: of classifiers with a decoder they end as its tokenizer ends them."""
    is_with_decoder = getattr(model.config, "is_encoder_decoder", False)
    reads_end = is_with_decoder and type(model).__name__.endswith("ForSequenceClassification")
    return texts_of_ids(end=model.config.eos_token_id if reads_end else None)


@torch.no_grad()
def by_transformers(model: Any, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Of each text alone: scores of a classifier, else hidden states [n, W]."""
    found = []
    for text in texts:
        ids = torch.tensor([text])
        if "For" in type(model).__name__:
            found.append(model(input_ids=ids).logits[0].numpy())
            continue
        is_whole = getattr(model.config, "is_encoder_decoder", False) and hasattr(model, "get_encoder")
        body = model.get_encoder() if is_whole and hasattr(model, "decoder") else model
        found.append(body(input_ids=ids)[0][0].numpy())
    return found


def pooling_config(folder: Path, cache: Path, backend: str = "eager", **model: Any) -> dict[str, Any]:
    """The config of an engine over a folder, in float32 on the CPU."""
    return {
        "model": {"path": str(folder), "dtype": "float32"} | model,
        "compile": {"backend": backend},
        "runtime": {"device": "cpu"},
        "cache": {"dir": str(cache)},
    }


def served(engine: Any, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """The answers of an engine to texts in one row, as by_transformers."""
    answers = engine.encode(list(texts), use_activation=False, normalize=False)
    return [answer.outputs.data for answer in answers]


def largest_error(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> float:
    """The largest difference of any number."""
    return max(float(np.abs(one - other).max()) for one, other in zip(ours, theirs, strict=True))
