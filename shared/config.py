"""Typed configuration: frozen dataclasses whose fields carry their help text.

Each setting has one name everywhere: the field `max_num_seqs` is the flag `--max-num-seqs`, the variable
`QUIRE_MAX_NUM_SEQS` and the key `max_num_seqs` in a file. `config_sources` defines the precedence. A setting with the
same meaning as in vLLM has the same name.
"""

import argparse
import dataclasses
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.frames import MAX_STEP_TOKENS


class ConfigError(ValueError):
    """A setting is invalid; the message names the setting and the remedy."""


def _option(
    default: Any,
    help_text: str,
    *,
    choices: tuple[str, ...] = (),
    unit: str = "",
    least: float | None = None,
    most: float | None = None,
    is_size: bool = False,
    is_path: bool = False,
) -> Any:
    metadata = {"help": help_text, "choices": choices, "unit": unit, "least": least, "most": most}
    return field(default=default, metadata=metadata | {"is_size": is_size, "is_path": is_path})


def addresses(value: str) -> list[str]:
    """Return the addresses in a setting that separates them by commas."""
    return [each.strip() for each in value.split(",") if each.strip()]


class _Checked:
    """Base class that rejects values out of range whenever a configuration is created."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for option in dataclasses.fields(self):  # type: ignore[arg-type]
            _check(option, getattr(self, option.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceConfig(_Checked):
    """Settings for a whole service on one machine, in addition to its processes' settings."""

    frontends: int = _option(1, "front-end processes", least=1, most=1024)
    workers: int = _option(1, "worker processes", least=1, most=1024)
    standby: bool = _option(False, "run a second scheduler process, which takes over when the first one ends")
    watchdog_s: float = _option(
        120.0,
        "time after which a process with a hanging main loop is killed and restarted; 0: never",
        unit="s",
        least=0,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(_Checked):
    """Settings of the scheduler core process."""

    frontend_address: str = _option("ipc:///tmp/quire-frontends", "ZeroMQ address that front ends connect to")
    worker_address: str = _option("ipc:///tmp/quire-workers", "ZeroMQ address that workers connect to")
    policy: str = _option(
        "balanced",
        "scheduling policy: the order in which prompts are computed",
        choices=("balanced", "fcfs", "priority", "sjf", "edf", "slo", "fair", "lpm"),
    )
    admission_file: str = _option("", "TOML file with limits and shares of tenants, and request classes", is_path=True)
    batching: str = _option("continuous", "batching mode", choices=("continuous", "static", "dynamic"))
    max_batch_size: int = _option(16, "static and dynamic batching: maximum number of requests per batch", least=1)
    max_wait_ms: float = _option(
        50.0, "static and dynamic batching: maximum time to wait for a full batch", unit="ms", least=0
    )
    max_tokens_per_batch: int = _option(
        0, "dynamic batching: maximum number of prompt tokens per batch; 0: no limit", least=0
    )
    scheduler_delay_factor: float = _option(
        0.0, "continuous batching: delay admission by this factor times the duration of a prefill step", least=0
    )
    capacity: str = _option(
        "max_utilization",
        "KV cache that must be free to admit a request: for its present tokens, or for its maximum length",
        choices=("max_utilization", "guaranteed_no_evict"),
    )
    prefix_cache: str = _option("hash", "how equal prompt prefixes are shared", choices=("radix", "hash", "off"))
    session_wait_s: float = _option(
        300.0,
        "how long the first turn of a session waits for KV memory for its working set, if turns usually follow; 0: it"
        " does not wait",
        unit="s",
        least=0,
    )
    retention_share: float = _option(
        0.5,
        "part of the KV cache whose contents requests can retain for a time (`retention_s`); if tenants ask for more,"
        " each gets an equal part; 0: such hints have no effect",
        least=0,
        most=1,
    )
    policy_preemption: str = _option(
        "auto",
        "whether waiting requests preempt running ones; auto: with priority, edf and fair, under max_utilization",
        choices=("auto", "on", "off"),
    )
    preempt_threshold: float = _option(
        5.0, "how far a running request must rank behind a waiting one to be preempted", unit="s", least=0
    )
    preempt_priority_difference: float = _option(
        0.0,
        "policy priority: minimum difference in priority for preempting a running request; 0: any",
        least=0,
    )
    slo_ttft_ms: float = _option(
        2000.0,
        "policy slo: target for the first token of a request without its own; with balanced and sjf, shorter prompts"
        " get more of a step once it has passed",
        unit="ms",
        least=0,
    )
    slo_ttft_token_us: float = _option(
        125.0, "policy slo: time added to this target per prompt token", unit="us", least=0
    )
    victim_rule: str = _option(
        "fewest", "which running request to preempt", choices=("fewest", "youngest", "lowest_priority")
    )
    max_num_seqs: int = _option(
        0, "maximum number of running requests per worker; 0: the worker's own limit", least=0, most=1 << 16
    )
    max_num_batched_tokens: int = _option(
        0,
        "token budget per step, in which later tokens of a long prompt count more; 0: the worker's limit",
        least=0,
        most=MAX_STEP_TOKENS,
    )
    itl_target_ms: float = _option(
        500.0,
        "target duration of a step with decode rows: prompt chunks are short enough that the step takes at most"
        " this time, or twice the time of a step without chunks; 0: no target",
        unit="ms",
        least=0,
    )
    long_prefill_token_threshold: int = _option(
        0, "maximum number of prompt tokens of one request per step; 0: the whole token budget", least=0
    )
    max_tokens_in_paged_kv_cache: int = _option(
        0, "maximum number of tokens in a worker's KV cache; 0: as many as fit into its memory", least=0
    )
    max_queued_requests: int = _option(
        4096, "maximum number of waiting requests; more are rejected with RESOURCE_EXHAUSTED", least=1
    )
    max_queued_tokens: int = _option(
        1 << 24, "maximum number of tokens of waiting requests; more are rejected", least=1
    )
    max_plans_in_flight: int = _option(2, "batch plans in flight per worker (1 or 2)", least=1, most=2)
    worker_wait_s: float = _option(
        60.0, "how long requests wait for a worker before they end with UNAVAILABLE", unit="s", least=0
    )
    worker_silence_s: float = _option(
        5.0, "a worker reconnects after this much silence from the scheduler", unit="s", least=1, most=3600
    )
    step_deadline_s: float = _option(
        120.0, "deadline of a step until enough steps have been measured; an upper limit", unit="s", least=0.1
    )
    stall_timeout_s: float = _option(
        60.0, "cancel a stream whose client reads nothing for this long; 0: never", unit="s", least=0
    )
    keys: str = _option(
        "", "folder of CURVE keys (quire keys create); without it links are not encrypted", is_path=True
    )
    insecure: bool = _option(False, "allow listening on addresses that other machines can reach without TLS or keys")
    on_stop: str = _option(
        "hand_over",
        "live requests at SIGTERM: the front ends keep them for the next scheduler, or they end with UNAVAILABLE",
        choices=("hand_over", "end"),
    )
    resume_keep_s: float = _option(
        300.0, "how long a resumable request is kept for Resume after its client disconnected", unit="s", least=0
    )
    resume_keep_bytes: int = _option(
        64 << 20, "maximum memory for kept requests; the oldest are dropped first", unit="bytes", least=0
    )
    journal: str = _option(
        "",
        "folder of the journal; Resume then works even if the scheduler and the front ends fail together; the journal "
        "contains prompts and outputs of resumable requests; empty: no journal",
        is_path=True,
    )
    journal_bytes: int = _option(256 << 20, "approximate maximum size of the journal", unit="bytes", least=1 << 20)
    journal_fsync: str = _option(
        "none",
        "when the journal is synced to disk before tokens are sent: 'none' (survives the death of any process), "
        "'interval' (survives a crash of the machine except for the last 0.1 s), 'step' (survives it fully)",
        choices=("none", "interval", "step"),
    )
    journal_sync: str = _option(
        "none",
        "whether tokens are sent only after a standby has them in its journal: 'none', or 'standby' (while a standby is"
        " connected and not too slow)",
        choices=("none", "standby"),
    )
    standby_address: str = _option(
        "",
        "ZeroMQ address that standbys on other machines connect to, for example tcp://0.0.0.0:5703; needs a journal;"
        " empty: none",
    )
    standby_of: str = _option(
        "",
        "the --standby-address of each other scheduler, separated by commas: this scheduler starts as a standby, which"
        " takes over by command (--take-over) or by the leader lease; empty: this scheduler leads",
    )
    record_dir: str = _option(
        "auto",
        "folder of the flight recorder, which records every decision, without text and token ids; 'auto': "
        "quire/record/PORT in $XDG_STATE_HOME (~/.local/state), with the gRPC port of quire serve, 'off': no record",
        is_path=True,
    )
    record_bytes: int = _option(
        256 << 20, "maximum size of the flight record; the oldest part is deleted first", unit="bytes", least=8 << 20
    )
    record_tokens: bool = _option(False, "also record token ids, so that the record contains prompts and outputs")
    kv_events: str = _option(
        "",
        "ZeroMQ address of an endpoint picker that gets KV events in vLLM's form (tcp://picker:5557), in the clear, "
        "with the token ids of prompts that no principal or cache scope protects; empty: none",
    )
    leader_lease: str = _option(
        "",
        "file that several schedulers on one machine share, with the same addresses: one leads, the others wait as "
        "standbys and take over when it ends; for schedulers with --standby-of: a lease in etcd"
        " (etcd://HOST:PORT/NAME) or Kubernetes (kubernetes), whose holder leads; empty: this scheduler leads at once",
        is_path=True,
    )
    leader_lease_s: float = _option(
        2.0,
        "a lease in etcd or Kubernetes ends, and a standby takes over, if the leader does not renew it for this long",
        unit="s",
        least=1,
        most=60,
    )
    frontend_lease_s: float = _option(
        10.0, "a front end that is silent for this long is considered lost", unit="s", least=3
    )
    trace_steps: float = _option(
        0.1, "fraction of the steps with a traced request that get a step trace, 0 to 1", least=0, most=1
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig(_Checked):
    """Settings of a worker process."""

    worker_address: str = _option(
        "ipc:///tmp/quire-workers",
        "ZeroMQ address of the scheduler; with a standby on another machine, the addresses of both, separated by"
        " commas",
    )
    keys: str = _option(
        "", "folder of CURVE keys (quire keys create); without it links are not encrypted", is_path=True
    )
    worker_id: str = _option("", "name of this worker, at most 64 bytes; empty: host and process id")
    model: str = _option("demo", "'demo', the folder of a Hugging Face checkpoint, or a hub id")
    served_model_name: str = _option("", "model name in requests; empty: the name of the folder")
    device: str = _option(
        "auto", "'auto[:N]' (GPU N modulo the number of GPUs; the CPU if there is none), 'cpu' or 'cuda[:N]'"
    )
    dtype: str = _option(
        "auto", "data type of weights and KV cache", choices=("auto", "float32", "bfloat16", "float16")
    )
    quantization: str = _option(
        "none",
        "weight quantization at load: none, int8, int4 in groups of 64 inputs, or fp8 on a GPU",
        choices=("none", "int8", "int4", "fp8"),
    )
    load_format: str = _option(
        "auto", "'auto' loads the weights, 'random' initialises them randomly", choices=("auto", "random")
    )
    block_size: int = _option(16, "tokens per KV block", least=1, most=4096)
    kv_cache_memory: str = _option("512MiB", "memory for the KV cache on a CPU, for example 2GiB", is_size=True)
    host_cache: str = _option(
        "0",
        "host memory for cached prefixes that leave the device and for the KV of preempted requests, for example 16GiB;"
        " 0: compute them again",
        is_size=True,
    )
    disk_cache: str = _option(
        "",
        "folder on a local disk for cached prefixes that leave host memory (host_cache), which survive a restart of the"
        " worker; each worker uses a subfolder; empty: none",
        is_path=True,
    )
    disk_cache_bytes: str = _option(
        "64GiB", "disk space that a worker uses in the folder disk_cache, for example 500GiB", is_size=True
    )
    state_checkpoints: int = _option(
        -1,
        "recurrent states that are saved for requests with the same prefix, for models with such states; -1: two per"
        " row, in at most a quarter of the memory for the KV cache; 0: none",
        least=-1,
        most=1 << 20,
    )
    kv_cache_dtype: str = _option(
        "auto",
        "data type of the KV cache; 'auto': that of the weights; 'int8' and 'fp8' (e4m3): with a scale per token and"
        " head, about half the memory of 16 bits; on a CPU, int8 is faster than fp8; 'int4': with a scale and a zero"
        " per 32 elements, less than a third of the memory, less accurate",
        choices=("auto", "fp8", "int8", "int4"),
    )
    gpu_memory_utilization: float = _option(
        0.9, "fraction of the GPU's memory that the worker may use", least=0.01, most=1
    )
    max_num_seqs: int = _option(
        0,
        "maximum number of running requests (rows of the batch); 0: by the device (GPU up to 256, CPU 64)",
        least=0,
        most=1 << 16,
    )
    max_num_batched_tokens: int = _option(
        0,
        "maximum number of tokens per step; 0: by the device (GPU 2,048 to 8,192, CPU 512) and max_num_seqs",
        least=0,
        most=MAX_STEP_TOKENS,
    )
    max_model_len: int = _option(
        0, "maximum length of a sequence, prompt and output; 0: the model's own limit", least=0, most=1 << 30
    )
    speculation: str = _option(
        "off",
        "speculative decoding; 'ngram': draft tokens from the text of the same request, 'draft': from draft_model",
        choices=("off", "ngram", "draft"),
    )
    draft_model: str = _option(
        "",
        "checkpoint of a smaller model with the same tokenizer, as for 'model'; only with speculation=draft; empty: the"
        " model's own, which only 'demo' has",
    )
    speculative_tokens: int = _option(8, "maximum number of draft tokens per request and step", least=1, most=64)
    cuda_graphs: bool = _option(True, "capture steps as CUDA graphs at start (GPU only)")
    cuda_graph_tokens: int = _option(
        0,
        "largest step with prompt chunks or drafts that is captured as a CUDA graph, in tokens; 0: by the speed of the"
        " GPU and the size of the model (256 to 2,048)",
        least=0,
        most=MAX_STEP_TOKENS,
    )
    num_threads: int = _option(
        0, "CPU threads of a rank; 0: all cores, divided among the ranks on this machine", least=0, most=4096
    )
    tensor_parallel_size: int = _option(
        1,
        "number of ranks (processes, each with its own GPU or a share of the cores) that share the model and"
        " serve as one worker; memory settings are per rank",
        least=1,
        most=1024,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendConfig(_Checked):
    """Settings of a front-end process."""

    frontend_address: str = _option(
        "ipc:///tmp/quire-frontends",
        "ZeroMQ address of the scheduler core; with a standby on another machine, the addresses of both, separated by"
        " commas",
    )
    keys: str = _option(
        "", "folder of CURVE keys (quire keys create); without it links are not encrypted", is_path=True
    )
    insecure: bool = _option(False, "allow listening on addresses that other machines can reach without TLS or keys")
    frontend_id: str = _option("frontend-0", "stable name of this front end")
    model: str = _option("demo", "model whose tokenizer is used: 'demo', a checkpoint folder, or a hub id")
    host: str = _option("127.0.0.1", "address to listen on")
    grpc_port: int = _option(50051, "port for gRPC; 0: any free one", least=0, most=65535)
    http_port: int = _option(8000, "port for HTTP; 0: any free one", least=0, most=65535)
    stream_credit: int = _option(
        65536, "maximum output in bytes that the client has not read yet", unit="bytes", least=4, most=1 << 30
    )
    default_max_tokens: int = _option(
        0,
        "max_tokens of requests that do not set it; 0: the rest of the context, and 16 for /v1/completions",
        least=0,
        most=1 << 30,
    )
    generation_config: str = _option(
        "auto",
        "sampling defaults for requests: 'auto' (the model's generation_config.json), 'none', or the path of such a"
        " file or its folder",
    )
    max_concurrent_requests: int = _option(
        8192, "maximum number of concurrent calls; more are rejected with RESOURCE_EXHAUSTED", least=1
    )
    max_tokenizing_bytes: int = _option(
        64 << 20, "maximum amount of text in tokenisation; more is rejected", unit="bytes", least=1
    )
    stall_timeout_s: float = _option(
        60.0, "cancel a stream whose client reads nothing for this long; 0: never", unit="s", least=0
    )
    allowed_hosts: str = _option(
        "",
        "names of this service in the Host header of HTTP, separated by commas: NAME, *.NAME, or * for every name; IP "
        "addresses and localhost always work; empty: on loopback no other name, elsewhere every name",
    )
    allowed_origins: str = _option(
        "",
        "origins of web pages that may call HTTP, separated by commas, such as https://app.example.org, or * for every "
        "origin; empty: no pages but the service's own",
    )
    parser: str = _option(
        "auto",
        "how the model writes reasoning and tool calls; auto: as its chat template shows",
        choices=(
            "auto",
            "hermes",
            "qwen3_coder",
            "llama3_json",
            "pythonic",
            "mistral",
            "deepseek",
            "harmony",
            "glm4",
            "granite",
            "gemma4",
            "reasoning",
            "plain",
        ),
    )
    score_method: str = _option(
        "embedding",
        "how /rerank and /score compare texts; embedding: by the cosine of their embeddings; yes-no: by the probability"
        " that the model answers yes, for models trained as Qwen3-Reranker",
        choices=("embedding", "yes-no"),
    )
    response_store_bytes: int = _option(
        64 << 20,
        "memory for responses that requests may continue with previous_response_id; 0: none are stored",
        unit="bytes",
        least=0,
    )
    console: bool = _option(
        True, "serve the console, a web page for operators, at / of HTTP; its data requires operator rights"
    )
    console_trace_url: str = _option(
        "",
        "link of the console to a request's trace, with {trace_id}, such as https://jaeger.example.org/trace/{trace_id}",
    )
    tls_cert: str = _option(
        "", "PEM file with the server's certificate chain; enables TLS for gRPC and HTTP", is_path=True
    )
    tls_key: str = _option("", "PEM file with the private key of tls_cert", is_path=True)
    tls_client_ca: str = _option(
        "",
        "PEM file with the CA of client certificates; clients without a certificate are rejected",
        is_path=True,
    )
    principals: str = _option(
        "", "TOML file with the principals: their tokens, certificates and permissions", is_path=True
    )
    api_key_file: str = _option(
        "", "file with API keys, one per line: accept only callers with one as bearer token", is_path=True
    )
    health_port: int = _option(
        -1, "separate port for /health, /ready and /metrics, without TLS; -1: none", least=-1, most=65535
    )
    load_reports: bool = _option(
        False, "add the load of the service to responses as ORCA reports (endpoint-load-metrics), for load balancers"
    )
    grace_period_s: float = _option(10.0, "how long running requests may continue after SIGTERM", unit="s", least=0)


def add_options(parser: argparse.ArgumentParser, *configs: type[Any]) -> None:
    """Add one flag per distinct field of the given configuration classes."""
    seen: set[str] = set()
    for option in (option for config in configs for option in dataclasses.fields(config)):
        if option.name in seen:
            continue
        seen.add(option.name)
        flag = "--" + option.name.replace("_", "-")
        help_text = (option.metadata["help"] + _default_text(option)).replace("%", "%%")
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


def _default_text(option: "dataclasses.Field[Any]") -> str:
    """Return the default with its unit. The help text explains empty defaults."""
    value = f"{option.default} {option.metadata['unit']}".strip()
    return f" (default: {value})" if value else ""


def to_flags(config: object) -> list[str]:
    """Return the flags that pass this configuration to another process."""
    flags: list[str] = []
    for option in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, option.name)
        flag = option.name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags.append(f"--{flag}={value}")
    return flags


def state_folder() -> Path:
    """Return this user's folder for files that persist after Quire's processes exit."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "quire"


def parse_bytes(text: str) -> int:
    """Parse a size such as '512MiB', '2GiB' or '1000000'; return bytes.

    Raises:
        ConfigError: the text is not a size.
    """
    units = {
        "KIB": 1 << 10,
        "MIB": 1 << 20,
        "GIB": 1 << 30,
        "TIB": 1 << 40,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "B": 1,
        "": 1,
    }
    stripped = text.strip().upper()
    number = stripped.rstrip("KMGTIB")
    unit = stripped[len(number) :]
    try:
        size = int(float(number) * units[unit])
    except (ValueError, KeyError, OverflowError):
        size = -1
    if size < 0:
        raise ConfigError(f"{text!r} is not a size in bytes; use for example 512MiB or 2GiB")
    return size


def _check(option: "dataclasses.Field[Any]", value: Any) -> None:
    least, most, choices = (option.metadata[key] for key in ("least", "most", "choices"))
    name = f"{option.name} (--{option.name.replace('_', '-')})"
    if choices and value not in choices:
        raise ConfigError(f"{name}: unknown value {value!r}; use one of {', '.join(choices)}")
    # The comparison is written such that NaN is outside every range.
    if least is not None and not least <= value:
        raise ConfigError(f"{name}: {value} is too small; use at least {least}")
    if most is not None and not value <= most:
        raise ConfigError(f"{name}: {value} is too large; use at most {most}")
    if option.metadata["is_size"]:
        try:
            parse_bytes(value)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
