"""Sensors of the device: NVML for GPUs, and the energy counters of the processors (RAPL) for a CPU worker.

NVML comes with the driver; the package nvidia-ml-py reads it and is optional. Linux shows RAPL as files below
/sys/class/powercap, which often only root may read. The variable QUIRE_POWERCAP names another folder, for a container
that has the host's files elsewhere. What cannot be read is absent from metrics and usage; the log says so once.
"""

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from shared.logging import get_logger
from worker_svc.device.energy import EnergyMeter, Sample, StepEnergy, counted, next_sample, own_energy
from worker_svc.interface.result import DeviceReadings, StepResult

POWERCAP = Path("/sys/class/powercap")
POWERCAP_VARIABLE = "QUIRE_POWERCAP"
_STAT = Path("/proc/stat")
_INTERVAL_S = 0.1
"""Time between two readings of a counter."""
_READINGS_EVERY_S = 1.0
"""Time between two readings of utilisation, memory, power and clocks."""
_BUSY_FIELDS = (0, 1, 2, 5, 6, 7)
"""Columns of /proc/stat with busy time: user, nice, system, irq, softirq, steal."""


class SensorError(Exception):
    """The sensors cannot be read; the text says why."""


class Sensor(Protocol):
    """Sensors of one worker."""

    def energy_j(self) -> float | None:
        """Return the energy counter, J; None if it cannot be read."""

    def readings(self) -> DeviceReadings | None:
        """Return the present readings; None if there are none."""


# ---------------------------------------------------------------- NVML


