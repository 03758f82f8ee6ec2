"""Weights from a trainer into an engine: over groups that both join, or out of its memory by handles.

The forms are vLLM's, SGLang's and prime-rl's.

One transfer at a time. What is announced is checked before a collective is entered, as a peer that waits in one cannot
be told. A transfer that breaks off ends its group: both sides would count its buffers from different places.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from mllm_compile.errors import MllmError, TransferError, UpdateConflictError, WeightUpdateError
from mllm_compile.transfer.announcement import Announcement
from mllm_compile.transfer.group import Group, broadcast_into, empty, join, packed
from mllm_compile.transfer.handles import Given, by_json, by_sglangs_pickle, by_vllms_pickle
from mllm_compile.transfer.opcodes import MOST_BYTES
from mllm_compile.transfer.opened import counted, key_of, opened
from mllm_compile.transfer.table import read_table

if TYPE_CHECKING:
    from mllm_compile.engine.rollouts.weight_updates import WeightUpdates

_JOIN_S = 300.0  # a trainer starts its side by hand, or loads a model first
_SILENCE_S = 120.0  # of a sender
_MOST_GROUPS = 16
_MOST_TABLES = 1 << 16
_VLLM, _PRIME = "vLLM", "prime-rl"
_INIT_NAMED = "/init_weights_update_group"


class Transfers:
    """The groups of one engine, and the weights that it receives over them."""

    def __init__(self, weights: WeightUpdates) -> None:
        self._weights = weights
        self._groups: dict[str, Group] = {}
        self._buffer_bytes: int | None = None  # of vLLM's packed form; None: tensor by tensor
        self._last: Announcement | None = None  # of vLLM's form
        self._received: list[object] = []  # what the update that is open has been told of
        self._told: dict[bytes, tuple[str, ...]] = {}  # digest of SGLang's pickle → the names in it
        self.version: str | None = None  # of SGLang's last bucket
        self._lock = threading.Lock()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """
        Raises:
            UpdateConflictError: another transfer runs.
        """
        if not self._lock.acquire(blocking=False):
            raise UpdateConflictError("weights are being received already. Wait for the end of that call.")
        try:
            yield
        finally:
            self._lock.release()

    def started(self) -> None:
        """Notes that an update has begun."""
        self._received, self._told = [], {}

    def _join(
        self,
        key: str,
        host: str,
        port: int,
        rank: int,
        world_size: int,
        name: str | None = None,
        backend: str | None = None,
    ) -> None:
        """Joins a group in the place of any other one of that key; returns once all have joined.

        An update that is open is over: its trainer is gone, or begins anew.

        Args:
            name, backend: as `join` takes them.
        """
        self.leave(key)
        self._weights.abandon("a trainer joins anew")
        if len(self._groups) >= _MOST_GROUPS:
            raise UpdateConflictError(f"{_MOST_GROUPS} groups are joined; leave one first")
        self._groups[key] = join(
            host,
            port,
            rank,
            world_size,
            device=self._weights.device,
            timeout_s=_JOIN_S,
            silence_s=_SILENCE_S,
            allowed_hosts=(host,),  # the front has looked at it
            name=name,
            backend=backend,
        )

    def leave(self, name: str) -> bool:
        """Leaves a group; False: there was none."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.close()
        return group is not None

    # vLLM's form ------------------------------------------------------------------------------------------------------

    def join_vllm(self, host: str, port: int, rank: int, world_size: int, buffer_bytes: int | None) -> None:
        """Joins the group of /init_weight_transfer_engine.

        Args:
            buffer_bytes: a packed buffer ends with the tensor that exceeds so many; None: tensors come one by one.
        """
        with self.alone():
            self._join(_VLLM, host, port, rank, world_size)
        self._buffer_bytes = buffer_bytes

    def receive_vllm(
        self,
        names: list[Any],
        dtypes: list[Any],
        shapes: list[Any],
        *,
        counts: list[int] | None = None,
        handles: Any = None,
        pickled: str | None = None,
        sizes: list[int] | None = None,
        sums: dict[str, int] | None = None,
    ) -> int:
        """Receives what /update_weights announces; empty lists announce what the last ones did.

        Announced again in one update, as by a client that has lost the answer, nothing follows and nothing is awaited.

        Args:
            counts: values that follow of each, at places that follow; None: all of them.
            handles, pickled, sizes: the memory that they are in, as handles.py has it; None: the group brings them.
            sums: weights/sums.py's of some tensors.
        """
        if counts is not None:
            return self._receive_counted(names, dtypes, shapes, counts)
        announced = self._announced(names, dtypes, shapes)
        if announced in self._received:
            return len(announced.names)
        if handles is not None or pickled is not None:
            key = key_of(self._weights.device)
            with self._or_over():
                given = (
                    by_json(announced, handles, sizes, key)
                    if pickled is None
                    else by_vllms_pickle(announced, pickled, sizes, key)
                )
                return self._take_given(given, announced, sums)
        group = self._group(_VLLM, "/init_weight_transfer_engine")
        if self._buffer_bytes is None:
            tensors = one_by_one(group, announced)
        else:
            tensors = packed(group, announced.names, announced.dtypes, announced.shapes, self._buffer_bytes)
        return self._take(_VLLM, tensors, announced, sums)

    def _announced(self, names: list[Any], dtypes: list[Any], shapes: list[Any]) -> Announcement:
        """
        Raises:
            WeightUpdateError: the model has no such tensors. An update that has received nothing is over then.
        """
        try:
            announced = Announcement.of(names, dtypes, shapes)
            if not names and self._last is None:
                raise WeightUpdateError("no tensors are announced, and none were before; give names, dtypes and shapes")
            if not names and self._last is not None:
                announced = self._last
            if announced in self._received:
                return announced
            self._weights.check_announced(announced.names, announced.shapes, announced.dtypes)
        except MllmError as error:
            if not self._received:
                self._weights.abandon(str(error))
            raise
        self._last = announced
        return announced

    def _receive_counted(self, names: list[Any], dtypes: list[Any], shapes: list[Any], counts: list[int]) -> int:
        """Single values, as vLLM's sparse form has them: of each tensor its int32 places, then its values.

        They are of an update that leaves the rest as it is: one that has received nothing yet becomes one.
        """
        announced = Announcement.of(names, dtypes, shapes)
        most = [prod(shape) for shape in announced.shapes]
        if len(counts) != len(most) or any(not 0 <= count <= all_ for count, all_ in zip(counts, most, strict=True)):
            raise WeightUpdateError("num_updates_list: expected a number for each tensor, of at most its values")
        if (announced, counts) in self._received:
            return len(names)
        group = self._group(_VLLM, "/init_weight_transfer_engine")
        if not self._received:
            self._weights.abandon("it brings single values")
            self._weights.start(partial=True)
        self._weights.check_announced(announced.names, announced.shapes, announced.dtypes)
        try:
            with self._or_over():
                for name, dtype, count in zip(names, announced.dtypes, counts, strict=True):
                    places, values = empty(group, (count,), torch.int32), empty(group, (count,), dtype)
                    broadcast_into(group, places)
                    broadcast_into(group, values)
                    self._weights.receive_delta(name, places, values)
        except BaseException:
            self.leave(_VLLM)
            raise
        self._received.append((announced, counts))
        return len(names)

    @contextmanager
    def _or_over(self) -> Iterator[None]:
        """Ends the update that is open where something of it cannot be taken."""
        try:
            yield
        except BaseException as error:
            self._weights.abandon(str(error))
            raise

    def _take_given(self, given: list[Given], announced: Announcement, sums: dict[str, int] | None = None) -> int:
        """Gives tensors of another process' memory to the update that is open."""
        with opened(given, self._weights.device) as tensors:
            count = self._weights.receive(tensors, sums)
        self._received.append(announced)
        return count

    def _take(
        self,
        name: str,
        tensors: Iterable[tuple[str, torch.Tensor]],
        announced: Announcement,
        sums: dict[str, int] | None = None,
    ) -> int:
        """Gives tensors to the update that is open; a transfer that fails ends the group, and the update."""
        try:
            count = self._weights.receive(tensors, sums)
        except BaseException:
            self.leave(name)
            raise
        self._received.append(announced)
        return count

    def _group(self, name: str, path: str) -> Group:
        group = self._groups.get(name)
        if group is None:
            raise UpdateConflictError(
                f"no group is joined for this transfer. Call {path} first, and again after a failure."
            )
        return group

    # SGLang's form ----------------------------------------------------------------------------------------------------

    def join_named(self, name: str, host: str, port: int, rank: int, world_size: int, backend: str) -> None:
        """Joins the group of /init_weights_update_group."""
        with self.alone():
            self._join(f"sglang {name}", host, port, rank, world_size, name, backend)

    def leave_named(self, name: str) -> bool:
        """Leaves it; False: there was none."""
        with self.alone():
            return self.leave(f"sglang {name}")

    def check_named(self, name: str) -> None:
        """
        Raises:
            UpdateConflictError: no such group is joined.
        """
        self._group(f"sglang {name}", _INIT_NAMED)

    def receive_bucket(
        self, group_name: str, names: list[Any], dtypes: list[Any], shapes: list[Any], *, is_flat: bool
    ) -> int:
        """Receives a bucket of /update_weights_from_distributed, tensor by tensor or as one buffer.

        Announced again in one update, nothing follows, as in vLLM's form.
        """
        group_name = f"sglang {group_name}"
        group = self._group(group_name, _INIT_NAMED)
        announced = self._announced(names, dtypes, shapes)
        if announced in self._received:
            return len(announced.names)
        tensors = packed(group, *announced, sum(announced.sizes)) if is_flat else one_by_one(group, announced)
        return self._take(group_name, tensors, announced)

    def receive_given(self, pickled: str) -> int:
        """Receives the tensors of /update_weights_from_tensor.

        The same again brings nothing. The same names in other memory are of a trainer that begins anew: no call says
        so, and what the one before it left must not become half of an update.
        """
        digest = hashlib.sha256(pickled.encode()).digest()
        with self._or_over():
            given = by_sglangs_pickle(pickled)
            names = [one.name for one in given]
            if digest in self._told:
                with counted(given):
                    return len(given)
            if tuple(names) in self._told.values():
                self._weights.abandon("a trainer begins anew")
                self._weights.start()
                self.started()
            try:
                announced = self._announced(names, [str(one.dtype) for one in given], [one.shape for one in given])
            except MllmError:
                with suppress(MllmError), counted(given):
                    pass
                raise
            count = self._take_given(given, announced)
        self._told[digest] = announced.names
        return count

    # prime-rl's form --------------------------------------------------------------------------------------------------

    def join_prime(self, host: str, port: int, rank: int, world_size: int) -> None:
        """Joins the group of /init_broadcaster."""
        with self.alone():
            self._join(_PRIME, host, port, rank, world_size)

    @property
    def has_prime(self) -> bool:
        """True if weights come over a group, and not from a folder."""
        return _PRIME in self._groups

    def receive_prime(self) -> int:
        """Receives a whole checkpoint: how many tables, and of each its bytes, itself, and a buffer a dtype."""
        group = self._group(_PRIME, "/init_broadcaster")
        nothing = Announcement((), (), ())
        return self._take(_PRIME, self._from_tables(group), nothing)

    def _from_tables(self, group: Group) -> Iterator[tuple[str, torch.Tensor]]:
        for _ in range(_number(group, "tables", _MOST_TABLES)):
            table = empty(group, (_number(group, "bytes of a table", MOST_BYTES),), torch.uint8)
            broadcast_into(group, table)
            for _, rows in read_table(table.cpu().numpy().tobytes()):
                announced = Announcement.of_rows(rows)
                self._weights.check_announced(announced.names, announced.shapes, announced.dtypes)
                yield from packed(group, *announced, sum(announced.sizes))


def one_by_one(group: Group, announced: Announcement) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are broadcast one after another."""
    for name, dtype, shape in zip(*announced, strict=True):
        tensor = empty(group, shape, dtype)
        broadcast_into(group, tensor)
        yield name, tensor


def _number(group: Group, what: str, most: int) -> int:
    """A number that the trainer sends, int64.

    Raises:
        TransferError: it is no number of such things.
    """
    number = empty(group, (1,), torch.int64)
    broadcast_into(group, number)
    if not 0 <= int(number) <= most:
        raise TransferError(f"the trainer announces {int(number)} {what}; expected from 0 to {most}")
    return int(number)
