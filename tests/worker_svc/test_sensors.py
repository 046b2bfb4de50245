"""Sensors of the device, the meter that divides their energy among steps, and what is absent."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from worker_svc.device import sensors
from worker_svc.device.energy import EnergyMeter, Sample, counted, next_sample, own_energy
from worker_svc.device.sensors import DeviceMonitor, NvmlSensor, RaplSensor, SensorError
from worker_svc.interface.result import DeviceReadings, StepResult, StepTimings


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.floats(0.01, 2.0), st.floats(0.0, 1.0), st.floats(0.0, 500.0)), min_size=2, max_size=30))
def test_steps_and_pauses_have_all_energy_of_the_counter(steps: list[tuple[float, float, float]]) -> None:
    """Whatever the power does, the sum follows the counter, and no step has less than nothing."""
    meter, now, counter = EnergyMeter(), 0.0, 100.0
    sample = next_sample(None, now, counter, None)
    meter.take(sample, now, now)
    total = 0.0
    for seconds, busy, power in steps:
        now, counter = now + seconds, counter + power * seconds
        sample = next_sample(sample, now, counter, None)
        energy = meter.take(sample, now - busy * seconds, now)
        assert energy.step_uj >= 0
        assert energy.idle_uj >= 0
        total += (energy.step_uj + energy.idle_uj) / 1e6
    assert total == pytest.approx(counter - 100.0, abs=1e-4)


def test_a_step_after_a_pause_does_not_pay_for_the_pause() -> None:
    """At 50 W, a step of 0.1 s has 5 J, and the 0.9 s before it 45 J."""
    meter = EnergyMeter()
    meter.take(Sample(at=0.0, energy_j=0.0), 0.0, 0.0)

    energy = meter.take(Sample(at=1.0, energy_j=50.0, power_w=50.0), 0.9, 1.0)

    assert (energy.step_uj, energy.idle_uj) == (5_000_000, 45_000_000)


def test_a_step_between_two_readings_is_extrapolated() -> None:
    """0.1 s after a reading, the counter is assumed to have gone on; after more than a second, no further."""
    meter = EnergyMeter()
    sample = Sample(at=1.0, energy_j=50.0, power_w=50.0)
    meter.take(sample, 1.0, 1.0)

    assert meter.take(sample, 1.0, 1.1).step_uj == 5_000_000
    assert meter.take(sample, 1.1, 9.0).step_uj == 45_000_000


def test_a_counter_starts_again_at_its_range() -> None:
    """RAPL counters are narrow."""
    assert [counted(*each, 100) for each in ((10, 30), (90, 10), (5, 5))] == [20, 20, 0]


def test_a_worker_has_its_share_of_the_processors() -> None:
    """Without known CPU times it has all energy, and never more."""
    assert own_energy(10.0, 1.0, 4.0) == 2.5
    assert own_energy(10.0, 1.0, 0.0) == 10.0
    assert own_energy(10.0, 5.0, 4.0) == 10.0


def _zone(folder: Path, zone: str, name: str, energy_uj: int) -> Path:
    path = folder / zone
    path.mkdir()
    for file, text in (("name", name), ("energy_uj", str(energy_uj)), ("max_energy_range_uj", "1000000000")):
        (path / file).write_text(f"{text}\n")
    return path


def test_packages_are_added_up_and_their_parts_are_not(tmp_path: Path) -> None:
    """Cores and memory are part of a package, and psys contains the packages."""
    first = _zone(tmp_path, "intel-rapl:0", "package-0", 999_000_000)
    second = _zone(tmp_path, "intel-rapl:1", "package-1", 0)
    for zone, name in (("intel-rapl:0:0", "core"), ("intel-rapl:2", "psys")):
        _zone(tmp_path, zone, name, 77)
    times = iter([(0.0, 0.0), (1.0, 2.0), (1.0, 2.0)])
    sensor = RaplSensor(tmp_path, cpu_times=lambda: next(times))

    (first / "energy_uj").write_text("1000000\n")  # 2 J further, over the end of the range
    (second / "energy_uj").write_text("6000000\n")

    assert sensor.energy_j() == pytest.approx(4.0), "half of 8 J"
    (second / "energy_uj").unlink()
    assert sensor.energy_j() is None


def test_the_reason_without_counters_is_one_line(tmp_path: Path) -> None:
    """An empty folder, a missing one, and counters that are no numbers."""
    with pytest.raises(SensorError, match="no energy counters of processor packages were found"):
        RaplSensor(tmp_path)
    with pytest.raises(SensorError, match="no energy counters"):
        RaplSensor(tmp_path / "none")
    (_zone(tmp_path, "intel-rapl:0", "package-0", 1) / "energy_uj").write_text("?\n")
    with pytest.raises(SensorError, match="invalid literal"):
        RaplSensor(tmp_path)


class _NvmlError(Exception):
    pass


class _Nvml:
    """Two GPUs. What is named in `unsupported` raises, as NVML does on old GPUs."""

    NVMLError = _NvmlError
    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2

    def __init__(self, *unsupported: str) -> None:
        self._unsupported = unsupported

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if name in self._unsupported:
                raise _NvmlError("Not Supported")
            return _VALUES[name](*arguments)

        return call


class _Pair:
    def __init__(self, **values: int) -> None:
        self.__dict__.update(values)


_VALUES: dict[str, Callable[..., Any]] = {
    "nvmlInit": lambda: None,
    "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid[-1]),
    "nvmlDeviceGetTotalEnergyConsumption": lambda gpu: 1000 * (gpu + 1),
    "nvmlDeviceGetUtilizationRates": lambda gpu: _Pair(gpu=50 + 50 * gpu),
    "nvmlDeviceGetMemoryInfo": lambda gpu: _Pair(used=10, total=80),
    "nvmlDeviceGetPowerUsage": lambda gpu: 300_000,
    "nvmlDeviceGetClockInfo": lambda gpu, kind: 1000 * kind,
}


def test_nvml_reads_all_gpus_of_a_worker() -> None:
    """Energy, memory and power are sums; utilisation and clocks are means, in SI units."""
    sensor = NvmlSensor(_Nvml(), ["GPU-0", "GPU-1"])

    assert sensor.energy_j() == 3.0
    assert sensor.readings() == DeviceReadings(
        utilisation=0.75, memory_used=20, memory_total=160, power_w=600.0, processor_clock_hz=1e9, memory_clock_hz=2e9
    )


def test_what_a_gpu_does_not_support_is_absent() -> None:
    """One missing reading does not hide the others."""
    sensor = NvmlSensor(_Nvml("nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetUtilizationRates"), ["GPU-0"])

    readings = sensor.readings()
    assert sensor.energy_j() is None
    assert readings is not None
    assert (readings.utilisation, readings.power_w) == (None, 300.0)
    with pytest.raises(SensorError, match="NVML: Not Supported"):
        NvmlSensor(_Nvml("nvmlDeviceGetHandleByUUID"), ["GPU-0"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU has the library")
def test_a_machine_without_the_library_says_so() -> None:
    """The real package without a driver: its error becomes one line."""
    pynvml = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")

    with pytest.raises(SensorError, match="NVML: NVML Shared Library Not Found"):
        NvmlSensor(pynvml, ["GPU-0"])


def test_a_worker_without_sensors_has_no_monitor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Then results are sent as they are."""
    monkeypatch.setenv(sensors.POWERCAP_VARIABLE, str(tmp_path))

    assert sensors.start_monitor(torch.device("cpu"), 1) is None


