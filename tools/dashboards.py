"""Write the Grafana dashboards in deploy/grafana and Prometheus's rules in deploy/prometheus and deploy/kubernetes.

    python -m tools.dashboards                      write all files
    python -m tools.dashboards --check              fail if a file is out of date
    python -m tools.dashboards --runbook-url URL    write the rules with links to URL#ALERT

The dashboards need the package grafana-foundation-sdk, which is not a development dependency. `make dashboards`
installs it into a separate environment.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

from tools.alerts import RULE_OBJECT, RULES, RUNBOOK_URL, rule_object_text, rules_text

ROOT = Path(__file__).resolve().parents[1]
GRAFANA = ROOT / "deploy" / "grafana"
INTERVAL = "$__rate_interval"
"""Grafana's variable for the range of a rate."""


@dataclass(frozen=True, slots=True)
class Query:
    """A panel's query, and the legend of its series."""

    expr: str
    legend: str = ""
    exemplars: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of a dashboard."""

    title: str
    unit: str
    queries: tuple[Query, ...]
    description: str = ""


@dataclass(frozen=True, slots=True)
class Board:
    """A dashboard."""

    name: str
    title: str
    panels: tuple[Panel, ...]


def _rate(metric: str, by: str = "", labels: str = "") -> str:
    selector = f"{metric}{{{labels}}}" if labels else metric
    return f"sum{f' by ({by})' if by else ''} (rate({selector}[{INTERVAL}]))"


def _rates(title: str, unit: str, metric: str, by: str, labels: str = "", description: str = "") -> Panel:
    legend = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))
    return Panel(title, unit, (Query(_rate(metric, by, labels), legend),), description)


def _values(title: str, unit: str, metric: str, by: str = "", description: str = "") -> Panel:
    legend = " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(",")) if by else title
    return Panel(title, unit, (Query(f"sum{f' by ({by})' if by else ''} ({metric})", legend),), description)


def _quantiles(title: str, metric: str, by: str = "", unit: str = "s", description: str = "") -> Panel:
    """Return a panel with a histogram's p50, p95 and p99, whose points link to traces."""
    group = f"le, {by}" if by else "le"
    legend = f" {{{{{by}}}}}" if by else ""
    return Panel(
        title,
        unit,
        tuple(
            Query(f"histogram_quantile({share}, {_rate(f'{metric}_bucket', group)})", f"p{name}{legend}", share == 0.99)
            for share, name in ((0.5, "50"), (0.95, "95"), (0.99, "99"))
        ),
        description,
    )


_TTFT = _quantiles(
    "Time to first token",
    "gen_ai_server_time_to_first_token_seconds",
    description="A diamond is a sampled request; its link leads to its trace.",
)
_ITL = _quantiles(
    "Inter-token latency", "vllm:inter_token_latency_seconds", description="Per token, as clients see it."
)
_QUEUE = _values("Waiting requests by reason", "short", "quire_queue_requests", "reason")
_ERRORS = _rates(
    "Failed requests by reason", "reqps", "gen_ai_server_request_duration_seconds_count", "error_type", 'error_type!=""'
)
_KV = Panel(
    "KV cache",
    "percentunit",
    (
        Query(
            'sum by (worker, state) (quire_kv_blocks{state=~"held|cached"})'
            ' / on (worker) group_left sum by (worker) (quire_kv_blocks{state="total"})',
            "{{worker}} {{state}}",
        ),
    ),
    "Held by requests, and kept only by the prefix cache.",
)
_PREEMPTIONS = _rates("Preemptions by remedy", "ops", "quire_preemptions_total", "remedy")

