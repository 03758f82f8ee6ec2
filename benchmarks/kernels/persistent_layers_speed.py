"""Microseconds of a decode of one token by one launch, whose blocks walk all layers of Qwen3-0.6B's shape together.

    python -m benchmarks.kernels.persistent_layers_speed [--keys 576] [--layers 28] [--copies 1,4]
        [--in-flight 2,3,5,13]

Needs a Hopper GPU on which nothing else runs: all blocks have to be there at once. Weights are random. The first lines
are meetings of all blocks that do nothing else. Then the numbers of each form are compared with float32, beside torch's
in bfloat16, and a CUDA graph runs the step. A form has --copies of the results that all blocks read, and asks for
--in-flight slots of weights at once. Of the fastest, steps without waiting for weights and without waiting for other
blocks follow, with wrong numbers: what is left is the time of inputs and sums, and that of reads. The last table has
the cycles of a layer's stages, of one warp in the median block.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

import torch
from torch.nn.functional import silu

from benchmarks.kernels.quantised_linears_speed import off_by
from benchmarks.script import need_hopper, parser_of, positive, positives, told_in_one_line
from mllm_compile.bench.timing.graph import graph_us, read_rate
from mllm_compile.bench.timing.record import machine_line
from mllm_compile.kernels.cuda import KernelCompiler
from mllm_compile.runtime.cuda.driver import Kernel, address_of, load_kernel
from mllm_compile.runtime.cuda.kernel import CudaKernel

HIDDEN, HEADS, KV_HEADS, DIM, FFN, VOCABULARY = 1024, 16, 8, 128, 3072, 151_936
PAGE, BLOCKS, EPS = 16, 128, 1e-6
LEAST_KEYS, MOST_KEYS = 64, 1024  # each of four blocks has a page, and at most a page a warp
ROUNDS = 1000
PLACES_BYTES = 24_832  # of a layer's results, beside
COPIED_BYTES = 10_240  # those of which there are copies
MOST_COPIES = 4
CHECKED_STEPS, MOST_ERROR = 3, 1.2  # times torch's in bfloat16
SLOTS = 13  # of the ring
STAGES = ("qkv", "attention", "o", "gate_up", "down", "head")
PARTS = ("weights", "inputs", "products", "meeting, result")


@dataclass(frozen=True)
class PersistentLayers(CudaKernel):
    """Layers and head in one launch.

    Attributes:
        reads: weights are copied and waited for.
        waits: inputs are.
        marks: cycles are noted.
        copies: of results that all blocks read.
        in_flight: slots of the ring that are on their way at once.
    """

    layers: int
    vocabulary: int = VOCABULARY
    reads: bool = True
    waits: bool = True
    marks: bool = False
    copies: int = 1
    in_flight: int = SLOTS

    source: ClassVar[str] = "../benchmarks/kernels/persistent_layers.cu"
    headers: ClassVar[tuple[str, ...]] = ("../benchmarks/kernels/persistent_reader.cuh",)
    function: ClassVar[str] = "persistent_layers"
    switch: ClassVar[str] = "nothing: it is a trial"
    num_threads: ClassVar[int] = 17 * 32
    shared_bytes: ClassVar[int] = 232_448

    @property
    def name(self) -> str:
        return "persistent_layers_" + "_".join(str(int(value)) for value in asdict(self).values())

    def constants(self) -> dict[str, int]:
        return {name.upper(): int(value) for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Meetings(CudaKernel):
    """Blocks that only meet; by words that say that they are there, or by a counter."""

    words: bool
    copies: int = 1

    source: ClassVar[str] = "../benchmarks/kernels/persistent_meetings.cu"
    function: ClassVar[str] = "persistent_meetings"
    switch: ClassVar[str] = "nothing: it is a trial"
    num_threads: ClassVar[int] = 512
    shared_bytes: ClassVar[int] = 0

    @property
    def name(self) -> str:
        return f"persistent_meetings_{int(self.words)}_{self.copies}"

    def constants(self) -> dict[str, int]:
        return {"WORDS": int(self.words), "COPIES": self.copies, "ROUNDS": ROUNDS}


class Step(ctypes.Structure):
    """The kernel's arguments, as the struct in its source."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "qkv", "o", "gate_up", "down", "norms", "head_norms", "embedding", "final_norm", "turns", "cache", "table",
            "token", "places", "best", "done", "step", "marks",
        )),
        ("keys", ctypes.c_int), ("pages", ctypes.c_int),
    )  # fmt: skip


