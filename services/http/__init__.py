"""HTTP on the front end: OpenAI's API, probes, metrics.

An HTTP request becomes the same `GenerateRequest` that gRPC clients send, and is validated, run and streamed by the
same `Generator`; nothing in here generates, queues or limits. In reading order:

  * `server` and `app`: uvicorn on the front end's event loop, and the routes;
  * `endpoint`: one exchange from its body to its end: limits, deadlines, clients that leave, errors;
  * `schema` and `bodies`: what a request may hold; `identity`: its model and its id;
  * `sampling` and `prompts`: from there to `GenerateRequest`; `tool_calls`: tools in, parsed calls out;
  * `answers`, with `logprobs`: from `GenerateResponse` to OpenAI's chunks; `whole_answer`: their sum;
  * `generation`, `embeddings`, `texts`, `probes`: the endpoints;
  * `errors` and `openapi`: errors in OpenAI's form, and the API's own description.
"""
