"""Microseconds of one layer's attention in a verify step, a request's tokens together or folded, inside a CUDA graph.

    python -m benchmarks.kernels.verify_attention_speed [--json FILE] [--heads 32/8] [--batches 1 8] [--tokens 4]
        [--fp8]

Needs a Hopper GPU. Norms, rotation and the write of new keys are in the figures. `plain` is a decode of as many
requests, of one token each. `folded` writes new keys by a kernel of its own, and then each token is a decode. `decode`
is that without the first kernel. `together` is one kernel, whose clusters take a request's tokens together
(runtime/attention/hopper/). As in decode_attention_speed.py each graph runs several layers, with keys beyond the L2
cache, and the time of a small kernel before each is taken off. The Triton kernel of `folded` has no programmatic
dependency, unlike a program's.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from benchmarks.binaries import binaries_of
from benchmarks.kernels.decode_attention_speed import PAGE_SIZE, Case, Layers, heads_of
from benchmarks.script import need_gpu, parser_of, positive
from mllm_compile.bench.timing.record import append_record
from mllm_compile.kernels.cuda import KernelCompiler
from mllm_compile.runtime.attention.capture import RopeInputs
from mllm_compile.runtime.attention.hopper.clusters import cluster_kernels, most_rows
from mllm_compile.runtime.attention.hopper.decoder import ClusterDecode, ShareDecode
from mllm_compile.runtime.attention.hopper.shapes import most_in_clusters
from mllm_compile.runtime.attention.hopper.shares import ShareKernel

HEADS = ((32, 8),)
BATCHES = (1, 8, 16, 32, 64)
TOKENS = (2, 4, 8, 16)
LENGTHS = (512,)
MOST_ROWS = 256  # of a step

Decode = ClusterDecode | ShareDecode


class Kernels:
    """The decode kernels of some heads, compiled."""

    def __init__(self, num_heads: int, num_kv_heads: int, most_tokens: int, fp8: bool) -> None:
        group = num_heads // num_kv_heads
        shares = ShareKernel(num_kv_heads, group, PAGE_SIZE, fp8=fp8)
        clusters = {
            tokens: cluster_kernels(num_heads, num_kv_heads, PAGE_SIZE, fp8=fp8, tokens=tokens)
            for tokens in (1, *TOKENS)
            if tokens <= most_tokens and tokens * group <= most_rows(fp8)
        }
        with KernelCompiler() as compiler:
            binaries = binaries_of(compiler, (shares, *(kernel for kernels in clusters.values() for kernel in kernels)))
        scale, device = 128**-0.5, torch.device("cuda:0")
        self._kv_heads, self._most = num_kv_heads, most_in_clusters(shares, 4096)
        self._shares = ShareDecode(shares, binaries, scale, device)
        self._clusters = {
            tokens: ClusterDecode(kernels, binaries, scale, device) for tokens, kernels in clusters.items()
        }

    def plain(self, num_requests: int) -> Decode:
        """The kernels of so many requests with one token each, as a program chooses."""
        return self._clusters[1] if num_requests * self._kv_heads <= self._most else self._shares

    def together(self, tokens: int) -> Decode | None:
        """None: no kernel takes so many queries."""
        return self._clusters.get(tokens)


@dataclass(frozen=True)
class Step:
    """A step of `tokens` new tokens of each request, with its layers."""

    layers: Layers
    tokens: int

    @cached_property
    def rope_inputs(self) -> RopeInputs:
        case = self.layers.case
        count, dim = case.batch * self.tokens, case.head_dim
        heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
        packed = torch.randn(1, count, sum(heads) * dim, dtype=torch.bfloat16, device="cuda")
        q, k, v = (part.unflatten(-1, (-1, dim)) for part in packed.split([number * dim for number in heads], -1))
        turns = 6 * torch.rand(1, count, dim // 2, device="cuda").repeat(1, 1, 2)
        weights = [torch.ones(dim, dtype=torch.bfloat16, device="cuda")] * 2
        return RopeInputs.of([q, k, turns.cos().bfloat16(), turns.sin().bfloat16(), *weights], v[0], 1e-6)

    @cached_property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The page table and the lengths of each token."""
        ends = self.layers.lengths.cuda()[:, None] + torch.arange(1 - self.tokens, 1, device="cuda")
        return self.layers.page_table().repeat_interleave(self.tokens, 0), ends.flatten().int()

    @cached_property
    def slots(self) -> torch.Tensor:
        table, lengths = self.rows
        last = lengths.long() - 1
        page = table.gather(1, (last // PAGE_SIZE)[:, None]).squeeze(1).long()
        return page * PAGE_SIZE + last % PAGE_SIZE

    def run(self, decode: Decode, writes: bool, folded: bool) -> tuple[float, torch.Tensor]:
        """Microseconds of a layer, and the outputs of the last one.

        Args:
            writes: new keys are written by a kernel of their own, or else by the decode if it is not folded.
        """
        import mllm_compile.runtime.ops.attention.rope_cache  # noqa: F401  (defines the op)

        told = self.rope_inputs
        out = torch.zeros(told.q.shape[1:], dtype=told.q.dtype, device="cuda")
        q = torch.zeros_like(out)
        arguments = (told.cos, told.sin, told.q_weight, told.k_weight, told.eps, self.slots)

        def attend(_: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], __: torch.Tensor) -> None:
            keys, values = (page.flatten(0, 1) for page in pages)
            if not folded:
                decode([told.q[0], keys, values, *self.rows, out], told)
                return
            rotated = q
            if writes:
                rotated, _k = torch.ops.mllm.rope_and_cache(told.q, told.k, told.v, *arguments, keys, values)
            decode([rotated, keys, values, *self.rows, out], starts_early=False)

        return self.layers.layer_us(self.layers.each(attend)), out.float()


def measure(kernels: Kernels, together: Decode, case: Case, tokens: int, fp8: bool) -> dict[str, float]:
    layers = Layers(case)
    if fp8:
        layers.pages = [(keys.to(torch.float8_e4m3fn), values.to(torch.float8_e4m3fn)) for keys, values in layers.pages]
    plain, step = Step(layers, 1), Step(layers, tokens)
    folded = kernels.plain(case.batch * tokens)
    times: dict[str, float] = {}
    outputs: dict[str, torch.Tensor] = {}
    runs = {
        "plain": lambda: plain.run(kernels.plain(case.batch), writes=False, folded=False),
        "folded": lambda: step.run(folded, writes=True, folded=True),
        "decode": lambda: step.run(folded, writes=False, folded=True),
        "together": lambda: step.run(together, writes=False, folded=False),
    }
    for name, run in [*runs.items()] * 2:  # by turns
        us, outputs[name] = run()
        times[name] = min(us, times.get(name, us))
    error = float((outputs["together"] - outputs["folded"]).norm() / outputs["folded"].norm())
    if not error < 1e-2:
        sys.exit(f"together differs from folded by {error:.2e} for {tokens} tokens of {case}")
    return times


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--json", type=Path, help="also add the figures to this file, as a line")
    parser.add_argument("--heads", type=heads_of, nargs="+", default=HEADS, help="query heads/KV heads")
    parser.add_argument("--batches", type=positive, nargs="+", default=BATCHES)
    parser.add_argument("--tokens", type=positive, nargs="+", default=TOKENS)
    parser.add_argument("--lengths", type=positive, nargs="+", default=LENGTHS)
    parser.add_argument("--fp8", action="store_true", help="keys and values of e4m3")
    arguments = parser.parse_args()
    need_gpu()
    torch.manual_seed(0)
    results = []
    names = ("plain", "folded", "decode", "together")
    print("heads   batch tokens length ", *(f"{name:>9}" for name in names))
    for num_heads, num_kv_heads in arguments.heads:
        kernels = Kernels(num_heads, num_kv_heads, max(arguments.tokens), arguments.fp8)
        for length in arguments.lengths:
            for batch in arguments.batches:
                for tokens in (tokens for tokens in arguments.tokens if batch * tokens <= MOST_ROWS):
                    case, together = Case(num_heads, num_kv_heads, batch, length), kernels.together(tokens)
                    if together is None:
                        continue
                    times = measure(kernels, together, case, tokens, arguments.fp8)
                    results.append({"batch": batch, "tokens": tokens, "length": length, "us": times})
                    figures = (f"{times[name]:9.2f}" for name in names)
                    print(f"{num_heads:2}/{num_kv_heads:2} {batch:7} {tokens:6} {length:6} ", *figures)
    if arguments.json:
        append_record(arguments.json, __doc__, arguments, results)


if __name__ == "__main__":
    main()
