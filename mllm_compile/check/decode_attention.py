"""Runs the program's own kernels for decodes on small batches, against attention in float32.

Shape legend: R requests, H query heads, Hk kv heads, D head dim, L tokens of a request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from mllm_compile.check.served import Served
from mllm_compile.errors import CompileError
from mllm_compile.runtime.attention.capture import RopeInputs
from mllm_compile.runtime.attention.distances import of_distances
from mllm_compile.runtime.attention.flashinfer.kernels import PlanGroup
from mllm_compile.runtime.attention.hopper.clusters import ClusterKernel, choose_split
from mllm_compile.runtime.attention.hopper.shapes import pays_together
from mllm_compile.runtime.attention.hopper.shares import MOST_REQUESTS, ShareKernel
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.layer_kernels import DecodeVariant
from mllm_compile.runtime.attention.split.split_decode import LinkedDecodes, SplitDecodeSpace, choose_decoder
from mllm_compile.runtime.program.link import LinkedProgram
from mllm_compile.runtime.program.steps import AttentionStep, RopeInputNames

_LENGTHS = (1, 70, 300)  # a part of one program's keys; several programs that are added up
_LONGEST = 2100  # as many programs as one request's keys are ever split among
_LONGEST_ALONE = 6200  # so long that its heads have several clusters (attention/hopper/clusters.cu)
_ROWS_TOGETHER = 21  # of one request: more than a program takes together
_MORE_REQUESTS = 22  # than one warp of shares counts
_REACH = 128  # of a bias by distance, as T5 has it
_MOST_WINDOW = 8192  # a longer one would take seconds to reach the end of
# ‖ours − float32's‖ / ‖float32's‖ of the worst request; rounding alone is up to 3e-3 in bfloat16.
_TOLERANCE = 2e-2


def check_decode_attention(linked: LinkedProgram, served: Served) -> None:
    """
    Raises:
        CompileError: a layer's kernels compute something else than torch's operations.
    """
    checked, program = set(), linked.program
    rope_inputs = {step.layer: step.rope_inputs for step in program.steps if isinstance(step, AttentionStep)}
    for layer in (*program.layers, *program.cross_layers):
        stored, step = program.kernels_of_layer(layer.name), rope_inputs.get(layer.name)
        variants = stored.decode
        kind = (variants, stored.verify, layer.sm_scale, None if step is None else (len(step.values), step.eps))
        if variants and kind not in checked:
            checked.add(kind)
            check = _DecodeCheck(layer, served, step)
            kernels = linked.layer_kernels[layer.name]
            for lengths in check.batches(variants):
                check.run(lengths, variants, kernels.decode)
            for variant, decoder in zip(variants, kernels.decode, strict=True):
                if variant.takes_rows_together:
                    check.run(_LENGTHS, [variant], [replace(decoder, most_sequences=None)], _ROWS_TOGETHER)
            for variant, decoder in zip(stored.verify, kernels.verify, strict=True):
                for lengths in check.verify_batches(variant):
                    check.run(lengths, [variant], [decoder], variant.tokens)


class _DecodeCheck:
    """One layer's decodes: one new token of each request, or some in verify steps. Pages are in no order."""

    def __init__(self, layer: LayerSpec, served: Served, rope_inputs: RopeInputNames | None = None) -> None:
        """Args: rope_inputs: the layer's, if its kernels may rotate; they are then run so, too."""
        self._layer = layer
        self._rope_inputs = rope_inputs
        self._page_size, self._device = served.page_size, served.device
        self._dtype, self._cache_dtype = served.dtype, served.cache_dtype
        self._generator = torch.Generator().manual_seed(0)
        has_window = 0 <= layer.window_left <= _MOST_WINDOW
        self._longest = layer.window_left + 71 if has_window else _LONGEST
        self._alone = self._longest if has_window else _LONGEST_ALONE
        num_pages = -(-max(self._longest, self._alone, *_LENGTHS) // self._page_size)
        shape = (num_pages, self._page_size, layer.num_kv_heads, layer.head_dim)
        self._keys, self._values = (self._random(shape, self._dtype).to(self._cache_dtype) for _ in range(2))
        # As much as all keys of the longest request weigh together: what many blocks add up is felt as well.
        sinks = math.log(self._longest) + self._random((layer.num_heads,), self._dtype)
        self._sinks = None if layer.sinks is None else sinks
        table = self._random((layer.num_heads, 2 * _REACH + 1), self._dtype)
        self._bias = table if layer.has_distance_bias else None

    def _random(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(dtype).to(self._device)

    def batches(self, variants: Sequence[DecodeVariant]) -> list[tuple[int, ...]]:
        """Tokens of each request. Batches have one request, two, a few, and many; the fewest for each division by
        clusters; and the most and the fewest of each variant."""
        kv_heads = self._layer.num_kv_heads
        most = [variant.most_sequences // kv_heads for variant in variants[:-1] if variant.most_sequences is not None]
        shares = (kernel for variant in variants for kernel in variant.kernels if isinstance(kernel, ShareKernel))
        many = {min(kernel.requests_of_warp + _MORE_REQUESTS, MOST_REQUESTS) for kernel in shares}
        together = max(variant.together for variant in variants)
        split = {
            choose_split(count * kv_heads // together): count
            for count in range(_most_in_clusters(variants) // kv_heads, 0, -1)
        }
        sizes = {2, len(_LENGTHS) + 1, *split.values(), *most, *(count + 1 for count in most), *many} - {0, 1}
        lengths = (self._longest, *_LENGTHS[::-1])
        return [(self._alone,), *((lengths * size)[:size] for size in sorted(sizes))]

    def verify_batches(self, variant: DecodeVariant) -> list[tuple[int, ...]]:
        """Likewise of verify steps: one request, and the fewest for each division by clusters that steps have."""
        kv_heads, lengths = self._layer.num_kv_heads, (self._longest, *_LENGTHS[::-1])
        most = (variant.most_sequences or kv_heads) // kv_heads
        counts = [count for count in range(most, 0, -1) if pays_together(count * kv_heads, variant.tokens)]
        sizes = {choose_split(count * kv_heads): count for count in counts}.values()
        return [(self._alone,), *((lengths * size)[:size] for size in sorted(sizes))]

    def run(
        self,
        lengths: tuple[int, ...],
        variants: Sequence[DecodeVariant],
        decoders: LinkedDecodes,
        tokens: int = 1,
    ) -> None:
        """Raises CompileError where a request's answer is not float32's.

        Args:
            lengths: of requests, their new tokens included.
            tokens: rows of each. A request that is not as long has rows without a token.
        """
        layer, num_requests = self._layer, len(lengths)
        num_pages = self._keys.shape[0]
        pages = torch.stack([torch.randperm(num_pages, generator=self._generator) for _ in lengths])
        # Requests share all pages but the last, or two: a kernel may write to these.
        num_own = min(tokens, 2)
        for row, length in enumerate(lengths):
            last = (length - 1) // self._page_size
            first = max(0, last + 1 - num_own)
            pages[row, first : last + 1] = num_pages + row * num_own + torch.arange(last + 1 - first)
        own = torch.arange(num_requests * num_own, device=self._device) % num_pages
        keys, values = (_with_more(cache, own) for cache in (self._keys, self._values))
        slots = (pages[:, :, None] * self._page_size + torch.arange(self._page_size)).flatten(1).to(self._device)
        slots = slots.repeat_interleave(tokens, 0)
        row_lens = [max(0, length - tokens) + i + 1 if i < length else 0 for length in lengths for i in range(tokens)]
        num_rows = len(row_lens)

        group = PlanGroup.of(layer)
        types = self._dtype, self._cache_dtype
        chosen = choose_decoder(decoders, num_requests * layer.num_kv_heads)
        alone = [replace(chosen, most_sequences=None)]
        space = SplitDecodeSpace([(group, alone)], slots.int(), num_rows, self._page_size, *types)
        space.list_pages(torch.arange(num_rows, device=self._device))
        seq_lens = torch.tensor(row_lens, dtype=torch.int32, device=self._device)
        decode = space.prepare(group, alone, seq_lens)

        def compare(
            ours: torch.Tensor, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, what: str = ""
        ) -> None:
            for row, length in enumerate(row_lens):
                if not length:
                    continue
                theirs = self._in_float32(q[row], keys, values, slots[row, :length])
                error = ((ours[row].float() - theirs).norm() / theirs.norm()).item()
                if not error <= _TOLERANCE:
                    num_sequences = num_requests * layer.num_kv_heads
                    variant = variants[list(decoders).index(chosen)]
                    raise CompileError(_refusal(variant, num_sequences, layer, error, length, what))

        q = self._random((num_rows, layer.num_heads, layer.head_dim), self._dtype)
        if layer.logits_soft_cap > 0:  # products that it is felt by
            q *= layer.logits_soft_cap / (2 * layer.sm_scale * math.sqrt(layer.head_dim))
        of_layer = self._sinks, self._bias
        compare(decode.run(q, (keys, values), torch.empty_like(q), *of_layer), q, keys, values)
        if self._rope_inputs is None or not decode.fuses_rope:
            return
        rope_inputs = self._random_rope_inputs(self._rope_inputs, num_rows)
        ours = torch.empty_like(q)
        decode.run_with_rope(rope_inputs, (keys, values), ours, self._sinks)
        q, k = _rotated(rope_inputs)
        is_token = seq_lens > 0
        newest = slots[is_token].gather(1, seq_lens[is_token, None].long() - 1).squeeze(1)
        keys, values = (cache.float() for cache in (keys, values))  # what the kernel wrote is what it may have read
        theirs_keys, theirs_values = (
            cache.flatten(0, 1).index_copy(0, newest, self._cached(new[is_token])).view(cache.shape)
            for cache, new in ((keys, k), (values, rope_inputs.v))
        )
        compare(ours, q, theirs_keys, theirs_values, what="where it rotates or writes")
        compare(ours, q, keys, values, what="by the keys and values that it has written")

    def _cached(self, new: torch.Tensor) -> torch.Tensor:
        """New keys or values as a cache in eight bits has them; in float32."""
        if self._cache_dtype.itemsize > 1:
            return new.float()
        return new.to(self._dtype).to(self._cache_dtype).float()

    def _random_rope_inputs(self, step: RopeInputNames, num_rows: int) -> RopeInputs:
        layer, dtype = self._layer, self._dtype
        q, k = (
            self._random((1, num_rows, heads, layer.head_dim), dtype) for heads in (layer.num_heads, layer.num_kv_heads)
        )
        v = self._random((num_rows, layer.num_kv_heads, layer.head_dim), dtype)
        if not step.values[2:]:  # heads do not rotate
            return RopeInputs.of([q, k], v, step.eps)
        # As a model's: of random factors some logits would be so large that roundings of keys decide among them.
        angles = math.pi * self._random((1, num_rows, layer.head_dim // 2), dtype).float().repeat(1, 1, 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        weights = [1 + self._random((layer.head_dim,), dtype) / 4 for _ in step.values[4:]]
        return RopeInputs.of([q, k, cos, sin, *weights], v, step.eps)

    def _in_float32(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """The last token's attention over a request's. q: [H, D]; keys, values: the pages; slots: [L]; gives [H, D]."""
        layer = self._layer
        if layer.window_left >= 0:
            slots = slots[-layer.window_left - 1 :]
        if layer.chunk:
            slots = slots[(len(slots) - 1) // layer.chunk * layer.chunk :]
        group = layer.num_heads // layer.num_kv_heads
        keys, values = (cache.flatten(0, 1)[slots].float().repeat_interleave(group, 1) for cache in (keys, values))
        logits = torch.einsum("hd,lhd->hl", q.float(), keys) * layer.sm_scale
        if layer.logits_soft_cap > 0:
            logits = layer.logits_soft_cap * torch.tanh(logits / layer.logits_soft_cap)
        if layer.alibi_slopes:
            distance = torch.arange(1 - len(slots), 1, device=logits.device)
            logits = logits + logits.new_tensor(layer.slopes_of(0))[:, None] * distance
        if self._bias is not None:
            distance = torch.arange(1 - len(slots), 1, device=logits.device)
            logits = logits + of_distances(self._bias, distance)
        if self._sinks is not None:
            logits = torch.cat((logits, self._sinks.float()[:, None]), -1)
        return torch.einsum("hl,lhd->hd", logits.softmax(-1)[:, : len(slots)], values)


def _most_in_clusters(variants: Sequence[DecodeVariant]) -> int:
    """The sequences that clusters serve at most."""
    of_clusters = (
        variant for variant in variants if any(isinstance(kernel, ClusterKernel) for kernel in variant.kernels)
    )
    return max((variant.most_sequences or 0 for variant in of_clusters), default=0)


def _with_more(cache: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The pages, and behind them those at `places` once more; fp8 as bytes, which can be indexed on every device."""
    pages = cache.view(torch.uint8) if cache.dtype.itemsize == 1 else cache
    return torch.cat((pages, pages[places])).view(cache.dtype)


def _rotated(rope_inputs: RopeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """q [R, H, D] and k [R, Hk, D], normed and rotated where they are, float32."""
    if rope_inputs.cos is None or rope_inputs.sin is None:
        return rope_inputs.q[0].float(), rope_inputs.k[0].float()
    cos, sin = rope_inputs.cos[0, :, None].float(), rope_inputs.sin[0, :, None].float()

    def rotated(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = x[0].float()
        if weight is not None:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + rope_inputs.eps) * weight.float()
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat((-second, first), -1) * sin

    return rotated(rope_inputs.q, rope_inputs.q_weight), rotated(rope_inputs.k, rope_inputs.k_weight)


def _refusal(variant: DecodeVariant, num_sequences: int, layer: LayerSpec, error: float, length: int, what: str) -> str:
    name, switch = _who_decodes(variant, num_sequences)
    if what:
        what, switch = f" {what}", "compile.disable_passes: [rotate_in_attention]"
    return (
        f"the decode attention {name} of {layer.name} is off by {error:.2g}{what} at {length} tokens (limit "
        f"{_TOLERANCE:g}): its kernel does not serve these heads on this machine. Set {switch} to have another in its "
        "place, and report this."
    )


def _who_decodes(variant: DecodeVariant, num_sequences: int) -> tuple[str, str]:
    """The name of the piece or kernel, and the setting that does without it."""
    if variant.piece is not None:
        return variant.piece, "runtime.without: [split_decode]"
    clusters = {kernel.split: kernel for kernel in variant.kernels if isinstance(kernel, ClusterKernel)}
    kernel = clusters[choose_split(num_sequences // variant.together, clusters)] if clusters else variant.kernels[0]
    return kernel.name, kernel.switch
