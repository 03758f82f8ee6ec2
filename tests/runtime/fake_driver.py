"""A CUDA driver that answers every call, for machines without one."""

from __future__ import annotations


class FakeDriver:
    """Answers every call with success except `fails`, and notes the calls."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self._fails = fails

    def __getattr__(self, name: str):
        def call(*arguments) -> int:
            self.calls.append(name)
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_OF_A_TEST"
            return 7 if name == self._fails else 0

        return call
