"""The factors of the adapters that are on the device: a slot each, at addresses that stay.

Shape legend: K inputs, N outputs of a weight, r the rank of an adapter there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from mllm_compile.runtime.lora.target import LoraLayout, LoraTarget, Ranges, a_name, b_name, scales_name
from mllm_compile.runtime.lora.turns import in_turns

# Weight → A and B of the shapes that LoraTarget.shapes has, all scales within B; of DoRA also what W's outputs [N] are
# multiplied with.
Factors = Mapping[str, tuple[torch.Tensor, ...]]


class _Places(NamedTuple):
    """The views of a slot that a target's factors go to, of max_rank; and of the scales of its outputs, if any."""

    a: torch.Tensor
    b: torch.Tensor
    scales: torch.Tensor | None = None


class LoraPool:
    """The buffers of a rank's adapters.

    Attributes:
        targets: the weights that adapters may change, by their names.
        buffers: by the program's names.
        scaled: the linears whose outputs adapters may scale.
        unread: as LoraLayout's.
    """

    def __init__(self, layout: LoraLayout, device: torch.device, rank: int = 0) -> None:
        self.num_slots, self.max_rank = layout.num_slots, layout.max_rank
        self.unread = layout.unread
        self.dtype: torch.dtype = getattr(torch, layout.dtype)
        self.targets: Mapping[str, LoraTarget] = {target.weight: target for target in layout.targets}
        self.buffers = {
            name: torch.zeros(shape, dtype=self.dtype, device=device) for name, shape in layout.shapes().items()
        }
        self.scaled = frozenset(one.linear for one in layout.buffers if one.scales)
        for linear in self.scaled:
            self.buffers[scales_name(linear)].fill_(1)  # for good, where a part of the linear is no target
        self._rank = rank
        self._places: dict[int, list[tuple[LoraTarget, _Places]]] = {}  # by slot

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def check(self, factors: Factors) -> None:
        """Checks an adapter against the weights that it changes.

        Raises:
            ValueError: it changes another weight, a shape is not the weight's, or a rank is above max_rank.
        """
        for name, (a, b, *scales) in in_turns(factors.items()):
            target = self.targets.get(name)
            if target is None:
                raise ValueError(f"{name!r} is no weight that adapters may change; these are: {self._named()}")
            rank = a.shape[-2]
            shapes = tuple(a.shape), tuple(b.shape)
            if shapes != target.shapes(rank):
                expected = " and ".join(str(list(shape)) for shape in target.shapes(rank))
                raise ValueError(
                    f"{name!r}: expected A and B of shapes {expected}, got {list(a.shape)} and {list(b.shape)}"
                )
            if scales and (target.linear not in self.scaled or scales[0].shape != (target.outputs,)):
                raise ValueError(f"{name!r}: expected no scales, or [{target.outputs}] with lora.dora: true")
            if rank > self.max_rank:
                raise ValueError(f"{name!r}: expected a rank of at most {self.max_rank} (lora.max_rank), got {rank}")

    def write(self, slot: int, factors: Factors) -> None:
        """Makes this adapter the one in `slot`, on the current stream; weights that it does not name are the base's.

        Args:
            factors: whole, also where ranks have parts of the weights; in any floating type, on any device.

        Raises:
            ValueError: as `check`; or there is no such slot.
        """
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"expected a slot of 0 to {self.num_slots - 1}, got {slot}")
        self.check(factors)
        zeros: list[torch.Tensor] = []
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for target, places in in_turns(self._places_of(slot)):
            given = factors.get(target.weight)
            rank = 0 if given is None else given[0].shape[-2]
            a, b = places.a, places.b
            if given is not None:
                own_a, own_b = self._parts(target, given)
                is_whole = rank == self.max_rank
                targets += (a, b) if is_whole else (a[..., :rank, :], b[..., :rank])
                sources += (own_a, own_b)
            if rank < self.max_rank:
                # Both: what was there may be no number, and zero times that is none.
                zeros += (a[..., rank:, :], b[..., rank:])
            if places.scales is None:
                continue
            if given is None or len(given) < 3:
                places.scales.fill_(1)
            else:
                places.scales.copy_(self._part(given[2], 0, target.output_ranges), non_blocking=True)
        # All at once: a call of each takes longer than the copies.
        if targets:
            torch._foreach_copy_(targets, sources, non_blocking=True)
        if zeros:
            torch._foreach_zero_(zeros)

    def _places_of(self, slot: int) -> list[tuple[LoraTarget, _Places]]:
        """The places of all targets, found once: making 500 views takes longer than copies into them."""
        if slot not in self._places:
            self._places[slot] = [(target, self._places_in(target, slot)) for target in in_turns(self.targets.values())]
        return self._places[slot]

    def _places_in(self, target: LoraTarget, slot: int) -> _Places:
        a, b = (self.buffers[name(target.linear)][slot] for name in (a_name, b_name))
        if target.kind == "embedding":
            return _Places(a.T, b)
        if target.kind == "experts":
            return _Places(a.unflatten(0, (-1, self.max_rank)), b.unflatten(0, (-1, target.rows)))
        a, b = a.narrow(0, target.part * self.max_rank, self.max_rank), b.narrow(0, target.start, target.rows)
        if target.linear not in self.scaled:
            return _Places(a, b)
        return _Places(a, b, self.buffers[scales_name(target.linear)][slot].narrow(0, target.stored_start, target.rows))

    def _parts(self, target: LoraTarget, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's parts of A and B."""
        a, b = (self._part(one, 0, target.expert_ranges) for one in given[:2])
        return self._part(a, -1, target.input_ranges), self._part(b, -2, target.output_ranges)

    def _part(self, factor: torch.Tensor, dim: int, ranges: Ranges) -> torch.Tensor:
        """This rank's part of a factor."""
        if not ranges:
            return factor
        return torch.cat([factor.narrow(dim, start, length) for start, length in ranges[self._rank]], dim)

    def _named(self) -> str:
        names = list(self.targets)
        return ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
