"""Description of the API: `/openapi.json`, and `/docs` for people, without external resources."""

from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema

from quire import __version__
from services.http.messages.schema import CountTokensBody, MessagesBody
from services.http.responses.schema import ResponsesBody
from services.http.schema import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    EmbeddingBody,
    PoolingBody,
    TokenizeBody,
)
from services.http.scoring.schema import RerankBody, ScoreBody

_REF = "#/components/schemas/{model}"

_STRING: dict[str, Any] = {"type": "string"}
_INT: dict[str, Any] = {"type": "integer"}
_NULLABLE_OBJECT: dict[str, Any] = {"type": ["object", "null"]}


def _object(properties: dict[str, Any], *, optional: tuple[str, ...] = ()) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
    }


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_USAGE = _object(
    {
        "prompt_tokens": _INT,
        "completion_tokens": _INT,
        "total_tokens": _INT,
        "prompt_tokens_details": _object({"cached_tokens": _INT}),
        "energy_j": {"type": "number"},
    },
    optional=("energy_j",),
)
_PROMPT_USAGE = _object(
    {"prompt_tokens": _INT, "total_tokens": _INT, "prompt_tokens_details": _object({"cached_tokens": _INT})},
)
_FINISH_REASON = {"enum": ["stop", "length", "tool_calls"]}
_TOOL_CALL = _object(
    {"id": _STRING, "type": {"const": "function"}, "function": _object({"name": _STRING, "arguments": _STRING})}
)
_MESSAGE = _object(
    {
        "role": {"const": "assistant"},
        "content": {"type": ["string", "null"]},
        "refusal": {"type": "null"},
        "reasoning_content": _STRING,
        "tool_calls": _list(_TOOL_CALL),
    },
    optional=("reasoning_content", "tool_calls"),
)
_CHOICE = {
    "index": _INT,
    "finish_reason": _FINISH_REASON,
    "stop_reason": {"type": ["string", "integer", "null"]},
    "logprobs": _NULLABLE_OBJECT,
}
_MODEL = _object(
    {
        "id": _STRING,
        "object": {"const": "model"},
        "created": _INT,
        "owned_by": _STRING,
        "sampling_defaults": {"type": "object", "additionalProperties": {"type": "number"}},
    }
)
_HEAD = {"id": _STRING, "created": _INT, "model": _STRING, "system_fingerprint": _STRING}
_ANSWERS: dict[str, dict[str, Any]] = {
    "Completion": _object(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "choices": _list(_object({**_CHOICE, "text": _STRING})),
            "usage": _USAGE,
        }
    ),
    "ChatCompletion": _object(
        {
            **_HEAD,
            "object": {"const": "chat.completion"},
            "choices": _list(_object({**_CHOICE, "message": _MESSAGE})),
            "usage": _USAGE,
        }
    ),
    "Embeddings": _object(
        {
            "object": {"const": "list"},
            "data": _list(
                _object(
                    {
                        "object": {"const": "embedding"},
                        "index": _INT,
                        "embedding": {"anyOf": [_list({"type": "number"}), _STRING]},
                    }
                )
            ),
            "model": _STRING,
            "usage": _PROMPT_USAGE,
        }
    ),
    "Pooled": _object(
        {
            "id": _STRING,
            "object": {"const": "list"},
            "created": _INT,
            "data": _list(
                _object(
                    {
                        "object": {"const": "pooling"},
                        "index": _INT,
                        "data": {"anyOf": [_list({"type": "number"}), _STRING]},
                    }
                )
            ),
            "model": _STRING,
            "usage": _PROMPT_USAGE,
        }
    ),
    "Ranking": _object(
        {
            "id": _STRING,
            "model": _STRING,
            "results": _list(
                _object(
                    {
                        "index": _INT,
                        "relevance_score": {"type": "number"},
                        "document": _object({"text": _STRING}),
                    },
                    optional=("document",),
                )
            ),
            "usage": _PROMPT_USAGE,
        }
    ),
    "Scores": _object(
        {
            "id": _STRING,
            "object": {"const": "list"},
            "created": _INT,
            "model": _STRING,
            "data": _list(_object({"index": _INT, "object": {"const": "score"}, "score": {"type": "number"}})),
            "usage": _USAGE,
        }
    ),
    "Response": _object(
        {
            "id": _STRING,
            "object": {"const": "response"},
            "status": {"enum": ["completed", "incomplete"]},
            "output": _list({"type": "object"}),
            "usage": _object({"input_tokens": _INT, "output_tokens": _INT, "total_tokens": _INT}),
        }
    ),
    "AssistantMessage": _object(
        {
            "id": _STRING,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "content": _list({"type": "object"}),
            "stop_reason": {"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
            "usage": _object({"input_tokens": _INT, "output_tokens": _INT}),
        }
    ),
    "InputTokens": _object({"object": {"const": "response.input_tokens"}, "input_tokens": _INT}),
    "TokenCount": _object({"input_tokens": _INT}),
    "MessagesError": _object({"type": {"const": "error"}, "error": _object({"type": _STRING, "message": _STRING})}),
    "Models": _object({"object": {"const": "list"}, "data": _list(_MODEL)}),
    "Model": _MODEL,
    "Tokens": _object({"count": _INT, "max_model_len": _INT, "tokens": _list(_INT)}),
    "Text": _object({"prompt": _STRING}),
    "Version": _object({"version": _STRING}),
    "Error": _object(
        {
            "error": _object(
                {
                    "message": _STRING,
                    "type": _STRING,
                    "param": {"type": ["string", "null"]},
                    "code": {"type": ["string", "null"]},
                }
            )
        }
    ),
}
_ERRORS = {
    400: "a field is invalid or not supported; `param` names it",
    401: "the token is missing or unknown",
    403: "the principal may not act for this tenant or cache scope; or Host or Origin is not allowed",
    404: "no model with this name is served",
    408: "the body arrived too slowly, or the client read the answer too slowly",
    409: "a live request has the same id",
    410: "the request was cancelled by an operator",
    413: "the body is larger than 8 MiB",
    415: "the Content-Type is not application/json",
    429: "too many requests are waiting or in progress; try again after Retry-After",
    500: "internal server error",
    503: "no worker is available, or the service is shutting down; try again after Retry-After",
    504: "the deadline in X-Request-Timeout passed",
}
_TIMEOUT = {
    "name": "X-Request-Timeout",
    "in": "header",
    "description": "seconds until the request ends with 504",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 31_536_000},
}
_POSTS: list[tuple[str, str, type[Body], str, bool]] = [
    ("/v1/chat/completions", "Continue a conversation", ChatBody, "ChatCompletion", True),
    ("/v1/completions", "Continue a prompt", CompletionBody, "Completion", True),
    ("/v1/responses", "Continue a conversation, in OpenAI's Responses API", ResponsesBody, "Response", True),
    ("/v1/responses/input_tokens", "Count the tokens of a conversation", ResponsesBody, "InputTokens", False),
    ("/v1/messages", "Continue a conversation, in Anthropic's Messages API", MessagesBody, "AssistantMessage", True),
    ("/v1/messages/count_tokens", "Count the tokens of a conversation", CountTokensBody, "TokenCount", False),
    ("/v1/embeddings", "Turn texts into vectors", EmbeddingBody, "Embeddings", False),
    ("/pooling", "Convert texts into vectors, in vLLM's format", PoolingBody, "Pooled", False),
    *(
        (path, "Sort documents by relevance", RerankBody, "Ranking", False)
        for path in ("/v1/rerank", "/v2/rerank", "/rerank")
    ),
    *((path, "Compare texts", ScoreBody, "Scores", False) for path in ("/v1/score", "/score")),
    ("/tokenize", "Convert a text or a conversation into token ids", TokenizeBody, "Tokens", False),
    ("/detokenize", "Token ids into text", DetokenizeBody, "Text", False),
]
_GETS = [
    ("/v1/models", "The served models", "Models", ""),
    ("/v1/models/{name}", "One served model", "Model", "name"),
    ("/version", "The server's version", "Version", ""),
]
_TEXTS = [
    ("/health", "Liveness: the process runs"),
    ("/ready", "Readiness: requests would be served now (503 otherwise)"),
    ("/metrics", "Prometheus metrics of the whole service"),
]


