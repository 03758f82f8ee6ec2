"""Microseconds of a layer with a state and its MLP, all kernels of a decode one behind another, by kernel and variant.

    python -m benchmarks.kernels.state_layers_speed [--layers qwen3_5 nemotron_h] [--tokens 1,8]
        [--each 8] [--variants "" "conv._MOST_AHEAD=0" …] [--without norm conv,recurrence …]

Needs a Hopper GPU, NVRTC and Triton. A CUDA graph runs several layers, each with weights and states of its own, by the
kernels that a package has: no model is compiled. A variant sets constants of modules of runtime/ops/states/. With the
first variant, `--without` leaves kernels out (of conv, norm and recurrence, which takes the norm along), so that their
cost to all others shows. With --each `end` is the time that a kernel adds to a layer: from the previous kernel's end to
its own, the median of the layers. `µs` is from its own start, which may be before that end.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from benchmarks.kernels.quantised_linears_speed import EPS, load
from benchmarks.kernels.state_kernels_speed import launch_early, set_constants
from benchmarks.kernels.stream_linears_speed import Linear
from benchmarks.script import names_of, need_hopper, parser_of, positive, positives, told_in_one_line
from mllm_compile.bench.timing.graph import graph_us, read_rate
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.kernels.cuda import KernelCompiler
from mllm_compile.runtime import ops
from mllm_compile.runtime.ops.stream_linear.linear import bucket_of
from mllm_compile.runtime.ops.stream_linear.ops import STREAMED
from mllm_compile.runtime.ops.stream_linear.shapes import choose_tiling
from mllm_compile.runtime.state.layer import KINDS

LAYERS = 8
PARTS = ("conv", "norm", "recurrence")


@dataclass
class Sizes:
    """A mixer's linears, in the order in which they run, and the channels of its convolution and its norm."""

    linears: tuple[str, str, str, str]
    convolved: int
    state: tuple[int, ...]


SIZES = {
    "qwen3_5": Sizes(
        ("12352x4096:norm", "4096x4096:residual", "24576x4096:norm+gated", "4096x12288:residual"), 8192, (32, 128, 128)
    ),
    "nemotron_h": Sizes(
        ("18560x4096:norm", "4096x8192:residual", "21504x4096:norm+squared_relu", "4096x21504:residual"),
        10240,
        (128, 64, 128),
    ),
}


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").mul_(0.02).bfloat16()


