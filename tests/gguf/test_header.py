"""GGUF headers: what is read, and that every damage is one line and costs no more than the file is long."""

from __future__ import annotations

import random
import struct

import gguf
import numpy as np
import pytest

from mllm_compile.errors import CheckpointError
from mllm_compile.runtime.weights.gguf_header import read_gguf
from tests.sample import how_to_repeat, seed

U32, F32_TYPE, STRING, ARRAY = 4, 6, 8, 9


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, sizes: list[int], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def build(keys: list[bytes] = (), tensors: list[bytes] = (), data: int = 256, version: int = 3, **counts: int) -> bytes:
    head = b"GGUF" + struct.pack(
        "<IQQ", version, counts.get("num_tensors", len(tensors)), counts.get("num_keys", len(keys))
    )
    body = head + b"".join(keys) + b"".join(tensors)
    return body + bytes(-len(body) % 32) + bytes(data)


def read(data: bytes, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    return read_gguf(path)


def test_values_of_every_type_are_read(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint8("u8", 250)
    writer.add_int8("i8", -5)
    writer.add_uint16("u16", 65_000)
    writer.add_int16("i16", -300)
    writer.add_uint64("u64", 2**60)
    writer.add_int64("i64", -(2**60))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "ä")
    writer.add_array("texts", ["a", "bc"])
    writer.add_array("numbers", [1, 2, 3])
    writer.add_tensor("x", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf(tmp_path / "a.gguf")
    expected = {"u8": 250, "i8": -5, "u16": 65_000, "i16": -300, "u64": 2**60, "i64": -(2**60), "f32": 0.5, "f64": 0.1}
    expected |= {
        "yes": True,
        "text": "ä",
        "texts": (b"a", b"bc"),
        "numbers": (1, 2, 3),
        "general.architecture": "llama",
    }
    assert header.metadata == expected
    entry = header.tensors["x"]
    assert entry.shape == (2, 3)
    found = np.frombuffer((tmp_path / "a.gguf").read_bytes()[entry.begin : entry.end], np.float32)
    assert found.tolist() == [0, 1, 2, 3, 4, 5]


GOOD = [tensor("a", [32, 2], 0, 0)]
DAMAGED = {
    "no magic": (b"GGML" + build()[4:], "does not begin with GGUF"),
    "version 1": (build(version=1), "version 1; read are 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "empty": (b"", "does not begin with GGUF"),
    "cut off": (build(tensors=GOOD)[:30], "ends within its header"),
    "many tensors": (build(tensors=GOOD, num_tensors=2**40), "would have"),
    "many keys": (build(num_keys=2**63), "would have"),
    "long text": (build([key("a", STRING, struct.pack("<Q", 2**62))]), "would have 4,611,686,018,427,387,904 bytes"),
    "long array": (build([key("a", ARRAY, struct.pack("<IQ", U32, 2**40))]), "an array of"),
    "many texts": (build([key("a", ARRAY, struct.pack("<IQ", STRING, 2**40))]), "strings ends behind it"),
    "nested arrays": (build([key("a", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "array of arrays"),
    "unknown type": (build([key("a", 77, b"\0\0\0\0")]), "value of type 77"),
    "no bool": (build([key("a", 7, b"\5")]), "expected true or false"),
    "no UTF-8": (build([key("a", STRING, text(b"\xff"))]), "no UTF-8"),
    "a key twice": (build([key("a", U32, b"\0\0\0\0")] * 2), "is there twice"),
    "a tensor twice": (build(tensors=[GOOD[0], tensor("a", [32], 0, 0)]), "is there twice"),
    "odd alignment": (build([key("general.alignment", U32, struct.pack("<I", 24))]), "power of two"),
    "no alignment": (build([key("general.alignment", U32, bytes(4))]), "power of two"),
    "unaligned": (build(tensors=[tensor("a", [4], 0, 4)]), "is at bytes"),
    "behind the end": (build(tensors=[tensor("a", [4096], 0, 0)]), "is at bytes"),
    "overlapping": (build(tensors=[*GOOD, tensor("b", [32], 0, 32)]), "overlap"),
    "no block": (build(tensors=[tensor("a", [20], 2, 0)]), "in blocks of 32"),
    "no sizes": (build(tensors=[tensor("a", [], 0, 0)]), "0 dimensions"),
    "five sizes": (build(tensors=[tensor("a", [1] * 5, 0, 0)]), "5 dimensions"),
    "a size of zero": (build(tensors=[tensor("a", [0], 0, 0)]), "has sizes"),
    "sizes that overflow": (build(tensors=[tensor("a", [2**33, 2**33], 0, 0)]), "has sizes"),
    "a type that is not read": (build(tensors=[tensor("a", [256], 16, 0)]), "stored as IQ2_XXS, which is not read"),
    "a type that nobody knows": (build(tensors=[tensor("a", [256], 99, 0)]), "stored as type 99"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_refused_in_one_line(name, tmp_path):
    data, message = DAMAGED[name]
    with pytest.raises(CheckpointError, match=message) as error:
        read(data, tmp_path)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="cannot read"):
        read_gguf(tmp_path / "none.gguf")


def test_any_changed_byte_is_read_or_refused(tmp_path):
    texts = key("b", ARRAY, struct.pack("<IQ", STRING, 3) + text("x") + text("yy") + text(""))
    whole = build([key("a", F32_TYPE, bytes(4)), texts], [*GOOD, tensor("b", [32], 8, 256)], data=512)
    chance = random.Random(f"{seed()} gguf")
    for number in range(500):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 1, 3])):
            data[chance.randrange(len(data))] = chance.choice([0, 1, 127, 255, chance.randrange(256)])
        data = data[: chance.choice([len(data), chance.randrange(len(data))])]
        try:
            read(bytes(data), tmp_path)
        except CheckpointError as error:
            assert "\n" not in str(error), f"{number}: {how_to_repeat()}"
