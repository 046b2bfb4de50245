"""HTTP on the front end: OpenAI-compatible API, probes, metrics.

An HTTP request becomes the same `GenerateRequest` that gRPC clients send, and the same `Generator` validates, runs and
streams it. This package does not generate, queue or limit requests. In reading order:

  * `server` and `app`: uvicorn on the front end's event loop, and the routes;
  * `cross_origin`: allowed hosts and origins;
  * `endpoint`: one exchange from receiving the body to the end: limits, deadlines, disconnects, errors;
  * `schema` and `bodies`: fields of a request body; `identity`: model and request id;
  * `sampling` and `prompts`: body to `GenerateRequest`;
  * `answers` and `logprobs`: convert `GenerateResponse` to OpenAI's chunks; `whole_answer`: joins all chunks;
  * `runner`: runs requests for completions, chat completions, Responses and Messages; `output`: code shared by
    Responses and Messages;
  * `generation`, `embeddings`, `scoring`, `texts`, `probes`: the endpoints;
  * `errors` and `openapi`: errors in OpenAI's form, and the description of the API.
"""
