"""The typed configuration: frozen dataclasses whose fields carry their own help text.

One name per setting everywhere: the field `max_num_seqs` is the flag `--max-num-seqs`, the variable
`QUIRE_MAX_NUM_SEQS` and the key `max_num_seqs` in a file; `config_sources` says which wins. Names follow vLLM's where
the meaning is the same.
"""

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any


class ConfigError(ValueError):
    """A setting that cannot be used; the message names it and the remedy."""


def _option(
    default: Any,
    help_text: str,
    *,
    choices: tuple[str, ...] = (),
    unit: str = "",
    least: float | None = None,
    most: float | None = None,
) -> Any:
    metadata = {"help": help_text, "choices": choices, "unit": unit, "least": least, "most": most}
    return field(default=default, metadata=metadata)


class _Checked:
    """Refuses values out of range when a configuration is made, by whomever."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):  # type: ignore[arg-type]
            _check(option, getattr(self, option.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig(_Checked):
    """What a whole service on one machine needs beside the settings of its processes."""

    frontends: int = _option(1, "front-end processes", least=1, most=1024)
    workers: int = _option(1, "worker processes", least=1, most=1024)
    watchdog_s: float = _option(
        120.0, "a process that hangs for so long is killed and started again; 0: never", unit="s", least=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(_Checked):
    """What the scheduler core process needs."""

    frontend_address: str = _option("ipc:///tmp/quire-frontends", "ZeroMQ address that front ends connect to")
    worker_address: str = _option("ipc:///tmp/quire-workers", "ZeroMQ address that workers connect to")
    policy: str = _option("fcfs", "order of admission", choices=("fcfs", "priority", "sjf", "edf", "fair", "lpm"))
    admission_file: str = _option("", "TOML file with limits and shares of tenants, and request classes")
    batching: str = _option("continuous", "batching mode", choices=("continuous", "static", "dynamic"))
    max_batch_size: int = _option(16, "static and dynamic batching: most requests of a batch", least=1)
    max_wait_ms: float = _option(50.0, "static and dynamic batching: how long a batch collects", unit="ms", least=0)
    max_tokens_per_batch: int = _option(0, "dynamic batching: most prompt tokens of a batch; 0: no limit", least=0)
    scheduler_delay_factor: float = _option(
        0.0, "continuous batching: collect for so many prefill steps' time", least=0
    )
    capacity: str = _option(
        "max_utilization",
        "memory a request must find: for its present tokens, or for its longest possible sequence",
        choices=("max_utilization", "guaranteed_no_evict"),
    )
    prefix_cache: str = _option("hash", "sharing of equal prompt prefixes", choices=("radix", "hash", "off"))
    policy_preemption: str = _option(
        "auto",
        "whether urgent requests pause running ones; auto: under priority and edf with max_utilization",
        choices=("auto", "on", "off"),
    )
    preempt_threshold: float = _option(
        5.0, "how far a running request must rank behind to be paused", unit="s", least=0
    )
    victim_rule: str = _option("fewest", "whom to pause", choices=("fewest", "youngest", "lowest_priority"))
    max_num_seqs: int = _option(64, "most requests running at once per worker", least=1, most=1 << 16)
    max_num_batched_tokens: int = _option(
        0,
        "most tokens in one step of a worker, of which a long prompt's later ones count for more; 0: by its device"
        " (GPU 512, CPU 128) and max_num_seqs",
        least=0,
        most=1 << 24,
    )
    long_prefill_token_threshold: int = _option(
        0, "most prompt tokens of one request in a step; 0: the whole budget", least=0
    )
    max_tokens_in_paged_kv_cache: int = _option(
        0, "most tokens in a worker's KV cache; 0: what its memory holds", least=0
    )
    max_queued_requests: int = _option(4096, "most requests waiting; more are refused with RESOURCE_EXHAUSTED", least=1)
    max_queued_tokens: int = _option(1 << 24, "most tokens of waiting requests; more are refused", least=1)
    max_plans_in_flight: int = _option(2, "plans sent ahead to a worker (1 or 2)", least=1, most=2)
    worker_wait_s: float = _option(
        60.0, "how long requests wait for a worker before they end UNAVAILABLE", unit="s", least=0
    )
    worker_silence_s: float = _option(
        5.0, "a worker hearing nothing for so long connects again", unit="s", least=0.2, most=3600
    )
    step_deadline_s: float = _option(
        120.0, "ceiling of a step's deadline until enough steps were measured", unit="s", least=0.1
    )
    stall_timeout_s: float = _option(
        60.0, "a reader that takes nothing for so long is cancelled; 0: never", unit="s", least=0
    )
    keys: str = _option("", "folder of CURVE keys (quire keys create); without it links are not encrypted")
    insecure: bool = _option(False, "listen where other machines can reach it without TLS or keys")
    on_stop: str = _option(
        "hand_over",
        "live requests at SIGTERM: the front ends keep them for the next scheduler, or they end UNAVAILABLE",
        choices=("hand_over", "end"),
    )
    resume_keep_s: float = _option(
        300.0, "how long Resume can go on with a resumable request whose client is gone", unit="s", least=0
    )
    resume_keep_bytes: int = _option(
        64 << 20, "most memory for what is kept of such requests; the oldest go first", unit="bytes", least=0
    )
    journal: str = _option(
        "",
        "folder of the journal, with which Resume goes on even when scheduler and front ends are lost together; it "
        "holds prompts and outputs of resumable requests; empty: none",
    )
    journal_bytes: int = _option(256 << 20, "most space that the journal takes, roughly", unit="bytes", least=1 << 20)
    journal_fsync: str = _option(
        "none",
        "how far the disk must be before tokens go out: 'none' (survives the death of any process), 'interval' (and, "
        "but for the last moments, of the machine), 'step' (and of the machine)",
        choices=("none", "interval", "step"),
    )
    journal_fsync_interval_s: float = _option(
        0.1, "journal_fsync interval: time between two", unit="s", least=0.001, most=60
    )
    frontend_lease_s: float = _option(10.0, "a front end silent for so long is lost", unit="s", least=3)
    trace_steps: float = _option(
        1.0, "share of the steps with a traced request that get a step trace, 0 to 1", least=0, most=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(_Checked):
    """What one worker process needs."""

    worker_address: str = _option("ipc:///tmp/quire-workers", "ZeroMQ address of the scheduler")
    keys: str = _option("", "folder of CURVE keys (quire keys create); without it links are not encrypted")
    worker_id: str = _option("", "name of this worker, at most 64 bytes; default: host and process id")
    model: str = _option("demo", "'demo', the folder of a Hugging Face checkpoint, or a hub id")
    served_model_name: str = _option("", "name that requests give; default: the folder's name")
    device: str = _option(
        "auto", "'auto[:N]' (GPU N, counted round among those there are; without any the CPU), 'cpu' or 'cuda[:N]'"
    )
    dtype: str = _option("auto", "type of weights and KV", choices=("auto", "float32", "bfloat16", "float16"))
    quantization: str = _option(
        "none", "form of the weights: as given, or int8 (Llama and Qwen family on a CPU)", choices=("none", "int8")
    )
    load_format: str = _option("auto", "'auto' reads the weights, 'random' makes them", choices=("auto", "random"))
    block_size: int = _option(16, "tokens per KV block", least=1, most=4096)
    kv_cache_memory: str = _option("512MiB", "memory for KV blocks on a CPU, e.g. 2GiB")
    swap_space: str = _option("0", "host memory for the KV of paused requests, e.g. 4GiB; 0: compute it again instead")
    kv_cache_dtype: str = _option(
        "auto",
        "type of KV; 'auto': that of the weights, 'fp8': e4m3, half the memory of 16 bits",
        choices=("auto", "fp8"),
    )
    gpu_memory_utilization: float = _option(0.9, "share of a GPU's memory that the worker may use", least=0.01, most=1)
    max_num_seqs: int = _option(64, "rows the worker can hold", least=1, most=1 << 16)
    max_num_batched_tokens: int = _option(
        0,
        "most tokens the worker computes in one step; 0: by its device (GPU 512, CPU 128) and max_num_seqs",
        least=0,
        most=1 << 24,
    )
    max_model_len: int = _option(0, "longest sequence; 0: what the model's positions allow", least=0, most=1 << 30)
    decode_graphs: bool = _option(True, "capture decode steps as CUDA graphs at start (on a GPU only)")
    num_threads: int = _option(0, "CPU threads for torch; 0: all cores", least=0, most=4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig(_Checked):
    """What one front-end process needs."""

    frontend_address: str = _option("ipc:///tmp/quire-frontends", "ZeroMQ address of the scheduler core")
    keys: str = _option("", "folder of CURVE keys (quire keys create); without it links are not encrypted")
    insecure: bool = _option(False, "listen where other machines can reach it without TLS or keys")
    frontend_id: str = _option("frontend-0", "stable name of this front end")
    model: str = _option("demo", "where the tokenizer is: 'demo', a checkpoint folder, or a hub id")
    host: str = _option("127.0.0.1", "address to listen on")
    grpc_port: int = _option(50051, "port for gRPC; 0: any free one", least=0, most=65535)
    http_port: int = _option(8000, "port for HTTP; 0: any free one", least=0, most=65535)
    stream_credit: int = _option(
        65536, "bytes of output a stream may be ahead of its reader", unit="bytes", least=4, most=1 << 30
    )
    default_max_tokens: int = _option(256, "max_tokens for requests that give none", least=1, most=1 << 30)
    max_concurrent_requests: int = _option(
        8192, "most calls at once; more are refused with RESOURCE_EXHAUSTED", least=1
    )
    max_tokenizing_bytes: int = _option(
        64 << 20, "most text in tokenisation at once; more is refused", unit="bytes", least=1
    )
    stall_timeout_s: float = _option(
        60.0, "a reader that takes nothing for so long is cancelled; 0: never", unit="s", least=0
    )
    tls_cert: str = _option("", "PEM file with the server's certificate chain: gRPC and HTTP speak TLS")
    tls_key: str = _option("", "PEM file with its private key")
    tls_client_ca: str = _option("", "PEM file with the CA of client certificates; clients without one are refused")
    principals: str = _option("", "TOML file with who may call, by which token or certificate")
    health_port: int = _option(
        -1, "port for /health, /ready and /metrics alone, without TLS; -1: none", least=-1, most=65535
    )
    grace_period_s: float = _option(10.0, "how long running requests may go on after SIGTERM", unit="s", least=0)


def add_options(parser: argparse.ArgumentParser, *configs: type[Any]) -> None:
    """Adds one flag per distinct field of the given configuration classes."""
    seen: set[str] = set()
    for option in (option for config in configs for option in dataclasses.fields(config)):
        if option.name in seen:
            continue
        seen.add(option.name)
        flag = "--" + option.name.replace("_", "-")
        help_text = (option.metadata["help"] + _told_default(option)).replace("%", "%%")
        if option.type is bool or option.type == "bool":
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=help_text)
        else:
            parser.add_argument(
                flag,
                type=type(option.default),
                default=None,
                choices=option.metadata["choices"] or None,
                metavar=None if option.metadata["choices"] else type(option.default).__name__.upper(),
                help=help_text,
            )


def _told_default(option: "dataclasses.Field[Any]") -> str:
    """The default with its unit; what an empty one means is told by the help itself."""
    value = f"{option.default} {option.metadata['unit']}".strip()
    return f" (default: {value})" if value else ""


def to_flags(config: object) -> list[str]:
    """The flags that give another process the same configuration."""
    flags: list[str] = []
    for option in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, option.name)
        flag = option.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags.append(f"--{flag}={value}")
    return flags


def parse_bytes(text: str) -> int:
    """Bytes from '512MiB', '2GiB', '1000000' and the like.

    Raises:
        ConfigError: not a size.
    """
    units = {
        "KIB": 1 << 10,
        "MIB": 1 << 20,
        "GIB": 1 << 30,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "B": 1,
        "": 1,
    }
    stripped = text.strip().upper()
    number = stripped.rstrip("KMGIB")
    unit = stripped[len(number) :]
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        size = -1
    if size < 0:
        raise ConfigError(f"{text!r} is not a size in bytes; write 512MiB or 2GiB, for example")
    return size


def _check(option: "dataclasses.Field[Any]", value: Any) -> None:
    least, most, choices = (option.metadata[key] for key in ("least", "most", "choices"))
    name = f"{option.name} (--{option.name.replace('_', '-')})"
    if choices and value not in choices:
        raise ConfigError(f"{name}: {value!r} is none of {', '.join(choices)}")
    # Written so that nan is out of every range.
    if least is not None and not least <= value:
        raise ConfigError(f"{name}: {value} is too small; give at least {least}")
    if most is not None and not value <= most:
        raise ConfigError(f"{name}: {value} is too large; give at most {most}")
