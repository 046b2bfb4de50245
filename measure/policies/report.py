"""The results of a campaign as a table for a terminal."""

from collections.abc import Iterable, Mapping, Sequence

from measure.policies.metrics import Result

HEADER = (
    f"{'scheduler':<34}{'load':>6}{'seed':>5}{'requests':>9}{'tok/s':>8}{'TTFT p50':>10}{'mean':>8}{'p99':>8}"
    f"{'TPOT p99':>10}{'in targets':>11}{'hits':>7}{'preempted':>10}{'busy':>6}{'µs/step':>9}"
)


def line(result: Result) -> str:
    """Return the line of one run: times to the first token in s, per token in ms."""
    ttft: Mapping[str, float | None] = result["ttft_s"]
    tpot: Mapping[str, float | None] = result["tpot_s"]
    return (
        f"{result['scheduler']:<34}{result['load']:>6g}{result['seed']:>5}{result['requests']:>9}"
        f"{result['out_tok_per_s']:>8.0f}{number(ttft['p50'], 3):>10}{number(ttft['mean'], 3):>8}"
        f"{number(ttft['p99'], 2):>8}{number(tpot['p99'], 1, 1000):>10}{result['goodput']:>11.1%}"
        f"{result['prefix_hit_share']:>7.1%}{result['preemptions']:>10}{result['device_busy_share']:>6.0%}"
        f"{result['scheduler_us_per_step']:>9.0f}"
    )


def number(value: float | None, digits: int, factor: float = 1.0) -> str:
    """Return a number as text, or a dash for None."""
    return "-" if value is None else f"{value * factor:.{digits}f}"


def versions(results: Iterable[Result]) -> Sequence[str]:
    """Return the schedulers' versions."""
    return sorted({result["version"] for result in results})
