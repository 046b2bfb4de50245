"""`grpc.health.v1`: whether the process is alive and the service is ready.

`liveness` is SERVING while the process runs. `readiness` is SERVING while a usable worker is available and the process
is not shutting down. The empty name, which load balancers use, and the service's own name have the same status. The
reference servicer is not used: it lacks List, and its Watch calls never end, which would delay every shutdown.
"""

# Do not evaluate annotations: older versions of the package lack the messages of List.
from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.grpc.boundary import Context

LIVENESS = "liveness"
READINESS = "readiness"
GENERATION_SERVICE = "quire.v1.GenerationService"

_READINESS_NAMES = ("", READINESS, GENERATION_SERVICE)
_Status = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # no stubs
    """Health service that returns the last reported state."""

    def __init__(self) -> None:
        self._ready = False
        self._stopping = False
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether `readiness` is SERVING."""
        return self._ready

    def set_ready(self, ready: bool) -> None:
        """Set whether a usable worker is available."""
        if ready != self._ready and not self._stopping:
            self._ready = ready
            self._announce()

    def stop(self) -> None:
        """Report not ready from now on, and end the Watch calls."""
        self._ready, self._stopping = False, True
        self._announce()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        """Return the current status of one name."""
        status = self._status(request.service)
        if status is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"service: {request.service!r} is unknown; List returns the known names"
            )
        return _Status(status=status)

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        """Return the current status of all names."""
        names = (*_READINESS_NAMES, LIVENESS)
        return health_pb2.HealthListResponse(statuses={name: _Status(status=self._status(name)) for name in names})

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Stream one service's status whenever it changes."""
        last = None
        while True:
            # Read all three values before the write, because they may change during the write.
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
