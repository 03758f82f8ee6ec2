"""Every block type gives the numbers of ggml's reference, to the bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize

from mllm_compile.runtime.quantised.numbers import dequantised
from mllm_compile.runtime.weights.formats.base import VALUES, StoredTensor
from mllm_compile.runtime.weights.formats.gguf import format_name
from mllm_compile.runtime.weights.formats.registry import FORMATS
from mllm_compile.runtime.weights.gguf_header import BLOCK_TYPES

KINDS = {number: kind for number, kind in BLOCK_TYPES.items() if kind.dtype is None}


@pytest.mark.parametrize("number", KINDS, ids=lambda number: KINDS[number].name)
def test_random_blocks_are_the_numbers_of_the_reference(number):
    kind, chance = KINDS[number], np.random.default_rng(number)
    blocks = chance.integers(0, 256, (64, 4, kind.num_bytes), dtype=np.uint8)
    if kind.name == "MXFP4":
        blocks[:, :, 0] = chance.integers(90, 160, (64, 4))  # 255 is no number in OCP's format
    rows = blocks.reshape(64, -1)
    with np.errstate(all="ignore"):
        expected = dequantize(rows, gguf.GGMLQuantizationType(number))
    found = FORMATS[format_name(kind)].rows({"values": torch.from_numpy(rows)}, {}, 0, 64).numpy()
    finite = np.isfinite(expected)
    assert found.shape == expected.shape
    assert finite.mean() > 0.5
    assert np.array_equal(found[finite], expected[finite])


@pytest.mark.parametrize("number", KINDS, ids=lambda number: KINDS[number].name)
def test_linears_read_the_same_numbers_as_they_lie_in_memory(number):
    kind, chance = KINDS[number], np.random.default_rng(number)
    blocks = torch.from_numpy(chance.integers(0, 255, (16, 2 * kind.num_bytes), dtype=np.uint8))
    stored = {VALUES: StoredTensor("w", "f", tuple(blocks.shape), torch.uint8)}
    fmt = FORMATS[format_name(kind)]
    scheme = fmt.scheme(stored, (16, 2 * kind.block), {})
    tensors = {role: fmt.kept_tensor(role, {VALUES: blocks}, {}).to(scheme.dtype(role)) for role in scheme.roles}
    for role, tensor in tensors.items():
        assert tensor.shape == scheme.shape(role, 16, 2 * kind.block)
    found = dequantised(tensors, scheme.kind, scheme.group, 2 * kind.block, torch.float32)
    expected = fmt.rows({VALUES: blocks}, {}, 0, 16)
    finite = expected.isfinite()
    assert torch.equal(found[finite], expected[finite])


def test_types_have_the_sizes_of_the_reference():
    sizes = {number: (kind.block, kind.num_bytes) for number, kind in BLOCK_TYPES.items()}
    assert sizes == {number: gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] for number in sizes}
