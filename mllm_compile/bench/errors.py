"""The error of a benchmark that could not be taken."""

from mllm_compile.errors import MllmError


class BenchmarkError(MllmError):
    """An engine is not installed, failed, or did not do the work it was given."""