class _Sensor:
    def __init__(self) -> None:
        self.counter = 0.0

    def energy_j(self) -> float:
        return self.counter

    def readings(self) -> DeviceReadings:
        return DeviceReadings(power_w=self.counter)


def _result(busy_s: float) -> StepResult:
    timings = StepTimings(
        received_unix_ns=0,
        started_unix_ns=0,
        prepare_ns=0,
        forward_ns=round(busy_s * 1e9),
        sample_ns=0,
        idle_before_ns=0,
        num_tokens=1,
    )
    none = np.zeros(0, np.int32)
    return StepResult(step=1, rows=none.astype(np.int64), tokens=none, timings=timings, completed_copies=none)


def test_results_have_energy_and_each_reading_once() -> None:
    """Readings are taken once per second, and sent with one result."""
    sensor, now = _Sensor(), [0.0]
    monitor = DeviceMonitor(sensor, now=lambda: now[0])
    found = []
    for at in (0.0, 0.5, 1.0, 1.5):
        now[0], sensor.counter = at, 100 * at
        monitor.read()
        found.append(monitor.measured(_result(0.1)).timings)

    assert [each.energy_uj for each in found] == [0, 10_000_000, 10_000_000, 10_000_000]
    assert [each.idle_energy_uj for each in found] == [0, 40_000_000, 40_000_000, 40_000_000]
    assert [None if each.device is None else each.device.power_w for each in found] == [0.0, None, 100.0, None]
