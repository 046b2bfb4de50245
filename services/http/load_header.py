"""Middleware that adds the load of the service to responses (`calls.load_reports`)."""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.calls.load_reports import FORMAT_HEADER, LoadReports


class LoadHeader:
    """Adds a load report, if one is available, to the header of every response."""

    def __init__(self, app: ASGIApp, reports: LoadReports) -> None:
        self._app = app
        self._reports = reports

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward the request, and add the header to the response."""
        report = self._reports.newest
        if report is None or scope["type"] != "http" or not scope["path"].startswith("/v1/"):
            await self._app(scope, receive, send)
            return
        name, value = report.header(Headers(scope=scope).get(FORMAT_HEADER, ""))

        async def send_with_load(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[name] = value
            await send(message)

        await self._app(scope, receive, send_with_load)
