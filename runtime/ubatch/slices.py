"""Where a step is cut in two, and the batches of its parts.

Shape legend: T tokens of the step, R requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from mllm_compile.runtime.attention.base import AttentionBackend
from mllm_compile.runtime.attention.metadata import CommonAttentionMetadata, split_decodes_and_prefills
from mllm_compile.runtime.device.upload import upload
from mllm_compile.runtime.errors import UnsupportedModelError
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode
from mllm_compile.runtime.graph_mode import UBatchSlice

# A boundary of requests is taken if it is no farther from the middle than this share of the step's tokens. A request in
# two parts is slower: the later part waits for the earlier one's keys.
_NEAR = 1 / 8


def check_divides(state_layers: Sequence[object]) -> None:
    """
    Raises:
        UnsupportedModelError: the model's steps are not divided.
    """
    if state_layers:
        raise UnsupportedModelError(
            "runtime.enable_dbo divides steps, and layers of this model carry a state, which halves cannot be "
            "computed beside each other. Set runtime.enable_dbo: false."
        )


def ubatch_slices(batch: ForwardBatch, least_tokens: int) -> tuple[UBatchSlice, UBatchSlice] | None:
    """The halves of a step with prompts; None: it runs whole.

    Whole are steps of fewer than `least_tokens`, steps with adapters, steps with features of images, whose blocks see
    ahead, and steps with half of their requests decodes: a shared prefix is read once for all of them.
    """
    if not batch.forward_mode.is_prefill() or batch.num_tokens < max(2, least_tokens):
        return None
    if batch.media is not None or batch.mrope_positions is not None or batch.adapter_slots is not None:
        return None
    common = CommonAttentionMetadata.of(batch)
    starts = common.query_start_loc_cpu.numpy()
    num_decode_tokens = split_decodes_and_prefills(common)[2]
    cut = _place(starts)
    if cut < max(1, num_decode_tokens):
        return None
    first = int(np.searchsorted(starts, cut, side="right")) - 1  # the request that the second half begins in
    last = first + 1 if starts[first] < cut else first
    return (
        UBatchSlice(slice(0, last), slice(0, cut)),
        UBatchSlice(slice(first, common.num_reqs), slice(cut, batch.num_tokens)),
    )


def most_of_a_part(num_tokens: int) -> int:
    """Tokens that a half of a step of `num_tokens` has at most."""
    return min(num_tokens, int((0.5 + _NEAR) * num_tokens) + 1)


def _place(starts: np.ndarray) -> int:
    """The first token of the second half: a request's, where one begins near the middle."""
    num_tokens = int(starts[-1])
    middle = num_tokens // 2
    inner = starts[1:-1]
    if inner.size:
        nearest = int(inner[np.abs(inner - middle).argmin()])
        if abs(nearest - middle) <= _NEAR * num_tokens:
            return nearest
    return middle


def share_a_request(slices: tuple[UBatchSlice, UBatchSlice]) -> bool:
    """True if the second half has further tokens of the first one's last request."""
    first, second = slices
    return bool(first.request_slice.stop > second.request_slice.start)


def ubatch_of(batch: ForwardBatch, part: UBatchSlice, backend: AttentionBackend) -> ForwardBatch:
    """The batch of a part: its requests with as many of their new tokens as are in it; those in earlier parts are then
    in the KV cache.

    Args:
        backend: plans and computes its attention; of each part another.
    """
    common = CommonAttentionMetadata.of(batch)
    requests, tokens = part.request_slice, part.token_slice
    starts = common.query_start_loc_cpu.numpy()
    begins = np.maximum(starts[:-1][requests], tokens.start)
    new = np.minimum(starts[1:][requests], tokens.stop) - begins
    prefix = common.num_computed_tokens_cpu.numpy()[requests] + begins - starts[:-1][requests]
    lengths = np.stack((prefix + new, new, prefix)).astype(np.int32)
    seq_lens, extend_seq_lens, extend_prefix_lens = upload(lengths, batch.input_ids.device)
    is_first = tokens.start == 0
    return replace(
        batch,
        forward_mode=batch.forward_mode if is_first else ForwardMode.EXTEND,
        batch_size=len(new),
        input_ids=batch.input_ids[tokens],
        req_pool_indices=batch.req_pool_indices[requests],
        seq_lens=seq_lens,
        out_cache_loc=batch.out_cache_loc[tokens],
        positions=batch.positions[tokens],
        seq_lens_cpu=torch.from_numpy(lengths[0]),
        attn_backend=backend,
        extend_seq_lens=extend_seq_lens,
        extend_prefix_lens=extend_prefix_lens,
        extend_prefix_lens_cpu=torch.from_numpy(lengths[2]),
        extend_seq_lens_cpu=torch.from_numpy(lengths[1]),
        common_prefix_len=batch.common_prefix_len if is_first else 0,
        logits_indices=None,
        rope_lens=None if batch.rope_lens is None else batch.rope_lens[tokens],
        common_attn_metadata=None,
    )
