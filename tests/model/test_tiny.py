"""The embedded model: Transformers reads it offline, its shapes are those that the kernels serve, it has learnt."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import mllm_compile.model

TINY = Path(mllm_compile.model.__file__).parent / "tiny"
TRAINED_TEXT = "    Return a new list containing the items of this list.\n\n    If the file does not exist,"
UNTRAINED_LOSS = 8.0  # nats a token: log of the vocabulary's 3072


@pytest.fixture(scope="module")
def tokenizer():  # type: ignore[no-untyped-def]  # Transformers' class depends on the release
    return AutoTokenizer.from_pretrained(TINY, local_files_only=True)


@pytest.fixture(scope="module")
def model():  # type: ignore[no-untyped-def]
    return AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, local_files_only=True).eval()


def test_the_weights_are_tied_bf16_and_at_most_six_megabytes(model) -> None:  # type: ignore[no-untyped-def]
    assert (TINY / "model.safetensors").stat().st_size <= 6_000_000
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.tie_word_embeddings


def test_heads_are_of_128_with_two_query_heads_a_kv_head(model) -> None:  # type: ignore[no-untyped-def]
    config = model.config
    assert config.model_type == "qwen3"
    assert config.head_dim == 128
    assert config.num_attention_heads == 2 * config.num_key_value_heads
    assert config.max_position_embeddings >= 2048


def test_any_text_comes_back_from_the_tokenizer(tokenizer) -> None:  # type: ignore[no-untyped-def]
    text = "Grüße, 世界 🙂\n\n\tdef f(x):\r\n        return x  # \x00\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert max(ids) < len(tokenizer)


def test_the_chat_template_closes_turns_with_an_end_token_that_stops_generation(tokenizer, model) -> None:  # type: ignore[no-untyped-def]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    assert model.generation_config.eos_token_id == ends
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id] == ends[:1]


@torch.no_grad()
def test_text_like_its_own_is_far_likelier_than_to_an_untrained_model(tokenizer, model) -> None:  # type: ignore[no-untyped-def]
    ids = torch.tensor([tokenizer.encode(TRAINED_TEXT)])
    loss = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:])
    assert loss < 0.7 * UNTRAINED_LOSS
