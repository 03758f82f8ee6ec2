"""The one owner of a device's memory: gives it to models in turn, and takes it back.

Models that wait are served in the order in which they began to. One that runs gives way at once when it has no
requests, the longest idle one first; else when it has had its turn: then its requests are set aside. So a model waits
for at most one turn and one switch of each that is ahead of it. Memory goes from the one to the other as it is, as far
as the device can hand it over. A start holds up all switches, as it measures memory;
tenant.py ends one that hangs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from mllm_compile.files.byte_sizes import format_bytes
from mllm_compile.process.passage import close_all
from mllm_compile.server.api.errors import ApiError, not_ready
from mllm_compile.server.models.shares import Device, Share, shares_of
from mllm_compile.server.models.tenant import Tenant

logger = logging.getLogger("mllm_compile.server")

_LOOK_S = 0.01  # between two looks whether a model has become idle, while another one waits for its memory
# By so much may engines exceed what was planned for them: graphs and libraries are estimated, and mem_fraction_static
# leaves more. Without it two that fit could park each other for ever.
_SLACK = 0.03
_AGAIN_S = 0.5  # until a model that could not be woken is tried once more


class Broker:
    """Shares one device out; for one event loop.

    Args:
        name: of the device.
        tenants: the models on it, each with its needs.
        turn_s: time of a model with requests while others wait.
        most_awake: models that run at once; None: as many as fit.
    """

    def __init__(self, name: str, tenants: Sequence[Tenant], turn_s: float, most_awake: int | None) -> None:
        self.name = name
        self.tenants = tenants
        self._turn_s, self._most_awake = turn_s, most_awake
        needs = {one.name: one.needs for one in tenants if one.needs is not None}
        pinned = [one.name for one in tenants if one.is_pinned]
        self.num_bytes = Device.of(needs.values()).num_bytes
        shares = shares_of(needs, pinned, most_awake)
        for one in tenants:
            one.share = shares[one.name]
            if isinstance(one.share, str):
                one.front.supervisor.refuse_start(one.share)
        self._handed_over: list[int] = []  # descriptors of memory that has no model now
        self._changed = asyncio.Event()
        self._changed.set()

    def changed(self) -> None:
        """A model wants memory, or has given some back."""
        self._changed.set()

    @property
    def given_bytes(self) -> int:
        """Bytes that models hold now."""
        return sum(_held(one) for one in self.tenants)

    async def run(self) -> None:
        """Serves those that wait, until it is cancelled."""
        while True:
            waiting = [one for one in self.tenants if one.waits_since is not None and isinstance(one.share, Share)]
            if not waiting:
                self._changed.clear()
                await self._changed.wait()
                continue
            await self._serve(min(waiting, key=lambda one: one.waits_since or 0.0))

    async def _serve(self, tenant: Tenant) -> None:
        """Makes room for a model, and lets it run."""
        try:
            while tenant.waits_since is not None and not self._fits(tenant):
                rivals = self._rivals(tenant)
                if not rivals:  # a device has the last word on what it holds
                    break
                victim = self._that_gives_way(rivals)
                if victim is None:
                    await asyncio.sleep(_LOOK_S)
                else:
                    await self._park(victim, tenant)
            if tenant.waits_since is not None:
                await self._take(tenant)
        finally:
            close_all(self._all_handed_over())

    def _all_handed_over(self) -> list[int]:
        """The memory that has no model now; the caller's."""
        memory, self._handed_over = self._handed_over, []
        return memory

    def _fits(self, tenant: Tenant) -> bool:
        awake = sum(one.is_awake for one in self.tenants)
        if self._most_awake is not None and awake >= self._most_awake:
            return False
        return self.given_bytes - _held(tenant) + _all(tenant) <= self.num_bytes * (1 + _SLACK)

    def _rivals(self, tenant: Tenant) -> list[Tenant]:
        return [one for one in self.tenants if one.is_awake and not one.is_pinned and one is not tenant]

    def _that_gives_way(self, rivals: Sequence[Tenant]) -> Tenant | None:
        idle = [one for one in rivals if one.is_idle]
        if idle:
            return min(idle, key=lambda one: one.idle_since)
        over = [one for one in rivals if time.monotonic() - one.has_turn_since >= self._turn_s]
        return min(over, key=lambda one: one.has_turn_since, default=None)

    async def _park(self, victim: Tenant, tenant: Tenant) -> None:
        began = time.monotonic()
        try:
            self._handed_over += await victim.park()
        except ApiError as error:
            logger.error("%s cannot be parked, and stays: %s", victim.name, error.message)
            victim.is_pinned = victim.is_awake
            return
        logger.info("%s is parked for %s in %.3f s", victim.name, tenant.name, time.monotonic() - began)

    async def _take(self, tenant: Tenant) -> None:
        began, since = time.monotonic(), tenant.waits_since
        try:
            await tenant.take(self._all_handed_over())
        except ApiError as error:
            keeps_place = await self._not_woken(tenant, error)
            if tenant.is_alive and not tenant.is_idle:
                tenant.waits_since = since if keeps_place else time.monotonic()
            return
        if tenant.is_awake:
            logger.info("%s is awake in %.3f s", tenant.name, time.monotonic() - began)

    async def _not_woken(self, tenant: Tenant, error: ApiError) -> bool:
        """The device has less than it should. A model that gives way may help; else requests are told why, those within
        the engine too. False: no model can give way, and it is behind others, which may need less."""
        if not tenant.is_alive:  # it starts again, and asks then
            return False
        rivals = self._rivals(tenant)
        victim = self._that_gives_way(rivals)
        if victim is not None:
            await self._park(victim, tenant)
        elif not rivals:
            wanted = format_bytes(_all(tenant) - _held(tenant))
            why = f"{tenant.name} needs {wanted} of {self.name}, which others hold: {error.message}"
            logger.error("%s", why)
            tenant.front.refuse(not_ready(why, "no_memory"))
        if victim is None:
            await asyncio.sleep(_AGAIN_S)
        return bool(rivals)


def _held(one: Tenant) -> int:
    if not isinstance(one.share, Share):
        return 0
    return one.is_alive * one.share.held_bytes + one.is_awake * one.share.awake_bytes


def _all(one: Tenant) -> int:
    return one.share.held_bytes + one.share.awake_bytes if isinstance(one.share, Share) else 0
