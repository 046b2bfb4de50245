"""What the programs of all Python clients share: try features one by one and write a JSON line for each.

This module is copied into no environment and needs no package. The programs import it from the folder above their own.
"""

import asyncio
import importlib.metadata
import json
import os
import re
import sys
import threading
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import iscoroutine
from pathlib import Path
from typing import Any

DEMO = os.environ.get("CLIENTS_DEMO", "")
"""URL of the service of the bundled model, without a path."""
RECITER = os.environ.get("CLIENTS_RECITER", "")
"""URL of the service of the model that reasons, and that never ends if it is asked to go on forever."""
GRPC = os.environ.get("CLIENTS_GRPC", "")
"""HOST:PORT of the bundled model's service."""
KEY = os.environ.get("CLIENTS_KEY", "")
TOKENIZER = str(Path(__file__).parents[2] / "shared" / "demo_model")
"""Folder of the bundled model's tokenizer, for clients that count tokens."""

FEATURE_S = 180.0
"""How long one feature may take, on a machine with two busy cores."""
QUESTION = "What is 3 + 4?"
FOREVER = "Go on forever."
WEATHER_ANSWER = "sunny, 21 degrees"
LONG = "word " * 6000
"""A prompt that no context of the bundled model holds."""
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
BIRD = {
    "type": "object",
    "properties": {"name": {"enum": ["robin", "owl"]}, "size": {"enum": ["small", "large"]}},
    "required": ["name", "size"],
    "additionalProperties": False,
}

Trial = Callable[[], Any]


class Probe:
    """The features of one client."""

    def __init__(self, client: str, *packages: str) -> None:
        """Create a probe; `packages` are the distributions whose versions are stated."""
        self._client = client
        self._version = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
        self._trials: dict[str, Trial] = {}

    def tries(self, feature: str) -> Callable[[Trial], Trial]:
        """Decorate a function that fails with an exception if the feature does not work."""

        def add(trial: Trial) -> Trial:
            self._trials[feature] = trial
            return trial

        return add

    def absent(self, feature: str, reason: str) -> None:
        """State why the client cannot use a feature."""
        self._write(feature, "absent", reason)

    def run(self, wanted: set[str]) -> None:
        """Try the features in `wanted`, or all if it is empty."""
        for feature, trial in self._trials.items():
            if not wanted or feature in wanted:
                reason = _reason_of(trial)
                self._write(feature, "fail" if reason else "pass", reason)

    def _write(self, feature: str, result: str, reason: str) -> None:
        line = {"client": self._client, "version": self._version, "feature": feature, "result": result}
        print(json.dumps(line | {"reason": reason}), flush=True)


LOOP = asyncio.new_event_loop()


def run(*probes: Probe) -> None:
    """Try the features of all probes and end the process, also if a thread still waits for an answer."""
    threading.Thread(target=LOOP.run_forever, daemon=True).start()
    for probe in probes:
        probe.run(set(sys.argv[1:]))
    sys.stdout.flush()
    os._exit(0)


def _reason_of(trial: Trial) -> str:
    """Run a trial in a separate thread; return why it failed, or nothing."""
    reasons = [f"no result within {FEATURE_S:.0f} s"]

    def attempt() -> None:
        try:
            result = trial()
            if iscoroutine(result):
                # Some clients bind their connections to an event loop, so all trials share one loop.
                asyncio.run_coroutine_threadsafe(result, LOOP).result(FEATURE_S)
            reasons.append("")
        except BaseException as error:
            traceback.print_exc()
            reasons.append(f"{type(error).__name__}: {error}"[:500])

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(FEATURE_S)
    return reasons[-1]


@contextmanager
def raises(kind: type[BaseException], *texts: str, code: str = "") -> Iterator[None]:
    """Expect the client's own exception, with this code, and a message that contains these texts."""
    try:
        yield
    except kind as error:
        raised = error
    else:
        raise AssertionError(f"{kind} was not raised")
    assert not code or getattr(raised, "code", "") == code, f"the code is {getattr(raised, 'code', '')!r}"
    for text in texts:
        assert text in str(raised), f"{text!r} is not in {raised}"


@contextmanager
def frees(url: str, count: int = 1) -> Iterator[None]:
    """Expect that the service ends `count` requests as cancelled, and that none is left."""
    before = _metric(url, "quire_requests_ended_total", 'reason="cancelled"')
    yield
    end = time.monotonic() + FEATURE_S
    while True:
        cancelled = _metric(url, "quire_requests_ended_total", 'reason="cancelled"') - before
        live = _metric(url, "vllm:num_requests_running") + _metric(url, "vllm:num_requests_waiting")
        if cancelled >= count and not live:
            return
        assert time.monotonic() < end, f"{cancelled:.0f} requests were cancelled, and {live:.0f} are live"
        time.sleep(0.1)


def _metric(url: str, name: str, label: str = "") -> float:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"{url}/metrics", timeout=30) as response:
        text = response.read().decode()
    samples = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for labels, value in samples if label in labels)
