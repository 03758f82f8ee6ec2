"""prime-rl's table is read from its opcodes: nothing else of pickle is, and nothing is called."""

from __future__ import annotations

import os
import pickle

import pytest
import torch

from mllm_compile.errors import WeightUpdateError
from mllm_compile.transfer.announcement import Announcement
from mllm_compile.transfer.table import Announced, read_table


class Call:
    """A pickle that would call something."""

    def __init__(self, function, *arguments):
        self._what = function, arguments

    def __reduce__(self):
        return self._what


def rows_of(*shapes):
    return [(f"weight.{index}", torch.Size(shape), torch.Size(shape).numel()) for index, shape in enumerate(shapes)]


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_tables_of_every_protocol_are_read(protocol):
    shapes = [(), (1,), (70000, 3), (2, 3, 4, 5, 6), (0, 4)]
    table = {torch.bfloat16: rows_of(*shapes), torch.float32: rows_of((2**33, 1)), torch.int64: []}
    found = dict(read_table(pickle.dumps(table, protocol=protocol)))
    assert found["bfloat16"] == [Announced(f"weight.{i}", "bfloat16", shape) for i, shape in enumerate(shapes)]
    assert found["float32"] == [Announced("weight.0", "float32", (2**33, 1))]
    assert found["int64"] == []


@pytest.mark.parametrize(
    "table",
    [
        Call(os.system, "false"),
        {torch.float32: [Call(os.getcwd)]},
        {torch.float32: [(Call(eval, "1"), torch.Size([1]), 1)]},
        {"float32": rows_of((1,))},
        {torch.float32: [("a", torch.Size([2]), 3)]},
        {torch.float32: [("a", (2,), 2)]},
        {torch.float32: [(5, torch.Size([2]), 2)]},
        {torch.float32: [("a", torch.Size([2]))]},
        {torch.complex64: rows_of((1,))},
        {torch.float32: "text"},
        [1, 2],
        3.5,
        torch.zeros(2),
    ],
)
def test_any_other_pickle_is_refused(table):
    with pytest.raises(WeightUpdateError, match="the table"):
        read_table(pickle.dumps(table))


def test_every_beginning_and_every_changed_byte_is_read_or_refused():
    data = pickle.dumps({torch.bfloat16: rows_of((3, 4), (5,)), torch.float32: rows_of((7,))})
    for place in range(len(data)):
        for bad in (data[:place], data[:place] + bytes([data[place] ^ 0x15]) + data[place + 1 :]):
            try:
                read_table(bad)
            except WeightUpdateError:
                continue


def test_nested_tuples_that_would_take_for_ever_to_hash_are_refused():
    doubled = b")\x94" + b"".join(b"h" + bytes([depth]) + b"\x86\x94" for depth in range(60))
    for begin, end in ((b"", b"."), (b"}", b"K\x01s."), (b"", b"\x8c\x01a\x93."), (b"", b"N.")):
        with pytest.raises(WeightUpdateError):
            read_table(b"\x80\x04" + begin + doubled + end)


def test_a_table_cannot_multiply_its_bytes():
    """A Size is copied for each row that has it, and a number that is none may be long to show."""
    begin, end = b"\x80\x04}ctorch\nfloat32\n](\x8c\x01actorch\nSize\n", b"tas."
    size = b"(" + b"K\x01" * 17 + b"t"
    with pytest.raises(WeightUpdateError, match="a Size is of up to 16 numbers"):
        read_table(begin + size + b"\x85R" + b"K\x01" + end)
    doubled = b")\x94" + b"".join(b"h" + bytes([depth]) + b"\x86\x94" for depth in range(40))
    with pytest.raises(WeightUpdateError, match="a number of values that is their product"):
        read_table(begin + b"K\x01\x85\x85R" + doubled + end)


@pytest.mark.parametrize("shape", [[1] * 17, [-1, 4], [1 << 44]])
def test_shapes_that_no_tensor_has_are_refused(shape):
    with pytest.raises(WeightUpdateError, match="a shape is announced that no tensor has"):
        Announcement.of(["a"], ["bfloat16"], [shape])
