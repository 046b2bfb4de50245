"""Waits until a service is ready and every process has joined."""

import asyncio
import re
import ssl
import urllib.request

_PAUSE_S = 0.05
# Skip certificate verification, because these requests carry no secrets and go only to child processes on a reserved
# port.
_UNVERIFIED = ssl._create_unverified_context()


async def until_ready(probes: str, *, workers: int, frontends: int) -> None:
    """Wait until the service is ready and the workers and front ends are connected to the scheduler.

    Args:
        probes: base URL of /ready and /metrics.
        workers: number of workers that must have joined.
        frontends: number of front ends that must have joined.
    """
    # /ready covers one front end and any usable worker; the metrics count all of them.
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
    """Return the body of a successful response, or an empty string."""
    # No proxy is needed for the local front end.
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