BOARDS = (
    Board(
        "service",
        "Quire: service",
        (
            _rates("Requests", "reqps", "gen_ai_server_request_duration_seconds_count", "gen_ai_operation_name"),
            _ERRORS,
            _TTFT,
            _ITL,
            _quantiles("Request duration", "gen_ai_server_request_duration_seconds"),
            _quantiles("Mean time per output token of a request", "gen_ai_server_time_per_output_token_seconds"),
            Panel(
                "Tokens",
                "short",
                (
                    Query(_rate("vllm:prompt_tokens_total"), "prompt"),
                    Query(_rate("vllm:generation_tokens_total"), "output"),
                ),
            ),
            Panel(
                "Requests running and waiting",
                "short",
                (
                    Query("sum (vllm:num_requests_running)", "running"),
                    Query("sum (vllm:num_requests_waiting)", "waiting"),
                ),
            ),
            _rates("Targets of requests", "reqps", "quire_request_targets_total", "target, outcome"),
            Panel(
                "Error budget",
                "percentunit",
                (Query("quire:slo_errors:ratio_rate1h", "{{slo}}"),),
                "Share of bad events in the last hour. The objectives are in docs/observability.md.",
            ),
            _rates(
                "gRPC calls by status", "reqps", "rpc_server_call_duration_seconds_count", "rpc_response_status_code"
            ),
            _rates(
                "HTTP requests by status",
                "reqps",
                "http_server_request_duration_seconds_count",
                "http_response_status_code",
            ),
            _rates("Tokens merged for slow readers", "short", "quire_merged_tokens_total", "frontend"),
            _rates("Lost spans", "short", "quire_spans_dropped_total", "process"),
        ),
    ),
    Board(
        "scheduler",
        "Quire: scheduler",
        (
            _QUEUE,
            _rates("Ended requests by reason", "reqps", "quire_requests_ended_total", "reason"),
            _quantiles("Time in the queue", "vllm:request_queue_time_seconds"),
            _quantiles("Time to make and send a plan", "quire_plan_seconds"),
            _quantiles("Turn of the loop", "quire_scheduler_turn_seconds"),
            _quantiles("Link: step time outside the worker", "quire_link_seconds", "worker"),
            _rates("Composition of steps: tokens", "short", "quire_scheduled_tokens_total", "kind"),
            _rates("Composition of steps: rows", "short", "quire_scheduled_rows_total", "kind"),
            _quantiles("Tokens of a step", "vllm:iteration_tokens_total", unit="short"),
            _PREEMPTIONS,
            Panel(
                "Prefix cache: share of tokens found",
                "percentunit",
                (
                    Query(
                        f"{_rate('quire_prefix_cache_hit_tokens_total', 'tier')}"
                        f" / ignoring (tier) group_left {_rate('vllm:prefix_cache_queries_total')}",
                        "{{tier}}",
                    ),
                ),
            ),
            _rates(
                "Prefix cache: cached tokens computed again",
                "short",
                "quire_prefix_cache_unusable_tokens_total",
                "worker",
                description="No state checkpoint or window follows them. A checkpoint may be missing:"
                " --state-checkpoints.",
            ),
            _rates("Discarded tokens", "short", "quire_discarded_tokens_total", "worker"),
            _rates("Draft tokens", "short", "quire_draft_tokens_total", "worker"),
            _rates("Accepted draft tokens", "short", "quire_accepted_draft_tokens_total", "worker"),
            _rates("Malformed frames", "short", "quire_malformed_frames_total", "job"),
            _values("Flight record", "bytes", "quire_record_bytes"),
            _rates("Entries of the flight record", "ops", "quire_record_entries_total", "job"),
            _values("Front ends", "short", "quire_frontends"),
            _values("Workers", "short", "quire_workers"),
        ),
    ),
    Board(
        "worker",
        "Quire: workers",
        (
            _quantiles("Step", "quire_step_seconds", "worker"),
            _quantiles("Idle time of the device before a step", "quire_device_idle_seconds", "worker"),
            _rates("Where the time goes", "percentunit", "quire_worker_seconds_total", "worker, phase"),
            _rates("Steps", "ops", "quire_steps_total", "worker"),
            _rates("Sampled tokens", "short", "quire_sampled_tokens_total", "worker"),
            _values("Rows in use", "short", "quire_batch_rows", "worker"),
            _values("Tokens of the newest step", "short", "quire_batch_tokens", "worker"),
            _values("Plans in flight", "short", "quire_plans_in_flight", "worker"),
            _KV,
            Panel(
                "Host blocks",
                "short",
                (
                    Query("sum by (worker) (quire_host_blocks)", "{{worker}} total"),
                    Query("sum by (worker) (quire_host_blocks_cached)", "{{worker}} cached prefixes"),
                    Query("sum by (worker) (quire_host_blocks_held)", "{{worker}} preempted requests"),
                ),
            ),
            Panel(
                "Blocks copied",
                "short",
                (
                    Query(_rate("quire_swapped_out_blocks_total", "worker"), "{{worker}} to the host"),
                    Query(_rate("quire_swapped_in_blocks_total", "worker"), "{{worker}} back"),
                ),
            ),
            _values("Blocks of sliding windows", "short", "quire_window_blocks", "worker"),
            _values("Checkpoints of recurrent states", "short", "quire_state_checkpoints", "worker, state"),
            _values(
                "Recurrent states in host memory",
                "short",
                "quire_host_states",
                "worker, state",
                "Of cached prefixes (cached), of preempted requests (held), and places in all (total).",
            ),
            Panel(
                "Recurrent states copied",
                "short",
                (
                    Query(
                        _rate("quire_state_copies_total", "worker, direction"), "{{worker}} checkpoint {{direction}}"
                    ),
                    Query(_rate("quire_host_state_copies_total", "worker, direction"), "{{worker}} host {{direction}}"),
                ),
            ),
            Panel(
                "Recurrent states evicted",
                "short",
                (
                    Query(_rate("quire_state_checkpoints_evicted_total", "worker"), "{{worker}} checkpoints"),
                    Query(_rate("quire_host_states_evicted_total", "worker"), "{{worker}} host memory"),
                ),
            ),
        ),
    ),
    Board(
        "tenant",
        "Quire: tenants",
        (
            _rates("Output tokens", "short", "quire_tenant_tokens_total", "tenant", 'kind="output"'),
            _rates("Prompt tokens", "short", "quire_tenant_tokens_total", "tenant", 'kind="prompt"'),
            _rates("Ended outputs by reason", "reqps", "quire_tenant_requests_total", "tenant, finished_reason"),
            Panel(
                "Mean time in the queue",
                "s",
                (
                    Query(
                        f"{_rate('quire_tenant_queue_time_seconds_total', 'tenant')}"
                        f" / {_rate('quire_tenant_requests_total', 'tenant')}",
                        "{{tenant}}",
                    ),
                ),
            ),
            Panel(
                "Share of the service",
                "percentunit",
                (
                    Query(
                        f"{_rate('quire_tenant_tokens_total', 'tenant')}"
                        f" / ignoring (tenant) group_left {_rate('quire_tenant_tokens_total')}",
                        "{{tenant}}",
                    ),
                ),
                "Prompt and output tokens.",
            ),
        ),
    ),
    Board(
        "incident",
        "Quire: incident",
        (
            _TTFT,
            _ITL,
            _QUEUE,
            _ERRORS,
            _KV,
            _PREEMPTIONS,
            _quantiles("Step", "quire_step_seconds", "worker"),
            _quantiles("Idle time of the device before a step", "quire_device_idle_seconds", "worker"),
            _values("Workers", "short", "quire_workers"),
            Panel(
                "Firing alerts",
                "short",
                (Query('count (ALERTS{alertname=~"Quire.*", alertstate="firing"}) or vector(0)', "alerts"),),
            ),
        ),
    ),
)


