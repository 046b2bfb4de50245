"""Screen of `quire top`, computed from two scrapes of /metrics. Pure: texts and seconds in, lines out."""

from collections.abc import Iterable

from quire_server.scrape import Scrape

_BAR = 24


def render(before: Scrape, now: Scrape, seconds: float, address: str) -> list[str]:
    """Return the lines of the screen. Rates and latencies are those between the two scrapes, `seconds` apart."""

    def rate(name: str, **labels: str) -> float:
        return now.increase(name, before, **labels) / seconds

    def times(name: str) -> str:
        counts = [
            (float(bound), now.increase(f"{name}_bucket", before, le=bound))
            for bound in now.labels(f"{name}_bucket", "le")
        ]
        p50, p99 = (quantile(counts, share) for share in (0.5, 0.99))
        return "-" if p50 is None or p99 is None else f"{1000 * p50:.0f} / {1000 * p99:.0f} ms"

    running, waiting = now.sum("vllm:num_requests_running"), now.sum("vllm:num_requests_waiting")
    streams = now.sum("quire_live_streams")
    output, prompt = rate("vllm:generation_tokens_total"), rate("vllm:prompt_tokens_total")
    cached_prompt = rate("quire_prefix_cache_hit_tokens_total")
    ended, preempted = rate("quire_requests_ended_total"), rate("quire_preemptions_total")
    lines = [
        f"quire {address}   {now.sum('quire_workers'):.0f} workers, {now.sum('quire_frontends'):.0f} front ends",
        "",
        f"requests   {running:>8.0f} running   {waiting:>8.0f} waiting   {streams:>8.0f} streams",
        f"tokens/s   {output:>8.0f} output    {prompt:>8.0f} prompt    {cached_prompt:>8.0f} from the prefix cache",
        f"ended/s    {ended:>8.1f}           {preempted:>8.1f} preemptions/s",
        f"TTFT       {times('gen_ai_server_time_to_first_token_seconds')}  (p50 / p99)",
        f"ITL        {times('vllm:inter_token_latency_seconds')}  (p50 / p99)",
        "",
        f"{'worker':<16} {'KV held, cached':<{_BAR + 2}}  used   rows  steps/s  tokens/s  busy",
    ]
    for worker in now.labels("quire_kv_blocks", "worker"):
        total = now.sum("quire_kv_blocks", worker=worker, state="total") or 1.0
        held, cached = (now.sum("quire_kv_blocks", worker=worker, state=state) for state in ("held", "cached"))
        phases = ("prepare", "forward", "sample")
        busy = sum(rate("quire_worker_seconds_total", worker=worker, phase=phase) for phase in phases)
        lines.append(
            f"{worker[:16]:<16} {bar(held / total, cached / total)} {held / total:>5.0%}"
            f" {now.sum('quire_batch_rows', worker=worker):>6.0f} {rate('quire_steps_total', worker=worker):>8.1f}"
            f" {rate('quire_sampled_tokens_total', worker=worker):>9.0f} {min(busy, 1.0):>5.0%}"
        )
    return lines


def quantile(counts: Iterable[tuple[float, float]], share: float) -> float | None:
    """Return the quantile of a histogram; `counts` are cumulative counts by upper bound.

    Values are interpolated linearly within a bucket, as in Prometheus; beyond the last bound the result is that bound.
    """
    buckets = sorted(counts)
    total = buckets[-1][1] if buckets else 0.0
    if total <= 0:
        return None
    below, lower = 0.0, 0.0
    for bound, count in buckets:
        if count >= share * total:
            if bound == float("inf"):
                return lower
            return lower + (bound - lower) * (share * total - below) / (count - below)
        below, lower = count, bound
    return lower


def bar(held: float, cached: float) -> str:
    """Return a bar with two fractions of a whole: used by requests, and used only by the prefix cache."""
    filled = round(held * _BAR)
    kept = min(round((held + cached) * _BAR), _BAR) - filled
    return "[" + "#" * filled + "-" * kept + " " * (_BAR - filled - kept) + "]"
