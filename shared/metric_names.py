"""All Quire metrics with name, kind, labels, unit and bucket bounds; docs/metrics.md is generated from this module.

Names with dots are OpenTelemetry names. On `/metrics`, they have Prometheus's form (`rpc.server.call.duration` in
seconds is `rpc_server_call_duration_seconds`), and dots in labels are underscores. Names under `quire.` are specific to
Quire. Names under `vllm:` exist only on `/metrics`; Kubernetes endpoint pickers and vLLM dashboards read them. Every
front-end metric on `/metrics` also has the label `frontend`.
"""

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """Kind of a metric, with Prometheus's names."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


_UNITS = {"s": "seconds", "By": "bytes", "J": "joules", "W": "watts", "Hz": "hertz"}


@dataclass(frozen=True, slots=True)
class Metric:
    """Definition of a metric."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    """Unit in UCUM's form: "s", "By", "J", "W", "Hz" or "{token}"."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without infinity."""
    source: str = "scheduler"
    """Process that measures it: "frontend" or "scheduler"."""

    @property
    def prometheus_name(self) -> str:
        """Name on `/metrics`, without the suffix of a counter's or a histogram's samples."""
        if self.is_foreign:
            return self.name
        name, suffix = self.name.replace(".", "_"), self.prometheus_unit
        return name if not suffix or name.endswith(suffix) else f"{name}_{suffix}"

    @property
    def prometheus_unit(self) -> str:
        """Unit on `/metrics`; empty if the name does not contain the unit."""
        return "" if self.is_foreign else _UNITS.get(self.unit, "")

    @property
    def is_foreign(self) -> bool:
        """Whether this is another server's metric name, which is not exported by OTLP."""
        return ":" in self.name


GEN_AI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")
_FRONTEND = "frontend"
_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

# OpenTelemetry's metric names, with the bucket bounds of its conventions.

_CALL_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_FIRST_TOKEN_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_PER_TOKEN_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)

REQUEST_DURATION = Metric(
    "gen_ai.server.request.duration",
    _H,
    "Time from a request's arrival to its end",
    (*GEN_AI, "error.type"),
    "s",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    _FRONTEND,
)
TIME_TO_FIRST_TOKEN = Metric(
    "gen_ai.server.time_to_first_token",
    _H,
    "Time from a request's arrival until its first token was written to the client",
    GEN_AI,
    "s",
    _FIRST_TOKEN_BOUNDS,
    _FRONTEND,
)
TIME_PER_OUTPUT_TOKEN = Metric(
    "gen_ai.server.time_per_output_token",
    _H,
    "Mean time per token after the first, one value for each output that ended without an error",
    GEN_AI,
    "s",
    _PER_TOKEN_BOUNDS,
    _FRONTEND,
)
RPC_DURATION = Metric(
    "rpc.server.call.duration",
    _H,
    "Duration of the gRPC calls",
    ("rpc.system.name", "rpc.method", "rpc.response.status_code", "error.type"),
    "s",
    _CALL_BOUNDS,
    _FRONTEND,
)
HTTP_DURATION = Metric(
    "http.server.request.duration",
    _H,
    "Duration of the HTTP requests, until the end of a streamed answer",
    ("http.request.method", "http.route", "http.response.status_code", "url.scheme", "error.type"),
    "s",
    _CALL_BOUNDS,
    _FRONTEND,
)

# Metric names of vLLM.

_MODEL = ("model_name",)
_ENGINE = ("model_name", "engine")
_VLLM_LATENCY_BOUNDS = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_LENGTH_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000)

