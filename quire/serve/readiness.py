"""Waits until a service can be used: it says that it is ready, and every process has joined."""

import asyncio
import re
import ssl
import urllib.request

_PAUSE_S = 0.1
# It asks the processes it has started itself, at a port that it holds, and tells them nothing.
_UNVERIFIED = ssl._create_unverified_context()


async def until_ready(probes: str, *, workers: int, frontends: int) -> None:
    """Returns once the service is ready and so many workers and front ends are connected to the scheduler.

    Args:
        probes: URL under which /ready and /metrics answer.
        workers: how many must have joined.
        frontends: likewise.
    """
    # Readiness speaks for one front end and for "a usable worker"; the metrics tell about all of them.
    while True:
        if await asyncio.to_thread(_is_ready, probes, workers, frontends):
            return
        await asyncio.sleep(_PAUSE_S)


def _is_ready(probes: str, workers: int, frontends: int) -> bool:
    if not _get(f"{probes}/ready"):
        return False
    text = _get(f"{probes}/metrics")
    return _gauge(text, "quire_workers") >= workers and _gauge(text, "quire_frontends") >= frontends


def _get(url: str) -> str:
    """The answer, or nothing while there is none or one that is no success."""
    # Our own front end is not behind anybody's proxy.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=_UNVERIFIED)
    )
    try:
        with opener.open(url, timeout=5) as response:
            text: str = response.read().decode()
    except OSError:
        return ""
    return text


def _gauge(exposition: str, name: str) -> float:
    match = re.search(rf"^{name}(?:{{.*}})? (\S+)$", exposition, re.MULTILINE)
    return float(match.group(1)) if match else 0.0
