"""`grpc.health.v1`: the process is alive, or the service is ready.

`liveness` is true while the process runs. `readiness`, the empty name (which load balancers ask for) and the service's
own name are true while a usable worker is there and the process is not shutting down. The reference servicer is not
used: it lacks List, and its Watch calls never end, so that they would hold up every shutdown.
"""

# Annotations are not evaluated: older versions of the package have Check and Watch, but no messages for List.
from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.boundary import Context

LIVENESS = "liveness"
READINESS = "readiness"
GENERATION_SERVICE = "quire.v1.GenerationService"

_READINESS_NAMES = ("", READINESS, GENERATION_SERVICE)
_Status = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # no stubs
    """Answers probes from the last state it was told."""

    def __init__(self) -> None:
        self._ready = False
        self._stopping = False
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        """What `readiness` says."""
        return self._ready

    def set_ready(self, ready: bool) -> None:
        """A usable worker is there, or not."""
        if ready != self._ready and not self._stopping:
            self._ready = ready
            self._announce()

    def stop(self) -> None:
        """Not ready from now on; calls of Watch say so and end."""
        self._ready, self._stopping = False, True
        self._announce()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """The present status of one name."""
        status = self._status(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r}")
        return _Status(status=status)

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        """The present status of all names."""
        names = (*_READINESS_NAMES, LIVENESS)
        return health_pb2.HealthListResponse(statuses={name: _Status(status=self._status(name)) for name in names})

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """The status of one name whenever it changes."""
        last = None
        while True:
            # All three before the write, during which they may change.
            changed, stopping = self._changed, self._stopping
            status = self._status(request.service)
            if status is None:
                status = _Status.SERVICE_UNKNOWN
            if status != last:
                await context.write(_Status(status=status))
                last = status
            if stopping:
                return
            await changed.wait()

    def _status(self, name: str) -> int | None:
        if name == LIVENESS:
            return int(_Status.SERVING)
        if name in _READINESS_NAMES:
            return int(_Status.SERVING if self._ready else _Status.NOT_SERVING)
        return None

    def _announce(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
