"""The embedded model's card: what it is, how it was made, its held-out perplexity and what it says.

Owns measuring a model on a stream of tokens and writing the page. train_tiny.py hands in the facts of the run.

Shape legend: N tokens of a stream.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch
from torch.nn import functional
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

SAMPLE_TOKENS = 64
SAMPLE_PROMPTS = (
    'The "for" statement is used to iterate over',
    "Return a new list containing",
    "posixpath.join(a, *p)\n    Join two or more",
    "If the file cannot be opened,",
)
SAMPLE_QUESTION = "What does shutil.copytree do?"


@dataclass(frozen=True)
class Perplexity:
    """Perplexity of one stream; the mark between documents counts as a token, and as no byte."""

    per_token: float
    per_byte: float


@torch.no_grad()
def stream_loss(model: Qwen3ForCausalLM, stream: torch.Tensor, context: int) -> float:
    """Mean loss in nats a token over `stream` ([N] int64): windows one after another, every token but the first."""
    model.eval()
    total = torch.zeros((), dtype=torch.float64, device=stream.device)
    for start in range(0, stream.numel() - 1, context):
        window = stream[start : start + context + 1]
        logits = model(input_ids=window[None, :-1], use_cache=False).logits[0]
        total += functional.cross_entropy(logits.float(), window[1:], reduction="sum").double()
    return total.item() / (stream.numel() - 1)


def perplexity(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, stream: torch.Tensor) -> Perplexity:
    """Perplexity of `stream` in windows of all the model's positions."""
    loss = stream_loss(model, stream, model.config.max_position_embeddings)
    num_bytes = len(tokenizer.decode(stream.tolist(), skip_special_tokens=True).encode())
    return Perplexity(math.exp(loss), math.exp(loss * (stream.numel() - 1) / num_bytes))


def model_card(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    facts: dict[str, str],
    trained: Perplexity,
    untrained: Perplexity,
) -> str:
    """The page as Markdown; `model` is on the CPU in float32 and is left in bf16."""
    config = model.config
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    return f"""\
# The embedded model

A Qwen3 of {num_parameters:,} parameters ({config.num_hidden_layers} layers, hidden {config.hidden_size}, head dim \
{config.head_dim}, {config.num_attention_heads} query and {config.num_key_value_heads} KV heads, vocabulary \
{config.vocab_size}, tied embeddings, {config.max_position_embeddings} positions, bf16)
with its own byte-level BPE tokenizer and a ChatML template. It is here so that everything can be tried and tested
offline on a model that has learnt something: its text reads like Python's documentation, and what it says is made up.

Made by `examples/tiny_models/train_tiny.py`, which also wrote this page, from text that every Python carries: the
language reference (`pydoc_data`), the docstrings of the standard library, and questions and answers made of them for
the chat template. That text is under the Python Software Foundation's license.

| | |
|---|---|
{rows}

## Held-out perplexity

Of the saved bf16 weights, computed in float32, in windows of {config.max_position_embeddings} tokens.

| | a token | a byte |
|---|---|---|
| trained | {trained.per_token:.2f} | {trained.per_byte:.3f} |
| untrained (the same model before its first step) | {untrained.per_token:.0f} | {untrained.per_byte:.2f} |

{_samples(model, tokenizer)}"""


def _samples(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> str:
    """Greedy continuations in float32, and how far bf16 agrees with them."""
    question = [{"role": "user", "content": SAMPLE_QUESTION}]
    chat = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    prompts = [*SAMPLE_PROMPTS, chat]
    exact = [_continuation(model, tokenizer, prompt) for prompt in prompts]
    model.to(torch.bfloat16)
    rounded = [_continuation(model, tokenizer, prompt) for prompt in prompts]
    num_same = sum(_common_prefix(a, b) for a, b in zip(exact, rounded, strict=True))
    blocks = [f"```\n{prompt}▶{tokenizer.decode(ids)}\n```\n" for prompt, ids in zip(prompts, exact, strict=True)]
    return (
        f"## Samples\n\nGreedy, float32, CPU; at most {SAMPLE_TOKENS} tokens after the ▶. Computed in bf16, {num_same}"
        f" of these {sum(map(len, exact))} tokens come before the first difference.\n\n" + "\n".join(blocks)
    )


@torch.no_grad()
def _continuation(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, prompt: str) -> list[int]:
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False)])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=SAMPLE_TOKENS, do_sample=False)
    return output[0, ids.shape[1] :].tolist()


def _common_prefix(a: list[int], b: list[int]) -> int:
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))
