"""Tiny random encoder-decoders of Transformers' classes, and their greedy answers by Transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, processors

from tests.pooling_folder import WORDS

VOCAB = 128
_OF_BART: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": 160,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "decoder_start_token_id": 3,
    "forced_eos_token_id": None,
}
_OF_T5: dict[str, Any] = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "eos_token_id": 3,
    "decoder_start_token_id": 0,
}
_OF_GEMMA: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": 160,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 2.0,  # released ones say 50, which small scores do not reach
}
_PARTS = ("speech_encoder", "t2u_encoder", "t2u_decoder")  # that a translator of texts has not
_OF_SEAMLESS: dict[str, Any] = {
    "hidden_size": 64,
    **{name: _OF_BART[name] for name in _OF_BART if name != "d_model"},
    **{f"{part}_layers": 1 for part in _PARTS},
    **{f"{part}_attention_heads": 4 for part in _PARTS},
}
# Of each class, and of each way that it is told to compute, what its config says.
CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("BartForConditionalGeneration", _OF_BART),
    "bart scaled": ("BartForConditionalGeneration", _OF_BART | {"scale_embedding": True}),
    "mbart": ("MBartForConditionalGeneration", _OF_BART | {"forced_bos_token_id": 7}),
    "marian": ("MarianMTModel", _OF_BART | {"decoder_start_token_id": 0, "scale_embedding": True}),
    "pegasus": ("PegasusForConditionalGeneration", _OF_BART | {"decoder_start_token_id": 0}),
    "nllb": ("M2M100ForConditionalGeneration", _OF_BART | {"forced_bos_token_id": 9}),
    "blenderbot": ("BlenderbotForConditionalGeneration", _OF_BART),
    "blenderbot small": ("BlenderbotSmallForConditionalGeneration", _OF_BART),
    "plbart": ("PLBartForConditionalGeneration", _OF_BART),
    "t5": ("T5ForConditionalGeneration", _OF_T5),
    "flan t5": (
        "T5ForConditionalGeneration",
        _OF_T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "mt5": ("MT5ForConditionalGeneration", _OF_T5 | {"feed_forward_proj": "gated-gelu"}),
    "umt5": ("UMT5ForConditionalGeneration", _OF_T5 | {"feed_forward_proj": "gated-gelu"}),
    "seamless": ("SeamlessM4TForTextToText", _OF_SEAMLESS),
    "seamless v2": ("SeamlessM4Tv2ForTextToText", _OF_SEAMLESS),
    "t5gemma": ("T5GemmaForConditionalGeneration", _OF_GEMMA),
}


def save_encoder_decoder(name: str, folder: Path, **changes: Any) -> Any:
    """Writes a random float32 model of CLASSES in Hugging Face's format; returns it."""
    import transformers

    class_name, told = CLASSES[name]
    model_class = getattr(transformers, class_name)
    if name == "t5gemma":
        ids = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3, "decoder_start_token_id": 2}
        parts = dict.fromkeys(("encoder", "decoder"), told | changes)
        config = model_class.config_class(**parts, vocab_size=VOCAB, **ids)
    else:
        config = model_class.config_class(**(told | changes))
    torch.manual_seed(0)
    model = model_class(config).eval()
    if name == "t5gemma":
        model.set_attn_implementation("eager")  # Transformers 5.17 takes sdpa, which drops soft caps
    for of, parameter in model.named_parameters():
        if parameter.dim() > 1 and parameter.requires_grad:  # tables of positions have none
            torch.nn.init.normal_(parameter, std=_std_of(of, model.config))
    model.save_pretrained(folder)
    return model


def _std_of(parameter: str, config: Any) -> float:
    """The standard deviation of a parameter. T5's queries carry the scale of scores; else these would hide its bias."""
    if parameter.endswith("relative_attention_bias.weight"):
        return 1.0
    is_scale = parameter.endswith(".q.weight") and hasattr(config, "d_kv")
    return 0.15 * (config.d_kv**-0.5 if is_scale else 1.0)


def config_of_class(class_name: str) -> Any:
    """A small config of any class of BART's kind."""
    import transformers

    config = getattr(transformers, class_name).config_class(**_OF_BART)
    config.architectures = [class_name]
    return config


def save_word_tokenizer(folder: Path) -> None:
    """Words `w4` to `w99`; [SEP] is behind a text."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A [SEP]", special_tokens=[("[SEP]", 3)])
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")  # so that tokens have bytes, which grammars need
    tokenizer.save(str(folder / "tokenizer.json"))


def save_speech_tokenizer(folder: Path) -> None:
    """Words as save_word_tokenizer's, and from 100 on the special tokens of Whisper's decoder."""
    names = ("startoftranscript", "translate", "transcribe", "startofprev", "nospeech", "notimestamps")
    save_word_tokenizer(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<|{name}|>" for name in names])
    tokenizer.save(str(folder / "tokenizer.json"))


def sources_of_ids(*lengths: int) -> list[list[int]]:
    """Token ids that no model has a use of its own for."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(10, 100, (length,), generator=generator).tolist() for length in lengths]


def save_whisper(folder: Path, **changes: Any) -> Any:
    """Writes a random Whisper with windows of 1 s, and its extractor's settings; returns it."""
    import transformers

    own = {name: value for name, value in _OF_BART.items() if name != "max_position_embeddings"}
    sizes = {"num_mel_bins": 16, "max_source_positions": 50, "max_target_positions": 64}
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**(own | sizes | changes))).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(folder)
    transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)
    save_word_tokenizer(folder)
    return model


@torch.no_grad()
def greedy_of_sound(
    model: Any,
    samples: Any,
    start: Sequence[int],
    count: int,
    suppressed: Sequence[int] = (),
    at_begin: Sequence[int] = (),
    rule: Any = None,
) -> list[int]:
    """The likeliest tokens of a sound, by Transformers' own extractor and forward, without those that are suppressed,
    or are at the beginning; `rule` changes logits as generate's processors do."""
    import transformers

    extract = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    features = extract(samples, sampling_rate=16000, return_tensors="pt").input_features
    return _greedy(model, model.get_encoder()(features), start, count, suppressed, at_begin, rule)


@torch.no_grad()
def greedy(model: Any, source: Sequence[int], start: Sequence[int], count: int) -> list[int]:
    """The likeliest tokens behind `start`, by a whole forward of Transformers for each."""
    return _greedy(model, model.get_encoder()(torch.tensor([source])), start, count)


def _greedy(
    model: Any,
    states: Any,
    start: Sequence[int],
    count: int,
    suppressed: Sequence[int] = (),
    at_begin: Sequence[int] = (),
    rule: Any = None,
) -> list[int]:
    ids = list(start)
    for place in range(count):
        logits = model(encoder_outputs=states, decoder_input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        logits[[*suppressed, *(() if place else at_begin)]] = -torch.inf
        if rule is not None:
            logits = rule(torch.tensor([ids]), logits[None])[0]
        ids.append(int(logits.argmax()))
    return ids[len(start) :]