VLLM_RUNNING = Metric("vllm:num_requests_running", _G, "Requests that hold a row of a batch", _MODEL)
VLLM_WAITING = Metric("vllm:num_requests_waiting", _G, "Requests in the waiting queue", _MODEL)
VLLM_KV_USAGE = Metric(
    "vllm:kv_cache_usage_perc", _G, "Share of the KV blocks that requests hold, from 0 to 1, over all workers", _MODEL
)
VLLM_CACHE_CONFIG = Metric(
    "vllm:cache_config_info",
    _G,
    "Always 1; the labels have the block size in tokens and the KV blocks of all workers",
    ("model_name", "block_size", "num_gpu_blocks"),
)
VLLM_PREFIX_QUERIES = Metric(
    "vllm:prefix_cache_queries", _C, "Tokens of admitted sequences that were looked up in the prefix cache", _ENGINE
)
VLLM_PREFIX_HITS = Metric(
    "vllm:prefix_cache_hits", _C, "Tokens of admitted sequences whose KV was in the prefix cache", _ENGINE
)
VLLM_PREEMPTIONS = Metric("vllm:num_preemptions", _C, "Requests preempted, for memory or by rank", _ENGINE)
VLLM_DRAFTS = Metric("vllm:spec_decode_num_drafts", _C, "Rows that verified drafts, summed over the steps", _ENGINE)
VLLM_DRAFT_TOKENS = Metric("vllm:spec_decode_num_draft_tokens", _C, "Draft tokens that rows verified", _ENGINE)
VLLM_ACCEPTED_TOKENS = Metric("vllm:spec_decode_num_accepted_tokens", _C, "Draft tokens that were accepted", _ENGINE)
VLLM_ITERATION_TOKENS = Metric(
    "vllm:iteration_tokens_total",
    _H,
    "Tokens of a step",
    _ENGINE,
    bounds=(1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
)
VLLM_PROMPT_TOKENS = Metric(
    "vllm:prompt_tokens", _C, "Tokens of submitted prompts", _MODEL, "{token}", source=_FRONTEND
)
VLLM_GENERATION_TOKENS = Metric(
    "vllm:generation_tokens", _C, "Tokens written to clients", _MODEL, "{token}", source=_FRONTEND
)
VLLM_REQUEST_SUCCESS = Metric(
    "vllm:request_success",
    _C,
    "Ended outputs by reason: stop, length, abort (the client has left) or error",
    ("model_name", "finished_reason"),
    source=_FRONTEND,
)
VLLM_TIME_TO_FIRST_TOKEN = Metric(
    "vllm:time_to_first_token_seconds",
    _H,
    TIME_TO_FIRST_TOKEN.help,
    _MODEL,
    "s",
    (*_FIRST_TOKEN_BOUNDS, 20, 40, 80, 160, 640, 2560),
    _FRONTEND,
)
VLLM_INTER_TOKEN_LATENCY = Metric(
    "vllm:inter_token_latency_seconds",
    _H,
    "Time between two tokens of an output as the client receives them: 0 between tokens in one message",
    _MODEL,
    "s",
    (0.001, 0.0025, 0.005, *_PER_TOKEN_BOUNDS, 5, 7.5, 10, 20, 40, 80),
    _FRONTEND,
)
VLLM_TIME_PER_OUTPUT_TOKEN = Metric(
    "vllm:request_time_per_output_token_seconds",
    _H,
    TIME_PER_OUTPUT_TOKEN.help,
    _MODEL,
    "s",
    (*_PER_TOKEN_BOUNDS, 5, 7.5, 10, 20, 40, 80),
    _FRONTEND,
)
VLLM_E2E = Metric(
    "vllm:e2e_request_latency_seconds",
    _H,
    "Time from arrival to the last token, for outputs that ended without an error",
    _MODEL,
    "s",
    _VLLM_LATENCY_BOUNDS,
    _FRONTEND,
)
VLLM_QUEUE_TIME = Metric(
    "vllm:request_queue_time_seconds",
    _H,
    "Time from arrival at the scheduler to the first step",
    _MODEL,
    "s",
    _VLLM_LATENCY_BOUNDS,
    _FRONTEND,
)
VLLM_PREFILL_TIME = Metric(
    "vllm:request_prefill_time_seconds",
    _H,
    "Time to the first token, excluding the queue and including tokenisation and links",
    _MODEL,
    "s",
    _VLLM_LATENCY_BOUNDS,
    _FRONTEND,
)
VLLM_DECODE_TIME = Metric(
    "vllm:request_decode_time_seconds",
    _H,
    "Time from the first to the last token",
    _MODEL,
    "s",
    _VLLM_LATENCY_BOUNDS,
    _FRONTEND,
)
VLLM_INFERENCE_TIME = Metric(
    "vllm:request_inference_time_seconds",
    _H,
    "Time from arrival to the last token, excluding the queue",
    _MODEL,
    "s",
    _VLLM_LATENCY_BOUNDS,
    _FRONTEND,
)
VLLM_REQUEST_PROMPT_TOKENS = Metric(
    "vllm:request_prompt_tokens", _H, "Prompt tokens of a request", _MODEL, "{token}", _LENGTH_BOUNDS, _FRONTEND
)
VLLM_REQUEST_GENERATION_TOKENS = Metric(
    "vllm:request_generation_tokens",
    _H,
    "Generated tokens of an output",
    _MODEL,
    "{token}",
    _LENGTH_BOUNDS,
    _FRONTEND,
)

# Quire's own: front end.

LIVE_STREAMS = Metric("quire.live_streams", _G, "Calls in progress", source=_FRONTEND)
MERGED_TOKENS = Metric(
    "quire.merged_tokens",
    _C,
    "Tokens that shared a message because the client read slowly",
    unit="{token}",
    source=_FRONTEND,
)
SHARE_HELD = Metric(
    "quire.share.held", _G, "Amount of a front-end resource held by all principals together", ("resource",),
    source=_FRONTEND,
)  # fmt: skip
SHARE_LIMIT = Metric("quire.share.limit", _G, "Limit of a front-end resource", ("resource",), source=_FRONTEND)
SHARE_REFUSALS = Metric(
    "quire.share.refusals",
    _C,
    "Requests refused because their principal held its share of a resource",
    ("resource",),
    "{request}",
    source=_FRONTEND,
)
REQUEST_TARGETS = Metric(
    "quire.request_targets",
    _C,
    "Request targets by kind (first_token, total) and outcome (met, missed); goodput is the rate of met targets",
    ("target", "outcome"),
    source=_FRONTEND,
)
TENANT_REQUESTS = Metric(
    "quire.tenant.requests", _C, "Ended outputs by tenant and reason", ("tenant", "finished_reason"), source=_FRONTEND
)
TENANT_TOKENS = Metric(
    "quire.tenant.tokens", _C, "Tokens by tenant: prompt or output", ("tenant", "kind"), "{token}", source=_FRONTEND
)
TENANT_QUEUE = Metric(
    "quire.tenant.queue_time", _C, "Time that a tenant's requests waited", ("tenant",), "s", source=_FRONTEND
)
TENANT_ENERGY = Metric(
    "quire.tenant.energy",
    _C,
    "Energy by tenant: its requests' shares of their steps; absent if no worker can read energy",
    ("tenant",),
    "J",
    source=_FRONTEND,
)
SCHEDULER_CONNECTED = Metric(
    "quire.scheduler.connected",
    _G,
    "1 while the front end receives messages from the scheduler, else 0",
    source=_FRONTEND,
)
SCHEDULER_READY = Metric(
    "quire.scheduler.ready",
    _G,
    "1 while the front end receives messages from the scheduler and a worker is usable, else 0",
    source=_FRONTEND,
)
SCHEDULER_SILENCE = Metric(
    "quire.scheduler.silence",
    _G,
    "Time since the scheduler's newest message to the front end",
    unit="s",
    source=_FRONTEND,
)
SCHEDULER_ADDRESSES = Metric(
    "quire.scheduler.addresses",
    _G,
    "Scheduler addresses to which the front end may connect; more than 1 with a standby on another machine",
    source=_FRONTEND,
)
SCHEDULER_RESTARTS = Metric(
    "quire.scheduler.restarts",
    _C,
    "Schedulers to which the front end connected after the first one, by the end of the one before: planned (SIGTERM, a"
    " takeover by command) or lost",
    ("reason",),
    source=_FRONTEND,
)
SPANS_DROPPED = Metric(
    "quire.spans_dropped",
    _C,
    "Spans lost because the collector was down or slow, by process",
    ("process",),
    "{span}",
    source="both",
)

# Quire's own: scheduler.

_WORKER = ("worker",)
_TURN_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1, 5)
_STEP_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
_FINE_BOUNDS = (0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1)

