"""Microseconds of a layer's piece for many tokens without adapters and with them, and its kernels by name.

    python -m benchmarks.kernels.adapted_piece_speed [--tokens 256,2048,8192] [--adapters 8] [--rank 16]

Needs a Hopper GPU. The piece is what Qwen3-8B has between two attentions, as passes leave it, but for the rotation and
the KV cache. It is compiled as a model's pieces are. Tokens have no adapter, all the same one, or several: in turn of
up to 512 tokens, else in stretches. The first line of each number of tokens has times of CUDA graphs. The lines below
have what kernels take that adapters add or change, of one profiled call each.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.kernels.adapter_kernels_speed import FFN, HIDDEN, LINEARS, load_gated, slots_of
from benchmarks.script import need_hopper, parser_of, positive, positives
from mllm_compile.bench.timing.graph import graph_us
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.bench.trace.device_events import device_events
from mllm_compile.inductor.compile_piece import compile_piece
from mllm_compile.inductor.job import PieceInput
from mllm_compile.runtime.program.pieces import load_piece

_IN_TURN = 512  # tokens up to which adapters alternate
_SHOWN = 12  # kernels
_NAME = 70  # characters of a kernel's
_HEAD = """
import torch
from torch.nn.functional import linear

def norm(x, weight):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
"""
PLAIN = f"""{_HEAD}
class Piece(torch.nn.Module):
    def forward(self, x, residual, first, second, o, gate_up, down, qkv):
        h = residual + linear(x, o)
        h = h + linear(torch.ops.mllm.gated_linear.default(norm(h, first), gate_up), down)
        return h, linear(norm(h, second), qkv)
"""
ADAPTED = f"""{_HEAD}
def added(x, weight, a, b, slots, *parts):
    shrunk = torch.ops.mllm.lora_shrink.default(x, a, slots, False, True)
    return torch.ops.mllm.lora_expand.default(linear(x, weight), shrunk, b, slots, *parts, False, True)

class Piece(torch.nn.Module):
    def forward(self, x, residual, first, second, o, gate_up, down, qkv, slots,
                o_a, o_b, gate_up_a, gate_up_b, down_a, down_b, qkv_a, qkv_b):
        h = residual + added(x, o, o_a, o_b, slots, [0], [{HIDDEN}])
        normed = norm(h, first)
        shrunk = torch.ops.mllm.lora_shrink.default(normed, gate_up_a, slots, False, False).squeeze(0)
        product = torch.ops.mllm.gated_linear_lora.default(normed, gate_up, shrunk, gate_up_b, slots)
        h = h + added(product, down, down_a, down_b, slots, [0], [{HIDDEN}])
        parts = [0, 4096, 5120], [4096, 1024, 1024]
        return h, added(norm(h, second), qkv, qkv_a, qkv_b, slots, *parts)
"""
Run = Callable[[], object]


def inputs_of(tokens: int | str, adapters: int, rank: int) -> list[tuple[tuple[int | str, ...], str]]:
    """Shapes and types of the inputs of both pieces: the plain one has the first eight."""
    weights = [((one.outputs, one.inputs), "bfloat16") for one in LINEARS.values()]
    factors = [
        (shape, "bfloat16")
        for one in LINEARS.values()
        for shape in ((adapters, rank * len(one.parts), one.inputs), (adapters, one.outputs, rank))
    ]
    rows = [((tokens, HIDDEN), "bfloat16")] * 2
    return [*rows, *[((HIDDEN,), "bfloat16")] * 2, *weights, ((tokens,), "int32"), *factors]


def compiled(folder: Path, source: str, count: int, adapters: int, rank: int, most: int) -> Callable[..., object]:
    """A piece that has the first `count` inputs."""
    folder.mkdir()
    path = folder / "piece.py"
    path.write_text(source)
    given = [PieceInput.contiguous(*one) for one in inputs_of("T", adapters, rank)[:count]]
    compile_piece(path, given, "cuda:0", {"T": most}, folder / "piece.pt2", folder)
    return load_piece("piece.pt2", (folder / "piece.pt2").read_bytes())


def kernels_of(run: Run) -> Counter[str]:
    """Microseconds of a call's kernels, by name."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    found: Counter[str] = Counter()
    for event in device_events(trace):
        found[event.name[:_NAME]] += event.end - event.start
    return found


def column(tokens: int, pieces: list[Callable[..., object]], adapters: int, rank: int) -> None:
    """Prints what so many tokens take."""
    generator, made = torch.Generator("cuda").manual_seed(0), []
    for shape, dtype in inputs_of(tokens, adapters, rank):
        sizes = [int(size) for size in shape]
        if dtype == "int32":
            made.append(torch.empty(0))
            continue
        values = torch.randn(sizes, generator=generator, device="cuda", dtype=torch.bfloat16)
        made.append(values / sizes[-1] ** 0.5 if len(sizes) > 1 and sizes[0] != tokens else values)
    plain, adapted = pieces
    runs: dict[str, Run] = {"plain": partial(plain, made[:8])}
    for used in (0, 1, adapters):
        slots = slots_of(tokens, adapters, max(used, 1), tokens <= _IN_TURN)[0]
        name = f"{used} adapters" if used != 1 else "one adapter"
        runs[name] = partial(adapted, [*made[:8], slots if used else slots.fill_(-1), *made[9:]])
    times = {name: graph_us(run) for name, run in runs.items()}
    of_plain = times["plain"]
    print(f"{tokens} tokens:", ", ".join(f"{name} {us:.1f} ({us / of_plain:.3f})" for name, us in times.items()))
    kernels = {name: kernels_of(run) for name, run in runs.items()}
    base, *_, last = kernels.values()
    names = sorted(last.keys() | base.keys(), key=lambda name: -abs(last[name] - base[name]))
    for name in names[:_SHOWN]:
        print("   ", " ".join(f"{of_run[name]:9.1f}" for of_run in kernels.values()), name)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=positives, default=[256, 2048, 8192])
    parser.add_argument("--adapters", type=positive, default=8)
    parser.add_argument("--rank", type=positive, default=16)
    arguments = parser.parse_args()
    need_hopper()
    print(machine_line())
    assert LINEARS["gate_up"].outputs == 2 * FFN, "as the pieces have it"
    most, (adapters, rank) = max(arguments.tokens), (arguments.adapters, arguments.rank)
    load_gated(rank)
    with tempfile.TemporaryDirectory() as root:
        pieces = [
            compiled(Path(root) / name, source, count, adapters, rank, most)
            for name, source, count in (("plain", PLAIN, 8), ("adapted", ADAPTED, 17))
        ]
        with torch.inference_mode():
            for tokens in arguments.tokens:
                column(tokens, pieces, adapters, rank)


if __name__ == "__main__":
    main()