class Model:
    """LAYERS layers of a kind, and a batch of decodes."""

    def __init__(self, name: str, tokens: int, linears: Sequence[Linear], without: frozenset[str]) -> None:
        self.name, self.tokens, self.linears, self.without = name, tokens, linears, without
        sizes = SIZES[name]
        self.rows = torch.arange(1, tokens + 1, device="cuda")
        self.has_state = torch.ones(tokens, dtype=torch.bool, device="cuda")
        self.conv_weight, self.conv_bias = bf16(sizes.convolved, 4), bf16(sizes.convolved)
        self.inputs = [bf16(tokens + 1, 3, sizes.convolved) for _ in range(LAYERS)]
        self.states = [torch.zeros(tokens + 1, *sizes.state, device="cuda") for _ in range(LAYERS)]
        heads = sizes.state[0]
        self.log_rates, self.dt_bias, self.skip = bf16(heads), bf16(heads), bf16(heads)
        self.norm = bf16(128 if name == "qwen3_5" else 8192)
        self.x = torch.randn(tokens, 4096, device="cuda").bfloat16()
        self.squares = self.x.float().pow(2).unflatten(-1, (-1, 16)).sum(-1)

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and states, once a layer."""
        weights = sum(linear.weights[0].nbytes for linear in self.linears)
        return weights + 2 * (0 if "recurrence" in self.without else self.states[0][1:].nbytes)

    def run(self) -> None:
        op = torch.ops.mllm
        into, out, up, down = self.linears
        residual, scaled, squares = self.x, self.x, self.squares
        mixer = self._delta if self.name == "qwen3_5" else self._ssd
        for layer in range(LAYERS):
            made = op.stream_linear(scaled, into.weights[layer], squares, EPS, False, None, False)
            mixed = mixer(layer, made)
            residual, scaled, squares = op.stream_linear_residual_norm(
                mixed, out.weights[layer], residual, out.next_norm
            )
            of_marks = ("gated" in up.marks, None, "squared_relu" in up.marks)
            wide = op.stream_linear(scaled, up.weights[layer], squares, EPS, *of_marks)
            residual, scaled, squares = op.stream_linear_residual_norm(
                wide, down.weights[layer], residual, down.next_norm
            )

    def _convolved(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype, device="cuda")
        if "conv" not in self.without:
            ops.op("causal_conv_states")(
                *(x, self.conv_weight, self.conv_bias, self.inputs[layer], self.rows, self.has_state, None, None),
                *(out, "silu", self.name == "qwen3_5"),
            )
        return out

    def _delta(self, layer: int, made: torch.Tensor) -> torch.Tensor:
        mixed, z, beta, g = made.split((8192, 4096, 32, 32), -1)
        q, k, v = self._convolved(layer, mixed).split((2048, 2048, 4096), -1)
        out = torch.empty(self.tokens, 32, 128, dtype=torch.bfloat16, device="cuda")
        norms = (None, None) if "norm" in self.without else (z.unflatten(-1, (32, 128)), self.norm)
        if "recurrence" not in self.without:
            ops.op("gated_delta_states")(
                *(q.unflatten(-1, (16, 128)), k.unflatten(-1, (16, 128)), v.unflatten(-1, (32, 128)), g, beta),
                *(self.log_rates, self.dt_bias, *norms, self.states[layer], self.rows, self.has_state, None, None),
                *(out, True, EPS, "silu"),
            )
        return out.flatten(1)

    def _ssd(self, layer: int, made: torch.Tensor) -> torch.Tensor:
        z, mixed, dt = made.split((8192, 10240, 128), -1)
        x, b, c = self._convolved(layer, mixed).split((8192, 1024, 1024), -1)
        out = torch.empty(self.tokens, 128, 64, dtype=torch.bfloat16, device="cuda")
        norms = (None, None) if "norm" in self.without else (z.unflatten(-1, (128, 64)), self.norm)
        if "recurrence" not in self.without:
            ops.op("ssd_states")(
                *(x.unflatten(-1, (128, 64)), dt, self.log_rates, b.unflatten(-1, (8, 128)), c.unflatten(-1, (8, 128))),
                *(self.skip, self.dt_bias, *norms, self.states[layer], self.rows, self.has_state, None, None),
                *(out, True, 0.0, None, True, EPS, 8),
            )
        return out.flatten(1)


def measure(model: Model, each: bool) -> Iterator[str]:
    """A line for the layer, and one for each of its kernels."""
    layer = graph_us(model.run) / LAYERS
    yield f"{layer:8.1f} µs a layer, {model.num_bytes / layer / 1e6:.2f} TB/s"
    if each:
        yield from _kernels(model)


def _kernels(model: Model) -> Iterator[str]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    found = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    found.sort(key=lambda event: event.time_range.start)
    count, left = divmod(len(found), 3 * LAYERS)
    if left or not count:
        yield f"         {len(found)} kernels were traced, no multiple of {3 * LAYERS}: not shown by kernel"
        return
    spans = [(event.name, event.time_range.start, event.time_range.end) for event in found]
    by_place: list[list[tuple[float, float]]] = [[] for _ in range(count)]
    for index, ((_, _, before), (_, start, end)) in enumerate(itertools.pairwise(spans), start=1):
        if index % (LAYERS * count) >= count:  # not of the first layer: nothing is ahead of it
            by_place[index % count].append((end - before, end - start))
    for (name, *_), ends in zip(spans, by_place, strict=False):
        added, own = (statistics.median(column) for column in zip(*ends, strict=True))
        yield f"    end {added:6.1f}  µs {own:6.1f}  {name[:40]}"


def main(arguments: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--tokens", type=positives, default="8", help="requests that decode, with commas between")
    parser.add_argument("--variants", nargs="+", default=[""], help="of constants, each measured in turn")
    parser.add_argument("--without", nargs="+", type=names_of(PARTS), default=[], help="kernels left out")
    parser.add_argument("--each", type=positive, help="show what each kernel takes with so many requests")
    options = parser.parse_args(arguments)
    need_hopper()
    from mllm_compile.runtime.ops.dependent_launch import starts_early  # imports Triton

    torch.manual_seed(0)
    print(f"{machine_line()}, a sum reads {read_rate():.0f} GB/s")
    for kind in KINDS:
        ops.op(f"{kind}_states")
    if starts_early():
        launch_early()
    for name in options.layers:
        linears = [Linear.parse(text) for text in SIZES[name].linears]
        with KernelCompiler() as compiler:
            for linear in linears:
                linear.set_tokens(1)
            tilings = [
                choose_tiling(one.kind, bucket) for bucket in {*map(bucket_of, options.tokens)} for one in linears
            ]
            compiler.start(tilings)
            load(compiler, tilings, STREAMED.load_kernels)
        for tokens in options.tokens:
            cases = [(options.variants[0], frozenset(names)) for names in options.without]
            for variant, without in [*cases, *((one, frozenset[str]()) for one in options.variants)]:
                set_constants(variant)
                left_out = f", without {' and '.join(sorted(without))}" if without else ""
                model = Model(name, tokens, linears, without)
                print(f"{name}, {tokens} tokens, {variant or 'as it is'}{left_out}")
                for line in measure(model, tokens == options.each):
                    print(line)
                del model
        del linears
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    with told_in_one_line():
        sys.exit(main(sys.argv[1:]))
