"""The real `quire serve` as a context manager.

    with serve(checkpoint, "--workers", "2") as served:
        Client(served.grpc).generate("text")

The test bed starts the command as a user would, on free ports, and waits for its ready line. At the end it sends
SIGTERM and asserts that the exit code is 0 and that no process of the service is left, including restarted ones.
"""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
QUIRE = (sys.executable, "-m", "quire_server.cli.main")
"""The command `quire`, run from this source tree."""
END_S = 60
"""Time limit for a service to exit; generous, for a machine with two busy cores."""
PATIENCE_S = 120
"""Time limit for a service to finish its current requests."""
DEFAULTS = {
    # Tiny models gain nothing from a second thread. If the cores are busy, a second thread makes them 30 times slower,
    # because each barrier waits for a thread that is not scheduled.
    "QUIRE_NUM_THREADS": "1",
}
"""What the service's environment holds unless a test says otherwise."""

SERVICE_VARIABLE = "QUIRE_TEST_SERVICE"
"""Variable with the addresses GRPC,HTTP of a running service, for tests that neither configure nor damage the service.
"""
_MARKER = "QUIRE_TEST_RUN"
_READY = re.compile(r"ready grpc=(\S+) http=(\S+)\n")


class Service:
    """A running service that is reached at two addresses."""

    def __init__(self, grpc: str, http: str) -> None:
        self.grpc = grpc
        """HOST:PORT of gRPC."""
        self.http = http
        """HOST:PORT of HTTP."""

    def metric(self, name: str, **labels: str) -> float:
        """Return the sum over all samples of a metric with these labels; 0 if there are none."""
        return _sum(self.metrics(), name, **labels)

    def metrics(self, accept: str = "text/plain") -> str:
        """Return the text of /metrics, in a format that the reader accepts."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        request = urllib.request.Request(f"http://{self.http}/metrics", headers={"Accept": accept})
        with opener.open(request, timeout=30) as response:
            text: str = response.read().decode()
        return text

    def wait_until_empty(self, **ended: int) -> None:
        """Wait until no request runs or waits, and the given numbers of requests have ended for each reason.

        Then assert that every block is free or cached. A cancellation travels through front end, core and worker
        without a response, so its arrival is visible only in the metrics.
        """
        end = time.monotonic() + PATIENCE_S
        while not _is_empty(metrics := self.metrics(), ended):
            assert time.monotonic() < end, f"not empty, or not {ended} ended, after {PATIENCE_S} s:\n{metrics}"
            time.sleep(0.05)
        # Read both at the same time, because a worker may join at any time.
        free, cached, total = (_sum(metrics, "quire_kv_blocks", state=state) for state in ("free", "cached", "total"))
        assert free + cached == total


class Served(Service):
    """A running service of this machine. Made by `serve`."""

    def __init__(self, process: "subprocess.Popen[str]", marker: str, log: Path, grpc: str, http: str) -> None:
        super().__init__(grpc, http)
        self.process = process
        """The supervisor."""
        self.log = log
        """What the supervisor and its children wrote on stderr."""
        self._marker = marker

    def children(self, role: str = "") -> list[psutil.Process]:
        """Return the live processes with a role ("scheduler", "worker", "frontend"), or all of them."""
        found = psutil.Process(self.process.pid).children()
        return [child for child in found if is_alive(child) and (not role or role in arguments_of(child))]

    def pid(self, role: str) -> int:
        """Return the process id of the only process with a role."""
        (child,) = self.children(role)
        return int(child.pid)

    def processes(self) -> list[psutil.Process]:
        """Return every live process of this service, including those whose parent has died."""
        return processes_marked(self._marker)

    def log_lines(self) -> list[dict[str, Any]]:
        """Return the JSON lines of the log so far."""
        # The last line may be incomplete.
        whole, _, _ = self.log.read_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines() if line.startswith("{")]

    def count_logged(self, event: str) -> int:
        """Return how many log lines so far report an event."""
        return sum(line["event"] == event for line in self.log_lines())

    def wait(self) -> int:
        """Wait until the supervisor exits and return its exit code."""
        return self.process.wait(END_S)

    def assert_nothing_left(self) -> None:
        """Assert that no process of this service is left shortly after it exits."""
        _, alive = psutil.wait_procs(self.processes(), timeout=END_S)
        assert alive == [], f"left over: {[process.cmdline() for process in alive]}"


def until(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Wait for a condition that no event announces.

    Raises:
        TimeoutError: it does not hold after `patience_s`; the message contains `what`.
    """
    end = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not after {patience_s} s: {what}")
        time.sleep(0.05)


