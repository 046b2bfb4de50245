"""Write docs/metrics.md, the page of every metric, span and attribute, from the modules that define them.

    python -m tools.reference           write the page
    python -m tools.reference --check   fail if the page is out of date

The definitions are `shared.metric_names` and `shared.span_names`. A test compares them with the names in the code.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from shared import metric_names, span_names
from shared.metric_names import Metric

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "metrics.md"

NO_COUNTERPART = {
    "vllm:lora_requests_info": "Quire serves no LoRA adapters",
    "vllm:engine_sleep_state": "workers do not sleep",
    "vllm:external_prefix_cache_queries, …_hits": "there is no external KV cache",
    "vllm:mm_cache_queries, …_hits": "prompts are text",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "acceptance is not counted by position",
    "vllm:request_prefill_kv_computed_tokens": "`vllm:prefix_cache_queries` less `vllm:prefix_cache_hits`, as sums",
    "vllm:request_params_n, …_max_tokens": "attributes of spans",
    "http_requests_total": "`http_server_request_duration_seconds_count`",
}
"""vLLM metrics that Quire does not have, and what to read instead."""

_HEAD = """# Metrics, spans and attributes

`/metrics` of any front end shows the metrics of the whole service. A reader that accepts OpenMetrics gets exemplars,
which lead from a bucket of a latency to the trace of a request in it. With `OTEL_EXPORTER_OTLP_ENDPOINT`, each front
end and the scheduler also export their own metrics by OTLP, except the names under `vllm:`, every
`OTEL_METRIC_EXPORT_INTERVAL` milliseconds.

Series with the name of a worker exist while the worker is connected. Sum the rates over workers, not the values. Every
metric of a front end has the label `frontend` on `/metrics`. At most 100 tenants have series of their own; the others
share the tenant `(other)`.

This page is made by `python -m tools.reference`; a test fails when it is out of date.
"""


def page() -> str:
    standard = [each for each in metric_names.ALL if not each.is_foreign and not each.name.startswith("quire.")]
    own = [each for each in metric_names.ALL if each.name.startswith("quire.")]
    foreign = [each for each in metric_names.ALL if each.is_foreign]
    parts = [
        _HEAD,
        "\n## Metrics with OpenTelemetry's names\n\n",
        _metrics(standard),
        "\n### Bucket bounds\n\n",
        _table(("metric", "bounds, seconds"), [(f"`{each.name}`", _bounds(each)) for each in standard if each.bounds]),
        "\n## Metrics with vLLM's names\n\n"
        "Endpoint pickers of Kubernetes and dashboards for vLLM read these names. `num_requests_waiting`,\n"
        "`num_requests_running`, `kv_cache_usage_perc` and `cache_config_info` are one series for the whole\n"
        "service. The label `engine` is the name of a worker.\n\n",
        _table(
            ("name", "kind", "labels", "meaning"),
            [(f"`{each.name}`", each.kind.value, _labels(each.labels), each.help) for each in foreign],
        ),
        "\nThese have no counterpart:\n\n",
        _table(("name", "instead, or why"), [(f"`{name}`", why) for name, why in NO_COUNTERPART.items()]),
        "\n## Quire's own metrics\n\n",
        _metrics(own),
        "\n## Spans\n\n"
        "The client's `traceparent` decides whether a request is traced. A request without one is traced by the\n"
        "ratio `OTEL_TRACES_SAMPLER_ARG` if `OTEL_TRACES_SAMPLER=parentbased_traceidratio`. `--trace-steps` sets the\n"
        "share of the steps with traced requests that get spans. A slow or failed request that was not sampled is\n"
        "traced after its end: its spans have no links and no `quire.tokens`, and workers add none. The names under\n"
        "`quire.` are a proposal: the conventions have no spans below the call.\n\n",
        _table(
            ("span", "process", "parent", "meaning", "attributes"),
            [
                (f"`{name}`", info.process, _code(info.parent), info.meaning, _labels(info.attributes))
                for name, info in span_names.SPANS.items()
            ],
        ),
        "\n## Attributes of spans\n\n",
        _attributes(span_names.ATTRIBUTES),
        "\n`OTEL_SEMCONV_STABILITY_OPT_IN=gen_ai_latest_experimental` adds the attributes `gen_ai.*` to the spans of\n"
        "calls, and `rpc/dup` adds names of the earlier conventions for RPC. Prompts, outputs and stop strings are\n"
        "never recorded.\n\n",
        _attributes(span_names.OPT_IN_ATTRIBUTES),
    ]
    return "".join(parts)


def _metrics(metrics: Iterable[Metric]) -> str:
    return _table(
        ("name", "on /metrics", "kind", "unit", "labels", "meaning"),
        [
            (
                f"`{each.name}`",
                f"`{each.prometheus_name}{'_total' if each.kind is metric_names.Kind.COUNTER else ''}`",
                each.kind.value,
                each.unit,
                _labels(each.labels),
                each.help,
            )
            for each in metrics
        ],
    )


def _attributes(attributes: Mapping[str, str]) -> str:
    return _table(("attribute", "meaning"), [(f"`{name}`", meaning) for name, meaning in attributes.items()])


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _labels(labels: Iterable[str]) -> str:
    return ", ".join(f"`{label}`" for label in labels)


def _code(parent: str) -> str:
    return " or ".join(f"`{each}`" if each.startswith("quire.") else each for each in parent.split(" or "))


def _bounds(metric: Metric) -> str:
    return " ".join(f"{bound:g}" for bound in metric.bounds)


def main() -> int:
    """Write the page, or check it; return the exit code."""
    if "--check" in sys.argv[1:]:
        if PAGE.read_text("utf-8") == page():
            return 0
        print("docs/metrics.md: out of date; run python -m tools.reference", file=sys.stderr)
        return 1
    PAGE.write_text(page(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
