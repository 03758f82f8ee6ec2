"""The parts of steps that verify_parts.py finds in a trace."""

from __future__ import annotations

from benchmarks.steps.verify_parts import STEPS, report
from mllm_compile.bench.trace.device_events import DeviceEvent

LAYER = (("cluster_decode", 30.0), ("stream_linear", 12.0), ("stream_linear", 52.0))


def step_at(start: float, num_layers: int = 3) -> list[DeviceEvent]:
    """A kernel that makes inputs, layers, and 10 µs of nothing ahead of a head."""
    events, now = [DeviceEvent(start, start + 5, "_begin_kernel")], start + 5
    for name, us in LAYER * num_layers:
        events.append(DeviceEvent(now, now + us, name))
        now += us
    return [*events, DeviceEvent(now + 10, now + 60, "head")]


def test_a_steps_period_its_idle_time_and_a_layers_kernels_are_told():
    period = 5 + 3 * 94 + 60 + 40  # nothing runs for 40 between two steps
    events = [event for number in range(4) for event in step_at(number * period)]
    lines = report([DeviceEvent(-9, -3, "a prompt"), *events])
    assert lines[0].startswith(f"a step every {period} µs, the GPU idle for ")
    assert float(lines[0].split("idle for ")[1].split(";")[0]) == round((3 * 10 + 2 * 40) / 3)
    assert "40 before _begin_kernel" in lines[0]
    assert [line.split() for line in lines[1:4]] == [
        ["0.0", "to", "30.0", "cluster_decode"],
        ["30.0", "to", "42.0", "stream_linear"],
        ["42.0", "to", "94.0", "stream_linear"],
    ]
    assert [" ".join(line.split()) for line in lines[4:]] == [
        "192.0 µs a step by 6.0 x stream_linear",
        "90.0 µs a step by 3.0 x cluster_decode",
        "50.0 µs a step by 1.0 x head",
        "5.0 µs a step by 1.0 x _begin_kernel",
    ]


def test_steps_are_of_the_middle_and_a_kernel_that_begins_early_adds_what_is_behind_others():
    steps = [step_at(number * 1000.0) for number in range(41)]
    slow = [event._replace(end=event.end + 400) for event in steps[20][-1:]]
    early = [DeviceEvent(step[0].start + 1, step[0].start + 7, "early") for step in steps]
    lines = report(sorted([event for step in steps for event in step] + slow + early))
    assert any("2.0 µs a step by" in line and line.endswith("early") for line in lines)
    assert any(f"{50 + 400 / STEPS:.1f} µs a step" in line and line.endswith("head") for line in lines)


def test_a_trace_without_captured_steps_says_so():
    assert report(step_at(0.0)) == ["fewer than two captured steps"]
