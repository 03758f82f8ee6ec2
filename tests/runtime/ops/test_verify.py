"""The Triton kernels around a captured verify step against torch's operations, through Triton's interpreter, on a CPU.

One test runs this file with the interpreter (tests/runtime/interpreted.py).
"""

from __future__ import annotations

import pytest
import torch

from mllm_compile.check import verify_reference
from mllm_compile.check.verify import small_step
from mllm_compile.runtime.ops.tokens.verify_fields import RESULT_FIELDS
from mllm_compile.runtime.sampling.state import NUM_INTS, SEED
from tests.runtime.interpreted import (
    IS_INTERPRETED,
    interpreted,
    run_interpreted,
    starts_the_interpreter,
    take_loop_bounds,
)


@starts_the_interpreter
def test_kernels_do_what_torchs_operations_do_through_the_interpreter():
    run_interpreted(__file__)


@pytest.fixture
def ops(monkeypatch):
    from mllm_compile.runtime.ops.tokens import verify

    monkeypatch.setattr(verify, "wrap_triton", lambda kernel: kernel)
    monkeypatch.setattr(verify, "_AT_ONCE", 32)
    take_loop_bounds(monkeypatch)
    return verify


@interpreted
@pytest.mark.parametrize(
    ("settings", "page_size", "num_tokens", "synthetic"),
    [
        ((2, 4, 0), 16, 4, (-1.0, 0.0)),
        ((1, 3, 0), 1, 2, (-1.0, 0.0)),
        ((3, 3, 0), 16, 16, (-1.0, 0.0)),
        ((1, 20, 0), 100, 4, (-1.0, 0.0)),
        ((2, 4, 1), 16, 4, (1.0, 0.5)),
        ((2, 4, 1), 16, 8, (3.0, 0.0)),
    ],
)
def test_the_kernels(ops, settings, page_size, num_tokens, synthetic):
    seen = set()
    for seed in range(3):
        given = small_step(settings, page_size, num_tokens, seed, longest=120)
        ours, theirs = ([tensor.clone() for tensor in given] for _ in range(2))
        ops.begin_verify(*ours, page_size)
        verify_reference.begin_verify(theirs, page_size)
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(one, other), place
        fields, _, last_tokens, lengths, history, *_, drafted = theirs
        seen |= set(drafted[:, 1].tolist())

        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(-1, 3, (len(fields), num_tokens), generator=generator)
        right = torch.randint(4, tokens[:, 1:].shape, generator=generator) > 0
        tokens[:, :-1] = drafted[:, 2 : 1 + num_tokens].long().where(right, tokens[:, :-1])
        ints = torch.randint(2**40, (NUM_INTS, len(lengths)), generator=generator)
        assert ints[SEED].unique().numel() == len(lengths)
        arguments = [tokens, fields, drafted, torch.tensor(synthetic), ints]
        state = [last_tokens, lengths, history, torch.full((len(fields), RESULT_FIELDS), -7)]
        ours, theirs = ([tensor.clone() for tensor in state] for _ in range(2))
        ops.end_verify(*arguments, *ours)
        verify_reference.end_verify([*arguments, *theirs])
        for place, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert torch.equal(one, other), place
    assert len(seen) > 1


@pytest.mark.skipif(IS_INTERPRETED, reason="kernels are analysed as they are compiled")
def test_torch_knows_what_the_kernels_write(monkeypatch):
    """A package copies what it takes them to write and is not told of."""
    pytest.importorskip("triton")
    from torch._higher_order_ops.triton_kernel_wrap import identify_accessed_tensors
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    from mllm_compile.inductor.patches.hidden_waits import hide_waits_from_analysis
    from mllm_compile.runtime.ops.tokens import verify

    written: list[list[str]] = []

    class Analysed:
        def __init__(self, kernel) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: object):
            return self.analyse

        def analyse(self, *args, **options) -> None:
            names = self.kernel.arg_names
            given = dict(zip(names, args, strict=False)) | {key: options[key] for key in options if key in names}
            accesses = identify_accessed_tensors(self.kernel, given, {}).read_writes
            written.append(sorted(write.name.removesuffix("_ptr") for write in accesses.writes))

    hide_waits_from_analysis()
    monkeypatch.setattr(verify, "wrap_triton", Analysed)
    monkeypatch.setattr(
        driver, "_active", type("Hopper", (), {"get_current_target": lambda self: GPUTarget("cuda", 90, 32)})()
    )
    begin = small_step((2, 4, 0), 16, 4, 0)
    verify.begin_verify(*begin, 16)
    fields, _, last_tokens, lengths, history, *_, drafted = begin
    tokens, results = begin[6], torch.zeros(len(fields), RESULT_FIELDS, dtype=torch.int64)
    ints, synthetic = torch.zeros(NUM_INTS, len(lengths), dtype=torch.int64), torch.tensor([-1.0, 0.0])
    verify.end_verify(tokens, fields, drafted, synthetic, ints, last_tokens, lengths, history, results)
    places = ["drafted", "input_ids", "out_cache_loc", "page_table", "positions", "rows", "seq_lens"]
    assert written == [places, ["history", "last_tokens", "lengths", "results"]]
