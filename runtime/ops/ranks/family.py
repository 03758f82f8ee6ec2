"""The kernels that work over ranks, as the compiler, the stored program and the checks see them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mllm_compile.runtime.collectives.sum_kernels import (
    KERNELS,
    AddNormKernel,
    ChooseKernel,
    PushKernel,
    PushNormKernel,
    RanksKernel,
    SendKernel,
    SendNormKernel,
)
from mllm_compile.runtime.cuda.family import KernelFamily
from mllm_compile.runtime.cuda.kernel import CudaKernel
from mllm_compile.runtime.files.json_data import from_json

if TYPE_CHECKING:
    import torch

    from mllm_compile.runtime.cuda.family import CalledPieces

_CHECKED_SIZES = (8, 4096, 131072)  # elements, each several times: three buffers take turns
_CHECKED_ROWS = (1, 7, 40)
_CHECKED_RANKS = 2
_CHECKED_BLOCKS = 16  # of each rank, which share the GPU here
_CHECKED_BYTES = 2 << 20  # of a copied sum: more than the largest of these rows
_MOST_OFF = 0.02  # of a norm's numbers, which are of about 1: two roundings to bfloat16


class Family(KernelFamily):
    """Two kernels if pieces sum bfloat16 over ranks, three for each width of rows that are then normed, and one for
    each number of gathered columns, as of logits."""

    def wanted(self, pieces: CalledPieces) -> tuple[RanksKernel, ...]:
        import torch

        from mllm_compile.runtime.ops import op

        summing, norming, gathering = op("all_reduce"), op("all_reduce_residual_norm"), op("all_gather")
        targets = (summing, norming, gathering)
        nodes = [node for piece, _ in pieces for node in piece.graph.nodes if node.target in targets]
        values = {node: node.args[0].meta["val"] for node in nodes}
        ours = [node for node, val in values.items() if val.dtype is torch.bfloat16 and val.device.type == "cuda"]
        summed = [node for node in ours if node.target is not gathering]
        if not summed:
            return ()
        widths = sorted({int(values[node].shape[-1]) for node in summed if node.target is norming})
        normed = [kernel(width) for width in widths for kernel in (PushNormKernel, SendNormKernel, AddNormKernel)]
        columns = {
            int(values[node].shape[-1])
            for node in ours
            if node.target is gathering and node.args[1] == values[node].ndim - 1
        }
        return (PushKernel(), SendKernel(), *normed, *(ChooseKernel(size) for size in sorted(columns)))

    def from_json(self, data: Mapping[str, Any]) -> RanksKernel:
        kind = {kernel.source: kernel for kernel in KERNELS}[data["source"]]
        return from_json(kind, {name: value for name, value in data.items() if name != "source"})

    def load(self, kernels: Sequence[CudaKernel], binaries: Mapping[str, bytes], device: torch.device) -> None:
        from mllm_compile.runtime.collectives.push import load_ranks_kernel

        for kernel in kernels:
            if isinstance(kernel, KERNELS):
                load_ranks_kernel(kernel, binaries, device)

    def faults(self, kernels: Sequence[CudaKernel], device: torch.device) -> Iterator[str]:
        """Runs two ranks on this one device, on two streams."""
        if not kernels:
            return
        ranks = _Ranks(device)
        for kernel in kernels:
            if isinstance(kernel, PushKernel | SendKernel):
                yield from ranks.faults_of_sums(kernel)
            if isinstance(kernel, PushNormKernel | SendNormKernel | AddNormKernel):
                yield from ranks.faults_of_norms(kernel)
            if isinstance(kernel, ChooseKernel):
                yield from ranks.faults_of_choices(kernel)


class _Ranks:
    def __init__(self, device: torch.device) -> None:
        import torch

        from mllm_compile.runtime.collectives.choose import TokenChoice, choice_bytes
        from mllm_compile.runtime.collectives.copied import CopiedSums, copied_bytes
        from mllm_compile.runtime.collectives.push import NOTHING, PushedSums, SentSums, buffer_bytes, sent_bytes

        def ranks(kind: Any, num_bytes: int, word: int, *most: int) -> list[Any]:
            self._memory += [
                torch.full((num_bytes // 4,), word, dtype=torch.int32, device=device) for _ in range(_CHECKED_RANKS)
            ]
            places = [one.data_ptr() for one in self._memory[-_CHECKED_RANKS:]]
            return [kind(rank, places, device, *most) for rank in range(_CHECKED_RANKS)]

        self._device = device
        self._memory: list[torch.Tensor] = []
        self._pushed = ranks(PushedSums, buffer_bytes(_CHECKED_RANKS), NOTHING - (1 << 32), _CHECKED_BLOCKS)
        self._sent = ranks(SentSums, sent_bytes(_CHECKED_RANKS), 0, _CHECKED_BLOCKS)
        self._choices = ranks(TokenChoice, choice_bytes(_CHECKED_RANKS), 0)
        num_bytes = copied_bytes(_CHECKED_RANKS, _CHECKED_BYTES)
        self._copied = ranks(CopiedSums, num_bytes, 0, _CHECKED_BYTES)
        self._streams = [torch.cuda.Stream(device) for _ in range(_CHECKED_RANKS)]
        self._generator = torch.Generator(device).manual_seed(0)

    def _random(self, *shape: int) -> torch.Tensor:
        import torch

        return torch.randn(shape, generator=self._generator, device=self._device).bfloat16()

    def _run(self, ranks: Sequence[Any], call: Callable[[int, Any], Any]) -> list[Any]:
        import torch

        torch.cuda.synchronize(self._device)
        found = []
        for rank, stream in enumerate(self._streams):
            with torch.cuda.stream(stream):
                found.append(call(rank, ranks[rank]))
        torch.cuda.synchronize(self._device)
        return found

    def faults_of_sums(self, kernel: PushKernel | SendKernel) -> Iterator[str]:
        import torch

        ranks = self._pushed if isinstance(kernel, PushKernel) else self._sent
        for size in _CHECKED_SIZES * 3:
            parts = [self._random(size) for _ in range(_CHECKED_RANKS)]
            parts[0][0] = parts[1][0] = -0.0
            sums = self._run(ranks, lambda rank, one: one.sum(parts[rank]))  # noqa: B023
            wanted = (parts[0].float() + parts[1].float()).bfloat16()
            if not all(torch.equal(one, wanted) for one in sums):
                yield f"{kernel.name}: the sum of {size} numbers is wrong. Set {kernel.switch}, and report this."
                return

    def faults_of_norms(self, kernel: PushNormKernel | SendNormKernel | AddNormKernel) -> Iterator[str]:
        import torch

        ranks = {PushNormKernel: self._pushed, SendNormKernel: self._sent}.get(type(kernel), self._copied)
        for rows in _CHECKED_ROWS * 3:
            parts = [self._random(rows, kernel.columns) for _ in range(_CHECKED_RANKS)]
            residual, weight = self._random(rows, kernel.columns), self._random(kernel.columns)
            found = self._run(ranks, lambda rank, one: one.sum_and_norm(parts[rank], residual, weight, 1e-6))  # noqa: B023
            summed = (residual.float() + (parts[0].float() + parts[1].float())).bfloat16()
            wide = summed.float()
            normed = weight.float() * wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
            are_right = all(
                torch.equal(one, summed) and float(((other - normed).abs() / (1 + normed.abs())).max()) < _MOST_OFF
                for one, other in found
            )
            if not are_right or not torch.equal(found[0][1], found[1][1]):
                yield (
                    f"{kernel.name}: the norm of {rows} rows that are summed over ranks is wrong. Set {kernel.switch}, "
                    "and report this."
                )
                return

    def faults_of_choices(self, kernel: ChooseKernel) -> Iterator[str]:
        import torch

        from mllm_compile.runtime.collectives.choose import HandOn

        for rows in _CHECKED_ROWS * 3:
            whole = self._random(rows, _CHECKED_RANKS * kernel.columns)
            whole[0, [kernel.columns - 1, -1]] = 60.0  # of equals the lowest
            whole[rows // 2, 1] = torch.nan if rows > 1 else 70.0
            wanted = whole.argmax(-1)
            wanted[whole.isnan().any(-1)] = -1
            parts = [part.contiguous() for part in whole.chunk(_CHECKED_RANKS, -1)]
            slots = torch.arange(rows, device=self._device)
            fives = [torch.full((rows,), 5, device=self._device) for _ in range(2 * _CHECKED_RANKS)]
            places = [
                HandOn(slots, fives[rank], fives[-1 - rank][:1], slots.new_zeros(8, 64))
                for rank in range(_CHECKED_RANKS)
            ]
            found = self._run(self._choices, lambda rank, one: one.choose(parts[rank], places[rank]))  # noqa: B023
            kept = wanted.clamp(min=0)
            kept[0] = 5  # the dummy row keeps its own
            are_right = all(
                torch.equal(tokens, wanted)
                and torch.equal(there.last_tokens, kept)
                and torch.equal(there.chosen[5, :rows], wanted)
                and there.replay_slot.tolist() == [6]
                for tokens, there in zip(found, places, strict=True)
            )
            if not are_right:
                yield f"{kernel.name}: the tokens of {rows} rows are wrong. Set {kernel.switch}, and report this."
                return
