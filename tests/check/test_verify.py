"""The check of the kernels around a captured verify step: right ones pass, wrong ones do not leave the compiler."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.check.verify import check_verify_steps
from mllm_compile.check.verify_reference import begin_verify, end_verify
from mllm_compile.errors import CompileError
from mllm_compile.runtime.program.loaded import VerifyPieces
from tests.check.test_decode_loop import boxed


def check(begin=begin_verify, end=end_verify, page_size: int = 16) -> None:
    pieces = VerifyPieces(boxed(lambda arguments: begin(arguments, page_size)), boxed(end))
    check_verify_steps(pieces, page_size, torch.device("cpu"))


@pytest.mark.parametrize("page_size", [1, 16, 100])
def test_the_operations_in_torch_pass(page_size):
    check(page_size=page_size)


@pytest.mark.parametrize("place", [6, 7, 8, 9, 10, 11, 12])
def test_inputs_that_are_not_as_they_should_be_are_refused(place):
    def begin(arguments, page_size):
        begin_verify(arguments, page_size)
        arguments[place][2] += 1

    with pytest.raises(CompileError, match=r"begin_verify do something else .* speculative.method: none"):
        check(begin=begin)


@pytest.mark.parametrize("longest", [1, 2, 6])
def test_drafts_that_are_looked_up_otherwise_are_refused(longest):
    def begin(arguments, page_size):
        settings = arguments[1].clone()
        settings[:2] = torch.tensor([1, longest])
        begin_verify([arguments[0], settings, *arguments[2:]], page_size)

    with pytest.raises(CompileError, match="begin_verify"):
        check(begin=begin)


@pytest.mark.parametrize("place", [5, 6, 7, 8])
def test_tokens_that_are_not_kept_are_refused(place):
    def end(arguments):
        before = arguments[place].clone()
        end_verify(arguments)
        arguments[place].copy_(before)

    with pytest.raises(CompileError, match="end_verify do something else"):
        check(end=end)


def test_an_acceptance_by_choices_alone_is_refused():
    def end(arguments):
        end_verify([*arguments[:3], torch.tensor([-1.0, 0.0]), *arguments[4:]])

    with pytest.raises(CompileError, match="end_verify"):
        check(end=end)
