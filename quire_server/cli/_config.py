"""Flags of the shared configuration classes, for every command that starts a process."""

import dataclasses
from typing import Any

from quire_server.cli._parser import OneLineParser
from shared.config import WorkerConfig, add_options

TOPICS = {
    "model": ("model", "served_model_name", "device", "dtype", "quantization", "max_model_len", "tensor_parallel_size"),
    "processes": ("workers", "frontends", "standby", "num_threads", "grace_period_s"),
    "addresses": ("host", "grpc_port", "http_port", "frontend_address", "worker_address", "worker_id", "frontend_id"),
    "access": (
        "api_key", "api_key_file", "principals", "tls_cert", "tls_key", "keys", "insecure", "allowed_hosts",
        "allowed_origins",
    ),
    "batch and memory": (
        "max_num_seqs", "max_num_batched_tokens", "itl_target_ms", "gpu_memory_utilization", "kv_cache_memory",
        "kv_cache_dtype", "host_cache", "disk_cache", "disk_cache_bytes", "state_checkpoints", "prefix_cache",
        "capacity",
    ),
    "order and limits of requests": (
        "policy", "batching", "admission_file", "max_concurrent_requests", "max_queued_requests", "default_max_tokens",
    ),
    "speculative decoding": ("speculation", "draft_model", "speculative_tokens"),
    "records": ("record_dir", "record_bytes", "journal"),
}  # fmt: skip
"""The settings that most services need, grouped by topic for --help."""
DTYPE_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add_config_flags(parser: OneLineParser, *configs: type[Any]) -> None:
    """Add one flag per setting of the given classes, and the dtype aliases that other tools accept."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings; one file serves all processes")
    add_options(parser, *configs)
    parser.group_settings((field.name for config in configs for field in dataclasses.fields(config)), TOPICS)
    if WorkerConfig not in configs:
        return
    dtype = next(field for field in dataclasses.fields(WorkerConfig) if field.name == "dtype")
    parser.add_argument(
        "--dtype",
        type=lambda word: DTYPE_ALIASES.get(word, word),
        choices=dtype.metadata["choices"],
        default=None,
        help=f"{dtype.metadata['help']}; bf16, fp16 and fp32 are accepted as well (default: {dtype.default})",
    )
