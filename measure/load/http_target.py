"""Any server with OpenAI's API over HTTP: completions or chat, streamed as server-sent events."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import Mapping
from typing import Any

from measure.load.http1 import HttpPool, Url
from measure.load.prompts import Prompt
from measure.load.targets import Answer, Request, RequestCancelledError, RequestFailedError


class _Events:
    """Splits body parts into server-sent events and adds each event to a response."""

    def __init__(self, request: Request, answer: Answer) -> None:
        self._request, self._answer = request, answer
        self._rest = b""
        self.error_body = b""
        self.failure = ""
        self.finished = False
        self.cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def take(self, status: int, body: bytes) -> None:
        if status != 200:
            self.error_body += body[: 65_536 - len(self.error_body)]
            return
        *lines, self._rest = (self._rest + body).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.finished = True
            return
        try:
            event = json.loads(data)
        except ValueError:
            self.failure = self.failure or "invalid event"
            return
        if "error" in event:
            self.failure = self.failure or _error_kind("error in stream", event)
            return
        if usage := event.get("usage"):
            self._answer.prompt_tokens = usage.get("prompt_tokens") or 0
            self._answer.output_tokens = usage.get("completion_tokens") or self._answer.output_tokens
            details = usage.get("prompt_tokens_details") or {}
            self._answer.cached_tokens = details.get("cached_tokens") or 0
        for choice in event.get("choices") or ():
            self.finished = self.finished or bool(choice.get("finish_reason"))
            ids = choice.get("token_ids") or ()
            text = _text_of(choice)
            # An empty text is a token that does not complete a character. The last chunk of a response has no token.
            is_token = bool(text or ids) or (
                "text" in choice and not choice.get("finish_reason") and "prompt_token_ids" not in choice
            )
            if is_token:
                self._answer.take(max(len(ids), 1), text, ids, keep=self._request.keeps_answer)
        limit = self._request.cancel_after
        if limit is not None and self._answer.output_tokens >= limit and not self.cancelled.done():
            self.cancelled.set_result(None)


class HttpTarget:
    """Calls `/v1/completions`, or `/v1/chat/completions` if prompts are messages."""

    def __init__(
        self,
        url: Url,
        *,
        model: str = "",
        token: str = "",
        tls: ssl.SSLContext | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Store the arguments; `connect` opens connections.

        Args:
            url: address of the server, without `/v1`.
            model: model name in each request; empty to omit it.
            token: bearer token.
            tls: trust store.
            extra: further fields for each request.
        """
        headers = {"accept": "text/event-stream, application/json"}
        self._pool = HttpPool(url, headers | ({"authorization": f"Bearer {token}"} if token else {}), tls)
        self._common = ({"model": model} if model else {}) | dict(extra or {})

    async def connect(self) -> None:
        """Open one connection. Requests open further ones when needed."""
        with contextlib.suppress(OSError, RequestFailedError):
            await self._ask("GET", "/v1/models")

    async def stream(self, request: Request, answer: Answer) -> None:
        """Send a request and fill in the response; see `Target`."""
        body = self._common | {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.ignore_eos:
            body["ignore_eos"] = True
        if request.tenant:
            body["tenant"] = request.tenant
        if request.priority:
            body["priority"] = -request.priority  # Over HTTP a lower number is more urgent, as in vLLM.
        if request.keeps_answer and not isinstance(request.prompt, str):
            body["return_token_ids"] = True
        path = _set_prompt(body, request.prompt)
        events = _Events(request, answer)
        call = asyncio.ensure_future(self._pool.call("POST", path, json.dumps(body).encode(), events.take))
        try:
            waiting: tuple[asyncio.Future[Any], ...] = (call, events.cancelled)
            await asyncio.wait(waiting, timeout=request.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if events.cancelled.done() and not call.done():
                raise RequestCancelledError
            if not call.done():
                raise RequestFailedError("DEADLINE")
            status = call.result()
        except OSError as error:
            raise RequestFailedError(f"connection: {type(error).__name__}") from None
        finally:
            call.cancel()
        if status != 200:
            raise RequestFailedError(_error_kind(f"HTTP {status}", _object(events.error_body)))
        if events.failure:
            raise RequestFailedError(events.failure)
        if not events.finished:
            raise RequestFailedError("incomplete stream")

    async def model(self) -> str:
        """Return the name of the first served model.

        Raises:
            OSError: the server cannot be reached.
            RequestFailedError: it does not list models.
        """
        body = await self._ask("GET", "/v1/models")
        try:
            return str(body["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise RequestFailedError("/v1/models lists no model; pass its name with --model") from None

    async def count_tokens(self, prompt: Prompt, *, ignore_eos: bool) -> int:
        """Send a request and return how many prompt tokens the server counts; 0 if it does not report them.

        Raises:
            RequestFailedError: the server refused the request.
        """
        answer = Answer()
        await self.stream(Request(prompt, 1, ignore_eos=ignore_eos), answer)
        if answer.prompt_tokens:
            return answer.prompt_tokens
        # Some servers report this only in non-streaming responses.
        body = self._common | {"max_tokens": 1, "temperature": 0.0}
        path = _set_prompt(body, prompt)
        usage = (await self._ask("POST", path, json.dumps(body).encode())).get("usage")
        return int(usage.get("prompt_tokens") or 0) if isinstance(usage, dict) else 0

    async def _ask(self, method: str, path: str, body: bytes = b"") -> dict[str, Any]:
        parts: list[bytes] = []
        status = await self._pool.call(method, path, body, lambda status, body: parts.append(body))
        if status != 200:
            raise RequestFailedError(_error_kind(f"{path} answers {status}", _object(b"".join(parts))))
        return _object(b"".join(parts))

    async def close(self) -> None:
        """Close all connections."""
        self._pool.close()


def _set_prompt(body: dict[str, Any], prompt: Prompt) -> str:
    """Set the prompt's field; return the call's path."""
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], dict):
        body["messages"] = prompt
        return "/v1/chat/completions"
    body["prompt"] = prompt
    return "/v1/completions"


def _text_of(choice: Mapping[str, Any]) -> str:
    delta = choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
    return str(text or ("…" if delta.get("tool_calls") else ""))


def _error_kind(prefix: str, body: Mapping[str, Any]) -> str:
    error = body.get("error")
    code = (error.get("code") or error.get("type") or "") if isinstance(error, dict) else ""
    return f"{prefix} {code}".strip()


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
