"""Energy of steps, from a counter that is read a few times per second. Pure.

Between two readings, the counter is extrapolated with the power since the reading before. The energy of all steps and
of the time between them adds up to what the counter shows, because each step takes the difference to what was reported.
"""

from dataclasses import dataclass

from worker_svc.interface.result import DeviceReadings

_MOST_EXTRAPOLATED_S = 1.0
"""Time after a reading from which on the counter is assumed to stand still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One reading of the sensors."""

    at: float
    """Monotonic time, s."""
    energy_j: float | None
    """Energy counter of this worker, J, from an arbitrary start; None if it cannot be read."""
    power_w: float = 0.0
    """Mean power since the sample before."""
    readings: DeviceReadings | None = None


@dataclass(frozen=True, slots=True)
class StepEnergy:
    """Energy of a step and of the time before it."""

    step_uj: int = 0
    idle_uj: int = 0


def next_sample(before: Sample | None, at: float, energy_j: float | None, readings: DeviceReadings | None) -> Sample:
    """Return a sample with the power since the sample before."""
    power = 0.0
    if before is not None and before.energy_j is not None and energy_j is not None and at > before.at:
        power = max(0.0, energy_j - before.energy_j) / (at - before.at)
    return Sample(at=at, energy_j=energy_j, power_w=power, readings=readings)


def own_energy(energy_j: float, own_cpu_s: float, busy_cpu_s: float) -> float:
    """Return this worker's part of the processors' energy: its share of the CPU time that all programs used.

    Args:
        energy_j: energy of the processors in an interval.
        own_cpu_s: CPU time of this process in the interval.
        busy_cpu_s: CPU time of all programs in the interval; 0 if it is not known, so that the worker has all energy.
    """
    return energy_j if busy_cpu_s <= 0 else energy_j * min(1.0, max(0.0, own_cpu_s) / busy_cpu_s)


def counted(before_uj: int, now_uj: int, range_uj: int) -> int:
    """Return the energy between two readings of a counter that starts again at 0 after `range_uj`."""
    return now_uj - before_uj if now_uj >= before_uj else max(0, now_uj - before_uj + range_uj)


class EnergyMeter:
    """Divides a counter's energy among consecutive steps and the time between them."""

    def __init__(self) -> None:
        """Start with the first sample."""
        self._reported_j: float | None = None

    def take(self, sample: Sample, begin: float, end: float) -> StepEnergy:
        """Return the energy since the last call: of the step from `begin` to `end`, and of the time before it."""
        if sample.energy_j is None:
            return StepEnergy()
        if self._reported_j is None:
            self._reported_j = sample.energy_j
        total = max(self._reported_j, _at(sample, end))
        begun = min(total, max(self._reported_j, _at(sample, begin)))
        idle, step = begun - self._reported_j, total - begun
        self._reported_j = total
        return StepEnergy(round(step * 1e6), round(idle * 1e6))


def _at(sample: Sample, when: float) -> float:
    """Return the extrapolated counter."""
    assert sample.energy_j is not None
    return sample.energy_j + sample.power_w * min(_MOST_EXTRAPOLATED_S, when - sample.at)
