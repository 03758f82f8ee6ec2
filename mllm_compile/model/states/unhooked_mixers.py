"""Recurrent mixers whose code calls no function of a known name, as ops of ours for a trace.

A module is known by its weights' names and its methods. Its computation is written here again, with the known kinds of
layers; the self-check compares it with the model's own forward.

Shape legend: T tokens, C channels, H heads, D head width, K kernel width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

Method = Callable[..., Any]

_LEAST_DECAY = 1e-30  # a state that is multiplied by it is forgotten, and its logarithm is a number
_NEVER_ZERO = 1e-20  # of step sizes: inputs are divided by them


class UnhookedMixer(NamedTuple):
    """A module with a recurrence of its own.

    Attributes:
        methods: functions that compute what its methods of these names do, by ops of ours.
    """

    module: torch.nn.Module
    methods: dict[str, Method]


def unhooked_mixers(model: torch.nn.Module) -> Iterator[UnhookedMixer]:
    """The modules of `model` whose recurrences are known by their own code."""
    modules: Iterator[Any] = model.modules()
    for module in modules:
        if _has(module, "slope_rate", "query_decay", "key_decay", "diagonal_decay", "qkv_proj", "output_gate"):
            yield UnhookedMixer(module, {"forward": _lightning_attention})
        elif _has(module, "conv_qk_depthwise", "conv_qk_grouped", "v_proj_current", "v_proj_delayed"):
            yield UnhookedMixer(module, {"forward": _convolved_projections})
        elif _has(module, "conv_1d", "rg_lru") and hasattr(module.rg_lru, "_rnn_scan"):
            yield UnhookedMixer(module.conv_1d, {"forward": _causal_conv1d})
            yield UnhookedMixer(module.rg_lru, {"_rnn_scan": _gated_linear_scan})
        elif _has(module, "time_decay", "time_first", "extract_key_value"):
            yield UnhookedMixer(module, {"forward": _weighted_mean})
        elif _has(module, "time_shift", "time_mix_key", "time_mix_receptance", "key", "receptance", "value"):
            yield UnhookedMixer(module, {"forward": _shifted_feed_forward})
        elif _has(module, "chunkwise_kernel_fn", "sequence_kernel_fn", "step_kernel_fn"):
            yield UnhookedMixer(module, {"forward": _matrix_memory})
        elif _has(module, "ngram_embedding", "ngram_heads_vocab_sizes", "layer_multipliers"):
            yield UnhookedMixer(module, {"forward": _hashed_ngrams})
        elif _has(module, "_short_conv", "short_conv_state_len", "conv1d"):
            yield UnhookedMixer(module, {"_short_conv": _dilated_conv})


def _has(module: torch.nn.Module, *names: str) -> bool:
    return all(hasattr(module, name) for name in names)


def _lightning_attention(module: Any, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """MiniMax's linear attention, S ← exp(-slope)·S + v kᵀ, out = S·q: Mamba-2's scan with steps of 1."""
    heads = (*hidden_states.shape[:-1], module.num_attention_heads, 3 * module.head_dim)
    q, k, v = module.act_fn(module.qkv_proj(hidden_states)).view(heads)[0].split(module.head_dim, dim=-1)
    steps = torch.ones_like(v[..., 0])
    rates = -module.slope_rate.reshape(-1)
    out = torch.ops.mllm.ssd(v, steps, rates, k, q, None, None, None, None, False, 0.0, None, False, 0.0, 1, "")
    out = module.norm(out.to(hidden_states.dtype).flatten(1)[None])
    return module.out_proj(torch.sigmoid(module.output_gate(hidden_states)) * out), None


def _causal_conv1d(module: torch.nn.Conv1d, inputs: torch.Tensor) -> torch.Tensor:
    """A convolution of each channel by itself, [1, C, T] → [1, C, T]; the module's own ends K - 1 places later."""
    return _conv(inputs[0].transpose(0, 1), module.weight[:, 0], module.bias).transpose(0, 1)[None]


