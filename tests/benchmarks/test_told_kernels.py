"""The table of a step's kernels leaves out all that runs of any length have."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from benchmarks import told_kernels
from mllm_compile.bench.trace.device_events import DeviceEvent


def test_it_tells_what_a_longer_run_has_more(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    ran: list[int] = []

    def events(trace: object) -> list[DeviceEvent]:
        once, each = [DeviceEvent(0.0, 900.0, "prefill")] * 2, [("attend<int>(x)", 4.0), ("attend<int>(x)", 8.0)]
        return once + [DeviceEvent(0.0, micros, name) for _ in range(ran[-1]) for name, micros in each]

    monkeypatch.setattr(torch.profiler, "profile", lambda activities: nullcontext())
    monkeypatch.setattr(told_kernels, "device_events", events)
    told_kernels.tell_kernels(ran.append, 2, 10, 5)
    assert ran == [2, 12]
    assert capsys.readouterr().out.split() == ["12.0", "us:", "2.0", "x", "6.00", "(4.00", "to", "8.00)", "attend"]
