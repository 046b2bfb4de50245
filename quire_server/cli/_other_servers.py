"""Flags of other servers that Quire spells differently or does not need, and what to use instead.

vLLM's names are the ones that most users type; where the meaning is the same, Quire has the same name.
"""

_CHUNKED = "prompts are always computed in chunks; --max-num-batched-tokens limits their size"
REMEDIES = {
    "--enable-prefix-caching": "prefixes are shared by default; choose the kind with --prefix-cache",
    "--no-enable-prefix-caching": "use --prefix-cache off",
    "--enable-chunked-prefill": _CHUNKED,
    "--no-enable-chunked-prefill": _CHUNKED,
    "--max-num-partial-prefills": "use --long-prefill-token-threshold",
    "--scheduling-policy": "use --policy",
    "--enforce-eager": "use --no-cuda-graphs",
    "-tp": "use --tensor-parallel-size",
    "--pipeline-parallel-size": "layers are not divided among GPUs; use --tensor-parallel-size",
    "-pp": "layers are not divided among GPUs; use --tensor-parallel-size",
    "--data-parallel-size": "use --workers",
    "-dp": "use --workers",
    "--api-server-count": "use --frontends",
    "--max-concurrency": "use --max-concurrent-requests",
    "--preemption-mode": "Quire chooses between swap and recompute; --swap-space 0 leaves recompute",
    "--cpu-offload-gb": "weights stay on the device; --swap-space keeps preempted requests in host memory",
    "--kv-cache-memory-bytes": "use --kv-cache-memory on a CPU, --gpu-memory-utilization on a GPU",
    "--trust-remote-code": "Quire runs no code of a checkpoint",
    "--tokenizer": "the tokenizer of --model is used",
    "--chat-template": "the chat template of --model is used",
    "--ssl-certfile": "use --tls-cert",
    "--ssl-keyfile": "use --tls-key",
    "--ssl-ca-certs": "use --tls-client-ca",
    "--disable-log-requests": "requests are not logged; quire explain reads the flight record",
    "--disable-log-stats": "statistics are not logged; /metrics has them",
    "--otlp-traces-endpoint": "set the variable OTEL_EXPORTER_OTLP_ENDPOINT",
    "--uvicorn-log-level": "use quire log-level",
    "--guided-decoding-backend": "grammars need no setting",
    "--structured-outputs-config": "grammars need no setting",
    "--enable-auto-tool-choice": "tools need no setting",
    "--tool-call-parser": "use --parser; by default the chat template decides",
    "--reasoning-parser": "use --parser; by default the chat template decides",
    "--speculative-config": "use --speculation, --speculative-tokens and --draft-model",
    "--num-speculative-tokens": "use --speculative-tokens",
    "--seed": "give the seed in the request",
    "-q": "use --quantization",
}
"""By flag: what to do instead."""
