"""Console endpoints: live view, drain and resume of workers, explanations, and comparisons.

All endpoints require operator permissions, like the operator API over gRPC. Every path accepts only POST with a JSON
body, which a page from another origin cannot send without a preflight.
"""

import asyncio
import json
from typing import Any, TypeVar

from google.protobuf.message import Message

from protos.quire.link.v1 import link_pb2
from quire import __version__
from quire.admin.v1 import admin_pb2 as admin
from services.access.principals import CURRENT
from services.http.console.feed import Feed, comparison, prediction, worker
from services.http.endpoint import Exchange, Handler
from services.link.core_link import OPERATOR_TIMEOUT_S, CoreLink
from shared.errors import FieldViolation, InvalidRequestError, StalledReaderError, UnsupportedMethodError

_READING_TIMEOUT_S = 60.0
"""Timeout for questions about the scheduler's record, s."""
_STALLED_S = 30.0
"""Maximum time for which a viewer may not read before it is dropped, s. There is at least one event per second."""
MAX_PREDICTED_WORKERS = 64
ResponseT = TypeVar("ResponseT", bound=Message)


class ConsoleEndpoints:
    """The endpoints of one front end."""

    def __init__(self, link: CoreLink, *, trace_url: str) -> None:
        """Create the endpoints.

        Args:
            link: the link to the core.
            trace_url: link to a trace, containing `{trace_id}`; empty for none.
        """
        self._link = link
        self._trace_url = trace_url

    def served(self) -> list[tuple[str, str, Handler]]:
        """Return method, path and handler of each endpoint."""
        return [
            ("POST", "/console/api/watch", self.watch),
            ("POST", "/console/api/service", self.service),
            ("POST", "/console/api/drain", self.drain),
            ("POST", "/console/api/resume", self.resume),
            ("POST", "/console/api/explain", self.explain),
            ("POST", "/console/api/strategies", self.strategies),
            ("POST", "/console/api/predict", self.predict),
        ]

    async def watch(self, exchange: Exchange) -> None:
        """Stream the live view. A slow reader misses steps and gets the number of missed steps."""
        asked = await _question(exchange)
        request = admin.WatchStepsRequest(tables=bool(asked.get("tables")))
        await exchange.run_until_disconnect(self._watch(exchange, request))

    async def _watch(self, exchange: Exchange, request: admin.WatchStepsRequest) -> None:
        order = link_pb2.OperatorRequest()
        order.call.Pack(request)
        feed = Feed()
        async with self._link.watch(order) as view:
            model = self._link.model
            name = model.name if model is not None else ""
            await _send(exchange, {"traceUrl": self._trace_url, "model": name, "release": __version__})
            while True:
                data, dropped = await view.next()
                part = admin.WatchStepsResponse.FromString(data)
                part.dropped_steps += dropped
                await _send(exchange, feed.message(part))

    async def service(self, exchange: Exchange) -> None:
        """Return the release and the settings."""
        await _question(exchange)
        state = await self._ask(admin.GetSchedulerStateRequest(), admin.GetSchedulerStateResponse())
        await exchange.answer(
            {"frontend": __version__, "scheduler": state.release, "settings": dict(sorted(state.settings.items()))}
        )

    async def drain(self, exchange: Exchange) -> None:
        """Drain a worker. Draining the last worker needs confirmation.

        Raises:
            InvalidRequestError: this is the last worker that is not drained.
        """
        asked = await _question(exchange)
        request = admin.DrainWorkerRequest(worker_id=_text(asked, "worker"), move_requests=bool(asked.get("move")))
        if not asked.get("evenLast"):
            listed = await self._ask(admin.ListWorkersRequest(), admin.ListWorkersResponse())
            if {each.worker_id for each in listed.workers if not each.draining} == {request.worker_id}:
                raise InvalidRequestError(
                    FieldViolation(
                        "worker", f"{request.worker_id} is the last worker that takes requests; confirm with evenLast"
                    )
                )
        response = await self._ask(request, admin.DrainWorkerResponse())
        await exchange.answer({"worker": worker(response.worker)})

    async def resume(self, exchange: Exchange) -> None:
        """End the drain of a worker."""
        asked = await _question(exchange)
        request = admin.ResumeWorkerRequest(worker_id=_text(asked, "worker"))
        response = await self._ask(request, admin.ResumeWorkerResponse())
        await exchange.answer({"worker": worker(response.worker)})

    async def explain(self, exchange: Exchange) -> None:
        """Explain the duration of a request by its causes."""
        asked = await _question(exchange)
        await exchange.run_until_disconnect(self._explain(exchange, _text(asked, "request")))

    async def _explain(self, exchange: Exchange, request_id: str) -> None:
        request = admin.ExplainRequest(request_id=request_id)
        response = await self._ask(request, admin.ExplainResponse(), _READING_TIMEOUT_S)
        await exchange.answer({"text": response.text, "values": json.loads(response.json)})

    async def strategies(self, exchange: Exchange) -> None:
        """Compare static, dynamic and continuous batching for the requests of the last minutes."""
        asked = await _question(exchange)
        request = admin.CompareStrategiesRequest(rows=_number(asked, "rows", 256))
        request.since.FromSeconds(_number(asked, "seconds", 900))
        await exchange.run_until_disconnect(self._strategies(exchange, request))

    async def _strategies(self, exchange: Exchange, request: admin.CompareStrategiesRequest) -> None:
        response = await self._ask(request, admin.CompareStrategiesResponse(), _READING_TIMEOUT_S)
        await exchange.answer(comparison(response))

    async def predict(self, exchange: Exchange) -> None:
        """Predict the effect of other settings on the requests from the last minutes."""
        asked = await _question(exchange)
        settings = asked.get("settings", {})
        if not isinstance(settings, dict) or not all(isinstance(value, str | int) for value in settings.values()):
            raise InvalidRequestError(FieldViolation("settings", "must be an object of names and values"))
        request = admin.PredictRequest(
            settings=[f"{_text({'settings': name}, 'settings')}={value}" for name, value in settings.items()],
            workers=_number(asked, "workers", MAX_PREDICTED_WORKERS) if "workers" in asked else 0,
            kv_memory_factor=_number(asked, "memoryPercent", 1000) / 100 if "memoryPercent" in asked else 0.0,
        )
        request.since.FromSeconds(_number(asked, "seconds", 900))
        await exchange.run_until_disconnect(self._predict(exchange, request))

    async def _predict(self, exchange: Exchange, request: admin.PredictRequest) -> None:
        response = await self._ask(request, admin.PredictResponse(), _READING_TIMEOUT_S)
        await exchange.answer(prediction(response))

    async def _ask(self, request: Message, response: ResponseT, timeout_s: float = OPERATOR_TIMEOUT_S) -> ResponseT:
        order = link_pb2.OperatorRequest()
        order.call.Pack(request)
        reply = await self._link.operate(order, timeout_s)
        if not reply.response.Unpack(response):
            raise UnsupportedMethodError("scheduler: does not support this call; upgrade it to the front end's version")
        return response


