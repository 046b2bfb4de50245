"""gRPC: parses messages, authenticates callers, and connects each service to what does the work.

* `boundary` – bytes to messages, callers, and exceptions to statuses; every handler passes it.
* `batch` – many generation requests on one bidirectional call.
* `generation`, `model`, `admin`, `health` – the services of `quire.v1`, `quire.admin.v1` and `grpc.health.v1`.
* `vllm` – vLLM's engine protocol, so that routers can use Quire.
"""
