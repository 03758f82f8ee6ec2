"""Finds by trial how many threads a step should have: more of them only where they are faster.

How many threads pay depends on the machine's memory and on what else runs there. Decodes read all weights for a few
products; prompts compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from mllm_compile.runtime.device.cpu_threads import use_threads

# Of each kind of step: for two runs with each number, as the first of all is slow, and for all runs where those take
# less. A step is not interrupted, so larger models are not tried.
FIRST_RUNS, FIRST_RUNS_S, BUDGET_S = 2, 2.0, 0.15
MOST_WEIGHT_BYTES = 4 << 30  # read in some 0.4 s
_GAIN = 0.95  # of the time with fewer threads, which leave cores to others


@dataclass(frozen=True)
class StepThreads:
    """Threads of steps by their kind."""

    decode: int
    prompt: int

    def use(self, is_decode: bool) -> None:
        """Sets the number for a step of the calling thread."""
        use_threads(self.decode if is_decode else self.prompt)


def fastest(run: Callable[[], object], most: int, clock: Callable[[], float] = time.perf_counter) -> int:
    """The number of threads with which `run` is fastest, of `most`, a half of it, and so on down to 1.

    A number counts only if its run is 5 % faster than with fewer threads. Takes BUDGET_S, or as long as each number's
    first two runs take, up to FIRST_RUNS_S; numbers that were not tried by then are left out. The calling thread's own
    number is as before afterwards.
    """
    counts = [most]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    best_s: dict[int, float] = {}
    begin, rounds = clock(), 0
    while True:
        for count in counts:
            expected_s = max(best_s.values(), default=0.0)
            limit_s = FIRST_RUNS_S if rounds < FIRST_RUNS else BUDGET_S
            if clock() - begin + expected_s > limit_s:
                return _choice(best_s)
            use_threads(count)
            start = clock()
            run()
            best_s[count] = min(clock() - start, best_s.get(count, float("inf")))
        rounds += 1


def _choice(best_s: dict[int, float]) -> int:
    chosen = min(best_s)
    for count in sorted(best_s):
        if best_s[count] < _GAIN * best_s[chosen]:
            chosen = count
    return chosen