def _gated_linear_scan(
    module: Any, hidden_states: torch.Tensor, recurrent_gate: torch.Tensor, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """RecurrentGemma's S ← gate·S + x, out = S, over [1, T, C]: Mamba-1's scan with one number a channel, steps of the
    gate's logarithm, and inputs divided by them. A prompt's first token has no state, so that nothing is reset."""
    steps = -recurrent_gate[0].float().clamp(min=_LEAST_DECAY).log()
    inputs = hidden_states[0].float() / steps.clamp(min=_NEVER_ZERO)
    rates = -torch.ones_like(module.recurrent_param, dtype=torch.float32)[:, None]
    ones = torch.ones_like(inputs[:, :1])
    out = torch.ops.mllm.selective_scan(inputs, steps, rates, ones, ones, None, None, None, False, False, "")
    return out.to(hidden_states.dtype)[None], None


def _convolved_projections(
    module: Any, hidden_states: torch.Tensor, past_key_values: None = None, conv_mask: None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Zaya's q, k and v [1, T, H, D] of hidden_states [1, T, C]: two convolutions, of each channel and then of each
    head, mix q and k with earlier tokens'; half of v is the previous token's."""
    tokens = hidden_states[0]
    q, k = module.q_proj(tokens), module.k_proj(tokens)
    of_heads = (tokens.shape[0], module.num_key_value_heads, -1, module.head_dim)
    queries = (q.view(of_heads) + k.view(of_heads)) * 0.5
    keys = queries.mean(dim=-2)
    inner = module.conv_qk_depthwise
    mixed = _head_conv(module.conv_qk_grouped, _conv(torch.cat((q, k), dim=-1), inner.weight[:, 0], None), inner.bias)
    mixed_q, mixed_k = mixed.split((q.shape[1], k.shape[1]), dim=-1)
    delayed, bias = module.v_proj_delayed(tokens), module.v_proj_delayed.bias
    # Ahead of the first token the model projects a token of zeros, which gives the bias.
    delayed = _delayed(delayed, 1) if bias is None else _delayed(delayed - bias, 1) + bias
    v = torch.cat((module.v_proj_current(tokens), delayed), dim=-1)
    parts = (mixed_q + queries.reshape(q.shape), mixed_k + keys.reshape(k.shape), v)
    q, k, v = (part.view(tokens.shape[0], -1, module.head_dim)[None] for part in parts)
    return q, k, v


def _weighted_mean(module: Any, hidden: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """RWKV-4's attention over hidden [1, T, C]."""
    shifted = _delayed(hidden[0], 1)[None]
    k = module.key(_mixed(hidden, shifted, module.time_mix_key))
    v = module.value(_mixed(hidden, shifted, module.time_mix_value))
    receptance = torch.sigmoid(module.receptance(_mixed(hidden, shifted, module.time_mix_receptance)))
    out = torch.ops.mllm.wkv(k[0], v[0], module.time_decay, module.time_first, "")
    return module.output(receptance * out[None]), None


def _shifted_feed_forward(module: Any, hidden: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """RWKV-4's feed-forward, which mixes each token of hidden [1, T, C] with the one before."""
    shifted = _delayed(hidden[0], 1)[None]
    k = torch.square(torch.relu(module.key(_mixed(hidden, shifted, module.time_mix_key))))
    receptance = torch.sigmoid(module.receptance(_mixed(hidden, shifted, module.time_mix_receptance)))
    return receptance * module.value(k), None


def _mixed(values: torch.Tensor, others: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    return values * share + others * (1 - share)


def _matrix_memory(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    igate: torch.Tensor,
    fgate: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """xLSTM's cell over query, key [1, H, T, D], value [1, H, T, Dv], gates [1, H, T] → [1, H, T, Dv]."""
    tokens = (one[0].transpose(0, 1) for one in (query, key, value, igate, fgate))
    out = torch.ops.mllm.matrix_memory(*tokens, float(module.config.eps), "")
    return out.transpose(0, 1)[None], None


def _hashed_ngrams(module: Any, input_ids: torch.Tensor, past_key_values: None = None) -> torch.Tensor:
    """Qwen4's embeddings of token ids [1, T] with those ahead: each n-gram has rows of a table, by several hashes. An
    end of text, and nothing else, is ahead of a text's first token, and ahead of an end."""
    ids = input_ids[0].long()
    ends = ids.new_full((), module.eos_token_id)
    numbers = (ids + 1).float()[:, None]  # exact, and 0 says that there was none
    grams, latest = [ids], ids
    for behind in range(1, module.ngram_size):
        earlier = _delayed(numbers, behind)[:, 0].round().long() - 1
        is_none = earlier < 0 if behind == 1 else (earlier < 0) | (latest == ends)
        latest = torch.where(is_none, ends, earlier)
        grams.append(latest)
    mixed, rows = ids * module.layer_multipliers[0], []
    for place in range(1, module.ngram_size):
        mixed = torch.bitwise_xor(mixed, grams[place] * module.layer_multipliers[place])
        heads = slice((place - 1) * module.heads_per_ngram, place * module.heads_per_ngram)
        hashed = torch.remainder(mixed[:, None], module.ngram_heads_vocab_sizes[heads])
        rows.append(hashed + module.ngram_heads_offsets[heads])
    embedded: torch.Tensor = module.ngram_embedding(torch.cat(rows, dim=-1)).flatten(-2)
    return embedded[None]


def _dilated_conv(module: Any, hidden_states: torch.Tensor, past_key_values: None = None) -> torch.Tensor:
    """A causal convolution over every so many tokens of each channel of [1, T, C]: one over all of them, with zeros."""
    (dilation,) = module.conv1d.dilation
    spread = torch.nn.functional.pad(module.conv1d.weight[:, 0, :, None], (0, dilation - 1))
    weight = spread.flatten(1)[:, : module.short_conv_state_len + 1]
    return torch.nn.functional.silu(_conv(hidden_states[0], weight, None))[None]


def _head_conv(module: torch.nn.Conv1d, inputs: torch.Tensor, added: torch.Tensor | None) -> torch.Tensor:
    """A causal convolution of each group's channels over inputs + added, [T, C] → [T, C].

    `added` [C] is what the inputs have everywhere, ahead of the first token too, where a state has zeros.
    """
    outputs, width, num_columns = module.weight.shape
    weight = module.weight.view(module.groups, -1, width, num_columns)

    def of_groups(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = values.view(-1, module.groups, width).transpose(0, 1)
        return (rows @ weights.transpose(1, 2)).transpose(0, 1).reshape(-1, outputs)

    out = of_groups(inputs, weight[..., -1])
    for behind in range(1, num_columns):
        out = out + of_groups(_delayed(inputs, behind), weight[..., -1 - behind])
    if added is not None:
        out = out + of_groups(added, weight.sum(-1))
    return out if module.bias is None else out + module.bias


def _delayed(inputs: torch.Tensor, behind: int) -> torch.Tensor:
    """Each token gets the row of so many tokens before, [T, C], and zeros ahead of the first: a convolution as well."""
    channels = inputs.shape[1]
    weight = torch.cat((inputs.new_ones(channels, 1), inputs.new_zeros(channels, behind)), dim=1)
    return _conv(inputs, weight, None)


def _conv(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """inputs [T, C], weight [C, K], bias [C] → [T, C]."""
    mixed: torch.Tensor = torch.ops.mllm.causal_conv(inputs, weight, bias, "", "")
    return mixed
