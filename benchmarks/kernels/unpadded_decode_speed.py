"""Microseconds of one layer's decode attention with heads of 80 and 96, padded to 128 as they are served, and unpadded.

    python -m benchmarks.kernels.unpadded_decode_speed

Needs an NVIDIA GPU. Models with such heads have as many KV heads as query heads (phi-2 and phi-3-mini have 32). One
Triton kernel reads caches of 80, 96 and 128 numbers a head. It has a block for each head of a request: enough for all
multiprocessors, so that no keys are split. Beside it are the kernels that serve padded heads: `shares` on Hopper, and
runtime/ops/attention/split_decode.py. Each graph runs layers with caches of their own, more than the L2 cache holds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from benchmarks.kernels import decode_attention_speed as served
from benchmarks.script import need_gpu, parser_of
from mllm_compile.bench.timing.record import machine_line

HEADS, PADDED, PAGE_SIZE = 32, 128, 64
CASES = ((64, 577), (64, 4096), (8, 4096))  # requests, tokens of each


def reader() -> Callable[..., None]:
    """(q, keys, values, table, lengths, out, tile) → attends, whatever the width of a head is."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(
        q_ptr,
        keys_ptr,
        values_ptr,
        table_ptr,
        lengths_ptr,
        out_ptr,
        table_stride,
        SCALE: tl.constexpr,
        H: tl.constexpr,
        D: tl.constexpr,
        PADDED: tl.constexpr,
        PAGE: tl.constexpr,
        BLOCK: tl.constexpr,
        STAGES: tl.constexpr,
    ):
        head = tl.program_id(0)
        row = tl.program_id(1)
        dims = tl.arange(0, PADDED)
        block = tl.arange(0, BLOCK)
        heads = tl.arange(0, 16)  # the first is real: tl.dot takes no fewer rows
        is_dim = dims < D
        q_ptrs = q_ptr + (row * H + head) * D + dims[None, :]
        q = tl.load(q_ptrs + heads[:, None] * 0, mask=(heads[:, None] == 0) & is_dim[None, :], other=0.0)
        num_keys = tl.load(lengths_ptr + row)
        top = tl.full((16,), float("-inf"), tl.float32)
        total = tl.zeros((16,), tl.float32)
        acc = tl.zeros((16, PADDED), tl.float32)
        for offset in tl.range(0, num_keys, BLOCK, num_stages=STAGES):
            offsets = offset + block
            is_key = offsets < num_keys
            pages = tl.load(table_ptr + row * table_stride + offsets // PAGE, mask=is_key, other=0).to(tl.int64)
            places = ((pages * PAGE + offsets % PAGE) * H + head)[:, None] * D + dims[None, :]
            if D == PADDED:
                k = tl.load(keys_ptr + places, mask=is_key[:, None], other=0.0)
                v = tl.load(values_ptr + places, mask=is_key[:, None], other=0.0)
            else:
                k = tl.load(keys_ptr + places, mask=is_key[:, None] & is_dim[None, :], other=0.0)
                v = tl.load(values_ptr + places, mask=is_key[:, None] & is_dim[None, :], other=0.0)
            logits = tl.where(is_key[None, :], tl.dot(q, tl.trans(k)) * SCALE, float("-inf"))
            new_top = tl.maximum(top, tl.max(logits, 1))
            weights = tl.exp2(logits - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
            top = new_top
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        out_ptrs = out_ptr + (row * H + head) * D + dims[None, :]
        tl.store(out_ptrs + heads[:, None] * 0, out, mask=(heads[:, None] == 0) & is_dim[None, :])

    def attend(q, keys, values, table, lengths, out, tile) -> None:
        keys_at_once, warps, stages = tile
        rows, heads, width = q.shape
        kernel[(heads, rows)](
            q,
            keys,
            values,
            table,
            lengths,
            out,
            table.shape[1],
            SCALE=width**-0.5 * 1.4427,
            H=heads,
            D=width,
            PADDED=triton.next_power_of_2(width),
            PAGE=PAGE_SIZE,
            BLOCK=keys_at_once,
            STAGES=stages,
            num_warps=warps,
        )

    return attend


def check(attend: Callable[..., None], width: int) -> None:
    """Ends the script if the kernel does not attend."""
    table = torch.randperm(8).int().cuda().view(2, 4)
    keys, values = (torch.randn(8 * PAGE_SIZE, HEADS, width, device="cuda").bfloat16() for _ in range(2))
    lengths = torch.tensor([200, 63], dtype=torch.int32, device="cuda")
    q = torch.randn(2, HEADS, width, device="cuda").bfloat16()
    out = torch.empty_like(q)
    attend(q, keys, values, table, lengths, out, (64, 4, 3))
    for row, length in enumerate(lengths.tolist()):
        places = torch.arange(length, device="cuda")
        slots = table[row].long()[places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
        weights = (torch.einsum("hd,lhd->hl", q[row].float(), keys[slots].float()) * width**-0.5).softmax(-1)
        want = torch.einsum("hl,lhd->hd", weights, values[slots].float())
        if not (error := (out[row].float() - want).norm() / want.norm()) < 1e-2:
            sys.exit(f"heads of {width} are off by {error:.2g}")


def main() -> None:
    parser_of(__doc__).parse_args()
    need_gpu()
    torch.manual_seed(0)
    attend = reader()
    print(machine_line())
    for width in (80, 96, PADDED):
        check(attend, width)
    for num_requests, length in CASES:
        for width in (80, 96, PADDED):
            layers = served.Layers(served.Case(HEADS, HEADS, num_requests, length, head_dim=width))
            table, lengths = layers.page_table(), layers.lengths.cuda()

            def run_of(tile: tuple[int, int, int], layers=layers, table=table, lengths=lengths) -> Callable[[], None]:
                def one(query, pages, out) -> None:
                    keys, values = (page.flatten(0, 1) for page in pages)
                    attend(query, keys, values, table, lengths, out, tile)

                return layers.each(one)

            times = {tile: layers.layer_us(run_of(tile)) for tile in ((64, 4, 3), (128, 4, 2), (32, 2, 4))}
            tile, best = min(times.items(), key=lambda item: item[1])
            rate = layers.case.kv_bytes / best / 1e6
            of_case = f"{num_requests} x {length}"
            print(f"{of_case}, heads of {width}: {best:.1f} us, {rate:.2f} TB/s by {tile}")
            if width == PADDED:
                count = served.OF_MANY.of(num_requests * HEADS)
                split = layers.layer_us(served.split_decode(layers, is_few=False, num_splits=count))
                print(f"{of_case}, as served: split_decode {split:.1f} us")
                for name, kernel in served.hopper_kernels(HEADS, HEADS, PADDED, False).items():
                    if name == "shares":
                        taken = layers.layer_us(served.hopper_decode(layers, kernel))
                        print(f"{of_case}, as served: {name} {taken:.1f} us")


if __name__ == "__main__":
    main()
