"""What a real browser sends for pages from other origins; skipped without Chromium."""

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from services.http.server import HttpServer, listening_socket
from tests.services.stack import MODEL, Stack, running_stack

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
BROWSER_S = 60
"""How long a browser may take to start and show a page."""
pytestmark = pytest.mark.skipif(not CHROMIUM, reason="Chromium is not installed")

PAGE = """<!doctype html><iframe name="frame"></iframe>
<form target="frame" method="post" enctype="text/plain" action="API/v1/completions">
<input name='{"prompt": [5, 6], "max_tokens": 2, "user": "' value='"}'></form><script>
const text = JSON.stringify({prompt: [5, 6], max_tokens: 2}), results = {}
const attempt = async (name, path, options) => {
  try {
    const answer = await fetch("API" + path, options)
    results[name] = answer.type === "opaque" ? "opaque" : [answer.status, await answer.json()]
  } catch (error) { results[name] = error.name }
}
const submitted = new Promise(done => document.querySelector("iframe").addEventListener("load", done))
document.forms[0].submit()
submitted.then(async () => {
  await attempt("text", "/v1/completions", {method: "POST", mode: "no-cors", body: text})
  await attempt("untyped", "/v1/completions", {method: "POST", mode: "no-cors", body: new Blob([text])})
  await attempt("json", "/v1/completions",
    {method: "POST", body: text, headers: {"content-type": "application/json", authorization: "Bearer none"}})
  await attempt("models", "/v1/models")
  await fetch("/results", {method: "POST", body: JSON.stringify(results)})
})
</script>"""


@asynccontextmanager
async def chromium(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A browser without a window, for which evil.example and app.example are this machine."""
    with tempfile.TemporaryDirectory() as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-proxy-server", "--disable-dev-shm-usage",
            "--host-resolver-rules=MAP *.example 127.0.0.1", f"--user-data-dir={profile}", *arguments,
            # A killed browser leaves its temporary files behind.
            env=os.environ | {"TMPDIR": profile},
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def results_of_page(stack: Stack, name: str, port: int = 0) -> dict[str, Any]:
    """Return the results of requests from a page that the server of `name` gives to a browser."""
    results: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
    api = str(stack.http.base_url).rstrip("/")

    async def page(_request: Request) -> Response:
        return HTMLResponse(PAGE.replace("API", api))

    async def take(request: Request) -> Response:
        results.set_result(json.loads(await request.body()))
        return Response()

    listener = listening_socket("127.0.0.1", port)
    server = HttpServer(Starlette(routes=[Route("/", page), Route("/results", take, methods=["POST"])]))
    serving = asyncio.create_task(server.serve([listener]))
    try:
        async with chromium(f"http://{name}:{listener.getsockname()[1]}/"), asyncio.timeout(BROWSER_S):
            return await results
    finally:
        server.stop()
        await serving


def test_a_foreign_page_reaches_nothing(tmp_path: Path) -> None:
    """Neither a form nor a script of a foreign page generates a token or reads an answer."""

    async def main() -> None:
        async with running_stack(tmp_path, allowed_origins="http://app.example") as stack:
            results = await results_of_page(stack, "evil.example")

            assert results == {"text": "opaque", "untyped": "opaque", "json": "TypeError", "models": "TypeError"}
            assert stack.core.submissions == []

    asyncio.run(main())


def test_a_page_of_an_allowed_origin_is_served(tmp_path: Path) -> None:
    """A script from an allowed origin generates and reads; without a JSON Content-Type it is refused too."""

    async def main() -> None:
        with listening_socket("127.0.0.1", 0) as held:
            port = held.getsockname()[1]
            async with running_stack(tmp_path, allowed_origins=f"http://app.example:{port}") as stack:
                results = await results_of_page(stack, "app.example", port)

                assert (results["text"], results["untyped"]) == ("opaque", "opaque")
                assert results["json"][0] == results["models"][0] == 200
                assert results["json"][1]["usage"]["completion_tokens"] == 2
                assert len(stack.core.submissions) == 1

    asyncio.run(main())


@pytest.mark.parametrize(("name", "expected"), [("evil.example", "is not an allowed name"), ("localhost", MODEL.name)])
def test_a_rebound_name_is_refused(tmp_path: Path, name: str, expected: str) -> None:
    """A browser with a foreign name for the service gets nothing; with localhost it gets a response."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            url = f"http://{name}:{stack.http.base_url.port}/v1/models"
            async with chromium("--dump-dom", url) as browser, asyncio.timeout(BROWSER_S):
                assert browser.stdout is not None
                shown = (await browser.stdout.read()).decode()

            assert expected in shown

    asyncio.run(main())
