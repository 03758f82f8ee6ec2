"""The table of ops: an op is defined when somebody asks for it, and no other module is imported for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from mllm_compile.runtime.ops import op
from tests.fresh_process import fresh_process

LOADED = "print(*(name for name in sys.modules if name.startswith('mllm_compile.runtime.ops.')))"


@pytest.fixture(scope="module")
def modules_after() -> Iterator[Callable[[str], set[str]]]:
    """The modules of ops that some code imports."""
    with fresh_process("import torch") as process:

        def modules_after(code: str) -> set[str]:
            said = process.run(f"import sys, torch\nfrom mllm_compile.runtime import ops\n{code}\n{LOADED}")
            return {name.removeprefix("mllm_compile.runtime.ops.") for name in said.split()}

        yield modules_after


def test_an_op_is_defined_when_it_is_asked_for(modules_after):
    assert modules_after("assert not hasattr(torch.ops.mllm, 'gated_linear')") == set()
    assert "gated_linear.ops" in modules_after("ops.op('gated_linear')")


def test_a_source_defines_what_it_calls_and_nothing_else(modules_after):
    modules = modules_after("ops.define('torch.ops.mllm.attention_with_output(q, k, v, out, name)')")
    assert modules == {"attention", "attention.layer_op"}


def test_an_op_that_somebody_else_has_defined_is_taken_as_it_is(modules_after):
    """Tests stand in for ops whose modules need Triton."""
    code = (
        "library = torch.library.Library('mllm', 'FRAGMENT'); library.define('silu_mul(Tensor x) -> Tensor')\n"
        "assert ops.op('silu_mul') is torch.ops.mllm.silu_mul.default"
    )
    assert modules_after(code) == set()


def test_an_unknown_op_is_no_op():
    with pytest.raises(KeyError, match="no_such_op"):
        op("no_such_op")
