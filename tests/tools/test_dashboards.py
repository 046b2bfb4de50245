"""Dashboards and alerts: the committed files are those of the definitions, and each alert fires when it should."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shared import metric_names
from tools import alerts, dashboards
from tools.alerts import BURNS, OBJECTIVES, RULES, rules, rules_text
from tools.dashboards import BOARDS, GRAFANA, ROOT

PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian package prometheus)")

_NAMES = {"availability": "QuireAvailabilityBurn", "ttft": "QuireFirstTokenBurn", "itl": "QuireInterTokenBurn"}
_FIRST, _GAP = "gen_ai_server_time_to_first_token_seconds", "vllm:inter_token_latency_seconds"
_DURATIONS = "gen_ai_server_request_duration_seconds_count"


def test_the_rule_file_is_up_to_date() -> None:
    """A rule that changes is in the file: run `make dashboards`."""
    assert RULES.read_text("utf-8") == rules_text()


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)
def test_a_dashboard_has_the_defined_panels(board: dashboards.Board) -> None:
    """The committed dashboard shows exactly the defined panels and queries: run `make dashboards`."""
    found = json.loads((GRAFANA / f"{board.name}.json").read_text("utf-8"))

    assert [
        (panel["title"], [(each["expr"], each["legendFormat"], each["exemplar"]) for each in panel["targets"]])
        for panel in found["panels"]
    ] == [(panel.title, [(each.expr, each.legend, each.exemplars) for each in panel.queries]) for panel in board.panels]


def test_dashboards_and_rules_read_metrics_that_exist() -> None:
    """Every metric name in a query or rule is defined, with the suffix of its kind."""
    known = {"up", "ALERTS"} | {each["record"] for each in rules()["groups"][0]["rules"]}
    for metric in metric_names.ALL:
        name = metric.prometheus_name
        match metric.kind:
            case metric_names.Kind.COUNTER:
                known.add(f"{name}_total")
            case metric_names.Kind.GAUGE:
                known.add(name)
            case metric_names.Kind.HISTOGRAM:
                known |= {f"{name}_{suffix}" for suffix in ("bucket", "count", "sum")}
    texts = [query.expr for board in BOARDS for panel in board.panels for query in panel.queries]
    texts += [rule["expr"] for group in rules()["groups"] for rule in group["rules"]]
    read = {name for text in texts for name in re.findall(r"\b(?:quire|gen_ai|rpc|http|vllm)[_:]\w[\w:]*", text)}
    labels = {name.replace(".", "_") for metric in metric_names.ALL for name in metric.labels}

    assert read - labels <= known


def test_metrics_of_recurrent_states_and_windows_have_panels() -> None:
    """What docs/models.md advises operators to watch, and all metrics of states in host memory, are on a dashboard."""
    shown = {query.expr for board in BOARDS for panel in board.panels for query in panel.queries}
    named = set(re.findall(r"quire_\w+", (ROOT / "docs" / "models.md").read_text("utf-8")))
    named |= {each.prometheus_name for each in metric_names.ALL if each.name.startswith("quire.host_state")}

    assert len(named) >= 6
    assert [name for name in named if not any(re.search(rf"\b{name}(_total)?\b", expr) for expr in shown)] == []


def test_objectives_are_bounds_of_buckets() -> None:
    """A limit that is no bound of a bucket would count as if no event were in time."""
    assert float(alerts.TTFT_LIMIT_S) in metric_names.TIME_TO_FIRST_TOKEN.bounds
    assert float(alerts.ITL_LIMIT_S) in metric_names.VLLM_INTER_TOKEN_LATENCY.bounds


@needs_promtool
@pytest.mark.parametrize("slo", OBJECTIVES)
@pytest.mark.parametrize("times", [0.5, 2, 4, 10, 20])
def test_burn_alerts_fire_above_their_rates(slo: str, times: float, tmp_path: Path) -> None:
    """A constant burn fires exactly the alerts whose factor it exceeds."""
    bad = round(1_000_000 * (1 - OBJECTIVES[slo]) * times)
    expected = [_expected(_NAMES[slo], burn, slo=slo) for burn, *_ in BURNS if float(burn) < times]

    _check(tmp_path, _events(slo, f"0+{1_000_000 - bad}x20", f"0+{bad}x20"), _NAMES[slo], "15m", expected)


@needs_promtool
@pytest.mark.parametrize("slo", OBJECTIVES)
def test_burn_alerts_end_with_the_burn(slo: str, tmp_path: Path) -> None:
    """When the burn has stopped for longer than the short window, no page fires, though the budget is spent."""
    series = _events(slo, "0+500x30 15000+1000x45", "0+500x30 15000+0x45")
    fired = [_expected(_NAMES[slo], burn, slo=slo) for burn, _, short, _ in BURNS if short not in ("5m", "30m")]

    _check(tmp_path, series, _NAMES[slo], "75m", fired)


@needs_promtool
@pytest.mark.parametrize(
    ("alert", "fault", "healthy", "labels"),
    [
        ("QuireDown", {'up{job="quire"}': "1 0x20"}, {'up{job="quire"}': "1x20"}, {"job": "quire"}),
        ("QuireDown", {'up{job="quire"}': "1 _x20"}, {'up{job="quire"}': "1x20"}, {"job": "quire"}),
        (
            "QuireSchedulerDown",
            {'quire_scheduler_connected{frontend="a"}': "0x20", 'quire_scheduler_connected{frontend="b"}': "0x20"},
            {'quire_scheduler_connected{frontend="a"}': "0x20", 'quire_scheduler_connected{frontend="b"}': "1x20"},
            {},
        ),
        (
            "QuireSchedulerRestarts",
            {'quire_scheduler_restarts_total{frontend="a",reason="lost"}': "0x5 1x2 2x15"},
            {
                'quire_scheduler_restarts_total{frontend="a",reason="lost"}': "0x5 1x20",
                'quire_scheduler_restarts_total{frontend="a",reason="planned"}': "0x5 1x2 2x2 3x15",
            },
            {},
        ),
        (
            "QuireWorkersLost",
            {"quire_workers": "1x10 0x10", "quire_workers_lost_total": "0x10 1x10"},
            {"quire_workers": "1x10 0x10", "quire_workers_lost_total": "0x20"},
            {},
        ),
        # In a cell with one worker, a rollout takes some minutes.
        ("QuireNoWorker", {"quire_workers": "0x20"}, {"quire_workers": "1x7 0x8 1x10"}, {}),
        (
            "QuireWorkerCrashes",
            {"quire_workers_lost_total": "0x5 1x2 2x2 3x15"},
            {"quire_workers_lost_total": "0x5 1x20"},
            {},
        ),
        (
            "QuireOverloaded",
            {_DURATIONS + '{error_type="QUEUE_FULL"}': "0+5x20"},
            {
                _DURATIONS + '{error_type="CANCELLED"}': "0+5x20",
                _DURATIONS + '{error_type="TENANT_LIMIT"}': "0+5x20",
            },
            {},
        ),
        (
            "QuireStalledReaders",
            {'quire_requests_ended_total{reason="stalled"}': "0 1x20"},
            {'quire_requests_ended_total{reason="stalled"}': "1x20"},
            {},
        ),
        (
            "QuireStalledReaders",
            {_DURATIONS + '{error_type="STALLED_READER"}': "0 1x20"},
            {_DURATIONS: "0+5x20"},
            {},
        ),
        (
            "QuireKvCacheFull",
            {
                'vllm:kv_cache_usage_perc{cell="a", model_name="m"}': "0.99x20",
                'quire_queue_requests{cell="a", reason="room"}': "3x20",
            },
            {
                'vllm:kv_cache_usage_perc{cell="a", model_name="m"}': "0.99x20",
                'quire_queue_requests{cell="a", reason="room"}': "0x20",
                'vllm:kv_cache_usage_perc{cell="b", model_name="m"}': "0.5x20",
                'quire_queue_requests{cell="b", reason="room"}': "3x20",
            },
            {"cell": "a", "model_name": "m"},
        ),
        (
            "QuireSpansDropped",
            {'quire_spans_dropped_total{process="frontend"}': "0+5x20"},
            {'quire_spans_dropped_total{process="frontend"}': "5x20"},
            {"process": "frontend"},
        ),
        ("QuireRecordFailed", {"quire_record_writes": "0x20"}, {"quire_record_writes": "1x20"}, {}),
        (
            "QuireNoLeader",
            {"quire_scheduler_connected": "0x20", "quire_scheduler_addresses": "2x20"},
            {"quire_scheduler_connected": "0x20", "quire_scheduler_addresses": "1x20"},
            {},
        ),
        (
            # Two takeovers are an upgrade; the second front end started later and saw one of them.
            "QuireTakeovers",
            {
                'quire_leader_number{frontend="a"}': "1700000000000x9 1700000000001 1700000000002 1700000000003x9",
                'quire_leader_number{frontend="b"}': "_x10 1700000000002 1700000000003x9",
            },
            {'quire_leader_number{frontend="a"}': "1700000000000x9 1700000000001 1700000000002x9"},
            {},
        ),
        ("QuireTakeovers", {"quire_leader_pid": "71x9 82 71 93x9"}, {"quire_leader_pid": "71x9 82 93x9"}, {}),
        ("QuireNoStandby", {"quire_standby_ready": "0x20"}, {"quire_standby_ready": "1x20"}, {}),
        ("QuireJournalFailed", {"quire_journal_writes": "0x20"}, {"quire_journal_writes": "1x20"}, {}),
    ],
)
def test_a_cause_fires_its_alert(
    alert: str, fault: dict[str, str], healthy: dict[str, str], labels: dict[str, str], tmp_path: Path
) -> None:
    """An alert fires with its fault, and not without."""
    when = "3m" if alert == "QuireStalledReaders" else "15m"

    _check(tmp_path, fault, alert, when, [_expected(alert, "", **labels)])
    _check(tmp_path, healthy, alert, when, [])


def test_every_alert_has_a_unit_test() -> None:
    """A new alert needs a case above."""
    alerts = {rule["alert"] for group in rules()["groups"] for rule in group["rules"] if "alert" in rule}
    (marks,) = [mark for mark in test_a_cause_fires_its_alert.pytestmark if mark.name == "parametrize"]  # type: ignore[attr-defined]

    assert alerts == {case[0] for case in marks.args[1]} | set(_NAMES.values())


def test_every_alert_has_a_runbook_with_commands() -> None:
    """Each alert's link leads to a section of the page with commands."""
    page = (GRAFANA.parents[1] / "docs" / "runbooks.md").read_text("utf-8")
    sections = {part.split("\n", 1)[0].lower(): part for part in page.split("\n## ")[1:]}
    found = [rule for group in rules()["groups"] for rule in group["rules"] if "alert" in rule]

    for rule in found:
        url, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert (url, anchor) == (alerts.RUNBOOK_URL, rule["alert"].lower())
        assert "```sh\n" in sections[anchor], rule["alert"]
    assert sections.keys() == {rule["alert"].lower() for rule in found}