class NvmlSensor:
    """GPUs of one worker, through NVML. Energy, memory and power are summed, utilisation and clocks averaged."""

    def __init__(self, nvml: Any, uuids: Sequence[str]) -> None:
        """Open the GPUs.

        Args:
            nvml: the module pynvml, or an object with its functions.
            uuids: UUIDs of the GPUs, "GPU-…".

        Raises:
            SensorError: the library, the driver or a GPU was not found.
        """
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            self._handles = [nvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
        except nvml.NVMLError as error:
            raise SensorError(f"NVML: {error}") from None

    def energy_j(self) -> float | None:
        total = self._sum(self._nvml.nvmlDeviceGetTotalEnergyConsumption)
        return None if total is None else total / 1e3

    def readings(self) -> DeviceReadings | None:
        nvml = self._nvml
        rates, memory = self._each(nvml.nvmlDeviceGetUtilizationRates), self._each(nvml.nvmlDeviceGetMemoryInfo)
        power = self._sum(nvml.nvmlDeviceGetPowerUsage)
        processor = self._each(lambda handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        clock = self._each(lambda handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM))
        found = DeviceReadings(
            utilisation=None if rates is None else sum(each.gpu for each in rates) / (100 * len(rates)),
            memory_used=None if memory is None else sum(each.used for each in memory),
            memory_total=None if memory is None else sum(each.total for each in memory),
            power_w=None if power is None else power / 1e3,
            processor_clock_hz=None if processor is None else 1e6 * sum(processor) / len(processor),
            memory_clock_hz=None if clock is None else 1e6 * sum(clock) / len(clock),
        )
        return None if found == DeviceReadings() else found

    def _each(self, read: Callable[[Any], Any]) -> list[Any] | None:
        """Return what each GPU reports; None if one of them cannot report it."""
        try:
            return [read(handle) for handle in self._handles]
        except self._nvml.NVMLError:
            return None

    def _sum(self, read: Callable[[Any], int]) -> int | None:
        found = self._each(read)
        return None if found is None else sum(found)


# ---------------------------------------------------------------- RAPL


class RaplSensor:
    """Energy of all processor packages, of which the worker has its share of the CPU time."""

    def __init__(
        self, folder: Path, ranks: int = 1, cpu_times: Callable[[], tuple[float, float]] | None = None
    ) -> None:
        """Find the packages and read them once.

        Args:
            folder: folder with the zones, such as `intel-rapl:0`.
            ranks: ranks of the worker on this machine, which are assumed to use as much CPU time as this one.
            cpu_times: returns the CPU time of this process and of all programs, s.

        Raises:
            SensorError: there is no package, or it cannot be read.
        """
        self._cpu_times = cpu_times or _cpu_times
        self._ranks = ranks
        self._zones = [zone for zone in sorted(folder.glob("*:*")) if _is_package(zone)]
        if not self._zones:
            raise SensorError(f"{folder}: no energy counters of processor packages were found")
        try:
            self._ranges = [int((zone / "max_energy_range_uj").read_text()) for zone in self._zones]
            self._counters = self._read()
        except (OSError, ValueError) as error:
            raise SensorError(f"{folder}: {error}") from None
        self._times = self._cpu_times()
        self._own_j = 0.0

    def energy_j(self) -> float | None:
        try:
            counters = self._read()
        except (OSError, ValueError):
            return None
        times = self._cpu_times()
        used = sum(map(counted, self._counters, counters, self._ranges)) / 1e6
        own, busy = (now - before for now, before in zip(times, self._times, strict=True))
        self._counters, self._times = counters, times
        self._own_j += own_energy(used, self._ranks * own, busy)
        return self._own_j

    def readings(self) -> DeviceReadings | None:
        return None

    def _read(self) -> list[int]:
        return [int((zone / "energy_uj").read_text()) for zone in self._zones]


def _is_package(zone: Path) -> bool:
    """Return whether a zone is a processor package, and not a part of one or the whole machine ("psys")."""
    try:
        return (zone / "name").read_text().startswith("package")
    except OSError:
        return False


def _cpu_times() -> tuple[float, float]:
    """Return the CPU time of this process, and that of all programs since the start of the machine, in seconds."""
    try:
        columns = _STAT.read_text().split("\n", 1)[0].split()[1:]
        busy = sum(int(columns[field]) for field in _BUSY_FIELDS) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        busy = 0.0
    return time.process_time(), busy


# ---------------------------------------------------------------- choice and monitor


def open_sensor(device: torch.device, local_ranks: int) -> Sensor:
    """Return the sensors of a worker whose rank 0 is on this device, with all its ranks on this machine.

    Raises:
        SensorError: they cannot be read.
    """
    if device.type == "cpu":
        return RaplSensor(Path(os.environ.get(POWERCAP_VARIABLE) or POWERCAP), local_ranks)
    if device.type != "cuda":
        raise SensorError(f"{device.type}: devices of this type have no known sensors")
    try:
        import pynvml
    except ImportError:
        raise SensorError("the package nvidia-ml-py is not installed; pip install nvidia-ml-py") from None
    first = device.index or 0
    count = min(local_ranks, torch.cuda.device_count() - first)
    uuids = [f"GPU-{torch.cuda.get_device_properties(first + rank).uuid}" for rank in range(count)]
    return NvmlSensor(pynvml, uuids)


class DeviceMonitor:
    """Reads the sensors in a thread, and adds energy and readings to the results of steps."""

    def __init__(self, sensor: Sensor, now: Callable[[], float] = time.monotonic) -> None:
        """Take the first sample."""
        self._sensor = sensor
        self._now = now
        self._meter = EnergyMeter()
        self._stopped = threading.Event()
        self._sample: Sample = next_sample(None, now(), sensor.energy_j(), sensor.readings())
        self._read_at = self._sample.at
        self._sent: DeviceReadings | None = None

    def start(self) -> None:
        """Read every 100 ms until `stop`."""
        threading.Thread(target=self._run, name="sensors", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(_INTERVAL_S):
            self.read()

    def read(self) -> None:
        """Take the next sample."""
        now, readings = self._now(), self._sample.readings
        if now >= self._read_at + _READINGS_EVERY_S:
            self._read_at, readings = now, self._sensor.readings()
        self._sample = next_sample(self._sample, now, self._sensor.energy_j(), readings)

    def measured(self, result: StepResult) -> StepResult:
        """Return a result that has just been collected, with its energy, and with readings if there are new ones."""
        timings, sample, end = result.timings, self._sample, self._now()
        busy_s = (timings.prepare_ns + timings.forward_ns + timings.sample_ns) / 1e9
        energy: StepEnergy = self._meter.take(sample, end - busy_s, end)
        is_new = sample.readings is not self._sent
        self._sent = sample.readings
        return replace(
            result,
            timings=replace(
                timings,
                energy_uj=energy.step_uj,
                idle_energy_uj=energy.idle_uj,
                device=sample.readings if is_new else None,
            ),
        )


def start_monitor(device: torch.device, local_ranks: int) -> DeviceMonitor | None:
    """Return a running monitor; None, with one line in the log, if the sensors cannot be read."""
    try:
        monitor = DeviceMonitor(open_sensor(device, local_ranks))
    except SensorError as error:
        get_logger().info("energy is not measured", device=str(device), reason=str(error))
        return None
    monitor.start()
    return monitor
