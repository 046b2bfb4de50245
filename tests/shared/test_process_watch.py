"""A dying process is detected, by its own name only."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from shared.process_watch import ProcessWatch, own_process

_CHILD = "from shared.process_watch import own_process; print(own_process(), flush=True); input()"


@pytest.fixture
def child() -> Iterator["subprocess.Popen[str]"]:
    """Yield a child process."""
    process = subprocess.Popen((sys.executable, "-c", _CHILD), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def _name(child: "subprocess.Popen[str]") -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_dying_process_is_seen(child: "subprocess.Popen[str]", number: signal.Signals) -> None:
    """A live process is not dying; after a signal it is, and remains so after it was reaped."""
    watch = ProcessWatch.open(_name(child))
    assert watch is not None
    assert not watch.is_dying()

    child.send_signal(number)
    end = time.monotonic() + 30
    while not watch.is_dying() and time.monotonic() < end:
        time.sleep(0.001)

    assert watch.is_dying()
    child.wait()
    assert watch.is_dying()
    watch.close()


def test_a_stopped_process_is_not_dying(child: "subprocess.Popen[str]") -> None:
    """A stopped process may continue."""
    watch = ProcessWatch.open(_name(child))
    assert watch is not None

    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)

    assert not watch.is_dying()
    watch.close()


def test_other_names_open_nothing() -> None:
    """Another boot, another namespace, another start, and whatever else a peer may say, is not watched."""
    name = own_process()
    boot, namespace, number, start = name.split("/")
    wrong = ["", "/", "///", "x", f"{boot}/{namespace}/{number}/1", f"{boot}/{namespace}/{number}x/{start}"]
    wrong += [
        f"{boot}/pid:[1]/{number}/{start}",
        f"0{boot}/{namespace}/{number}/{start}",
        name + "/",
        "/".join(["a"] * 999),
    ]
    wrong += [f"{boot}/{namespace}/../{number}/{start}", f"{boot}/{namespace}/{2**40}/{start}", f"{name}\0"]

    assert [each for each in wrong if ProcessWatch.open(each) is not None] == []
    watch = ProcessWatch.open(name)
    assert watch is not None
    watch.close()
