"""The check of the kernels around a captured decode: right ones pass, wrong ones do not leave the compiler."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.check.decode_loop import check_decode_loop
from mllm_compile.errors import CompileError
from mllm_compile.runtime.program.loaded import DecodeLoopPieces
from mllm_compile.runtime.sampling.state import IS_GREEDY, SEED, TEMPERATURE
from tests.runtime.step.decode_loop_cases import begin_decode, end_decode


def check(begin=begin_decode, end=end_decode, page_size: int = 16, vocab_size: int = 1000) -> None:
    logits = torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(0))
    pieces = DecodeLoopPieces(boxed(lambda arguments: begin(arguments, page_size)), boxed(end))
    check_decode_loop(pieces, page_size, logits)


def boxed(piece):
    """As a package is called: it empties the list that it is given, and copies what does not begin at 16 bytes."""

    def call(arguments):
        given = [argument.clone() if argument.data_ptr() % 16 else argument for argument in arguments]
        arguments.clear()
        return piece(given)

    return call


@pytest.mark.parametrize("page_size", [1, 16, 64, 100])
def test_the_operations_in_torch_pass(page_size):
    check(page_size=page_size)


def refuses_to_be_in_place(arguments, page_size):
    requests = arguments[1].clone()
    requests[:, :, 0] = requests[:, :, 0].abs()
    begin_decode([arguments[0], requests, *arguments[2:]], page_size)


def forgets_the_new_page(arguments, page_size):
    before = arguments[3].clone()
    begin_decode(arguments, page_size)
    arguments[3].copy_(before)


def lists_few_pages(arguments, page_size):
    begin_decode(arguments, page_size)
    arguments[-1][:, 512:] = -7


def off_by_one(place):
    def begin(arguments, page_size):
        begin_decode(arguments, page_size)
        arguments[place][2] += 1

    return begin


@pytest.mark.parametrize(
    "begin",
    [refuses_to_be_in_place, forgets_the_new_page, lists_few_pages, *(off_by_one(place) for place in range(4, 10))],
)
def test_inputs_that_are_not_as_they_should_be_are_refused(begin):
    with pytest.raises(CompileError, match=r"begin_decode do something else .* compile.backend: eager"):
        check(begin=begin)


def always_greedy(arguments):
    ints = arguments[2].clone()
    ints[IS_GREEDY] = 1
    return end_decode([*arguments[:2], ints, *arguments[3:]])


def at_temperature_one(arguments):
    floats = arguments[1].clone()
    floats[TEMPERATURE] = 1
    return end_decode([arguments[0], floats, *arguments[2:]])


def of_one_seed(arguments):
    ints = arguments[2].clone()
    ints[SEED] = 1
    return end_decode([*arguments[:2], ints, *arguments[3:]])


def at_one_position(arguments):
    return end_decode([*arguments[:4], torch.full_like(arguments[4], 2), *arguments[5:]])


def stands_still(arguments):
    before = arguments[5].clone()
    tokens = end_decode(arguments)
    arguments[5].copy_(before)
    return tokens


def writes_past_its_rows(arguments):
    tokens = end_decode(arguments)
    arguments[7][2, -1] = 0
    return tokens


def leaves_no_tokens(arguments):
    before = arguments[6].clone()
    tokens = end_decode(arguments)
    arguments[6].copy_(before)
    return tokens


@pytest.mark.parametrize("vocab_size", [200, 1000, 151_936])
@pytest.mark.parametrize("end", [always_greedy, at_temperature_one, of_one_seed, at_one_position])
def test_tokens_that_are_chosen_otherwise_are_refused(end, vocab_size):
    with pytest.raises(CompileError, match="end_decode do something else"):
        check(end=end, vocab_size=vocab_size)


@pytest.mark.parametrize("end", [stands_still, writes_past_its_rows, leaves_no_tokens])
def test_tokens_that_are_not_handed_on_are_refused(end):
    with pytest.raises(CompileError, match="end_decode do something else"):
        check(end=end)
