"""One update of a model's weights: takes tensors one by one, checks them, and swaps them in whole.

*Staged*: tensors go into copies beside the weights, which serve on; `swap` copies these over. *Direct*: they go
straight into the weights, so no step is launched from the first one on, and an update that breaks off leaves them
neither old nor new (`is_torn`). The caller sees to the moment; nothing here knows steps or requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from mllm_compile.runtime.errors import DeviceMemoryError, WeightUpdateError
from mllm_compile.runtime.updates.live import LiveWeights
from mllm_compile.runtime.updates.places import Box, Found, Use, Vocabulary, needed_of
from mllm_compile.runtime.updates.sparse import Scatter, scatters_of
from mllm_compile.runtime.weights.checks import faults_of
from mllm_compile.runtime.weights.formats.base import StoredTensor
from mllm_compile.runtime.weights.formats.registry import FORMATS
from mllm_compile.runtime.weights.making import Quantising, making_of
from mllm_compile.runtime.weights.spec import WeightPart, WeightSpec, place_of
from mllm_compile.runtime.weights.sums import weight_sums
from mllm_compile.runtime.weights.views import viewed

_NAMED = 5  # of tensors that are missing


class WeightUpdate:
    """An update that has begun.

    Attributes:
        num_tensors: those taken.
        num_unread: those of them that the program does not read.
        is_whole: it was swapped in.
        is_partial: weights that it does not bring stay.

    Args:
        live: the weights.
        is_direct: without a copy beside them.
        is_partial: weights that it does not bring stay.
        names: the vocabulary of tensors' names; None: either.
    """

    def __init__(
        self,
        live: LiveWeights,
        *,
        is_direct: bool = False,
        is_partial: bool = False,
        names: Vocabulary | None = None,
    ) -> None:
        self._live, self._places = live, live.places
        self._is_direct, self.is_partial, self._names = is_direct, is_partial, names
        self.num_tensors = self.num_unread = 0
        self._has_written = self.is_whole = False
        self._device = next(iter(live.tensors.values())).device
        self._taken: set[str] = set()
        self._sums_of_ties: dict[str, list[int]] = {}  # of what came by each name
        self._filled: dict[Box, str] = {}  # by which tensor
        self._specs: dict[str, WeightSpec] = {}  # weights that were filled, in the vocabulary of their tensors
        self._held: dict[str, torch.Tensor] = {}  # of weights that are made of several
        self._needed: dict[str, list[str]] = {}  # a held tensor → all that its weight is made of
        self._staged: dict[str, torch.Tensor] = {}
        self._scatters: list[Scatter] = []
        self._may_write = not is_direct

    @property
    def is_torn(self) -> bool:
        """True if the weights are neither the old ones nor the new."""
        return self._has_written and not self.is_whole

    def begin_writing(self) -> None:
        """Waits for steps that read weights, if the update is direct; else for nothing, and once.

        Ahead of a tensor that comes over a group: to receive one may hold up whatever waits for the whole device.
        """
        if not self._may_write:
            _synchronize(self._device)
            self._may_write = True

    def check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Found:
        """Where a tensor would go that is announced.

        Raises:
            WeightUpdateError: it cannot be taken: unknown, of another shape or type, or there already.
        """
        if name in self._taken:
            raise WeightUpdateError(f"tensor {name!r} came twice in this update. Send each tensor once.")
        return self._places.find(name, shape, dtype, self._names)

    def take(self, name: str, tensor: torch.Tensor, byte_sum: int | None = None) -> None:
        """Copies a tensor to where it goes; its memory may be used again behind this, on the current stream.

        Args:
            byte_sum: weights/sums.py's, as its sender computed it.

        Raises:
            WeightUpdateError: it cannot be taken, or has another sum. `prepare` finds NaN and inf: to look for them in
                each tensor, the host would wait for the device as often.
            DeviceMemoryError: there is no room for a copy of the weights.
        """
        tensor = tensor.detach()
        found = self.check(name, tuple(tensor.shape), tensor.dtype)
        self.begin_writing()
        with torch.inference_mode(), _room():
            if byte_sum is not None and _sum_of(tensor) != byte_sum:
                raise WeightUpdateError(f"tensor {name!r} is not what was sent: its sum differs. Send it again.")
            self._check_factor(name, tensor)
            if not self._is_told_by_a_tie(name, tensor):
                self._fill(found, tensor)
        self._taken.add(name)
        self.num_tensors += 1
        self.num_unread += not found.uses

    def take_delta(self, name: str, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Takes new values of some of a tensor's numbers; the others stay.

        Args:
            indices: [n] int32 or int64, places in the tensor when it is flat; each once.
            values: [n], of a floating type.

        Raises:
            WeightUpdateError: there is no such tensor, it is quantised in memory, an index is beyond it or there twice,
                a value is NaN or inf, or the update is to be whole.
        """
        if not self.is_partial or self._is_direct:
            raise WeightUpdateError(
                f"some values of {name!r} came, in an update that is whole or direct. Begin a staged "
                "one with partial=True."
            )
        if name in self._taken:
            raise WeightUpdateError(f"tensor {name!r} came twice in this update. Send each tensor once.")
        with torch.inference_mode(), _room():
            uses = self._places.uses(name, self._names)
            if not self._is_told_by_a_tie(name, indices, values):
                scatters = scatters_of(name, uses, indices, values, self._live)
                for use in uses:
                    self._claim(use.box, name)
                self._scatters += scatters
        self._taken.add(name)
        self.num_tensors += 1
        self.num_unread += not uses

    def missing(self) -> list[str]:
        """Names of tensors that are still to come."""
        names = [name for needed in self._needed.values() for name in needed if name not in self._held]
        if not self.is_partial:
            names += self._places.missing(set(self._filled))
        return [name for name in dict.fromkeys(names) if name not in self._held]

    def check_complete(self) -> None:
        """
        Raises:
            WeightUpdateError: a tensor is missing.
        """
        missing = self.missing()
        if missing:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            raise WeightUpdateError(
                f"the update lacks {', '.join(map(repr, missing[:_NAMED]))}{more}. Send them, or begin one with "
                "partial=True."
            )

    def prepare(self) -> None:
        """Checks what was taken, ahead of `swap`.

        Raises:
            WeightUpdateError: a weight holds NaN or inf.
            DeviceMemoryError: there is no room for it.
        """
        with torch.inference_mode(), _room():
            of_live = {name: self._live.tensors[name] for name in self._specs if name not in self._staged}
            for part, what, _ in faults_of(list(self._specs.values()), of_live | self._staged):
                raise WeightUpdateError(f"tensor {part.tensor!r} {what}. The update is refused.")
            for name, weight in self._staged.items():
                self._live.as_served(name, weight)
        _synchronize(self._device)

    def swap(self) -> None:
        """Writes what was prepared into the weights, and waits for the device before and behind: steps have streams of
        their own, and kernels that are launched early read weights ahead of the kernels before them."""
        _synchronize(self._device)
        self._has_written = True
        self._live.written.update(self._specs, self._staged, (scatter.weight for scatter in self._scatters))
        with torch.inference_mode():
            if self._staged:
                torch._foreach_copy_([self._live.tensors[name] for name in self._staged], list(self._staged.values()))
            for scatter in self._scatters:
                scatter.write(self._live)
        _synchronize(self._device)
        self.is_whole = True
        self.drop()

    def drop(self) -> None:
        """Lets go of what was taken."""
        self._staged.clear()
        self._held.clear()
        self._scatters.clear()

    # --- a tensor arrives ---------------------------------------------------------------------------------------------

    def _check_factor(self, name: str, tensor: torch.Tensor) -> None:
        factor = self._places.factors.get(name)
        if factor is None:
            return
        if self._live.factors.get(factor) != factor.power_of(float(tensor)):
            raise WeightUpdateError(
                f"tensor {name!r} is a scale of the KV cache, which cached keys and values have: expected the one that "
                "was loaded. Leave it out, or start the engine anew."
            )

    def _is_told_by_a_tie(self, name: str, *tensors: torch.Tensor) -> bool:
        """True if the tensor, or the places and values of some of it, came by another name, and are the same."""
        tie = self._places.same(name)
        if not tie:
            return False
        own = [_sum_of(tensor) for tensor in tensors]
        for other in tie:
            if self._sums_of_ties.get(other, own) != own:
                raise WeightUpdateError(
                    f"tensors {other!r} and {name!r} are one weight of this model, and they differ. Send one of "
                    "them, or both equal; serve a checkpoint that has two where they may differ."
                )
        is_told = bool(self._sums_of_ties.keys() & set(tie))
        self._sums_of_ties[name] = own
        return is_told

    def _fill(self, found: Found, tensor: torch.Tensor) -> None:
        tensor = tensor.to(self._device)
        plain = [use for use in found.uses if use.part.quantised is None]
        quantising = Quantising()
        places = [self._place(use, found.name) for use in plain]
        for use, place in zip(plain, places, strict=True):
            if use.part.is_quantised_here:
                quantising.add(use.part, place)
            else:
                making_of(use.part, place)([tensor])
        for one in quantising.found():
            one.fill(viewed(tensor, one.rows))
        for use, place in zip(plain, places, strict=True):
            self._scale(use.part, place)
        if len(plain) < len(found.uses):
            self._held[found.name] = tensor.clone()
            self._fill_quantised([use for use in found.uses if use.part.quantised is not None])

    def _fill_quantised(self, uses: Sequence[Use]) -> None:
        """Fills parts whose tensors are all there, and lets go of these."""
        ready = [use for use in uses if all(name in self._held for name in needed_of(use.part))]
        for use in ready:
            self._check_details(use.part)
        for use in ready:
            place = self._place(use, use.part.tensor)
            making_of(use.part, place)([self._held[one.name] for one in use.part.sources])
            self._scale(use.part, place)
        for use in uses:
            for name in needed_of(use.part):
                if ready:
                    self._held.pop(name, None)
                    self._needed.pop(name, None)
                elif name in self._held:
                    self._needed[name] = needed_of(use.part)

    def _check_details(self, part: WeightPart) -> None:
        """Refuses numbers within small tensors that are others than those that were compiled for."""
        quantised = part.quantised
        assert quantised is not None, "others have none"

        def read(one: StoredTensor) -> bytes:
            return self._held[one.name].cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()

        for name, value in FORMATS[quantised.format].details(quantised.tensors, read).items():
            if quantised.numbers.get(name) != value:
                raise WeightUpdateError(
                    f"tensor {part.tensor!r}: expected {name} to be {quantised.numbers.get(name)}, got {value}. "
                    "Quantise it as the checkpoint is that was compiled, or send it plain."
                )

    def _place(self, use: Use, name: str) -> torch.Tensor:
        """The place of a part, which `name` fills now."""
        self._claim(use.box, name)
        self._specs[use.spec.name] = use.spec
        return place_of(self._weight(use.spec), use.part)

    def _claim(self, box: Box, name: str) -> None:
        """Notes that `name` fills a box.

        Raises:
            WeightUpdateError: another tensor does.
        """
        other = self._filled.setdefault(box, name)
        if other != name:
            raise WeightUpdateError(f"tensors {other!r} and {name!r} fill one place of the model. Send one of them.")

    def _weight(self, spec: WeightSpec) -> torch.Tensor:
        """The weight to write: a copy beside the one that serves, unless the update is direct."""
        name = spec.name
        if self._is_direct and name not in self._live.panels:
            self._has_written = True
            return self._live.tensors[name]
        if name not in self._staged:
            if self.is_partial:
                self._staged[name] = self._live.in_rows(name)
            else:
                new = torch.zeros_like if spec.has_zeros else torch.empty_like
                self._staged[name] = new(self._live.tensors[name])
        return self._staged[name]

    def _scale(self, part: WeightPart, place: torch.Tensor) -> None:
        """Multiplies a part as loading did."""
        if part.factor is None:
            return
        if part.factor not in self._live.factors:
            raise WeightUpdateError(
                f"tensor {part.tensor!r} is multiplied by a scale of the KV cache that a packed runtime does not have. "
                "Compile the model without --pack-weights."
            )
        place.mul_(self._live.factors[part.factor])


@contextmanager
def _room() -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise no_room("the device") from error


def no_room(where: str) -> DeviceMemoryError:
    """The error of an update that finds no memory."""
    return DeviceMemoryError(
        f"{where} has no room for a copy of the weights beside those that serve. Begin the update with direct=True, "
        "which needs none, or leave more memory free by a smaller runtime.mem_fraction_static."
    )


def _sum_of(tensor: torch.Tensor) -> int:
    return weight_sums({"": tensor.contiguous()})[""]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
