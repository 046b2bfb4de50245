"""What `quire top` makes of two scrapes."""

import pytest

from quire_server.cli._top_view import bar, quantile, render
from quire_server.scrape import Scrape, parse

TEXT = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running 3
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{frontend="a"}} {a}
vllm:generation_tokens_total{{frontend="b"}} 10
# TYPE quire_kv_blocks gauge
quire_kv_blocks{{state="held",worker="w0"}} 50
quire_kv_blocks{{state="cached",worker="w0"}} 25
quire_kv_blocks{{state="total",worker="w0"}} 100
# TYPE gen_ai_server_time_to_first_token_seconds histogram
gen_ai_server_time_to_first_token_seconds_bucket{{le="0.1"}} {fast}
gen_ai_server_time_to_first_token_seconds_bucket{{le="1"}} {all}
gen_ai_server_time_to_first_token_seconds_bucket{{le="+Inf"}} {all}
"""


def test_rates_are_those_between_two_scrapes() -> None:
    """200 tokens in 4 s are 50 a second, over all front ends; latencies are those of the time between."""
    before, now = (parse(TEXT.format(a=a, fast=fast, all=all_)) for a, fast, all_ in ((100, 90, 100), (300, 90, 110)))
    text = "\n".join(render(before, now, 4.0, "host:1"))

    assert "3 running" in text
    assert "    50 output" in text
    assert "550 / 991 ms" in text
    assert "w0" in text
    assert "[############------      ]   50%" in text


WORKERS = """
# TYPE quire_preemptions counter
{}
"""


def test_workers_that_join_or_leave_do_not_distort_totals() -> None:
    """Workers that leave, restart or join between two scrapes do not distort the totals.

    Only workers in both scrapes count. One that left subtracts nothing, one that restarted counts from 0, and a new one
    adds nothing.
    """

    def scrape(**counts: int) -> Scrape:
        lines = [f'quire_preemptions_total{{worker="{name}"}} {count}' for name, count in counts.items()]
        return parse(WORKERS.format("\n".join(lines)))

    before, now = scrape(left=1000, stayed=10, anew=500), scrape(stayed=14, anew=2, come=70)

    assert now.increase("quire_preemptions_total", before) == 6
    assert now.increase("quire_preemptions_total", before, worker="stayed") == 4


def test_nothing_happened() -> None:
    """Without any request there is no latency, and with no worker no line."""
    empty = parse("")

    assert "-  (p50" in "\n".join(render(empty, empty, 1.0, "host:1"))


@pytest.mark.parametrize(
    ("counts", "share", "value"),
    [
        ([(1.0, 10), (2.0, 20), (float("inf"), 20)], 0.5, 1.0),
        ([(1.0, 10), (2.0, 20), (float("inf"), 20)], 0.75, 1.5),
        ([(1.0, 0), (float("inf"), 5)], 0.5, 1.0),
        ([], 0.5, None),
        ([(1.0, 0), (float("inf"), 0)], 0.5, None),
    ],
)
def test_quantiles_are_prometheus_own(counts: list[tuple[float, float]], share: float, value: float | None) -> None:
    """Linear within a bucket; beyond the last bound, that bound."""
    assert quantile(counts, share) == value


def test_a_bar_has_a_constant_length() -> None:
    """Two shares that are both rounded up do not make the bar longer."""
    assert {len(bar(held / 7, (7 - held) / 7)) for held in range(8)} == {26}