@cache
def describe() -> dict[str, Any]:
    """Return the OpenAPI document."""
    _, definitions = models_json_schema([(body, "validation") for _, _, body, _, _ in _POSTS], ref_template=_REF)
    paths: dict[str, Any] = {}
    for path, summary, body, answer, streams in _POSTS:
        error = "MessagesError" if path.startswith("/v1/messages") else "Error"
        paths[path] = {"post": _operation(summary, answer, body=body, streams=streams, error=error)}
    for path, summary, answer, parameter in _GETS:
        paths[path] = {"get": _operation(summary, answer, parameter=parameter)}
    for path, summary in _TEXTS:
        responses = {"200": {"description": "yes", "content": {"text/plain": {"schema": _STRING}}}}
        if path == "/ready":
            responses["503"] = {"description": "not ready", "content": {"text/plain": {"schema": _STRING}}}
        paths[path] = {"get": {"summary": summary, "responses": responses}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Quire",
            "version": __version__,
            "description": "OpenAI-compatible HTTP API. The gRPC API offers more.",
        },
        "paths": paths,
        "components": {"schemas": {**definitions["$defs"], **_ANSWERS}},
    }


def _operation(
    summary: str,
    answer: str,
    *,
    body: type[Body] | None = None,
    streams: bool = False,
    parameter: str = "",
    error: str = "Error",
) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": _REF.format(model=answer)}}}
    if streams:
        content["text/event-stream"] = {"schema": {}}
    failure = {"application/json": {"schema": {"$ref": _REF.format(model=error)}}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "done", "content": content},
            **{str(status): {"description": text, "content": failure} for status, text in _ERRORS.items()},
        },
    }
    if parameter:
        operation["parameters"] = [{"name": parameter, "in": "path", "required": True, "schema": _STRING}]
    if streams:
        operation["parameters"] = [_TIMEOUT]
    if body is not None:
        schema = {"$ref": _REF.format(model=body.__name__)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Quire: HTTP API</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
  code { background: #f3f3f3; padding: 0 .3em } summary { cursor: pointer; padding: .3em 0 }
  table { border-collapse: collapse; margin: .5em 0 1em } td { border-top: 1px solid #ddd; padding: .2em .8em .2em 0;
  vertical-align: top } .method { display: inline-block; width: 4em; font-weight: bold }
  @media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } code { background: #2a2a2a }
  td { border-color: #444 } }
</style>
<h1>Quire: HTTP API</h1>
<p>Described for programs in <a href="openapi.json">openapi.json</a>.</p>
<main></main>
<script>
const make = (tag, text, parent) => {
  const e = document.createElement(tag); e.textContent = text; parent.append(e); return e
}
const kind = (s) => s.$ref ? s.$ref.split("/").pop() : s.const !== undefined ? JSON.stringify(s.const) :
  s.enum ? s.enum.map(v => JSON.stringify(v)).join(" | ") : s.anyOf ? [...new Set(s.anyOf.map(kind))].join(" | ") :
  s.type === "array" ? "list of " + kind(s.items || {}) : String(s.type || "anything")
fetch("openapi.json").then(answer => answer.json()).then(api => {
  const main = document.querySelector("main")
  const fields = (name, parent) => {
    const schema = api.components.schemas[name], table = make("table", "", parent)
    for (const [field, s] of Object.entries(schema.properties || {})) {
      const row = make("tr", "", table)
      make("code", field, make("td", "", row))
      make("td", kind(s) + ((schema.required || []).includes(field) ? "" : ", optional"), row)
      make("td", s.description || "", row)
    }
  }
  for (const [path, methods] of Object.entries(api.paths)) for (const [method, op] of Object.entries(methods)) {
    const details = make("details", "", main), summary = make("summary", "", details)
    make("span", method.toUpperCase(), summary).className = "method"
    make("code", path, summary); summary.append(" " + op.summary)
    const body = op.requestBody && op.requestBody.content["application/json"].schema
    if (body) fields(kind(body), details)
    const table = make("table", "", details)
    for (const [status, r] of Object.entries(op.responses)) {
      const row = make("tr", "", table); make("td", status, row); make("td", r.description, row)
    }
  }
  make("h2", "Objects", main)
  for (const name of Object.keys(api.components.schemas)) {
    const details = make("details", "", main); make("code", name, make("summary", "", details)); fields(name, details)
  }
})
</script>
</html>
"""
