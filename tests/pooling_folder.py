"""A tiny embedder or classifier as sentence-transformers keeps it: a tokenizer of words, and module files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, processors

from tests.model.pooling_models import save_pooling_model

WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *(f"w{number}" for number in range(4, 100)))


def save_word_tokenizer(folder: Path) -> None:
    """Words `w4` to `w99`, with [CLS] ahead of a text and [SEP] behind each."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def save_module_files(folder: Path, *kinds: str, pooling: dict[str, Any], settings: dict[str, Any]) -> None:
    """modules.json of these kinds in order, the pooling's config, and config_sentence_transformers.json."""
    modules = [
        {
            "idx": at,
            "name": str(at),
            "path": "" if at == 0 else f"{at}_{kind}",
            "type": f"sentence_transformers.models.{kind}",
        }
        for at, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))


def save_embedder(folder: Path, class_name: str = "BertModel", **changes: Any) -> Any:
    """A tiny model with a tokenizer; returns Transformers' model."""
    model = save_pooling_model(class_name, folder, pad_token_id=0, **changes)
    save_word_tokenizer(folder)
    return model
