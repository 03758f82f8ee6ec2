"""mllm_compile/adapters/slots.py: by examples, and by rules that hold whatever happens in which order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mllm_compile.adapters.slots import AdapterSlots


def granted(slots: AdapterSlots[str, str]) -> list[tuple[str, int]]:
    return [tuple(one) for one in slots.take_granted()]


def loads(slots: AdapterSlots[str, str]) -> list[tuple[str, int]]:
    return [tuple(one) for one in slots.take_loads()]


def test_a_request_waits_for_its_adapter_while_another_one_runs():
    slots: AdapterSlots[str, str] = AdapterSlots(2)
    slots.take("sql", "first")
    assert (granted(slots), loads(slots)) == ([], [("sql", 0)])
    slots.take("sql", "second")
    assert (granted(slots), loads(slots)) == ([], [])
    slots.loaded(0)
    assert granted(slots) == [("first", 0), ("second", 0)]
    slots.take("law", "third")
    assert (granted(slots), loads(slots)) == ([], [("law", 1)])
    slots.take("sql", "fourth")
    assert granted(slots) == [("fourth", 0)]
    assert (slots.in_use, slots.waited_for, slots.num_waiting) == (["sql"], ["law"], 1)


def filled(*adapters: str) -> AdapterSlots[str, str]:
    """Slots with a user of each adapter, named as it is."""
    slots: AdapterSlots[str, str] = AdapterSlots(len(adapters))
    for index, adapter in enumerate(adapters):
        slots.take(adapter, adapter)
        slots.loaded(index)
    slots.take_granted(), slots.take_loads()
    return slots


def test_the_slot_that_was_unused_for_longest_is_taken():
    slots = filled("a", "b", "c")
    for user in ("b", "c", "a"):
        slots.leave(user)
    slots.take("d", "d")
    assert loads(slots) == [("d", 1)]
    slots.take("a", "again")
    assert (granted(slots), loads(slots)) == ([("again", 0)], [])


def test_a_slot_in_use_drains_for_one_that_waits_and_the_others_go_on():
    slots = filled("a", "b")
    slots.take("b", "more")
    slots.take("c", "waits")
    slots.take("b", "goes on")
    assert granted(slots) == [("more", 1), ("goes on", 1)]
    slots.take("a", "behind it")
    assert granted(slots) == []
    slots.leave("a")
    assert loads(slots) == [("c", 0)]
    for user in ("b", "more", "goes on"):
        slots.leave(user)
    assert loads(slots) == [("a", 1)]


def test_a_slot_drains_no_more_when_nobody_waits_for_it():
    slots = filled("a")
    slots.take("b", "waits")
    slots.take("a", "behind it")
    slots.leave("waits")
    assert granted(slots) == [("behind it", 0)]


def test_a_load_that_fails_is_told_to_those_that_wait_for_it_alone():
    slots: AdapterSlots[str, str] = AdapterSlots(1)
    slots.take("a", "first")
    slots.take("b", "second")
    slots.take("a", "third")
    assert slots.failed(0) == ["first", "third"]
    assert loads(slots)[-1] == ("b", 0)
    assert slots.num_waiting == 1


def test_a_forgotten_adapter_keeps_its_slot_until_its_last_request_has_ended():
    slots = filled("a")
    slots.forget("a")
    assert slots.place("b") is None
    assert slots.in_use == ["a"]
    slots.leave("a")
    assert slots.place("b") == 0
    slots.take("b", "user")
    slots.take("c", "other")
    assert (granted(slots), slots.place("d")) == ([], None), "neither goes on in a slot that is being filled"
    slots.loaded(0)
    assert granted(slots) == [("user", 0)]


class SlotRules(RuleBasedStateMachine):
    """Requests come and end, loads succeed and fail, adapters are forgotten, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: AdapterSlots[int, int] = AdapterSlots(2)
        self.number = 0
        self.adapter_of: dict[int, int] = {}  # all users that have not ended
        self.slot_of: dict[int, int] = {}  # those that were granted one
        self.content: dict[int, int] = {}  # slot → the adapter that was loaded last
        self.loading: dict[int, int] = {}
        self.forgotten: set[int] = set()

    def settle(self) -> None:
        for adapter, slot in self.slots.take_loads():
            assert slot not in self.loading
            assert not any(place == slot for place in self.slot_of.values()), "a slot in use is overwritten"
            self.loading[slot] = adapter
            self.content.pop(slot, None)
        for user, slot in self.slots.take_granted():
            assert user in self.adapter_of
            assert self.content.get(slot) == self.adapter_of[user], "a request goes on with another adapter"
            self.slot_of[user] = slot

    @rule(adapter=st.integers(0, 4))
    def take(self, adapter: int) -> None:
        if adapter not in self.forgotten:
            self.number += 1
            self.adapter_of[self.number] = adapter
            self.slots.take(adapter, self.number)
            self.settle()

    @precondition(lambda self: self.adapter_of)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        user = data.draw(st.sampled_from(sorted(self.adapter_of)))
        self.slots.leave(user)
        del self.adapter_of[user]
        self.slot_of.pop(user, None)
        self.settle()

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), succeeds=st.booleans())
    def end_load(self, data: st.DataObject, succeeds: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.loading)))
        adapter = self.loading.pop(slot)
        if succeeds:
            self.content[slot] = adapter
            self.slots.loaded(slot)
        else:
            for user in self.slots.failed(slot):
                assert self.adapter_of.pop(user) == adapter
        self.settle()

    @rule(adapter=st.integers(5, 6))
    def place(self, adapter: int) -> None:
        slot = self.slots.place(adapter)
        if slot is not None:
            assert slot not in self.loading
            assert not any(place == slot for place in self.slot_of.values())
            self.loading[slot] = adapter
            self.content.pop(slot, None)

    @rule(adapter=st.integers(0, 4))
    def forget(self, adapter: int) -> None:
        self.forgotten.add(adapter)
        self.slots.forget(adapter)
        self.settle()

    @invariant()
    def nobody_waits_without_a_reason(self) -> None:
        """Someone is served or loaded for in each slot, or the own adapter is on its way."""
        waiting = self.adapter_of.keys() - self.slot_of.keys()
        busy = set(self.slot_of.values()) | self.loading.keys()
        assert self.slots.num_waiting == len(waiting)
        assert (
            not waiting or len(busy) == 2 or {self.adapter_of[user] for user in waiting} <= set(self.loading.values())
        )

    def teardown(self) -> None:
        """All come to their end: none waits for ever."""
        for _ in range(10 * (len(self.adapter_of) + 1)):
            for slot in list(self.loading):
                self.content[slot] = self.loading.pop(slot)
                self.slots.loaded(slot)
                self.settle()
            for user in list(self.slot_of):
                del self.adapter_of[user], self.slot_of[user]
                self.slots.leave(user)
                self.settle()
        assert not self.adapter_of


TestSlotRules = SlotRules.TestCase
TestSlotRules.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
