"""Microseconds of one layer's decode attention by kernel, heads, batch and length, inside a CUDA graph.

    python -m benchmarks.kernels.decode_attention_speed [--json FILE]
    python -m benchmarks.kernels.decode_attention_speed --heads 32/8 --batches 1 8 --lengths 16000 32000 --ours
    python -m benchmarks.kernels.decode_attention_speed --heads 20/20 --head-dim 64 --lengths 1500 --ours

Needs an NVIDIA GPU and the `cuda` extra. Which of the program's own kernels decodes for how many requests is on
this table: the Triton kernel in its form for few requests or for many, and on Hopper clusters and shares
(runtime/attention/hopper/). Each graph runs several layers with KV of their own, more than the L2 cache holds, over
random page tables. Before each layer a small kernel runs, as in a model. The time of these kernels alone is taken off.
XQA splits as FlashInfer does by default. The last columns are the fastest of our own, its read rate, and the Triton
kernel's fastest form and split beside the chosen one. With --ours FlashInfer's and the Triton kernel's other forms are
left out, and clusters are timed with fewer blocks each too (clusters/2, clusters/4). Of heads of 64 its other forms are
told. And the deterministic mode's kernel is timed, by the blocks of a row and KV head (in order/8).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from pathlib import Path

import torch

from benchmarks.binaries import binaries_of
from benchmarks.script import need_gpu, parser_of, positive
from mllm_compile.bench.timing.graph import graph_us
from mllm_compile.bench.timing.record import append_record
from mllm_compile.kernels.cuda import KernelCompiler, can_compile_kernels
from mllm_compile.runtime.attention.hopper.clusters import cluster_kernels
from mllm_compile.runtime.attention.hopper.decoder import ClusterDecode, ShareDecode
from mllm_compile.runtime.attention.hopper.kernel import HEAD_DIM as CLUSTERS_HEAD_DIM
from mllm_compile.runtime.attention.hopper.shapes import are_served, has_clusters, heads_together
from mllm_compile.runtime.attention.hopper.shares import HEAD_DIMS, ShareKernel
from mllm_compile.runtime.attention.split.split_decode import DecodePiece
from mllm_compile.runtime.attention.split.splits import IN_ORDER, MOST_FEW_SEQUENCES, OF_FEW, OF_MANY

HEADS = ((16, 8), (32, 8))
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
LENGTHS = (128, 512, 1024, 4096, 16384)
MAX_TOKENS = 1 << 20  # of a batch
TABLE_TOKENS = 32768  # the page table's width: what a request may grow to
SPLITS = (1, 2, 4, 8, 16, 32)
COLD_BYTES = 256 << 20  # several times the L2 cache
MAX_LAYERS = 16
MAX_BLOCKS = 2048
PAGE_SIZE = 64


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    num_heads: int
    num_kv_heads: int
    batch: int
    length: int  # of every request; ragged: their mean
    is_ragged: bool = False
    head_dim: int = 128

    def lengths(self) -> torch.Tensor:
        """Longest first, as the scheduler has them."""
        if not self.is_ragged:
            return torch.full((self.batch,), self.length, dtype=torch.int32)
        spread = torch.rand(self.batch, generator=torch.Generator().manual_seed(0)) + 0.5
        return (spread * self.length).int().sort(descending=True).values

    @property
    def kv_bytes(self) -> int:
        """Bytes that one layer must read."""
        return int(self.lengths().sum()) * self.num_kv_heads * self.head_dim * 2 * 2


class Layers:
    """KV pages of several layers in random order, and queries."""

    def __init__(self, case: Case) -> None:
        self.case = case
        lengths = case.lengths()
        self.num_pages = (lengths + PAGE_SIZE - 1) // PAGE_SIZE
        total = int(self.num_pages.sum())
        count = min(MAX_LAYERS, max(2, COLD_BYTES // case.kv_bytes))
        shape = (total + 1, PAGE_SIZE, case.num_kv_heads, case.head_dim)
        kwargs = {"dtype": torch.bfloat16, "device": "cuda"}
        self.pages = [
            (torch.empty(shape, **kwargs).normal_(), torch.empty(shape, **kwargs).normal_()) for _ in range(count)
        ]
        self.order = torch.randperm(total).int() + 1
        self.queries = torch.randn(count, case.batch, case.num_heads, case.head_dim, **kwargs)
        self.out = torch.zeros_like(self.queries)
        self.lengths = lengths

    def page_table(self) -> torch.Tensor:
        table = torch.zeros(self.case.batch, TABLE_TOKENS // PAGE_SIZE, dtype=torch.int32)
        start = 0
        for row, count in enumerate(self.num_pages.tolist()):
            table[row, :count] = self.order[start : start + count]
            start += count
        return table.cuda()

    def each(self, attend: Callable[..., object]) -> Callable[[], None]:
        def run() -> None:
            for query, pages, out in zip(self.queries, self.pages, self.out, strict=True):
                query.mul_(1)
                attend(query, pages, out)

        return run

    def layer_us(self, run: Callable[[], None]) -> float:
        """Microseconds of one layer of what `each` has made, without the kernel before it."""
        return (graph_us(run) - self._nothing_us) / len(self.pages)

    @cached_property
    def _nothing_us(self) -> float:
        return graph_us(self.each(lambda query, pages, out: None))


def planned(layers: Layers, workspace: torch.Tensor, use_tensor_cores: bool) -> Callable[[], None]:
    """FlashInfer's decode, planned as for a captured batch."""
    import flashinfer

    case = layers.case
    indptr = torch.zeros(case.batch + 1, dtype=torch.int32)
    indptr[1:] = layers.num_pages.cumsum(0)
    last = (layers.lengths - 1) % PAGE_SIZE + 1
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace,
        "NHD",
        use_cuda_graph=True,
        use_tensor_cores=use_tensor_cores,
        paged_kv_indptr_buffer=indptr.cuda(),
        paged_kv_indices_buffer=layers.order.cuda(),
        paged_kv_last_page_len_buffer=last.cuda(),
    )
    options = {"q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16}
    heads = (case.num_heads, case.num_kv_heads, case.head_dim, PAGE_SIZE)
    wrapper.plan(indptr, layers.order.cuda(), last, *heads, **options)
    return layers.each(lambda query, pages, out: wrapper.run(query, pages, out=out))


def xqa(layers: Layers, workspace: torch.Tensor) -> Callable[[], None]:
    from flashinfer.xqa import xqa as xqa_attention

    case = layers.case
    table, lengths = layers.page_table(), layers.lengths.cuda().view(torch.uint32)[:, None]
    semaphores = torch.zeros(1 << 16, dtype=torch.int32, device="cuda").view(torch.uint32)

    def attend(query: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        heads_and_page = (case.num_kv_heads, PAGE_SIZE)
        xqa_attention(query[:, None], *pages, table, lengths, out[:, None], workspace, semaphores, *heads_and_page)

    return layers.each(attend)


def split_decode(layers: Layers, is_few: bool, num_splits: int) -> Callable[[], None]:
    import mllm_compile.runtime.ops.attention.split_decode  # noqa: F401  (defines the op)

    case = layers.case
    table, lengths = layers.page_table(), layers.lengths.cuda()
    heads = (case.batch, num_splits, case.num_heads)
    scratch = [torch.empty(*heads, *rest, device="cuda") for rest in ((case.head_dim,), (), ())]
    done = torch.zeros(case.batch, case.num_kv_heads, dtype=torch.int32, device="cuda")
    most = (OF_FEW if is_few else OF_MANY).most
    options = {"sinks": None, "slopes": None, "bias": None, "page_size": PAGE_SIZE, "max_splits": most}
    options |= {"sm_scale": case.head_dim**-0.5, "soft_cap": 0.0, "window_left": -1, "fetch_first": is_few, "chunk": 0}

    def attend(query: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        keys, values = (page.flatten(0, 1) for page in pages)
        torch.ops.mllm.split_decode(query, keys, values, table, lengths, out, *scratch, done, **options)

    return layers.each(attend)


def ordered_decode(layers: Layers, blocks: int) -> Callable[[], None]:
    import mllm_compile.runtime.ops.attention.ordered_decode  # noqa: F401  (defines the op)

    case = layers.case
    table, lengths = layers.page_table(), layers.lengths.cuda()
    heads = (case.batch, IN_ORDER.most, case.num_heads)
    scratch = [torch.empty(*heads, *rest, device="cuda") for rest in ((case.head_dim,), (), ())]
    done = torch.zeros(case.batch, case.num_kv_heads, dtype=torch.int32, device="cuda")
    options = {"sinks": None, "slopes": None, "page_size": PAGE_SIZE, "sm_scale": case.head_dim**-0.5, "soft_cap": 0.0}

    def attend(query: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        keys, values = (page.flatten(0, 1) for page in pages)
        inputs = (query, keys, values, table, lengths, out, *scratch, done)
        torch.ops.mllm.ordered_decode(*inputs, **options, blocks=blocks)

    return layers.each(attend)


@cache
def hopper_kernels(num_heads: int, num_kv_heads: int, head_dim: int, with_fewer: bool) -> dict[str, DecodePiece]:
    """Clusters and shares, compiled; none on other GPUs. Clusters of no more than 2 or 4 blocks too, if asked for."""
    if not are_served(num_heads, num_kv_heads, head_dim, PAGE_SIZE) or not can_compile_kernels("cuda:0"):
        return {}
    together = heads_together(num_kv_heads, head_dim)
    kv_heads, width = num_kv_heads // together, head_dim * together
    clusters = cluster_kernels(num_heads, kv_heads, PAGE_SIZE, together=together) if has_clusters(width) else ()
    shares = ShareKernel(kv_heads, num_heads // kv_heads, PAGE_SIZE, head_dim=width, together=together)
    with KernelCompiler() as compiler:
        binaries = binaries_of(compiler, (*clusters, shares))
    scale, device = head_dim**-0.5, torch.device("cuda:0")
    most_blocks = {"clusters": 8, **({"clusters/2": 2, "clusters/4": 4} if with_fewer else {})}
    decoders: dict[str, DecodePiece] = {}
    for name, most in most_blocks.items() if clusters else ():
        some = [kernel for kernel in clusters if kernel.split <= most]
        decoders[name] = ClusterDecode(some, binaries, scale, device)
    decoders["shares"] = ShareDecode(shares, binaries, scale, device)
    return decoders


def hopper_decode(layers: Layers, kernel: DecodePiece) -> Callable[[], None]:
    table, lengths = layers.page_table(), layers.lengths.cuda()

    def attend(query: torch.Tensor, pages: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor) -> None:
        keys, values = (page.flatten(0, 1) for page in pages)
        kernel([query, keys, values, table, lengths, out])

    return layers.each(attend)


def measure(case: Case, workspace: torch.Tensor, ours_alone: bool) -> dict[str, float]:
    """Microseconds by kernel: "Triton" with the form and split that are chosen, "few/4" with these."""
    layers = Layers(case)
    sequences = case.batch * case.num_kv_heads
    is_few = sequences <= MOST_FEW_SEQUENCES
    kernels = {
        "CUDA cores": lambda: planned(layers, workspace, False),
        "tensor cores": lambda: planned(layers, workspace, True),
        "XQA": lambda: xqa(layers, workspace),
        "Triton": lambda: split_decode(layers, is_few, (OF_FEW if is_few else OF_MANY).of(sequences)),
    }
    if ours_alone:
        kernels = {"Triton": kernels["Triton"]}
    for name, kernel in hopper_kernels(case.num_heads, case.num_kv_heads, case.head_dim, ours_alone).items():
        kernels[name] = lambda kernel=kernel: hopper_decode(layers, kernel)
    for few, name, most in ((True, "few", OF_FEW.most), (False, "many", OF_MANY.most)):
        for splits in SPLITS:
            is_told = not ours_alone or case.head_dim not in HEAD_DIMS
            if is_told and splits <= most and splits * sequences <= MAX_BLOCKS:
                kernels[f"{name}/{splits}"] = lambda few=few, splits=splits: split_decode(layers, few, splits)
    for blocks in (1, 2, 4, 8, 16) if ours_alone else ():
        if blocks * sequences <= MAX_BLOCKS:
            kernels[f"in order/{blocks}"] = lambda blocks=blocks: ordered_decode(layers, blocks)
    times, outputs = {}, {}
    for name, make in kernels.items():
        times[name] = layers.layer_us(make())
        outputs[name] = layers.out.float().clone()
        layers.out.fill_(float("nan"))
    first, reference = next(iter(outputs.items()))
    for name, output in outputs.items():
        error = float((output - reference).norm() / reference.norm())
        if not error < 1e-2:
            sys.exit(f"{name} differs from {first} by {error:.2e} for {case}")
    return times


def heads_of(text: str) -> tuple[int, int]:
    num_heads, num_kv_heads = map(positive, text.split("/"))
    return num_heads, num_kv_heads


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--json", type=Path, help="also add the figures to this file, as a line")
    parser.add_argument("--heads", type=heads_of, nargs="+", default=HEADS, help="query heads/KV heads")
    parser.add_argument("--head-dim", type=int, choices=(64, *HEAD_DIMS), default=HEAD_DIMS[0])
    parser.add_argument("--batches", type=positive, nargs="+", default=BATCHES)
    parser.add_argument("--lengths", type=positive, nargs="+", default=LENGTHS)
    parser.add_argument("--ours", action="store_true", help="leave out what is not the program's own")
    arguments = parser.parse_args()
    if arguments.head_dim != CLUSTERS_HEAD_DIM and not arguments.ours:
        parser.error(f"heads of {arguments.head_dim} are timed by the program's own kernels alone: add --ours")
    need_gpu()
    torch.manual_seed(0)
    workspace = torch.zeros(512 << 20, dtype=torch.uint8, device="cuda")
    results = []
    ours = ("Triton", "clusters", "shares")
    columns = ("CUDA cores", "tensor cores", "XQA", *ours)
    print("heads   batch length    CUDA  tensor     XQA  Triton clusters  shares  fastest  TB/s  Triton's fastest")
    ragged = arguments.batches[-2:] if arguments.batches is BATCHES else ()
    for num_heads, num_kv_heads in arguments.heads:
        for is_ragged, batches in ((False, arguments.batches), (True, ragged)):
            for batch in batches:
                for length in (length for length in arguments.lengths if length * batch <= MAX_TOKENS):
                    case = Case(num_heads, num_kv_heads, batch, length, is_ragged, arguments.head_dim)
                    times = measure(case, workspace, arguments.ours)
                    results.append(asdict(case) | {"us": times})
                    own = min((name for name in times if name in ours), key=times.__getitem__)
                    rate = case.kv_bytes / times[own] / 1e6
                    others = {name: us for name, us in times.items() if "/" in name}
                    fastest = min(others, key=others.__getitem__, default="")
                    shown = others if arguments.ours else {fastest: others.get(fastest, 0.0)}
                    heads, mark = f"{num_heads:2}/{num_kv_heads}", "~" if is_ragged else " "
                    print(
                        f"{heads} {mark}{batch:5} {length:6}",
                        *(f"{times[name]:7.2f}" if name in times else f"{'':7}" for name in columns),
                        f"{own:8} {rate:5.2f} ",
                        ", ".join(f"{name} {us:.2f}" for name, us in shown.items()),
                    )
    if arguments.json:
        append_record(arguments.json, __doc__, arguments, results)


if __name__ == "__main__":
    main()
