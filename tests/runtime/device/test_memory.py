"""Pages of the KV cache: as many as fit, are of use, and are allowed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mllm_compile.runtime.device.memory import KVBudget
from mllm_compile.runtime.errors import DeviceMemoryError
from tests.runtime.runner_cases import DEFAULTS

RUNTIME = replace(DEFAULTS, page_size=4, max_model_len=10, max_running_requests=5)  # of use: 1 + 5 * 3 pages
BUDGET = KVBudget(1200, "1200 bytes")


@pytest.mark.parametrize(
    ("bytes_per_page", "most", "pages"), [(100, None, 12), (1, None, 16), (100, 30, 9), (1, 30, 9), (200, 30, 6)]
)
def test_a_cache_has_the_pages_that_fit_are_of_use_and_are_allowed(bytes_per_page, most, pages):
    assert BUDGET.num_pages(bytes_per_page, replace(RUNTIME, max_total_tokens=most)) == pages


def test_a_cache_that_holds_no_request_is_refused():
    with pytest.raises(DeviceMemoryError, match=r"KV cache of one request of 10 tokens needs .* 1200 bytes"):
        BUDGET.num_pages(400, RUNTIME)