def test_runbooks_may_lie_elsewhere() -> None:
    """The address of the page is a setting."""
    assert '"https://wiki/quire#quiredown"' in rules_text("https://wiki/quire")


def _events(slo: str, good: str, bad: str) -> dict[str, str]:
    """Return series of good and bad events, per minute."""
    if slo == "availability":
        name = "rpc_server_call_duration_seconds_count"
        operators = 'rpc_method="quire.admin.v1.AdminService/Explain", rpc_response_status_code="UNKNOWN"'
        return {
            f'{name}{{rpc_response_status_code="OK"}}': good,
            f'{name}{{rpc_response_status_code="UNAVAILABLE"}}': bad,
            # Operator calls count as neither. A refusal by a tenant's own limit does not count as a fault.
            f"{name}{{{operators}}}": "0+5000x80",
            f'{name}{{rpc_response_status_code="RESOURCE_EXHAUSTED", error_type="TENANT_LIMIT"}}': "0+1x80",
        }
    name, limit = (_FIRST, alerts.TTFT_LIMIT_S) if slo == "ttft" else (_GAP, alerts.ITL_LIMIT_S)
    return {
        f'{name}_bucket{{le="{limit}"}}': good,
        f'{name}_count{{kind="good"}}': good,
        f'{name}_count{{kind="bad"}}': bad,
    }


def _expected(alert: str, burn: str, **labels: str) -> dict[str, Any]:
    (rule,) = [
        rule
        for group in rules()["groups"]
        for rule in group["rules"]
        if rule.get("alert") == alert and rule["labels"].get("burn", "") == burn
    ]
    return {"exp_labels": rule["labels"] | labels, "exp_annotations": rule["annotations"]}


def _check(folder: Path, series: dict[str, str], alert: str, when: str, expected: list[dict[str, Any]]) -> None:
    """Run promtool's unit test; JSON is YAML."""
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": name, "values": values} for name, values in series.items()],
                "alert_rule_test": [{"eval_time": when, "alertname": alert, "exp_alerts": expected}],
            }
        ],
    }
    path = folder / "test.json"
    path.write_text(json.dumps(test), "utf-8")
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, "test", "rules", str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