def board_text(board: Board) -> str:
    """Return a dashboard as Grafana's JSON."""
    from grafana_foundation_sdk.builders import dashboard, prometheus, timeseries
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import DataSourceRef

    source = DataSourceRef(type_val="prometheus", uid="${datasource}")
    made = (
        dashboard.Dashboard(board.title)
        .uid(f"quire-{board.name}")
        .tags(["quire"])
        .refresh("10s")
        .time("now-30m", "now")
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for each in board.panels:
        panel = timeseries.Panel().title(each.title).unit(each.unit).datasource(source).height(8).span(12).min(0)
        if each.description:
            panel = panel.description(each.description)
        for number, query in enumerate(each.queries):
            panel = panel.with_target(
                prometheus.Dataquery()
                .expr(query.expr)
                .legend_format(query.legend)
                .exemplar(query.exemplars)
                .ref_id(chr(ord("A") + number))
            )
        made = made.with_panel(panel)
    return str(JSONEncoder(sort_keys=True, indent=2).encode(made.build())) + "\n"


def main() -> int:
    """Write the files, or check them; return the exit code."""
    parser = argparse.ArgumentParser(description="Write dashboards and rules.")
    parser.add_argument("--check", action="store_true", help="fail if a file is out of date")
    parser.add_argument("--runbook-url", default=RUNBOOK_URL, help="page with the runbooks (default: %(default)s)")
    options = parser.parse_args()
    files = {RULES: rules_text(options.runbook_url), RULE_OBJECT: rule_object_text(options.runbook_url)} | {
        GRAFANA / f"{board.name}.json": board_text(board) for board in BOARDS
    }
    stale = [path for path, text in files.items() if not path.exists() or path.read_text("utf-8") != text]
    if options.check:
        for path in stale:
            print(f"{path.relative_to(ROOT)}: out of date; run make dashboards", file=sys.stderr)
        return bool(stale)
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files[path], "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
