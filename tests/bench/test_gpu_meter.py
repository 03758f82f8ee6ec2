"""A GPU's clock, power and what slows it, read from a driver that is made up."""

from __future__ import annotations

import itertools
import sys
import threading
from dataclasses import asdict, replace
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mllm_compile.bench.measure import worker
from mllm_compile.bench.measure.results import joined, measurement_from_json
from mllm_compile.bench.measure.workloads import LatencyWork
from mllm_compile.bench.show.report import clocks_explain
from mllm_compile.bench.timing import gpu_meter
from mllm_compile.bench.timing.gpu_meter import GpuMeter, GpuState, Nvml
from tests.bench.result_cases import run, tpot
from tests.bench.test_report import printed
from tests.bench.test_worker import SETTING, StandInEngine
from tests.hang_guard import HANG_S

POWER_CAP, IDLE = 0x4, 0x1


class Driver(ModuleType):
    """NVML of one GPU: each reading comes a second after the one before, and takes `watts` joules."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.clocks = [1980]
        self.watts, self.joules, self.reasons, self.readings = 400, 0, 0, 0
        self.several = threading.Event()  # readings from inside of the work

    def nvmlInit(self) -> None:
        self.is_open = True

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert self.is_open and uuid == "GPU-abc"
        return "gpu"

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: str) -> int:
        return 700_000

    def nvmlDeviceGetClockInfo(self, gpu: str, kind: int) -> int:
        assert (gpu, kind) == ("gpu", self.NVML_CLOCK_SM)
        self.readings += 1
        if self.readings >= 5:
            self.several.set()
        return self.clocks[min(self.readings, len(self.clocks)) - 1]

    def nvmlDeviceGetTotalEnergyConsumption(self, gpu: str) -> int:
        self.joules += self.watts
        return self.joules * 1000

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: str) -> int:
        return self.reasons


@pytest.fixture
def driver(monkeypatch) -> Driver:
    driver = Driver()
    monkeypatch.setitem(sys.modules, "pynvml", driver)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc"))
    monkeypatch.setattr(gpu_meter, "SAMPLE_S", 0.0)
    clock = itertools.count()
    monkeypatch.setattr(GpuMeter, "now", property(lambda meter: float(next(clock))))
    return driver


def state_of(meter: GpuMeter, driver: Driver) -> GpuState | None:
    with meter.watching() as span:
        assert driver.several.wait(HANG_S), "the thread reads meanwhile"
    return meter.state([span])


def test_the_state_is_the_median_clock_and_the_mean_power_of_the_work(driver):
    driver.clocks, driver.reasons = [100, 200] + [1500] * 1000, POWER_CAP | IDLE
    state = state_of(GpuMeter(Nvml.of("cuda:0")), driver)
    assert state == GpuState(clock_mhz=1500, watts=400, limit_watts=700, slowed_by=("power cap",))
    assert str(state) == "1500 MHz, 400 of 700 W, held down by power cap"
    assert GpuState.from_json(asdict(state)) == state


def test_an_idle_gpu_or_one_with_set_clocks_is_not_held_down(driver):
    driver.reasons = IDLE | 0x2
    state = state_of(GpuMeter(Nvml.of("cuda")), driver)
    assert state is not None and state.slowed_by == ()
    assert str(state) == "1980 MHz, 400 of 700 W"


def test_work_that_is_over_at_once_has_the_state_right_behind_it(driver, monkeypatch):
    monkeypatch.setattr(gpu_meter, "SAMPLE_S", 60.0)
    driver.clocks = [1, 500, 1700]  # when it is opened, before and behind
    meter = GpuMeter(Nvml.of("cuda"))
    with meter.watching() as span:
        pass
    assert meter.state([span]) == GpuState(clock_mhz=1700, watts=400, limit_watts=700)


def test_nothing_is_read_of_a_cpu_or_without_the_library_or_its_counters(driver, monkeypatch):
    assert Nvml.of("cpu") is None and driver.readings == 0

    def refuse(gpu: str) -> int:
        raise Driver.NVMLError("not supported")

    monkeypatch.setattr(driver, "nvmlDeviceGetTotalEnergyConsumption", refuse)
    assert Nvml.of("cuda:0") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Nvml.of("cuda:0") is None
    meter = GpuMeter(None)
    with meter.watching() as span:
        pass
    assert meter.state([span]) is None


def test_latency_notes_the_state_beside_each_point(driver, monkeypatch):
    engine = StandInEngine()
    monkeypatch.setattr(worker, "open_engine", lambda name, setting: engine)
    monkeypatch.setattr(gpu_meter, "SAMPLE_S", 60.0)
    driver.reasons = POWER_CAP
    work = LatencyWork(batches=(1, 2), input_len=5, output_len=3, repeats=2)
    on_gpu = {"engine": "x", "setting": asdict(replace(SETTING, device="cuda:0")), "work": asdict(work)}
    lines = [measurement_from_json(line) for line in worker.latency(on_gpu)["measurements"]]
    assert [(line.name, len(line.gpu)) for line in lines] == [("tpot", 1), ("prefill", 1)] * 2
    assert {state.slowed_by for line in lines for state in line.gpu} == {("power cap",)}
    said = printed(run("mllm", *(replace(line, median=1.0) for line in lines)))
    assert "mllm, the GPU: tpot b=1 at 1980 MHz, 400 of 700 W, held down by power cap; prefill b=1 at 1980" in said


def process(ms: float, mhz: float, *slowed_by: str):
    state = GpuState(clock_mhz=mhz, watts=690, limit_watts=700, slowed_by=slowed_by)
    return run("mllm", replace(tpot(256, ms), gpu=(state,)))


def test_processes_that_differ_as_their_clocks_do_are_explained_by_them():
    both = joined([process(10.0, 1980), process(13.2, 1500, "power cap")])
    assert clocks_explain(both.measurements[0]) == pytest.approx(1.0)
    said = printed(both)
    assert "processes differ by 28% (10.00 and 13.20 ms): the GPU's clocks (1980 and 1500 MHz, held down by" in said
    assert "power cap) explain 100% of that. Measure again with the clocks alike" in said


@pytest.mark.parametrize(("mhz", "share"), [(1980.0, 0), (1900.0, 13), (2000.0, 0)])
def test_processes_that_differ_at_like_clocks_are_not_explained_by_them(mhz, share):
    said = printed(joined([process(10.0, 1980), process(13.2, mhz)]))
    assert f"the GPU's clocks (1980 and {mhz:.0f} MHz) explain {share}% of that, so a process keeps" in said


def test_of_rates_the_lower_one_is_the_slower_process():
    rates = [replace(one.measurements[0], unit="tok/s") for one in (process(100, 1000), process(200, 2000))]
    assert clocks_explain(joined([run("mllm", one) for one in rates]).measurements[0]) == 1.0
