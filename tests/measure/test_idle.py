"""The tool that measures an idle service."""

import os
import threading

from measure.studies.idle import Rate, Usage, rates, read


def test_threads_of_one_name_are_added_up() -> None:
    """Rates are differences per second; a thread that started meanwhile counts from zero."""
    before = {(1, 1): Usage("worker", "main", 10**9, 100), (1, 2): Usage("worker", "io", 0, 5)}
    after = {
        (1, 1): Usage("worker", "main", 3 * 10**9, 140),
        (1, 2): Usage("worker", "io", 10**9, 25),
        (1, 3): Usage("worker", "io", 10**9, 20),
    }

    assert rates(before, after, 10.0) == {("worker", "main"): Rate(0.2, 4.0), ("worker", "io"): Rate(0.2, 4.0)}


def test_every_thread_is_read() -> None:
    """The readings of this process include each of its threads."""
    ending = threading.Event()
    thread = threading.Thread(target=ending.wait)
    thread.start()
    try:
        found = read(os.getpid())
    finally:
        ending.set()
        thread.join()

    assert (os.getpid(), thread.native_id) in found
    assert all(usage.cpu_ns > 0 for usage in found.values())