def _sum(metrics: str, name: str, **labels: str) -> float:
    total = 0.0
    for sample in metrics.splitlines():
        match = re.fullmatch(rf"{name}(?:{{(.*)}})? (\S+)", sample)
        if match and labels.items() <= dict(re.findall(r'(\w+)="([^"]*)"', match.group(1) or "")).items():
            total += float(match.group(2))
    return total


def _is_empty(metrics: str, ended: Mapping[str, int]) -> bool:
    busy = _sum(metrics, "quire_kv_blocks", state="held")
    busy += _sum(metrics, "vllm:num_requests_running") + _sum(metrics, "vllm:num_requests_waiting")
    return not busy and all(
        _sum(metrics, "quire_requests_ended_total", reason=reason) == count for reason, count in ended.items()
    )


@contextmanager
def serve(
    model: Path | str, *flags: str, environ: Mapping[str, str] | None = None, end: bool = True
) -> Iterator[Served]:
    """Run a service.

    Args:
        model: the checkpoint folder, or "demo".
        flags: further flags of `quire serve`.
        environ: additions to the environment.
        end: whether to stop the service and check how it exits; False if the test stops it itself.
    """
    marker = uuid.uuid4().hex
    arguments = (*QUIRE, "serve", f"--model={model}", "--grpc-port=0", "--http-port=0", *flags)
    with tempfile.TemporaryDirectory(prefix="quire-test-") as folder:
        log = Path(folder) / "stderr.log"
        with log.open("w") as stderr:
            process = subprocess.Popen(
                arguments,
                cwd=ROOT,
                # A killed supervisor does not delete its socket folder. Deleting our folder deletes it too.
                env={
                    **os.environ,
                    **DEFAULTS,
                    "TMPDIR": folder,
                    "XDG_STATE_HOME": folder,
                    **(environ or {}),
                    _MARKER: marker,
                },
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                # A test sends Ctrl-C to the service's process group, as a terminal does.
                start_new_session=True,
            )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            match = _READY.fullmatch(line)
            assert match, f"no ready line but {line!r}; exit code {process.poll()}; its log:\n{log.read_text()}"
            served = Served(process, marker, log, *match.groups())
            yield served
            if end:
                process.terminate()
                code = served.wait()
                assert code == 0, f"exit code {code}; its log:\n{log.read_text()}"
            served.assert_nothing_left()
        except BaseException:
            print(f"log of quire serve:\n{log.read_text()}", file=sys.stderr)
            raise
        finally:
            for survivor in processes_marked(marker):
                with suppress(psutil.NoSuchProcess):
                    survivor.kill()
            process.wait(END_S)
            assert process.stdout is not None
            process.stdout.close()


def free_ports(count: int) -> list[int]:
    """Different TCP ports of 127.0.0.1 that are free now."""
    with ExitStack() as held:
        probes = [held.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def processes_marked(marker: str) -> list[psutil.Process]:
    """Return the live processes that inherited a marker from `serve`."""
    return [
        process
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get(_MARKER) == marker and is_alive(process)
    ]


def arguments_of(process: psutil.Process) -> list[str]:
    """Return a process's command line; empty if it has exited."""
    try:
        return list(process.cmdline())
    except psutil.NoSuchProcess:
        return []


def is_alive(process: psutil.Process) -> bool:
    """Whether a process still runs; a zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
