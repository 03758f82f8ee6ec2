"""Microseconds of one layer's attention over latents (MLA), inside a CUDA graph, and its read rate.

    python -m benchmarks.kernels.latent_attention_speed [--heads 16 32 128] [--tiles] [--prefill] [--json FILE]
    python -m benchmarks.kernels.latent_attention_speed --forms [--heads 16 128] [--tiles] [--json FILE]

Needs an NVIDIA GPU and the `cuda` extra. Each graph runs several layers with latents of their own, more than the L2
cache holds, over random page tables. Before each layer a small kernel runs, as in a model. The time of these kernels
alone is taken off. `--tiles` times other tiles and splits than those that are chosen; runtime/attention/latent/tiles.py
and split/splits.py are on that table. `--prefill` times a prompt. `--forms` times all that a layer does for a prompt,
over latents and over keys and values made of them, and says which is chosen: runtime/attention/latent/choice.py is on
that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.script import need_gpu, parser_of
from mllm_compile.bench.timing.graph import graph_us, read_rate
from mllm_compile.bench.timing.record import append_record, machine_line
from mllm_compile.runtime.attention.base import AttentionInputs
from mllm_compile.runtime.attention.latent import tiles as chosen
from mllm_compile.runtime.attention.latent.backend import LatentAttnBackend, LatentPieces
from mllm_compile.runtime.attention.latent.choice import (
    ExpansionChoice,
    PromptSizes,
    Widths,
    all_of_them,
    faster_on_gpu,
    none_of_them,
)
from mllm_compile.runtime.attention.latent.tiles import Tile, num_prefill_tiles
from mllm_compile.runtime.attention.layer import AttentionLayer, LayerSpec
from mllm_compile.runtime.attention.split.splits import OF_LATENTS
from mllm_compile.runtime.forward_batch import ForwardBatch, ForwardMode
from mllm_compile.runtime.memory_pool import KVPool, ReqToTokenPool

WIDTH, VALUE_WIDTH, PAGE_SIZE = 576, 512, 64
HEADS = (16, 32, 64, 128)
FEW_REPLAYS = 3  # of prompts, which take up to a second
CASES = ((1, 4096), (8, 4096), (64, 4096), (256, 1024))  # requests, tokens of each
TILES = (
    *(Tile(16, 64, 4, 2), Tile(16, 32, 4, 2), Tile(16, 32, 4, 3)),
    *(Tile(32, 64, 4, 2), Tile(32, 64, 8, 2), Tile(32, 64, 8, 3)),
    *(Tile(64, 32, 8, 2), Tile(64, 32, 8, 3), Tile(64, 64, 8, 2), Tile(64, 64, 4, 2)),
)
SPLITS = (1, 2, 4, 8, 16, 32, 64)
KEY, VALUE = 128, 128  # of a head's own columns of a key, and of its values
# New tokens, and tokens before them.
PROMPTS = (
    *((64, 0), (128, 0), (256, 0), (512, 0), (1024, 0), (2048, 0), (8192, 0), (32000, 0)),
    *((32, 8192), (64, 8192), (128, 8192), (256, 8192), (512, 8192), (256, 31744), (512, 31744), (2048, 29952)),
)
EXPANDED_TILES = (Tile(128, 64, 8, 2), Tile(128, 64, 8, 3), Tile(128, 128, 8, 2), Tile(128, 32, 8, 3))
COLD_BYTES = 256 << 20  # several times the L2 cache
MAX_LAYERS = 16


class Layers:
    """Latents of several layers in random order, and queries."""

    def __init__(self, num_heads: int, num_requests: int, length: int, num_tokens: int | None = None) -> None:
        """Args: num_tokens: of queries; one a request, unless it is given."""
        self.kv_bytes = num_requests * length * WIDTH * 2
        count = min(MAX_LAYERS, max(2, COLD_BYTES // self.kv_bytes))
        width = -(-length // PAGE_SIZE)
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.latents = [torch.randn((num_requests * width + 1) * PAGE_SIZE, 1, WIDTH, **options) for _ in range(count)]
        self.table = (torch.randperm(num_requests * width).int() + 1).view(num_requests, width).cuda()
        self.seq_lens = torch.full((num_requests,), length, dtype=torch.int32, device="cuda")
        tokens = num_tokens or num_requests
        self.queries = torch.randn(count, tokens, num_heads, WIDTH, **options)
        self.out = torch.zeros(count, tokens, num_heads, VALUE_WIDTH, **options)

    def each(self, attend: Callable[..., object]) -> Callable[[], None]:
        def run() -> None:
            for query, latents, out in zip(self.queries, self.latents, self.out, strict=True):
                query.mul_(1)
                attend(query, latents, out)

        return run


def decode(layers: Layers, num_splits: int) -> Callable[[], None]:
    num_requests, num_heads = layers.queries.shape[1:3]
    tops, totals = (torch.empty(num_requests, num_splits, num_heads, device="cuda") for _ in range(2))
    partial = torch.empty(num_requests * num_splits * num_heads * VALUE_WIDTH, device="cuda")

    def attend(query: torch.Tensor, latents: torch.Tensor, out: torch.Tensor) -> None:
        batch = (layers.table, layers.seq_lens, out, partial, tops, totals)
        torch.ops.mllm.latent_decode(query, latents, *batch, PAGE_SIZE, WIDTH**-0.5)

    return layers.each(attend)


def prefill(layers: Layers) -> Callable[[], None]:
    num_tokens, num_heads = layers.queries.shape[1:3]
    count, rows = num_prefill_tiles(num_tokens, num_heads), chosen.PREFILL_TILE.rows
    tiles = torch.tensor([(0, 0, num_tokens, i * rows) for i in reversed(range(count))], dtype=torch.int32).cuda()

    def attend(query: torch.Tensor, latents: torch.Tensor, out: torch.Tensor) -> None:
        batch = (layers.table, layers.seq_lens, tiles, out)
        torch.ops.mllm.latent_prefill(query, latents, *batch, PAGE_SIZE, WIDTH**-0.5)

    return layers.each(attend)


class Step:
    """New tokens of requests behind others that are in the cache, as a layer of a step has them."""

    def __init__(self, num_heads: int, new: int, before: int, num_requests: int = 1) -> None:
        length, options = new + before, {"dtype": torch.bfloat16, "device": "cuda"}
        scale, own = (KEY + WIDTH - VALUE_WIDTH) ** -0.5, {"up_projection": "up", "up_key_dim": KEY}
        widths = num_heads, 1, WIDTH, VALUE_WIDTH
        spec = LayerSpec("layer", 0, *widths, scale, 0.0, -1, None, is_latent=True, **own, up_value_dim=VALUE)
        up = torch.randn(num_heads * (KEY + VALUE), VALUE_WIDTH, **options) * VALUE_WIDTH**-0.5
        self.layer = AttentionLayer.of(spec, {"up": up})
        pages = -(-length // PAGE_SIZE)
        self.rows = torch.arange(1, num_requests + 1).cuda()
        self.table = ReqToTokenPool(num_requests, pages * PAGE_SIZE, "cuda")
        ids = torch.randperm(num_requests * pages).cuda() + 1
        places = torch.arange(pages).cuda().repeat(num_requests)
        self.table.write_pages(self.rows.repeat_interleave(pages), places, ids, PAGE_SIZE)
        self.pool = KVPool(len(ids) + 1, PAGE_SIZE, [spec.cache_shape], torch.bfloat16, "cuda")
        self.pool.get_kv_buffer(0)[0].normal_()
        self.q = torch.randn(num_requests * new, num_heads, spec.query_dim, **options)
        self.out = torch.empty(num_requests * new, num_heads, spec.out_dim, **options)
        self.lengths = tuple(torch.full((num_requests,), count, dtype=torch.int32) for count in (new, length))

    def attend(self, choice: ExpansionChoice) -> Callable[[], None]:
        """The launches of a layer."""
        ops, scale = torch.ops.mllm, {"sm_scale": self.layer.sm_scale}
        pieces = LatentPieces(
            lambda inputs: ops.latent_decode(*inputs, page_size=PAGE_SIZE, **scale),
            lambda inputs: ops.latent_prefill(*inputs, page_size=PAGE_SIZE, **scale),
            lambda inputs: ops.expanded_prefill(*inputs, **scale),
        )
        backend = LatentAttnBackend(
            [self.layer],
            {self.layer.name: pieces},
            req_to_token=self.table.req_to_token,
            max_requests=len(self.rows),
            page_size=PAGE_SIZE,
            dtype=torch.bfloat16,
            choice=choice,
        )
        new, length = self.lengths
        nothing = torch.zeros(len(self.q), dtype=torch.int64, device="cuda")
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if int(new[0]) == 1 else ForwardMode.EXTEND,
            batch_size=len(self.rows),
            input_ids=nothing,
            req_pool_indices=self.rows,
            seq_lens=length.cuda(),
            out_cache_loc=nothing,
            positions=nothing,
            seq_lens_cpu=length,
            req_to_token_pool=self.table,
            token_to_kv_pool=self.pool,
            attn_backend=backend,
            extend_seq_lens_cpu=new,
        )
        backend.init_forward_metadata(batch)
        latents = self.pool.get_kv_buffer(0)[0][:0]
        inputs = AttentionInputs(self.q, latents, latents, self.out, self.layer, batch)
        return lambda: backend.forward(inputs)

    def decode_with_products_in_pieces(self) -> Callable[[], None]:
        """The launches of decodes without expand_latents: the products, and copies where they are put together."""
        layer, (_, lengths) = self.layer, self.lengths
        num_requests, num_heads = self.q.shape[:2]
        count = OF_LATENTS.of(num_requests * chosen.num_decode_tiles(num_heads))
        tops, totals = (torch.empty(num_requests, count, num_heads, device="cuda") for _ in range(2))
        partial = torch.empty(num_requests * count * num_heads * VALUE_WIDTH, device="cuda")
        for_keys, for_values = layer.up_weight.view(num_heads, -1, VALUE_WIDTH).split([KEY, VALUE], 1)
        latents, lengths = self.pool.get_kv_buffer(0)[0], lengths.cuda()
        pages = (self.table.req_to_token[1:, ::PAGE_SIZE] // PAGE_SIZE).contiguous()
        sums = self.q.new_empty(num_requests, num_heads, VALUE_WIDTH)

        def run() -> None:
            wide = torch.cat(
                (torch.bmm(self.q[..., :KEY].transpose(0, 1), for_keys).transpose(0, 1), self.q[..., KEY:]), -1
            )
            batch = wide, latents, pages, lengths, sums, partial, tops, totals
            torch.ops.mllm.latent_decode(*batch, PAGE_SIZE, layer.sm_scale)
            torch.bmm(sums.transpose(0, 1), for_values.transpose(1, 2)).transpose(0, 1).contiguous()

        return run


def time_forms(heads: Sequence[int], tries_tiles: bool) -> list[dict[str, object]]:
    """Prints and returns what prompts take over latents and expanded."""
    from mllm_compile.runtime.ops.attention import expanded, latent  # noqa: F401  (defines the ops)

    results = []
    for num_heads in heads:
        for num_requests in (1, 64):
            step = Step(num_heads, 1, 4095, num_requests)
            inside, outside = step.attend(none_of_them), step.decode_with_products_in_pieces()
            times = [graph_us(run) for run in (inside, outside)]
            shown = ", ".join(
                f"{where} {time:.1f} us" for where, time in zip(("attention", "pieces"), times, strict=True)
            )
            results.append({"heads": num_heads, "decodes": num_requests, "us": times})
            print(f"{num_heads} heads, {num_requests} decodes of 4096, products in {shown}")
    print("heads    new  before   over latents      expanded   chosen")
    for num_heads in heads:
        for new, before in PROMPTS:
            prompt = Step(num_heads, new, before)
            times = [graph_us(prompt.attend(choice), replays=FEW_REPLAYS) for choice in (none_of_them, all_of_them)]
            lengths = PromptSizes(Widths.of(prompt.layer), np.array([new]), np.array([before]), beside_decodes=False)
            pays = bool(faster_on_gpu(lengths)[0])
            pairs = new * before + new * (new + 1) / 2
            rates = [2 * num_heads * pairs * width / time / 1e6 for width, time in zip((1088, 320), times, strict=True)]
            results.append({"heads": num_heads, "new": new, "before": before, "us": times, "pays": pays})
            shown = "   ".join(f"{time:9.1f} {rate:4.0f}" for time, rate in zip(times, rates, strict=True))
            print(f"{num_heads:5} {new:6} {before:7}  {shown}   {'expanded' if pays else 'over latents'}")
    if tries_tiles:
        kept = expanded.expanded_tile
        for tile in EXPANDED_TILES:
            expanded.expanded_tile = lambda *widths, tile=tile: tile
            for num_heads, new, before in ((16, 8192, 0), (16, 2048, 8192), (128, 2048, 0)):
                try:
                    time = graph_us(Step(num_heads, new, before).attend(all_of_them), replays=FEW_REPLAYS)
                except Exception as error:
                    print(f"{tile}: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
                    continue
                print(f"{tile}, {num_heads} heads, {new} behind {before}: {time:9.1f} us")
        expanded.expanded_tile = kept
    return results


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--heads", type=int, nargs="+", default=HEADS, help="query heads")
    parser.add_argument("--tiles", action="store_true", help="time other tiles and splits, too")
    parser.add_argument("--prefill", action="store_true", help="time prompts, too")
    parser.add_argument("--forms", action="store_true", help="time prompts over latents and expanded, and nothing else")
    parser.add_argument("--json", type=Path, help="also add the figures to this file, as a line")
    arguments = parser.parse_args()
    need_gpu()
    from mllm_compile.runtime.ops.attention import latent  # defines the ops

    torch.manual_seed(0)
    if arguments.forms:
        found = time_forms(arguments.heads, arguments.tiles)
        if arguments.json:
            append_record(arguments.json, __doc__, arguments, found)
        return
    results: list[dict[str, object]] = []

    def note(what: str, layers: Layers, run: Callable[[], None], flops: float) -> None:
        nothing = graph_us(layers.each(lambda query, latents, out: None))
        try:
            time = (graph_us(run) - nothing) / len(layers.latents)
        except Exception as error:
            print(f"{what:46} {type(error).__name__}: {str(error).splitlines()[0][:90]}")
            return
        rate = layers.kv_bytes / time / 1e6
        results.append({"what": what, "us": time, "TB/s": rate, "TFLOPS": flops / time / 1e6})
        print(f"{what:46} {time:9.2f} us {rate:6.2f} TB/s {flops / time / 1e6:7.0f} TFLOPS")

    print(f"{machine_line()}; a sum reads {read_rate() / 1e3:.2f} TB/s")
    for num_heads in arguments.heads:
        for num_requests, length in CASES:
            layers = Layers(num_heads, num_requests, length)
            flops = 2.0 * num_requests * length * num_heads * (WIDTH + VALUE_WIDTH)
            of_case = f"{num_heads:3} heads {num_requests:3} x {length}"
            splits = OF_LATENTS.of(num_requests * chosen.num_decode_tiles(num_heads))
            note(f"{of_case}, /{splits}", layers, decode(layers, splits), flops)
            if arguments.tiles and num_requests == 64:
                kept = latent.decode_tile, latent.num_decode_tiles
                for tile in TILES:
                    if not num_heads / 2 <= tile.rows <= num_heads:
                        continue
                    latent.decode_tile = lambda heads, tile=tile: tile
                    latent.num_decode_tiles = lambda heads, tile=tile: -(-heads // tile.rows)
                    blocks = num_requests * -(-num_heads // tile.rows)
                    wanted = [one for one in SPLITS if one == 1 or 66 <= one * blocks <= 600]
                    for count in wanted[-4:]:
                        shape = f"{tile.rows}x{tile.keys}, {tile.warps} warps, {tile.stages} stages, /{count}"
                        note(f"{of_case}, {shape}", layers, decode(layers, count), flops)
                latent.decode_tile, latent.num_decode_tiles = kept
    if arguments.prefill:
        for num_heads in arguments.heads:
            for num_tokens, length in ((2048, 2048), (256, 8192)):
                layers = Layers(num_heads, 1, length, num_tokens)
                pairs = num_tokens * (length - num_tokens) + num_tokens * (num_tokens + 1) / 2
                flops = 2.0 * pairs * num_heads * (WIDTH + VALUE_WIDTH)
                of_case = f"{num_heads:3} heads, prompt of {num_tokens} after {length - num_tokens}"
                note(of_case, layers, prefill(layers), flops)
                if arguments.tiles:
                    chosen_tile = latent.PREFILL_TILE
                    for tile in (replace(chosen_tile, stages=2), Tile(64, 64, 8, 2), Tile(64, 64, 8, 3)):
                        latent.PREFILL_TILE = tile
                        shape = f"{tile.rows}x{tile.keys}, {tile.stages} stages"
                        note(f"{of_case}, {shape}", layers, prefill(layers), flops)
                    latent.PREFILL_TILE = chosen_tile
    if arguments.json:
        append_record(arguments.json, __doc__, arguments, results)


if __name__ == "__main__":
    main()