class Decode:
    """Weights, a cache of one request's keys, and what the launches share."""

    def __init__(self, layers: int, keys: int, device: str = "cuda", vocabulary: int = VOCABULARY) -> None:
        def random(*shape: int, scale: float = 0.03) -> torch.Tensor:
            return (torch.randn(shape, device=device) * scale).bfloat16()

        def norm(*shape: int) -> torch.Tensor:
            return (torch.rand(shape, device=device) + 0.5).bfloat16()

        self.layers, self.keys, pages = layers, keys, -(-keys // PAGE)
        self.tensors = {
            "qkv": random(layers, (HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
            "o": random(layers, HIDDEN, HEADS * DIM),
            "gate_up": random(layers, 2 * FFN, HIDDEN),
            "down": random(layers, HIDDEN, FFN),
            "norms": norm(layers, 2, HIDDEN),
            "head_norms": norm(layers, 2, DIM),
            "embedding": random(vocabulary, HIDDEN, scale=0.2),
            "final_norm": norm(HIDDEN),
            "turns": self._turns().to(device),
            "cache": random(layers, pages, 2, KV_HEADS, PAGE, DIM, scale=1.0),
            "table": torch.randperm(pages, device=device).int(),
            "token": torch.tensor([7], dtype=torch.int32, device=device),
            "places": torch.empty(2 * layers * _places_bytes(MOST_COPIES), dtype=torch.uint8, device=device),
            "best": torch.zeros(1, dtype=torch.int64, device=device),
            "done": torch.zeros(1, dtype=torch.int32, device=device),
            "step": torch.zeros(1, dtype=torch.int32, device=device),
            "marks": torch.zeros(BLOCKS, len(STAGES), len(PARTS), dtype=torch.int32, device=device),
        }
        self.arguments = Step(*(one.data_ptr() for one in self.tensors.values()), keys, pages)

    def _turns(self) -> torch.Tensor:
        angles = (self.keys - 1) / 1e6 ** (torch.arange(0, DIM, 2) / DIM)
        return torch.stack([angles.cos(), angles.sin()]).float()

    def begin(self, copies: int) -> None:
        """Empties the places of results; each has so many copies."""
        self.copies = copies
        self.tensors["places"].fill_(255)
        self.tensors["step"].zero_()

    @property
    def hidden(self) -> torch.Tensor:
        """The output of the last layer in the last launch."""
        size = self.layers * _places_bytes(self.copies)
        last = (int(self.tensors["step"]) - 1) % 2
        places = self.tensors["places"][last * size : (last + 1) * size].view(torch.bfloat16)
        return places[-HIDDEN - 128 : -128]  # ahead of the parts' weights

    def by_torch(self, token: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """The last layer's output, and its new key and value; the cache stays as it is."""
        of = {name: tensor.to(dtype) for name, tensor in self.tensors.items() if tensor.is_floating_point()}
        cos, sin = (turn.to(dtype) for turn in of["turns"])
        x, kept = of["embedding"][token], of["cache"][0]
        for layer in range(self.layers):
            q, k, v = (of["qkv"][layer] @ _normed(x, of["norms"][layer, 0])).split(
                [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM]
            )
            q, k = (
                _rotated(_normed(one.view(-1, DIM), of["head_norms"][layer, number]), cos, sin)
                for number, one in enumerate((q, k))
            )
            kept = of["cache"][layer][self.tensors["table"].long()].permute(1, 2, 0, 3, 4).flatten(2, 3)
            kept = kept[:, :, : self.keys].clone()
            kept[0, :, -1], kept[1, :, -1] = k, v.view(-1, DIM)
            keys, values = kept.repeat_interleave(HEADS // KV_HEADS, 1)
            shares = ((keys @ q[..., None])[..., 0] * DIM**-0.5).softmax(-1)
            x = x + of["o"][layer] @ (shares[:, None] @ values).flatten()
            gate, up = (of["gate_up"][layer] @ _normed(x, of["norms"][layer, 1])).chunk(2)
            x = x + of["down"][layer] @ (silu(gate) * up)
        return x, kept[:, :, -1]

    def chosen(self, hidden: torch.Tensor) -> int:
        x = _normed(hidden.float(), self.tensors["final_norm"].float())
        return int((self.tensors["embedding"].float() @ x).argmax())

    def new_keys(self) -> torch.Tensor:
        """The last layer's newest key and value in the cache."""
        page, place = divmod(self.keys - 1, PAGE)
        return self.tensors["cache"][-1, int(self.tensors["table"][page]), :, :, place]

    def read_bytes(self) -> int:
        """Bytes that a step reads: weights, keys and values."""
        read = sum(self.tensors[name].nbytes for name in ("qkv", "o", "gate_up", "down", "embedding"))
        return read + self.layers * self.keys * 2 * KV_HEADS * DIM * 2


def _places_bytes(copies: int) -> int:
    return PLACES_BYTES + copies * COPIED_BYTES


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)


def main(arguments: Sequence[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--keys", type=positive, default=576)
    parser.add_argument("--layers", type=positive, default=28)
    parser.add_argument("--copies", type=positives, default="1,4")
    parser.add_argument("--in-flight", type=positives, default="2,3,5,13")
    options = parser.parse_args(arguments)
    if not LEAST_KEYS <= options.keys <= MOST_KEYS:
        parser.error(f"--keys {options.keys}: expected {LEAST_KEYS} to {MOST_KEYS}")
    if max(options.copies) > MOST_COPIES or max(options.in_flight) > SLOTS:
        parser.error(f"expected up to {MOST_COPIES} copies and {SLOTS} slots in flight")
    need_hopper()
    torch.manual_seed(0)
    limit = read_rate()
    print(f"{machine_line()}, a sum reads {limit:.0f} GB/s")
    decode = Decode(options.layers, options.keys)
    forms = [
        PersistentLayers(options.layers, copies=copies, in_flight=in_flight)
        for copies in options.copies
        for in_flight in options.in_flight
    ]
    meetings = {"a counter": Meetings(False)} | {
        f"words that are there, {copies} copies": Meetings(True, copies) for copies in options.copies
    }
    with KernelCompiler() as compiler:
        compiler.start([*meetings.values(), *forms])
        _measure_meetings(meetings, compiler.binaries(meetings.values()))
        binaries = compiler.binaries(forms)
        print(f"{'copies':>8}{'in flight':>11}{'off by':>9}{'by torch':>10}{'µs':>8}{'of read':>9}")
        times = {form: _measure(decode, form, binaries, limit) for form in forms}
        fastest = min(times, key=lambda form: times[form])
        others = {
            "whole": fastest,
            "without waiting for weights": replace(fastest, reads=False),
            "without waiting for others": replace(fastest, waits=False),
            "with neither": replace(fastest, reads=False, waits=False),
        }
        marked = [replace(fastest, marks=True), replace(fastest, marks=True, reads=False)]
        binaries = compiler.binaries([*others.values(), *marked])
    print(f"{fastest.copies} copies, {fastest.in_flight} in flight")
    for name, form in others.items():
        print(f"{name:32}{_time(decode, form, binaries):8.1f} µs")
    for form in marked:
        _print_marks(decode, form, binaries)
    return 0


def _launch(kernel: Kernel, decode: Decode) -> None:
    kernel.launch(BLOCKS, PersistentLayers.num_threads, [decode.arguments], starts_early=False)


def _measure_meetings(meetings: dict[str, Meetings], binaries: dict[str, bytes]) -> None:
    places = torch.empty(ROUNDS * HIDDEN * MOST_COPIES, dtype=torch.int16, device="cuda")
    counter = torch.empty(ROUNDS, dtype=torch.int32, device="cuda")
    out = torch.empty(BLOCKS, dtype=torch.int32, device="cuda")
    for name, kind in meetings.items():
        kernel = load_kernel(kind, binaries)

        def meet(kernel: Kernel = kernel, kind: Meetings = kind) -> None:
            places.fill_(-1)
            counter.zero_()
            kernel.launch(BLOCKS, kind.num_threads, [address_of(one) for one in (places, counter, out)], False)

        print(f"a meeting by {name:32}{graph_us(meet) / ROUNDS:8.2f} µs")


def _measure(decode: Decode, form: PersistentLayers, binaries: dict[str, bytes], limit: float) -> float:
    """Compares steps, one behind the other, and times one, in µs."""
    kernel = load_kernel(form, binaries)
    decode.begin(form.copies)
    for _ in range(CHECKED_STEPS - 1):
        _check_step(kernel, decode)
    error, of_torch = _check_step(kernel, decode)
    time = _time(decode, form, binaries)
    share = decode.read_bytes() / limit / 1e3 / time
    print(f"{form.copies:8}{form.in_flight:11}{error:9.4f}{of_torch:10.4f}{time:8.1f}{share:9.0%}")
    return time


def _check_step(kernel: Kernel, decode: Decode) -> tuple[float, float]:
    """Launches a step; its output's distance from float32, and that of torch in bfloat16."""
    token = int(decode.tensors["token"])
    true, true_keys = decode.by_torch(token, torch.float32)
    rough, rough_keys = decode.by_torch(token, torch.bfloat16)
    _launch(kernel, decode)
    found, chosen = decode.hidden, int(decode.tensors["token"])
    errors = [off_by(found, true), off_by(decode.new_keys().flatten(0, 1), true_keys.flatten(0, 1))]
    of_torch = [off_by(rough, true), off_by(rough_keys.flatten(0, 1), true_keys.flatten(0, 1))]
    if not all(one <= MOST_ERROR * other for one, other in zip(errors, of_torch, strict=True)):
        sys.exit(f"error: outputs and new keys are off by {errors}, expected at most {MOST_ERROR} times {of_torch}")
    if chosen != decode.chosen(found):
        sys.exit(f"error: token {chosen}, expected {decode.chosen(found)}")
    return errors[0], of_torch[0]


def _time(decode: Decode, form: PersistentLayers, binaries: dict[str, bytes]) -> float:
    kernel = load_kernel(form, binaries)
    decode.begin(form.copies)
    return graph_us(lambda: _launch(kernel, decode), calls=8)


def _print_marks(decode: Decode, kind: PersistentLayers, binaries: dict[str, bytes]) -> None:
    kernel = load_kernel(kind, binaries)
    decode.begin(kind.copies)
    for _ in range(3):
        _launch(kernel, decode)
    name = "cycles of a layer" if kind.reads else "without waiting for weights"
    print(f"{name:32}" + "".join(f"{part:>17}" for part in PARTS))
    marks = decode.tensors["marks"].float() / decode.layers
    for number, stage in enumerate(STAGES):
        there = marks[:, number][marks[:, number].sum(-1) > 0]
        if len(there):
            middle = (there.median(0).values * (decode.layers if stage == "head" else 1)).tolist()
            print(f"{stage:32}" + "".join(f"{cycles:17.0f}" for cycles in middle))


if __name__ == "__main__":
    with told_in_one_line():
        sys.exit(main(sys.argv[1:]))
