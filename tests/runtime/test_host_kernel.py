"""Programs of kernels on a host end with what is wrong, though threads wait."""

from __future__ import annotations

import pytest

from tests.runtime.host_kernel import compiled, needs_compiler, run_program

SOURCE = """
int main() {
  launch(1, 2 * LANES, 1024, [] {
    if (threadIdx.x == 0) make_barrier(0, 1), make_barrier(8, 1);
    __syncthreads();
    if (threadIdx.x == LANES) expect_bytes(0, 16), arrive(0);
    wait_for(8, 0);
  });
}
"""


@needs_compiler
def test_one_arrival_too_many_is_told_while_all_other_threads_wait(tmp_path):
    with pytest.raises(AssertionError, match="a barrier has too many arrivals"):
        run_program(compiled(SOURCE, tmp_path))
