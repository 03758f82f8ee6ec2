"""An update of a model over several ranks: rank 0 takes it, and sends the others what it has checked.

Whole tensors go to every rank, which keeps its part. All swap behind the same step, as messages and steps come in one
order. Rank 0 looks at what it has no part of: a follower that refused something could not go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress

import torch

from mllm_compile.runtime.errors import MllmError, WeightUpdateError
from mllm_compile.runtime.updates.live import LiveWeights
from mllm_compile.runtime.updates.places import Found, Vocabulary
from mllm_compile.runtime.updates.session import WeightUpdate, no_room
from mllm_compile.runtime.updates.sparse import check_values
from mllm_compile.runtime.updates.wire import pack

Send = Callable[[Iterable[memoryview]], None]


class RankedUpdate(WeightUpdate):
    """Like WeightUpdate.

    Args:
        send: has the followers take a message; from the thread that takes tensors.
        send_still: likewise, from the thread of `swap`.
        agree: sends a message, and tells whether all followers could do what was sent before it.
    """

    def __init__(
        self,
        live: LiveWeights,
        send: Send,
        send_still: Send,
        agree: Callable[[Iterable[memoryview]], bool],
        *,
        is_direct: bool = False,
        is_partial: bool = False,
        names: Vocabulary | None = None,
    ) -> None:
        super().__init__(live, is_direct=is_direct, is_partial=is_partial, names=names)
        self._send, self._send_still, self._agree = send, send_still, agree
        self._of_others = live.places_of_others
        send(pack("begin", is_direct=is_direct, is_partial=is_partial, names=names))

    def check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Found:
        """Where a tensor would go on this rank, if all can take it; see WeightUpdate.check."""
        for places in self._of_others:
            places.find(name, shape, dtype, self._names)
        return super().check(name, shape, dtype)

    def take(self, name: str, tensor: torch.Tensor, byte_sum: int | None = None) -> None:
        """Takes a tensor for all ranks; see WeightUpdate.take. NaN and inf are refused here, not by `prepare`."""
        with torch.inference_mode():
            self._check_numbers(name, tensor)
        super().take(name, tensor, byte_sum)
        if self._is_direct and self._others_read(name, tensor):
            self._has_written = True  # they do, perhaps ahead of this rank's first tensor
        self._send(pack("take", [tensor], name=name))

    def take_delta(self, name: str, indices: torch.Tensor, values: torch.Tensor) -> None:
        """Takes single values for all ranks; see WeightUpdate.take_delta."""
        with torch.inference_mode():
            for places in self._of_others:
                check_values(name, places.uses(name, self._names), indices, values)
            self._check_numbers(name, values)
        super().take_delta(name, indices, values)
        self._send(pack("delta", [indices, values], name=name))

    def missing(self) -> list[str]:
        """Names of tensors that are still to come, to any rank."""
        names = super().missing()
        if not self.is_partial:
            for places in self._of_others:
                names += places.missing(places.filled_by(self._taken))
        return list(dict.fromkeys(names))

    def prepare(self) -> None:
        """Checks what was taken, on all ranks; see WeightUpdate.prepare."""
        super().prepare()
        if not self._agree(pack("prepare")):
            raise no_room("a rank that follows")

    def swap(self) -> None:
        """Swaps on all ranks behind the steps that were announced."""
        self._send_still(pack("swap"))
        super().swap()

    def drop(self) -> None:
        """Lets go of what was taken, on all ranks; behind a swap nothing is left of it."""
        if not self.is_whole:
            with suppress(MllmError):  # ranks that are gone have nothing to let go of
                self._send(pack("drop"))
        super().drop()

    def _others_read(self, name: str, tensor: torch.Tensor) -> bool:
        """True if a rank that follows has a part of the tensor."""
        kind = tuple(tensor.shape), tensor.dtype
        return any(places.find(name, *kind, self._names).uses for places in self._of_others)

    def _check_numbers(self, name: str, tensor: torch.Tensor) -> None:
        """Refuses NaN and inf in the whole tensor: other ranks have other parts of it."""
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            return
        narrow = self._narrowest()
        if not bool((tensor.to(narrow) if narrow.itemsize < tensor.dtype.itemsize else tensor).isfinite().all()):
            raise WeightUpdateError(
                f"tensor {name!r} holds NaN or inf as {str(narrow).removeprefix('torch.')}. The update is refused."
            )

    def _narrowest(self) -> torch.dtype:
        """The smallest type that weights are cast to."""
        dtypes = {spec.dtype for spec in self._live.specs if spec.dtype.is_floating_point and spec.dtype.itemsize > 1}
        return min(dtypes, key=lambda dtype: torch.finfo(dtype).max, default=torch.float32)
