"""Energy through the real processes: counters of the processors, metrics and `quire explain`."""

import contextlib
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from measure.testbed.service import serve
from quire import Client
from quire.types import SchedulingOptions
from quire_server.cli.main import main

_WATTS = 20.0


@pytest.fixture
def powercap(tmp_path: Path) -> Iterator[Path]:
    """A folder like /sys/class/powercap, whose only package uses 20 W."""
    zone = tmp_path / "powercap" / "intel-rapl:0"
    zone.mkdir(parents=True)
    for file, text in (("name", "package-0"), ("energy_uj", "0"), ("max_energy_range_uj", str(1 << 40))):
        (zone / file).write_text(f"{text}\n")
    stopped = threading.Event()

    def count() -> None:
        energy_uj, interval_s = 0.0, 0.02
        while not stopped.wait(interval_s):
            energy_uj += _WATTS * interval_s * 1e6
            (zone / "new").write_text(f"{energy_uj:.0f}\n")
            (zone / "new").replace(zone / "energy_uj")

    thread = threading.Thread(target=count)
    thread.start()
    yield zone.parent
    stopped.set()
    thread.join()


def _explained_energy_j(target: str, request_id: str) -> float:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["explain", request_id, "--json", f"--target={target}"]) == 0
    (request,) = json.loads(out.getvalue())["requests"]
    return float(request["energy_j"])


def test_requests_have_their_energy_everywhere(powercap: Path) -> None:
    """Usage, the tenant's counter and `quire explain` agree, and the worker's counter covers them."""
    with serve("demo", environ={"QUIRE_POWERCAP": str(powercap)}) as served, Client(served.grpc) as client:
        usages = [
            client.generate(
                "One",
                max_tokens=300,
                ignore_eos=True,
                request_id=f"r{number}",
                scheduling=SchedulingOptions(tenant="a"),
            )
            .result()
            .finished.usage
            for number in range(3)
        ]
        served.wait_until_empty()

        used = served.metric("quire_tenant_energy_joules_total", tenant="a")
        assert used > 0
        assert served.metric("quire_worker_energy_joules_total", phase="step") >= 0.999 * used
        assert "quire_device_power_watts" not in served.metrics(), "processors have no readings"
        explained = [_explained_energy_j(served.grpc, f"r{number}") for number in range(3)]
        assert min(explained) > 0
        assert sum(explained) == pytest.approx(used, rel=1e-5)
        assert [usage.energy_j for usage in usages] == pytest.approx(explained, rel=1e-5)
        assert served.count_logged("energy is not measured") == 0


def test_without_counters_nothing_is_reported(tmp_path: Path) -> None:
    """The log says so once per worker, and metrics have no energy."""
    with serve("demo", environ={"QUIRE_POWERCAP": str(tmp_path)}) as served, Client(served.grpc) as client:
        client.generate("One", max_tokens=5, request_id="r").result()

        assert "_joules_total{" not in served.metrics()
        assert served.count_logged("energy is not measured") == 1
