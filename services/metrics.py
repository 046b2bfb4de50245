"""Metrics of the front end; `shared.metric_names` documents names and labels."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from protos.quire.link.v1 import link_pb2
from shared import metric_names as names
from shared.metrics import Distribution, Histogram, Registry, SpanRef

MAX_TENANTS = 100
"""Maximum number of tenants with separate series. A limit is needed because clients may choose tenant names."""
OTHER_TENANTS = "(other)"
"""Label for all further tenants."""
PROVIDER = "quire"
"""Value of `gen_ai.provider.name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One ended output; times in seconds."""

    model: str
    operation: str
    tenant: str
    reason: str
    """"stop", "length", "abort" or "error"."""
    prompt_tokens: int
    output_tokens: int
    elapsed: float
    """Time from arrival to the end."""
    first: float | None
    """Time from arrival until the first token was written to the client; None if there was none."""
    last: float | None
    """Time from arrival until the last token was written."""
    queued: float
    """Time in the queue."""
    energy_j: float = 0.0
    """Energy of its share of its steps, J; 0 if not known."""
    first_target: float | None = None
    """Target for the first token, counted from arrival; None without a target."""
    total_target: float | None = None
    """Target for the last token."""
    span: SpanRef | None = None

    @property
    def per_token(self) -> float | None:
        """Mean time per token after the first; None if there was none."""
        if self.first is None or self.last is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)

    def targets(self) -> Iterator[tuple[str, bool]]:
        """Yield each target and whether it was met, without targets after the client has left."""
        ended = self.reason in ("stop", "length")
        for name, target, reached in (
            ("first_token", self.first_target, self.first),
            ("total", self.total_target, self.elapsed if ended else None),
        ):
            if target is None:
                continue
            if reached is not None:
                yield name, reached <= target
            elif self.reason == "error" or self.elapsed > target:
                yield name, False


class ModelLatencies:
    """Latency histograms for one model and operation, with their labels resolved."""

    def __init__(self, metrics: "FrontendMetrics", operation: str, model: str) -> None:
        gen_ai = (operation, PROVIDER, model)
        self.token_gap: Distribution = metrics.token_gap.labels(model)
        """Time between two tokens of an output."""
        self._first_token = (
            metrics.of(names.TIME_TO_FIRST_TOKEN).labels(*gen_ai),
            metrics.of(names.VLLM_TIME_TO_FIRST_TOKEN).labels(model),
        )

    def first_token(self, seconds: float, span: SpanRef | None) -> None:
        for each in self._first_token:
            each.observe(seconds, span=span)


class FrontendMetrics:
    """Metrics registry of one front-end process."""

    def __init__(self, frontend_id: str, spans_dropped: Callable[[], int] = lambda: 0) -> None:
        self._frontend_id = frontend_id
        registry = self._registry = Registry()
        self._histograms: dict[str, Histogram] = {}
        self._latencies: dict[tuple[str, str], ModelLatencies] = {}
        self._tenants: set[str] = set()
        self.token_gap = self.of(names.VLLM_INTER_TOKEN_LATENCY)
        for metric in names.ALL:
            if metric.source == "frontend" and metric.kind is names.Kind.HISTOGRAM:
                self.of(metric)
        self._prompt_tokens = registry.values(names.VLLM_PROMPT_TOKENS)
        self.generation_tokens = registry.values(names.VLLM_GENERATION_TOKENS)
        self.merged_tokens = registry.values(names.MERGED_TOKENS)
        self.live_streams = registry.values(names.LIVE_STREAMS)
        self._success = registry.values(names.VLLM_REQUEST_SUCCESS)
        self._targets = registry.values(names.REQUEST_TARGETS)
        self._tenant_requests = registry.values(names.TENANT_REQUESTS)
        self._tenant_tokens = registry.values(names.TENANT_TOKENS)
        self._tenant_queue = registry.values(names.TENANT_QUEUE)
        self._tenant_energy = registry.values(names.TENANT_ENERGY)
        registry.computed(names.SPANS_DROPPED, spans_dropped, "frontend")

    def watch_share(self, name: str, limit: int, held: Callable[[], int], refusals: Callable[[], int]) -> None:
        """Report a shared resource's used amount, its limit, and its number of refusals."""
        self._registry.computed(names.SHARE_HELD, held, name)
        self._registry.computed(names.SHARE_LIMIT, lambda: limit, name)
        self._registry.computed(names.SHARE_REFUSALS, refusals, name)

    def watch_scheduler(
        self,
        *,
        connected: Callable[[], bool],
        ready: Callable[[], bool],
        silence_s: Callable[[], float],
        restarts: Callable[[], int],
        orderly_restarts: Callable[[], int],
        addresses: int,
    ) -> None:
        """Export the front end's view of the scheduler, so that metrics exist even if the scheduler sends nothing."""
        self._registry.computed(names.SCHEDULER_CONNECTED, connected)
        self._registry.computed(names.SCHEDULER_READY, ready)
        self._registry.computed(names.SCHEDULER_SILENCE, silence_s)
        self._registry.computed(names.SCHEDULER_RESTARTS, lambda: restarts() - orderly_restarts(), "lost")
        self._registry.computed(names.SCHEDULER_RESTARTS, orderly_restarts, "planned")
        self._registry.computed(names.SCHEDULER_ADDRESSES, lambda: addresses)

    def of(self, metric: names.Metric) -> Histogram:
        """Return the histogram of a definition."""
        found = self._histograms.get(metric.name)
        if found is None:
            found = self._histograms[metric.name] = self._registry.histogram(metric)
        return found

    def latencies(self, operation: str, model: str) -> ModelLatencies:
        found = self._latencies.get((operation, model))
        if found is None:
            found = self._latencies[operation, model] = ModelLatencies(self, operation, model)
        return found

    def rpc_ended(self, method: str, code: str, error_type: str, seconds: float) -> None:
        """Count one gRPC call; `method` is "package.Service/Method"."""
        self.of(names.RPC_DURATION).labels("grpc", method, code, error_type).observe(seconds)

    def http_ended(self, route: str, method: str, scheme: str, status: int, error_type: str, seconds: float) -> None:
        """Count one HTTP request; `status` is 0 if the client disconnected before the response."""
        labels = (method, route, str(status) if status else "", scheme, error_type)
        self.of(names.HTTP_DURATION).labels(*labels).observe(seconds)

    def request_ended(self, operation: str, model: str, error_type: str, seconds: float, span: SpanRef | None) -> None:
        """Count one request for a model, for all protocols."""
        labels = (operation, PROVIDER, model, error_type)
        self.of(names.REQUEST_DURATION).labels(*labels).observe(seconds, span=span)

    def prompt_submitted(self, model: str, tenant: str, count: int) -> None:
        """Count a call's prompt tokens once for all choices."""
        self._prompt_tokens.add(count, model)
        self._tenant_tokens.add(count, self._tenant(tenant), "prompt")

    def output_ended(self, output: Output) -> None:
        """Count one output of a request."""
        model, span = output.model, output.span
        self._success.add(1, model, output.reason)
        for name, is_met in output.targets():
            self._targets.add(1, name, "met" if is_met else "missed")
        tenant = self._tenant(output.tenant)
        self._tenant_requests.add(1, tenant, output.reason)
        self._tenant_tokens.add(output.output_tokens, tenant, "output")
        self._tenant_queue.add(output.queued, tenant)
        if output.energy_j:
            self._tenant_energy.add(output.energy_j, tenant)
        if output.reason not in ("stop", "length"):
            return
        lengths = (
            (names.VLLM_REQUEST_PROMPT_TOKENS, output.prompt_tokens),
            (names.VLLM_REQUEST_GENERATION_TOKENS, output.output_tokens),
        )
        for metric, count in lengths:
            self.of(metric).labels(model).observe(count)
        times = [
            (names.VLLM_E2E, output.elapsed),
            (names.VLLM_QUEUE_TIME, output.queued),
            (names.VLLM_INFERENCE_TIME, output.elapsed - output.queued),
        ]
        if output.first is not None and output.last is not None:
            decode = output.last - output.first
            times += [(names.VLLM_PREFILL_TIME, output.first - output.queued), (names.VLLM_DECODE_TIME, decode)]
        if (each := output.per_token) is not None:
            times.append((names.VLLM_TIME_PER_OUTPUT_TOKEN, each))
            gen_ai = (output.operation, PROVIDER, model)
            self.of(names.TIME_PER_OUTPUT_TOKEN).labels(*gen_ai).observe(each, span=span)
        for metric, seconds in times:
            self.of(metric).labels(model).observe(max(seconds, 0.0), span=span)

    def families(self) -> list[link_pb2.MetricFamily]:
        """Return the current values, labelled with the front end's name."""
        return self._registry.families(frontend=self._frontend_id)

    def own_families(self) -> list[link_pb2.MetricFamily]:
        """Return the current values without the front end's name, because an OTLP export has it in the resource."""
        return self._registry.families()

    def _tenant(self, name: str) -> str:
        """Return the label of a tenant."""
        if name not in self._tenants:
            if len(self._tenants) >= MAX_TENANTS:
                return OTHER_TENANTS
            self._tenants.add(name)
        return name or "(none)"
