"""Waits until a service can be used: its health service says so, and every worker has joined."""

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


async def until_ready(addresses: Addresses, workers: int) -> None:
    """Returns once `readiness` is SERVING and `workers` workers have joined."""
    await _until_serving(addresses.grpc)
    while True:
        joined = await asyncio.to_thread(_count_workers, addresses.http)
        if joined is None or joined >= workers:
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


def _count_workers(http: str) -> int | None:
    """How many workers have joined, None when the metrics do not tell."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{http}/metrics", timeout=5) as response:
            text: str = response.read().decode()
    except OSError:
        return 0
    samples = [line for line in text.splitlines() if re.match(r"quire_workers[ {]", line)]
    return int(sum(float(sample.split()[-1]) for sample in samples)) if samples else None
