"""Recording rules and alerts of Prometheus: their definitions and the text of the rule files.

Alerts on an error budget say that clients suffer. Alerts on a cause name what to repair. Each alert has a section in
docs/runbooks.md, to which its annotation `runbook_url` links.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RULES = ROOT / "deploy" / "prometheus" / "quire-rules.yaml"
RULE_OBJECT = ROOT / "deploy" / "kubernetes" / "components" / "monitoring" / "rules.yaml"
RUNBOOK_URL = "docs/runbooks.md"
"""Page with the runbooks; `make dashboards RUNBOOK_URL=https://…` writes the rules with another one."""

OBJECTIVES = {"availability": 0.999, "ttft": 0.99, "itl": 0.99}
"""Share of events that must be good: calls without a fault of the server, first tokens and tokens in time."""
TTFT_LIMIT_S = "2.5"
"""A first token is in time within these seconds: a bound of the histogram's buckets."""
ITL_LIMIT_S = "0.2"
"""A further token is in time within these seconds."""
BURNS = (
    ("14.4", "1h", "5m", "page"),
    ("6", "6h", "30m", "page"),
    ("3", "1d", "2h", "ticket"),
    ("1", "3d", "6h", "ticket"),
)
"""Alerts on the burn rate: factor, long window, short window, severity."""

_CLIENT_CALLS = 'rpc_method!~"quire[.]admin[.].*"'
"""Selects the gRPC calls of clients; the calls of operators are no part of the objective."""
_NOT_OWN_LIMIT = 'error_type!="TENANT_LIMIT"'
"""A tenant that exceeds its own limit is no fault of the server."""
_BAD_RPC = "UNKNOWN|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|INTERNAL|UNAVAILABLE|DATA_LOSS"


def _bad_share(slo: str, window: str) -> str:
    """Return the share of bad events within a window; no data without events."""

    def total(metric: str, labels: str = "") -> str:
        return f"sum(rate({metric}{{{labels}}}[{window}]))"

    if slo == "availability":
        rpc, http = "rpc_server_call_duration_seconds_count", "http_server_request_duration_seconds_count"
        bad_rpc = total(rpc, f'{_CLIENT_CALLS}, {_NOT_OWN_LIMIT}, rpc_response_status_code=~"{_BAD_RPC}"')
        bad_http = total(http, f'{_NOT_OWN_LIMIT}, http_response_status_code=~"5..|429"')
        bad = f"(({bad_rpc} or vector(0)) + ({bad_http} or vector(0)))"
        return f"{bad} / (({total(rpc, _CLIENT_CALLS)} or vector(0)) + ({total(http)} or vector(0)) > 0)"
    metric, limit = {
        "ttft": ("gen_ai_server_time_to_first_token_seconds", TTFT_LIMIT_S),
        "itl": ("vllm:inter_token_latency_seconds", ITL_LIMIT_S),
    }[slo]
    good = total(f"{metric}_bucket", f'le="{limit}"')
    return f"1 - {good} / ({total(f'{metric}_count')} > 0)"


class Cause(NamedTuple):
    """An alert that names a cause."""

    name: str
    expr: str
    wait: str
    """How long the expression must hold."""
    severity: str
    summary: str


CAUSES = (
    Cause(
        "QuireDown",
        # Without any pod, discovery in Kubernetes has no target, and `up` has no value.
        'up{job="quire"} == 0 or absent(up{job="quire"})',
        "1m",
        "page",
        "No front end responds",
    ),
    Cause(
        "QuireSchedulerDown",
        # All front ends must agree: one that restarts has not heard the scheduler yet.
        "max without (frontend) (quire_scheduler_connected) == 0",
        "30s",
        "page",
        "Front ends hear nothing from the scheduler: it has ended, hangs or cannot be reached",
    ),
    Cause(
        "QuireNoLeader",
        # A takeover takes some seconds. All front ends must agree, as above.
        "max without (frontend) (quire_scheduler_connected) == 0"
        " and max without (frontend) (quire_scheduler_addresses) > 1",
        "10s",
        "page",
        "No scheduler leads, although there are standbys: no scheduler can acquire the lease, or all are lost",
    ),
    Cause(
        "QuireSchedulerRestarts",
        # Rollouts and takeovers by command are planned. `increase` extrapolates, so one restart can count a little more
        # than 1.
        'max without (frontend, reason) (increase(quire_scheduler_restarts_total{reason="lost"}[15m])) > 1.5',
        "0s",
        "page",
        "The scheduler restarts again and again",
    ),
    Cause(
        "QuireTakeovers",
        # An upgrade of two schedulers takes two takeovers at most. Schedulers on one machine have no number.
        "max without (frontend) (changes(quire_leader_number[15m])) > 2"
        " or max without (frontend) (changes(quire_leader_pid[15m])) > 2",
        "0s",
        "ticket",
        "Schedulers take over from each other again and again",
    ),
    Cause(
        "QuireWorkersLost",
        "quire_workers == 0 and increase(quire_workers_lost_total[10m]) > 0",
        "1m",
        "page",
        "The last worker was lost without a goodbye, and none has joined since; requests wait",
    ),
    Cause(
        "QuireNoWorker",
        # A rollout of a cell with one worker has none while the new one loads the model. Its old worker says goodbye.
        "quire_workers == 0",
        "10m",
        "page",
        "No worker has been connected for longer than a rollout takes; requests wait, or end with UNAVAILABLE",
    ),
    Cause(
        "QuireWorkerCrashes",
        "increase(quire_workers_lost_total[15m]) > 2.5",
        "0s",
        "ticket",
        "Workers are lost again and again",
    ),
    Cause(
        "QuireOverloaded",
        'sum(rate(gen_ai_server_request_duration_seconds_count{error_type=~"QUEUE_FULL|OVERLOADED"}[1m])) > 0',
        "1m",
        "ticket",
        "Requests are refused because the waiting queue is full",
    ),
    Cause(
        "QuireStalledReaders",
        # The first metric begins at 0, so the first such client fires. The second one also has clients who do
        # not take the last message of a request that has ended.
        'sum(rate(quire_requests_ended_total{reason="stalled"}[5m])) > 0'
        ' or sum(rate(gen_ai_server_request_duration_seconds_count{error_type="STALLED_READER"}[5m])) > 0',
        "0s",
        "ticket",
        "Requests end because their clients do not read",
    ),
    Cause(
        "QuireKvCacheFull",
        # Both metrics are of one cell: every label of the target must be equal.
        'vllm:kv_cache_usage_perc > 0.95 and ignoring (model_name, reason) quire_queue_requests{reason="room"} > 0',
        "1m",
        "ticket",
        "Requests wait because running ones hold the KV cache",
    ),
    Cause(
        "QuireSpansDropped",
        "sum by (process) (rate(quire_spans_dropped_total[5m])) > 0",
        "5m",
        "ticket",
        "Spans are lost because the collector is down or slow",
    ),
    Cause(
        "QuireJournalFailed",
        "quire_journal_writes == 0",
        "30s",
        "page",
        "The journal cannot be written; see its disk",
    ),
    Cause(
        "QuireNoStandby",
        "quire_standby_ready == 0",
        "5m",
        "ticket",
        "No standby scheduler waits; the loss of the scheduler would cause a longer pause",
    ),
    Cause(
        "QuireRecordFailed",
        "quire_record_writes == 0",
        "30s",
        "ticket",
        "The flight record is not written; see the scheduler's log and the disk",
    ),
)
_BURN_NAMES = {"availability": "QuireAvailabilityBurn", "ttft": "QuireFirstTokenBurn", "itl": "QuireInterTokenBurn"}


