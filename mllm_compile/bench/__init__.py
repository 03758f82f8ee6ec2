"""Measures the same work for this engine and others, the machine's limits, and where the time of a step goes.

measure/ has the work, and the fresh process in which one engine is measured. adapters/ run the work on an engine.
limits/ computes what the hardware would allow. trace/ finds where a step's time goes. show/ makes tables and plots.
timing/ is how all of it is timed. Nothing of the engine imports this package.
"""

from mllm_compile.errors import MllmError


class BenchmarkError(MllmError):
    """An engine is not installed, failed, or did not do the work it was given."""
