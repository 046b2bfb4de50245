"""Waits until a service can be used: its health service says so, and every process has joined."""

import asyncio
import re
import urllib.request

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.serve.supervisor import Addresses

_PAUSE_S = 0.1
_CHANNEL_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Our own front end is not behind anybody's proxy.
    ("grpc.enable_http_proxy", 0),
)


async def until_ready(addresses: Addresses, *, workers: int, frontends: int) -> None:
    """Returns once `readiness` is SERVING and so many workers and front ends are connected to the scheduler."""
    await _until_serving(addresses.grpc)
    # The health service speaks for one front end and for "a usable worker"; the metrics tell about all of them.
    while True:
        if await asyncio.to_thread(_connected, addresses.http, workers, frontends):
            return
        await asyncio.sleep(_PAUSE_S)


async def _until_serving(target: str) -> None:
    async with grpc.aio.insecure_channel(target, _CHANNEL_OPTIONS) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        while True:
            try:
                async for update in health.Watch(health_pb2.HealthCheckRequest(service="readiness")):
                    if update.status == health_pb2.HealthCheckResponse.SERVING:
                        return
            except grpc.aio.AioRpcError:
                pass  # the front end that we watched was restarted
            await asyncio.sleep(_PAUSE_S)


def _connected(http: str, workers: int, frontends: int) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{http}/metrics", timeout=5) as response:
            text: str = response.read().decode()
    except OSError:
        return False
    return _gauge(text, "quire_workers") >= workers and _gauge(text, "quire_frontends") >= frontends


def _gauge(exposition: str, name: str) -> float:
    match = re.search(rf"^{name}(?:{{.*}})? (\S+)$", exposition, re.MULTILINE)
    return float(match.group(1)) if match else 0.0
