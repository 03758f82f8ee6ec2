"""Microseconds of the kernels of adapters by linear, number of tokens and adapters, inside a CUDA graph.

    python -m benchmarks.kernels.adapter_kernels_speed [--tokens 1,8,64,256] [--prompts 2048,8192] [--rank 16]

Needs a Hopper GPU. The linears are Qwen3-8B's. Tokens have one adapter, or several: in turn of steps of few tokens, in
stretches of prompts. Each cell is the time, and behind a slash what the bytes take at the rate of a sum. Factors come
from the GPU's memory. The last lines are all kernels of a layer: each linear's two, and, of few tokens, those that
passes/lora_chains.py joins, norms among them. Of prompts they are a layer's linears as pieces have them, gates and ups
with their activation in one kernel, without adapters and with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear as torch_linear

from benchmarks.kernels.quantised_linears_speed import load
from benchmarks.script import need_hopper, parser_of, positive, positives
from mllm_compile.bench.timing.graph import graph_us, read_rate
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.kernels.cuda import KernelCompiler
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.ops.gated_linear.kernel import gated_kernels
from mllm_compile.runtime.ops.gated_linear.ops import load_gated_kernels

OPS: Any = torch.ops.mllm
HIDDEN, FFN, EPS = 4096, 12288, 1e-6
CALLS = 8  # in a graph at least, whose launch takes as long as a short kernel
LEAST_BYTES = 100 << 20  # of the factors that a graph reads: twice what the L2 holds
Factors = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Linear:
    """A linear and the outputs of its parts."""

    inputs: int
    parts: tuple[int, ...]
    is_gated: bool = False

    @property
    def outputs(self) -> int:
        return sum(self.parts)

    @property
    def starts(self) -> list[int]:
        return [sum(self.parts[:index]) for index in range(len(self.parts))]

    def factors(self, adapters: int, rank: int) -> Factors:
        rows = rank * len(self.parts)
        return _random(adapters, rows, self.inputs) / self.inputs**0.5, _random(adapters, self.outputs, rank) / 50

    def shrink(self, x: torch.Tensor, factors: Factors, slots: torch.Tensor, *, is_few: bool) -> torch.Tensor:
        shrunk: torch.Tensor = OPS.lora_shrink(x, factors[0], slots, is_few, True)
        return shrunk

    def expand(
        self, y: torch.Tensor, shrunk: torch.Tensor, factors: Factors, slots: torch.Tensor, *norm: Any, is_few: bool
    ) -> torch.Tensor:
        made = OPS.lora_expand_gated if self.is_gated else OPS.lora_expand
        return made(y, shrunk, factors[1], slots, self.starts, list(self.parts), is_few, True, *norm)


LINEARS = {
    "o": Linear(HIDDEN, (HIDDEN,)),
    "gate_up": Linear(HIDDEN, (FFN, FFN), is_gated=True),
    "down": Linear(FFN, (HIDDEN,)),
    "qkv": Linear(HIDDEN, (4096, 1024, 1024)),
}


class _Early:
    """Launches a Triton kernel as a package does, before the one ahead has ended."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *args, **named: self._kernel[grid](*args, launch_pdl=True, **named)


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def slots_of(tokens: int, adapters: int, used: int, is_few: bool) -> list[torch.Tensor]:
    """The slots of one call, or of several in turn that have one adapter each."""
    if used == 1:
        return list(torch.arange(adapters, dtype=torch.int32, device="cuda")[:, None].expand(-1, tokens).contiguous())
    every = torch.arange(tokens, dtype=torch.int32, device="cuda")
    return [every % used if is_few else every * used // tokens]


def each_us(run: Callable[[Any, torch.Tensor], object], factors: list[Any], slots: list[torch.Tensor]) -> float:
    """Microseconds of a call, of a graph that has each of the factors in turn."""
    calls = [(one, given) for one in factors for given in slots]

    def run_all() -> None:
        for one, given in calls:
            run(one, given)

    return graph_us(run_all, calls=-(-CALLS // len(calls))) / len(calls)


def separate(tensors: dict[str, torch.Tensor], of: dict[str, Factors], slots: torch.Tensor, *, is_few: bool) -> None:
    """All kernels of a layer, two for each linear."""
    for name, linear in LINEARS.items():
        shrunk = linear.shrink(tensors[f"{name} x"], of[name], slots, is_few=is_few)
        linear.expand(tensors[f"{name} y"], shrunk, of[name], slots, is_few=is_few)


def joined(tensors: dict[str, torch.Tensor], of: dict[str, Factors], slots: torch.Tensor) -> None:
    """All kernels of a layer of few tokens, as lora_chains.py leaves them."""
    (_, o_b), (gate_up_a, gate_up_b), (down_a, down_b), (qkv_a, _) = (of[name] for name in LINEARS)
    weight, h, gate_up = tensors["norm"], tensors["o x"], LINEARS["gate_up"]
    products = LINEARS["o"].shrink(h, of["o"], slots, is_few=True)
    after_o = tensors["o y"], products, o_b, slots, h, weight, False, gate_up_a
    h, _, squares, products = OPS.lora_expand_norm(*after_o)
    norm = squares, EPS, HIDDEN
    of_gate_up = tensors["gate_up y"], products, gate_up_b, slots, gate_up.starts, list(gate_up.parts), *norm, down_a
    _, products = OPS.lora_expand_gated_chained(*of_gate_up)
    after_down = tensors["down y"], products, down_b, slots, h, weight, False, qkv_a
    _, _, squares, products = OPS.lora_expand_norm(*after_down)
    LINEARS["qkv"].expand(tensors["qkv y"], products, of["qkv"], slots, squares, EPS, HIDDEN, is_few=True)


class Products:
    """A layer's linears of prompts, as pieces have them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._weights = {name: _random(one.outputs, one.inputs) / 50 for name, one in LINEARS.items()}

    def plain(self, name: str) -> torch.Tensor:
        """One linear, without adapters."""
        x, weight = self._tensors[f"{name} x"], self._weights[name]
        made: torch.Tensor = OPS.gated_linear(x, weight) if LINEARS[name].is_gated else torch_linear(x, weight)
        return made

    def adapted(self, name: str, factors: Factors, slots: torch.Tensor) -> torch.Tensor:
        """The same with them."""
        x, linear = self._tensors[f"{name} x"], LINEARS[name]
        if linear.is_gated:
            shrunk = linear.shrink(x, factors, slots, is_few=False)[0]
            made: torch.Tensor = OPS.gated_linear_lora(x, self._weights[name], shrunk, factors[1], slots)
        else:
            made = OPS.lora_linear(x, self._weights[name], *factors, slots, linear.starts, list(linear.parts))
        return made

    def times(self, factors: dict[str, Factors], slots: torch.Tensor) -> dict[str, str]:
        """The cells: microseconds without adapters and with them, of each linear, and their ratio of all."""
        plain = {name: graph_us(partial(self.plain, name), CALLS) for name in LINEARS}
        both = {name: graph_us(partial(self.adapted, name, factors[name], slots), CALLS) for name in LINEARS}
        plain["all"], both["all"] = sum(plain.values()), sum(both.values())
        return {f"{name} linear": f"{plain[name]:7.1f} →{both[name]:7.1f}" for name in plain} | {
            "ratio of all": f"{both['all'] / plain['all']:15.3f}"
        }


def load_gated(rank: int) -> None:
    """Compiles and loads the kernels of gates and ups."""
    (linear,) = (one for one in LINEARS.values() if one.is_gated)
    shape = linear.outputs, linear.inputs
    kernels = [*gated_kernels(*shape), *gated_kernels(*shape, rank)]
    with KernelCompiler() as compiler:
        compiler.start(kernels)
        load(compiler, kernels, load_gated_kernels)


def column(tokens: int, used: int, is_few: bool, adapters: int, rank: int, rate: float) -> dict[str, str]:
    """The cells of so many tokens of so many adapters.

    Args:
        rate: bytes that are read in a microsecond.
    """
    tensors, cells = {"norm": _random(HIDDEN)}, {}
    for name, linear in LINEARS.items():
        tensors |= {f"{name} x": _random(tokens, linear.inputs), f"{name} y": _random(tokens, linear.outputs)}
    slots = slots_of(tokens, adapters, used, is_few)[: None if is_few else 1]
    for name, linear in LINEARS.items():
        x, y = tensors[f"{name} x"], tensors[f"{name} y"]
        factors = [linear.factors(adapters, rank)]
        while is_few and sum(one.nbytes for of_layer in factors for one in of_layer) < LEAST_BYTES:
            factors.append(linear.factors(adapters, rank))
        shrunk = linear.shrink(x, factors[0], slots[0], is_few=is_few)
        shrink_us = each_us(partial(linear.shrink, x, is_few=is_few), factors, slots)
        expand_us = each_us(partial(linear.expand, y, shrunk, is_few=is_few), factors, slots)
        a, b = (one.nbytes * min(used, tokens) / adapters for one in factors[0])
        written = y.nbytes / 2 if linear.is_gated else y.nbytes
        cells[f"{name} shrink"] = f"{shrink_us:7.2f} /{(x.nbytes + a) / rate:6.2f}"
        cells[f"{name} expand"] = f"{expand_us:7.2f} /{(y.nbytes + written + b) / rate:6.2f}"
    layers = [{name: one.factors(adapters, rank) for name, one in LINEARS.items()} for _ in range(6)]
    cells["a layer"] = f"{each_us(partial(separate, tensors, is_few=is_few), layers, slots):15.2f}"
    if is_few:
        cells["joined"] = f"{each_us(partial(joined, tensors), layers, slots):15.2f}"
    else:
        cells |= Products(tensors).times(layers[0], slots[0])
    return cells


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tokens", type=positives, default=[1, 8, 64, 256])
    parser.add_argument("--prompts", type=positives, default=[2048, 8192])
    parser.add_argument("--adapters", type=positive, default=8)
    parser.add_argument("--rank", type=positive, default=16)
    arguments = parser.parse_args()
    need_hopper()
    load_gated(arguments.rank)
    from mllm_compile.runtime.ops.lora import chained, expand, fill, shrink, stretches  # define the ops, with Triton

    op("lora_linear")
    for module in (shrink, expand, chained, fill, stretches):
        module.wrap_triton = _Early  # type: ignore[attr-defined]
    rate, adapters = read_rate() * 1e3, arguments.adapters
    print(machine_line())
    for counts, is_few in ((arguments.tokens, True), (arguments.prompts, False)):
        for tokens in counts:
            one, several = (column(tokens, used, is_few, adapters, arguments.rank, rate) for used in (1, adapters))
            print(f"{tokens} tokens".ljust(16), f"{'one adapter':>15} {f'{adapters} adapters':>15}")
            for name, cell in one.items():
                print(f"{name:16} {cell} {several[name]}")


if __name__ == "__main__":
    main()
