"""gRPC: decodes requests, authenticates callers, and connects each service to the component that does its work.

* `boundary` – decodes requests, authenticates callers, and turns exceptions into gRPC statuses, for every handler.
* `event_loop` – the event loop of a front end, which handles gRPC's completions together.
* `batch` – many generation requests on one bidirectional call.
* `generation`, `model`, `admin`, `health` – the services of `quire.v1`, `quire.admin.v1` and `grpc.health.v1`.
* `vllm` – vLLM's engine protocol, so that routers can use Quire.
"""