QUEUE = Metric(
    "quire.queue.requests",
    _G,
    "Waiting requests by what they wait for: room, session, tenant_limit, grammar, prefix, assigned_worker, credit,"
    " worker",
    ("reason",),
)
SESSIONS = Metric(
    "quire.sessions",
    _G,
    "Sessions by state: active (with a request that waits or runs, except at the gate), pausing (the next turn is"
    " expected)",
    ("state",),
)
SESSION_TURNS = Metric("quire.session.later_turns", _C, "Requests that continued a session")
SESSION_LOST_TOKENS = Metric(
    "quire.session.lost_tokens",
    _C,
    "Tokens that later turns of sessions repeated, but that were not cached when they were admitted",
    unit="{token}",
)
SESSION_PAUSES = Metric(
    "quire.session.pauses", _C, "Pauses of sessions that ended with a return and for which a length was expected"
)
SESSION_PAUSE_TIME = Metric(
    "quire.session.pause_time",
    _C,
    "Total length of these pauses: expected (announced by the client, otherwise learned), actual, and the sum of the"
    " absolute differences as error",
    ("of",),
    unit="s",
)
SESSION_GATE_HELD = Metric(
    "quire.session_gate.held", _C, "First turns of sessions that had to wait for memory for their working set"
)
SESSION_GATE_PASSED = Metric(
    "quire.session_gate.passed",
    _C,
    "First turns of sessions that started after a wait for memory, by cause: room, or bound (the longest wait)",
    ("cause",),
)
SESSION_GATE_WAIT = Metric(
    "quire.session_gate.wait_time", _C, "Time that first turns of sessions waited for memory", unit="s"
)
FRONTENDS = Metric("quire.frontends", _G, "Connected front ends")
WORKERS = Metric("quire.workers", _G, "Usable workers")
WORKER_ENERGY = Metric(
    "quire.worker.energy",
    _C,
    "Energy of the workers' devices by phase: step, or idle between steps; absent if it cannot be read",
    ("worker", "phase"),
    "J",
)
DEVICE_UTILISATION = Metric(
    "quire.device.utilisation",
    _G,
    "Share of the time in which the device computed, as NVML reports it. This and the next three are absent if NVML"
    " cannot be read, and while the worker computes nothing",
    ("worker",),
)
DEVICE_MEMORY = Metric(
    "quire.device.memory", _G, "Device memory by state: used (by all processes) or total", ("worker", "state"), "By"
)
DEVICE_POWER = Metric("quire.device.power", _G, "Power draw of the devices", ("worker",), "W")
DEVICE_CLOCK = Metric(
    "quire.device.clock", _G, "Clock of a device by kind: processor or memory", ("worker", "kind"), "Hz"
)
WORKERS_JOINED = Metric("quire.workers_joined", _C, "Connections from workers, including restarted ones")
WORKERS_LOST = Metric("quire.workers_lost", _C, "Workers that were lost without a goodbye")
REQUESTS_ENDED = Metric("quire.requests_ended", _C, "Requests to the scheduler that ended, by reason", ("reason",))
FORECASTS = Metric(
    "quire.forecasts",
    _C,
    "Requests with a forecast wait, first_token or end that has occurred",
    ("of",),
)
FORECASTS_HELD = Metric(
    "quire.forecasts_held",
    _C,
    "Forecasts that held: the actual time was within the forecast quantile 0.5 or 0.9, which should be the fraction",
    ("of", "quantile"),
)
STEP_COST = Metric(
    "quire.step_cost",
    _G,
    "Learned time of a worker's steps: fixed, per decode row, prompt_token, context_token and block_copy",
    ("worker", "part"),
    "s",
)
MALFORMED_FRAMES = Metric("quire.malformed_frames", _C, "Frames dropped as malformed")
TURN = Metric(
    "quire.scheduler.turn", _H, "Time of one turn of the scheduler's loop, without its sleep", (), "s", _TURN_BOUNDS
)
TURN_PART = Metric(
    "quire.scheduler.turn_part",
    _H,
    "Time of the parts of a turn: snapshot (fork for the flight recorder), results, losses (of workers), requests,"
    " upkeep, metrics, plans, messages; and of garbage collections (collection), which are also in the part that they"
    " interrupt",
    ("part",),
    "s",
    _TURN_BOUNDS,
)
PLAN = Metric("quire.plan", _H, "Time to make, encode and send one plan", (), "s", _FINE_BOUNDS)
LINK = Metric(
    "quire.link",
    _H,
    "Time from the later of sending the plan and receiving the answer before it, until its answer arrives; the worker's"
    " own time is subtracted",
    _WORKER,
    "s",
    _FINE_BOUNDS,
)
STEP = Metric("quire.step", _H, "Time a worker spent on one step", _WORKER, "s", _STEP_BOUNDS)
DEVICE_IDLE = Metric("quire.device_idle", _H, "Idle time of the device before a step", _WORKER, "s", _FINE_BOUNDS)
WORKER_TIME = Metric(
    "quire.worker",
    _C,
    "Where the workers' time went: prepare, forward, sample, idle",
    ("worker", "phase"),
    "s",
)
KV_BLOCKS = Metric(
    "quire.kv_blocks", _G, "KV blocks by worker and state: free, cached, held, total", ("worker", "state")
)
RETAINED_BLOCKS = Metric(
    "quire.retained_blocks", _G, "KV blocks that requests have asked to retain, cached or held", _WORKER
)
BATCH_ROWS = Metric("quire.batch_rows", _G, "Rows in use", _WORKER)
BATCH_ROW_LIMIT = Metric("quire.batch_row_limit", _G, "Rows that the worker has", _WORKER)
BATCH_TOKENS = Metric("quire.batch_tokens", _G, "Tokens of the newest step", _WORKER)
PLANS_IN_FLIGHT = Metric("quire.plans_in_flight", _G, "Plans sent without a result so far", _WORKER)
STEPS = Metric("quire.steps", _C, "Steps planned", _WORKER)
SCHEDULED_TOKENS = Metric(
    "quire.scheduled_tokens", _C, "Tokens planned, by kind: prefill or decode", ("worker", "kind"), "{token}"
)
SCHEDULED_ROWS = Metric("quire.scheduled_rows", _C, "Rows planned, by kind: prefill or decode", ("worker", "kind"))
PREFIX_HIT_TOKENS = Metric(
    "quire.prefix_cache_hit_tokens",
    _C,
    "Tokens of admitted sequences whose KV existed, by tier: device, host (copied back from host memory) or disk",
    ("worker", "tier"),
    "{token}",
)
UNUSABLE_TOKENS = Metric(
    "quire.prefix_cache_unusable_tokens",
    _C,
    "Cached tokens of admitted sequences that are computed again, because no state checkpoint or window follows them",
    _WORKER,
    "{token}",
)
SAMPLED_TOKENS = Metric("quire.sampled_tokens", _C, "Tokens sampled and delivered", _WORKER, "{token}")
DISCARDED_TOKENS = Metric("quire.discarded_tokens", _C, "Sampled tokens that were discarded", _WORKER, "{token}")
DRAFT_TOKENS = Metric("quire.draft_tokens", _C, "Draft tokens that rows verified", _WORKER, "{token}")
ACCEPTED_DRAFT_TOKENS = Metric("quire.accepted_draft_tokens", _C, "Draft tokens that were accepted", _WORKER, "{token}")
PREEMPTIONS = Metric("quire.preemptions", _C, "Requests preempted, by remedy: recompute or swap", ("worker", "remedy"))
HOST_BLOCKS = Metric("quire.host_blocks", _G, "Size of host memory (--host-cache) in KV blocks", _WORKER)
WINDOW_BLOCKS = Metric(
    "quire.window_blocks",
    _G,
    "KV blocks that running requests hold for layers with a sliding window. A shared block counts once per request",
    _WORKER,
)
HOST_BLOCKS_HELD = Metric(
    "quire.host_blocks_held", _G, "Host KV blocks of preempted requests, and of copies in flight", _WORKER
)
HOST_BLOCKS_CACHED = Metric("quire.host_blocks_cached", _G, "Host KV blocks with cached prefixes", _WORKER)
SWAPPED_OUT = Metric("quire.swapped_out_blocks", _C, "Blocks copied from the device to host memory", _WORKER)
SWAPPED_IN = Metric("quire.swapped_in_blocks", _C, "Blocks copied from host memory to the device", _WORKER)
DISK_BLOCKS = Metric(
    "quire.disk_blocks", _G, "KV blocks on disk (--disk-cache), by state: cached or total", ("worker", "state")
)
DISK_COPIES = Metric(
    "quire.disk_copied_blocks", _C, "Blocks copied between host memory and disk, by direction", ("worker", "direction")
)
DISK_REFUSED = Metric(
    "quire.disk_refused_files", _C, "Files of the disk cache that were not used, by reason", ("worker", "reason")
)
HOST_STATES = Metric(
    "quire.host_states",
    _G,
    "Places for recurrent states in host memory, by state: cached (of cached prefixes), held (of preempted requests) or"
    " total",
    ("worker", "state"),
)
HOST_STATE_COPIES = Metric(
    "quire.host_state_copies",
    _C,
    "Recurrent states of cached prefixes copied to host memory, and rows that began with one",
    ("worker", "direction"),
)
HOST_STATES_EVICTED = Metric(
    "quire.host_states_evicted", _C, "Cached recurrent states in host memory whose place was needed", _WORKER
)
STATE_CHECKPOINTS = Metric(
    "quire.state_checkpoints", _G, "Checkpoints of recurrent states, by state: used or total", ("worker", "state")
)
STATE_COPIES = Metric(
    "quire.state_copies", _C, "Recurrent states saved to or restored from checkpoints", ("worker", "direction")
)
STATES_EVICTED = Metric(
    "quire.state_checkpoints_evicted", _C, "Checkpoints of recurrent states replaced by newer ones", _WORKER
)
JOURNAL_WRITES = Metric("quire.journal_writes", _G, "1 while the journal can be written, else 0")
JOURNAL_FAILURES = Metric("quire.journal_failures", _C, "Writes to the journal that failed")
JOURNAL_FORGOTTEN = Metric("quire.journal_forgotten", _C, "Requests dropped from the journal because it is full")
STANDBY_READY = Metric(
    "quire.standby_ready",
    _G,
    "1 while a standby scheduler waits to take over and has the whole journal, else 0; absent without a leader lease"
    " and a standby address",
)
LEADER_PID = Metric(
    "quire.leader_pid",
    _G,
    "Process id of the scheduler that leads; absent without a leader lease and a standby address",
)
LEADER_NUMBER = Metric(
    "quire.leader_number",
    _G,
    "Number under which the scheduler leads, which increases with each takeover; absent without a standby address",
)
STANDBY_LAG = Metric(
    "quire.standby_lag_bytes",
    _G,
    "Most journal bytes that a connected standby has not acknowledged; absent without a standby address",
    unit="By",
)
STANDBY_DROPPED = Metric(
    "quire.standby_dropped", _C, "Times that a standby was lost or was too slow; absent without a standby address"
)
STANDBY_COPIES = Metric(
    "quire.standby_copies",
    _C,
    "Copies of the whole journal that were begun for standbys; more than one for each standby if its disk is full or it"
    " has missed a part; absent without a standby address",
)
RECORD_SIZE = Metric("quire.record_bytes", _G, "Bytes of the flight record on disk", unit="By")
RECORD_WRITES = Metric(
    "quire.record_writes",
    _G,
    "1 while the flight record is written, 0 if it should be but is not; absent with --record-dir off",
)
RECORD_ENTRIES = Metric("quire.record_entries", _C, "Entries written to the flight record")
RECORD_FAILURES = Metric("quire.record_failures", _C, "Times that the flight recorder stopped recording")
RECORD_SNAPSHOTS = Metric("quire.record_snapshots", _C, "Snapshots of the scheduler's state for the flight record")
RECORD_LONGEST_FORK = Metric(
    "quire.record_longest_fork", _G, "Longest time that a snapshot blocked the scheduler's loop", unit="s"
)

ALL = tuple(each for each in list(globals().values()) if isinstance(each, Metric))
"""All metrics, in the order of this module."""
