"""Microseconds of one layer's experts with bfloat16 weights and with those in few bits, by number of tokens.

    python -m benchmarks.kernels.quantised_experts_speed [--tokens 1,8,64,2048] [--sweep] [--shape qwen-30b-a3b]
        [--forms bf16,row,group,int4,mxfp4,streamed,tiled]

Needs an NVIDIA GPU. A CUDA graph runs both linears of a layer (without what chooses and orders rows) for several sets
of choices, so that weights come from the GPU's memory. Of fp8, `row` weights have a scale a row, `group` weights one
for 128 inputs, as `int4` ones. `streamed` is MXFP4 by stream_expert_rows, with gpt-oss' activation; `tiled` is MXFP4
dequantised ahead of expert_tiles, with its gathers. GB/s are of the chosen experts' weights, each once; an `error` is
the distance from float32 over torch's distance in bfloat16. --sweep times other sizes of tiles too.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn.functional import silu

from benchmarks.script import names_of, need_gpu, parser_of, positives
from mllm_compile.bench.timing.graph import graph_us
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.kernels.cuda import KernelCompiler
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.expert_tiles.kernel import BLOCK, ExpertTilesKernel
from mllm_compile.runtime.ops.experts.linear import expert_linear_reference, order_of_step
from mllm_compile.runtime.ops.experts.shapes import VARIANT_TOKENS
from mllm_compile.runtime.quantised.numbers import dequantised, quantised
from mllm_compile.runtime.quantised.scheme import MXFP4, SCALES, VALUES, ZEROS, WeightScheme


@dataclass(frozen=True)
class Shape:
    """Experts, those that a token chooses, sizes, and if silu(gate) * up is of the first linear's kernel."""

    experts: int
    chosen: int
    hidden: int
    inner: int
    is_gated: bool


SHAPES = {
    "qwen-30b-a3b": Shape(128, 8, 2048, 768, True),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, False),
    "tiny": Shape(12, 3, 256, 96, True),
}
FORMS = {
    "bf16": None,
    "row": WeightScheme("fp8", 0),
    "group": WeightScheme("fp8", 128),
    "int4": WeightScheme("int4", 128, torch.bfloat16),
    "zeros": WeightScheme("int4", 128, torch.float16, has_zeros=True),
    "mxfp4": MXFP4,
    "streamed": MXFP4,
    "tiled": MXFP4,
}
ALPHA, LIMIT = 1.702, 7.0  # of gpt-oss' activation
SETS = 6  # of choices
# Columns of a tile, bytes of a row at once, warps, loads under way: for few rows of an expert, and for many.
SWEEP = [(64, 256, 4, 3), (64, 128, 2, 4), (32, 128, 2, 4), (32, 128, 2, 6), (16, 128, 1, 6)]
SWEEP_MANY = [(128, 128, 8, 2), (128, 64, 8, 4), (256, 64, 8, 2), (128, 64, 4, 3)]