def rules(runbook_url: str = RUNBOOK_URL) -> dict[str, Any]:
    """Return the recording rules and alerts, in Prometheus's form."""
    windows = ("5m", "30m", "1h", "2h", "6h", "1d", "3d")
    recorded = [
        {"record": f"quire:slo_errors:ratio_rate{window}", "expr": _bad_share(slo, window), "labels": {"slo": slo}}
        for slo in OBJECTIVES
        for window in windows
    ]
    burning = [
        {
            "alert": _BURN_NAMES[slo],
            "expr": " and ".join(
                f'quire:slo_errors:ratio_rate{window}{{slo="{slo}"}} > {factor} * {round(1 - objective, 6)}'
                for window in (long, short)
            ),
            "labels": {"severity": severity, "burn": factor},
            "annotations": {
                "summary": f"The error budget of {slo} burns at {factor} times its rate over {long} and {short}",
                "runbook_url": _runbook(runbook_url, _BURN_NAMES[slo]),
            },
        }
        for slo, objective in OBJECTIVES.items()
        for factor, long, short, severity in BURNS
    ]
    causes = [
        {
            "alert": each.name,
            "expr": each.expr,
            "for": each.wait,
            "labels": {"severity": each.severity},
            "annotations": {"summary": each.summary, "runbook_url": _runbook(runbook_url, each.name)},
        }
        for each in CAUSES
    ]
    return {
        "groups": [
            {"name": "quire-slo", "interval": "30s", "rules": recorded},
            {"name": "quire-burn", "interval": "30s", "rules": burning},
            {"name": "quire-causes", "interval": "15s", "rules": causes},
        ]
    }


def _runbook(url: str, alert: str) -> str:
    """Return the link to the section of an alert."""
    return f"{url}#{alert.lower()}"


_HEADING = "# Made by `python -m tools.dashboards`: recording rules and alerts of Quire.\n"
_RULE_OBJECT_HEAD = """apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: quire
spec:
"""


def rules_text(runbook_url: str = RUNBOOK_URL) -> str:
    """Return the rule file."""
    return _HEADING + "".join(_rule_text(runbook_url))


def rule_object_text(runbook_url: str = RUNBOOK_URL) -> str:
    """Return the same rules as an object of the Prometheus operator."""
    return _HEADING + _RULE_OBJECT_HEAD + "".join(f"  {line}" for line in _rule_text(runbook_url))


def _rule_text(runbook_url: str) -> list[str]:
    """Return the lines of the groups."""
    lines = ["groups:"]
    for group in rules(runbook_url)["groups"]:
        lines += [f"  - name: {group['name']}", f"    interval: {group['interval']}", "    rules:"]
        for rule in group["rules"]:
            lines += [f"      {'-' if number == 0 else ' '} {line}" for number, line in enumerate(_rule_lines(rule))]
    return [f"{line}\n" for line in lines]


def _rule_lines(rule: dict[str, Any]) -> Iterator[str]:
    for key, value in rule.items():
        if isinstance(value, dict):
            yield f"{key}:"
            yield from (f"  {name}: {json.dumps(text)}" for name, text in value.items())
        else:
            yield f"{key}: {json.dumps(value) if key == 'expr' else value}"
