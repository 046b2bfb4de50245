"""The server's own metrics for a run: counters before and after, gauges during the run, and its flight record. Pure.

Most names are vLLM metrics, which Quire also exports. Metrics under Quire's own names exist for Quire only.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from measure.load.recorded import RecordedRun
from quire_server.scrape import Scrape

_RUNNING, _WAITING, _KV_USAGE = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"


def gauges_of(page: str) -> str:
    """Return the lines of a metrics page that matter during a run. Parsing the whole page would take too long."""
    return "".join(f"{line}\n" for line in page.splitlines() if line.startswith((_RUNNING, _WAITING, _KV_USAGE)))


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """Metrics of the server during a run, including the warm-up. A value is None if the server does not report it."""

    prompt_tokens: float | None
    generation_tokens: float | None
    preemptions: float | None
    prefix_hit_share: float | None
    """Share of prompt tokens found in the prefix cache, over admitted sequences."""
    running: float | None
    """Mean number of running requests."""
    waiting: float | None
    """Mean number of waiting requests."""
    waiting_max: float | None
    kv_usage_max: float | None
    """Largest share of the KV cache that requests held, 0 to 1."""
    steps: float | None
    rows_per_step: float | None
    """Mean number of sequences in a step."""
    device_idle_share: float | None
    """Share of the time in which the workers' devices computed no step."""

    @classmethod
    def of(cls, before: Scrape, after: Scrape, meanwhile: Sequence[Scrape], seconds: float) -> "ServerFigures":
        """Return the metrics between two scrapes that are this far apart, and the gauges scraped between them."""

        def increase(name: str, **labels: str) -> float | None:
            # A counter that had no value before the run began at 0.
            if not any(each == name for each, _ in after.values):
                return None
            return after.sum(name, **labels) - before.sum(name, **labels)

        def share(part: float | None, whole: float | None) -> float | None:
            return None if part is None or not whole else part / whole

        def gauges(name: str) -> list[float]:
            return [each.sum(name) for each in meanwhile if any(key == name for key, _ in each.values)]

        def mean(values: Sequence[float]) -> float | None:
            return sum(values) / len(values) if values else None

        def busy_s() -> float | None:
            phases = [increase("quire_worker_seconds_total", phase=phase) for phase in ("forward", "sample")]
            return None if None in phases else sum(each or 0.0 for each in phases)

        busy = share(busy_s(), seconds * after.sum("quire_workers"))
        steps = increase("quire_steps_total")
        waiting = gauges(_WAITING)
        return cls(
            prompt_tokens=increase("vllm:prompt_tokens_total"),
            generation_tokens=increase("vllm:generation_tokens_total"),
            preemptions=increase("vllm:num_preemptions_total"),
            prefix_hit_share=share(
                increase("vllm:prefix_cache_hits_total"), increase("vllm:prefix_cache_queries_total")
            ),
            running=mean(gauges(_RUNNING)),
            waiting=mean(waiting),
            waiting_max=max(waiting, default=None),
            kv_usage_max=max(gauges(_KV_USAGE), default=None),
            steps=steps,
            rows_per_step=share(increase("quire_scheduled_rows_total"), steps),
            device_idle_share=None if busy is None else max(0.0, 1 - busy),
        )

    @classmethod
    def with_record(cls, scraped: "ServerFigures | None", recorded: RecordedRun) -> "ServerFigures":
        """Return the scraped metrics, completed with those that the flight record has for the run itself."""
        values = asdict(scraped) if scraped is not None else dict.fromkeys(each.name for each in fields(cls))
        return cls(**values | {name: value for name, value in asdict(recorded).items() if value is not None})

    def to_json(self) -> dict[str, Any]:
        """Return the metrics that exist, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}
