import pytest
import torch

from mllm_compile.runtime import forward_context
from mllm_compile.runtime.errors import ConfigError
from mllm_compile.runtime.forward_context import (
    BatchDescriptor,
    ForwardContext,
    ForwardTimes,
    get_forward_context,
    override_forward_context,
    set_forward_context,
)
from mllm_compile.runtime.graph_mode import CUDAGraphMode, GraphKind


def context(**kwargs):
    return set_forward_context({}, no_compile_layers={}, slot_mapping={}, num_tokens=5, **kwargs)


def test_without_a_context_the_error_says_how_to_set_one():
    with pytest.raises(RuntimeError, match="set_forward_context"):
        get_forward_context()


def test_inside_it_is_found_and_after_it_is_gone():
    with context() as made:
        assert get_forward_context() is made
    with pytest.raises(RuntimeError):
        get_forward_context()


def test_the_previous_context_is_back_even_after_an_exception():
    with context() as outer:
        with pytest.raises(ZeroDivisionError), context():
            raise ZeroDivisionError
        assert get_forward_context() is outer


def test_override_puts_a_given_context_in_place_and_takes_it_away():
    mine = ForwardContext(no_compile_layers={}, attn_metadata={}, slot_mapping={})
    with context() as outer:
        with override_forward_context(mine):
            assert get_forward_context() is mine
        with override_forward_context(None), pytest.raises(RuntimeError):
            get_forward_context()
        assert get_forward_context() is outer


def test_a_context_has_the_descriptor_that_it_is_given():
    with context() as made:
        assert made.batch_descriptor is None
    mine = BatchDescriptor(num_tokens=8, num_reqs=8, kind=GraphKind.DECODE)
    with context(cudagraph_runtime_mode=CUDAGraphMode.FULL, batch_descriptor=mine) as made:
        assert made.batch_descriptor is mine


@pytest.mark.parametrize("pair", [CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY])
def test_a_pair_of_modes_is_no_mode_to_run_in(pair):
    with pytest.raises(RuntimeError, match="decode_mode"), context(cudagraph_runtime_mode=pair):
        pass


def test_pairs_resolve_into_what_decode_and_the_rest_run_in():
    both, decode_only = CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY
    assert (both.decode_mode(), both.mixed_mode()) == (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE)
    assert (decode_only.decode_mode(), decode_only.mixed_mode()) == (CUDAGraphMode.FULL, CUDAGraphMode.NONE)
    for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL):
        assert mode.decode_mode() is mode.mixed_mode() is mode


def test_modes_have_the_names_of_the_config_and_an_unknown_one_lists_them():
    assert CUDAGraphMode.from_name("full_and_piecewise") is CUDAGraphMode.FULL_AND_PIECEWISE
    with pytest.raises(ConfigError, match="full_decode_only"):
        CUDAGraphMode.from_name("fast")


def test_forward_times_keep_a_median_per_number_of_tokens_and_log_at_the_interval(caplog):
    times = ForwardTimes(interval_s=0.0, device=torch.device("cpu"))
    with caplog.at_level("INFO"):
        for _ in range(3):
            with context(forward_times=times):
                pass
    assert [(tokens, count) for tokens, count, _ in times.medians()] == [(5, 3)]
    assert times.medians()[0][2] >= 0
    assert "forward of 5 tokens: median" in caplog.text


def test_forward_times_of_a_long_run_take_no_more_memory(monkeypatch):
    monkeypatch.setattr(forward_context, "_KEPT_FORWARDS", 4)
    times = ForwardTimes(interval_s=1e9, device=torch.device("cpu"))
    for _ in range(9):
        with times.measure(2):
            pass
    assert times.medians()[0][:2] == (2, 9)
    assert len(times._ms_by_tokens[2]) == 4