async def _question(exchange: Exchange) -> dict[str, Any]:
    """Return the body of an operator's request.

    Raises:
        PermissionDeniedError: the caller is no operator.
        InvalidRequestError: the body is not a JSON object.
    """
    CURRENT.get().check_admin()
    return await exchange.read(_json_object)


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(raw)
    except (ValueError, RecursionError):
        asked = None
    if not isinstance(asked, dict):
        raise InvalidRequestError(FieldViolation("body", "not a JSON object; send {}"))
    return asked


def _text(asked: dict[str, Any], name: str) -> str:
    value = asked.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 512:
        raise InvalidRequestError(FieldViolation(name, "must be a text of 1 to 512 characters"))
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(FieldViolation(name, "not valid Unicode text; remove lone surrogates")) from None
    return value


def _number(asked: dict[str, Any], name: str, most: int) -> int:
    value = asked.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise InvalidRequestError(FieldViolation(name, f"must be a whole number from 1 to {most}"))
    return value


async def _send(exchange: Exchange, content: dict[str, Any]) -> None:
    """Send an event; drop a viewer that does not read."""
    try:
        async with asyncio.timeout(_STALLED_S):
            await exchange.event(content)
    except TimeoutError:
        raise StalledReaderError("console: this page does not read its events; reload it") from None