class Experts:
    """Both linears of a layer in one form."""

    def __init__(self, shape: Shape, form: str) -> None:
        self.shape, self.scheme = shape, FORMS[form]
        self.is_streamed, self.is_tiled = form == "streamed", form == "tiled"
        rows = 2 * shape.inner
        sizes = {"up": (rows, shape.hidden), "down": (shape.hidden, shape.inner)}
        self.tensors = {name: self._weight(*size) for name, size in sizes.items()}
        self.loaded: set[int] = set()  # sizes of blocks that streamed kernels are there for

    def _weight(self, rows: int, columns: int) -> dict[str, torch.Tensor]:
        """One expert's weight is made and repeated: what it holds does not change its time."""
        plain = torch.randn(4, rows, columns, device="cuda") * columns**-0.5
        count = self.shape.experts // 4
        if self.scheme is None:
            return {VALUES: plain.bfloat16().repeat(count, 1, 1)}
        scheme = replace(self.scheme, group=self.scheme.group or columns)
        return {role: one.repeat(count, 1, 1) for role, one in quantised(plain, scheme).items()}

    def num_bytes(self, ids: torch.Tensor) -> int:
        of_all = sum(one.numel() * one.element_size() for tensors in self.tensors.values() for one in tensors.values())
        return of_all * len(ids.unique()) // self.shape.experts

    def exact(self, name: str, columns: int) -> torch.Tensor:
        tensors = self.tensors[name]
        if self.scheme is None:
            return tensors[VALUES].float()
        return dequantised(tensors, self.scheme.kind, self.scheme.group or columns, columns, torch.float32)

    def run(self, x: torch.Tensor, order: torch.Tensor, blocks: torch.Tensor | None, block: int) -> torch.Tensor:
        """The second linear's outputs; without a gate of its own it reads half of the first one's."""
        if self.is_streamed:
            self._load(block)
            how = [(self.shape.chosen, True, True, ALPHA, LIMIT), (self.shape.chosen, False, False, 0.0, 0.0)]
            for name, its in zip(self.tensors, how, strict=True):
                weight = self.tensors[name][VALUES], self.tensors[name][SCALES], None
                x = op("stream_expert_rows")(x, order, blocks, *weight, *its, name == "down", block)
            return x
        if self.is_tiled:
            inner = self._tiled("up", x, order, blocks, True)[:, : self.shape.inner]
            return self._tiled("down", inner, order, blocks, False)
        is_gated = self.shape.is_gated
        inner = self._linear("up", x, order, blocks, block, True, is_gated)
        inner = inner if is_gated else inner[:, : self.shape.inner].contiguous()
        return self._linear("down", inner, order, blocks, block, False, False)

    def _tiled(
        self, name: str, x: torch.Tensor, order: torch.Tensor, blocks: torch.Tensor | None, of_tokens: bool
    ) -> torch.Tensor:
        self._load_tiles()
        values, scales = self.tensors[name][VALUES], self.tensors[name][SCALES]
        weight = op("dequantised_experts")(values, scales, torch.bfloat16)
        sources = order // self.shape.chosen if of_tokens else order
        rows = x.index_select(0, sources.clamp(0, len(x) - 1))
        ids = x.new_empty(len(x) * (self.shape.chosen if of_tokens else 1), 1)  # its size is read
        return op("expert_tiles")(rows, order, blocks, weight, ids)

    def _load_tiles(self) -> None:
        from mllm_compile.runtime.ops.expert_tiles.ops import load_expert_tiles

        if self.loaded:
            return
        self.loaded.add(BLOCK)
        sizes = (one[VALUES].shape for one in self.tensors.values())
        kernels = [ExpertTilesKernel(rows, 2 * half, is_gated=False) for _, rows, half in sizes]
        load_expert_tiles(kernels, _compiled(kernels), torch.device("cuda:0"))

    def order(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        """The order of rows, their blocks, and the size of these."""
        if not self.is_tiled:
            return order_of_step(ids, self.shape.experts)
        slots = torch.ones(len(ids), dtype=torch.int64, device=ids.device)
        return *op("order_experts")(ids, slots, self.shape.experts, BLOCK, 0), BLOCK

    def _load(self, block: int) -> None:
        """Compiles and loads the kernels for such blocks, once."""
        from mllm_compile.runtime.ops.stream_expert_rows.ops import load_expert_rows, rows_kernel

        if block in self.loaded:
            return
        self.loaded.add(block)
        kernels = [
            rows_kernel(tensors[VALUES], None, self.shape.chosen, name == "up", name == "up", name == "down", block)
            for name, tensors in self.tensors.items()
        ]
        load_expert_rows(kernels, _compiled(kernels), torch.device("cuda:0"))

    def _linear(
        self,
        name: str,
        x: torch.Tensor,
        order: torch.Tensor,
        blocks: torch.Tensor | None,
        block: int,
        of_tokens: bool,
        is_gated: bool,
    ) -> torch.Tensor:
        tensors, chosen = self.tensors[name], self.shape.chosen
        if self.scheme is None:
            how = (chosen, False, of_tokens, is_gated, block)
            return op("grouped_linear")(x, order, blocks, tensors[VALUES], None, *how)
        weight = tensors[VALUES], tensors[SCALES], tensors.get(ZEROS), None, self.scheme.kind
        how = (self.scheme.group or x.shape[1], chosen, of_tokens, is_gated, block)
        return op("quantised_grouped_linear")(x, order, blocks, *weight, *how)

    def error(self, x: torch.Tensor, ids: torch.Tensor) -> float:
        """The distance from float32, over torch's in bfloat16."""
        shape = self.shape
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            up, down = (
                self.exact(name, columns).to(dtype) for name, columns in (("up", shape.hidden), ("down", shape.inner))
            )
            inner = expert_linear_reference(x.to(dtype), ids, up, None, False, True)
            gate, right = (inner[:, ::2], inner[:, 1::2]) if self.is_streamed else inner.chunk(2, -1)
            if self.is_streamed:
                gate, right = gate.clamp(max=LIMIT), right.clamp(-LIMIT, LIMIT)
                inner = (right + 1) * (gate * torch.sigmoid(ALPHA * gate))
            else:
                inner = silu(gate) * right if shape.is_gated else gate.contiguous()
            found.append(expert_linear_reference(inner, ids, down, None, False, False).float())
        true, theirs = found
        ours = self.run(x, *self.order(ids)).float()
        return ((ours - true).norm() / (theirs - true).norm()).item()


def _compiled(kernels: Sequence[CudaKernel]) -> dict[str, bytes]:
    """Binaries by the kernel's name."""
    with tempfile.TemporaryDirectory() as folder, KernelCompiler() as compiler:
        compiler.write(tuple(kernels), Path(folder), NullReporter())
        return {path.stem: path.read_bytes() for path in Path(folder).iterdir()}


def tilings(form: str, tokens: int, block: int, sweep: bool) -> Iterator[tuple[str, dict[int, tuple[int, ...]]]]:
    """Names and tilings: the one that is chosen, and others."""
    from mllm_compile.runtime.ops.experts.grouped_quantised import _TILINGS

    chosen = dict(_TILINGS)
    yield "chosen", chosen
    if sweep and form not in ("bf16", "streamed", "tiled"):
        most = next(most for most in chosen if block <= most)
        for tiling in SWEEP_MANY if most == max(chosen) else SWEEP:
            yield "x".join(map(str, tiling)), {**chosen, most: tiling}


def main(arguments: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=positives, default="1,8,64,2048")
    parser.add_argument("--forms", type=names_of(FORMS), default=",".join(FORMS))
    parser.add_argument("--shape", choices=SHAPES, default="qwen-30b-a3b")
    parser.add_argument("--sweep", action="store_true", help="other tilings too")
    options = parser.parse_args(arguments)
    need_gpu()
    torch.manual_seed(0)
    op("quantised_grouped_linear")  # defines it: its module needs Triton
    shape = SHAPES[options.shape]
    print(f"{machine_line()}, {options.shape}, microseconds a layer")
    print(f"{'form':6}{'tokens':>7}{'layer':>9}{'GB/s':>7}{'TFLOP/s':>9}{'error':>7}  tiling")
    for form in options.forms:
        experts = Experts(shape, form)
        for tokens in options.tokens:
            _measure(experts, form, tokens, options.sweep)
        del experts
        torch.cuda.empty_cache()
    return 0


def _measure(experts: Experts, form: str, tokens: int, sweep: bool) -> None:
    shape = experts.shape
    sets = SETS if tokens <= max(VARIANT_TOKENS) else 1
    x = torch.randn(tokens, shape.hidden, device="cuda").bfloat16()
    choices = [torch.rand(tokens, shape.experts, device="cuda").topk(shape.chosen).indices for _ in range(sets)]
    orders = [experts.order(ids) for ids in choices]
    num_bytes = sum(experts.num_bytes(ids) for ids in choices) / sets
    flops = 2 * tokens * shape.chosen * 3 * shape.hidden * shape.inner

    def run() -> None:
        for order, blocks, block in orders:
            experts.run(x, order, blocks, block)

    from mllm_compile.runtime.ops.experts.grouped_quantised import _TILINGS

    before = dict(_TILINGS)
    for name, tiling in tilings(form, tokens, orders[0][2], sweep):
        try:
            _TILINGS.update(tiling)
            error = experts.error(x[:64], choices[0][:64])
            layer = graph_us(run) / sets
            read, rate = num_bytes / layer / 1e3, flops / layer / 1e6
            print(f"{form:6}{tokens:7}{layer:9.1f}{read:7.0f}{rate:9.0f}{error:7.2f}  {name}")
        except Exception as failure:  # a tiling that cannot be launched hides no other
            print(f"{form:6}{tokens:7}  {name}: {str(failure)[:120]}")
        finally:
            _TILINGS.update(before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
