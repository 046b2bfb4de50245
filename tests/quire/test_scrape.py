"""Counters between two scrapes of /metrics."""

from quire_server.scrape import Scrape, parse

WORKERS = """
# TYPE quire_preemptions counter
{}
"""


def test_workers_that_join_or_leave_do_not_distort_totals() -> None:
    """Workers that leave, restart or join between two scrapes do not distort the totals.

    Only workers in both scrapes count. A worker that left subtracts nothing, one that restarted counts from 0, and a
    new one adds nothing.
    """

    def scrape(**counts: int) -> Scrape:
        lines = [f'quire_preemptions_total{{worker="{name}"}} {count}' for name, count in counts.items()]
        return parse(WORKERS.format("\n".join(lines)))

    before, now = scrape(left=1000, stayed=10, anew=500), scrape(stayed=14, anew=2, come=70)

    assert now.increase("quire_preemptions_total", before) == 6
    assert now.increase("quire_preemptions_total", before, worker="stayed") == 4
