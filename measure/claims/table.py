"""The claims of the articles in order, with verdicts and measured values from the results. Pure.

A claim whose part has no results yet is omitted.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from measure.claims.parts import STRATEGIES_PART
from measure.strategies.claims import Claim, Row, Verdict, at_least, claims_about

Values = Mapping[str, Any]


def claims(parts: Mapping[str, Any], runs: Sequence[Row]) -> list[Claim]:
    """Return every claim that has results.

    Args:
        parts: results by part, as in measure/results/claims.json.
        runs: results of `quire bench strategies`.
    """
    found: list[Claim] = []
    for part, name in _ORDER:
        if part == STRATEGIES_PART:
            found += claims_about(name, runs)
        elif part in parts:
            found += _OWN[name](parts[part]["values"])
    return found


def _buckets(values: Values) -> Iterator[Claim]:
    found = values["100-exponential"]
    yield Claim(
        "bucket effect: a static batch takes as long as its longest request; sorting by length avoids that",
        "not stated",
        Verdict.IN_PART,
        f"{found['order of arrival']:,} steps in order of arrival, {found['sorted by length']:,} sorted,"
        f" {found['sorted by a guess within 50 %']:,} sorted by guesses; continuous {found['continuous']:,}",
        "100 requests of exponential lengths at 10 slots. Sorting needs lengths that are not known before the end, and"
        " delays requests until similar ones have come",
        "buckets",
    )


def _generate(values: Values) -> Iterator[Claim]:
    for name, text in (
        ("50-100-200-500", "50 to 500 tokens"),
        ("100-exponential", "50 tokens on average, exponential"),
    ):
        found = values[name]
        static = found["generate, static batches"]["tokens_per_cpu_s"]
        naive = found["generate, one request at a time"]["tokens_per_cpu_s"]
        equal, full = (found[each]["tokens_per_cpu_s"] for each in ("quire, equal slots", "quire, 64 rows"))
        yield Claim(
            f"against transformers' generate() in static batches of {found['slots']} ({text})",
            "3 to 5 times, in practice 10 to 20 times",
            at_least(full / static, 10.0),
            f"{equal / static:.1f} times at {found['slots']} slots, {full / static:.1f} times at 64 rows;"
            f" {full / naive:.0f} times generate() with one request at a time",
            f"{found['requests']} requests, the bundled model in float32 on one CPU thread; tokens per second of CPU"
            f" time of all processes: {static:,.0f} and {naive:,.0f} (generate), {equal:,.0f} and {full:,.0f} (Quire)."
            " Part of the gain comes from Quire's CPU kernels and not from the order",
            "generate",
        )


def _rows(values: Values) -> Iterator[Claim]:
    rates = {int(size): row["out_tok_per_s"] for size, row in values.items()}
    yield Claim(
        "throughput of batch 16 and batch 64 against batch 1, 8B on an H100",
        "10 and 30 times",
        at_least(rates[64] / rates[1], 30.0),
        f"{rates[16] / rates[1]:.1f} and {rates[64] / rates[1]:.1f} times; batch 256 {rates[256] / rates[1]:.0f} times",
        "simulated device. A step reads all weights once, however many rows it has. From about 64 rows on, reading KV"
        " takes most of the step",
        "rows",
    )


def _windows(values: Values) -> Iterator[Claim]:
    low = values["by_load"]["0.05"]
    first = {name: f"{1e3 * row['ttft_mean_s']:,.0f}" for name, row in low.items()}
    yield Claim(
        "dynamic batching: a window of some ms is a good compromise",
        "10 to 100 ms",
        Verdict.IN_PART,
        f"mean TTFT {first['10 ms']}, {first['50 ms']}, {first['200 ms']} and {first['1000 ms']} ms with windows of 10,"
        f" 50, 200 and 1,000 ms; continuous {first['continuous']} ms",
        f"at 5 % of the capacity, {values['rows']} slots, simulated 8B on an H100. Even with a short window, requests"
        " wait for the end of the running batch. Continuous batching needs no window",
        "windows",
    )


def _prefixes(values: Values) -> Iterator[Claim]:
    off, on, radix = (values[f"agents, {cache}"] for cache in ("off", "hash", "radix"))
    yield Claim(
        "requests with equal prefixes share KV: long system prompts and conversations get cheaper",
        "large gain",
        at_least(off["ttft_mean_s"] / on["ttft_mean_s"], 2.0),
        f"agents: {on['hit_share']:.0%} of the prompt tokens found, mean TTFT {1e3 * on['ttft_mean_s']:,.0f} ms instead"
        f" of {1e3 * off['ttft_mean_s']:,.0f} ms; radix tree {1e3 * radix['ttft_mean_s']:,.0f} ms",
        "16 users, 12 turns, simulated 8B on an H100. Hashes and a radix tree find the same blocks",
        "prefixes",
    )
    off, on, radix = (values[f"prefixes, {cache}"] for cache in ("off", "hash", "radix"))
    yield Claim(
        "the same with 40 system prompts that do not all fit into the cache",
        "not stated",
        at_least(off["ttft_mean_s"] / on["ttft_mean_s"], 1.1),
        f"{on['hit_share']:.0%} found of {on['hit_bound']:.0%} that repeat; mean TTFT {1e3 * on['ttft_mean_s']:,.0f} ms"
        f" instead of {1e3 * off['ttft_mean_s']:,.0f} ms; radix tree {1e3 * radix['ttft_mean_s']:,.0f} ms",
        "the system prompts are 1.5 times as large as the KV cache",
        "prefixes",
    )


def _chunks(values: Values) -> Iterator[Claim]:
    whole, small = values["whole prompts"], values["chunks of 512"]
    yield Claim(
        "the same with 8B on an H100 and 32 decoding requests",
        "no stall",
        Verdict.HOLDS if small["longest_gap_s"] < 0.5 * whole["longest_gap_s"] else Verdict.IN_PART,
        f"longest time between two tokens {1e3 * whole['longest_gap_s']:.0f} ms in one step,"
        f" {1e3 * small['longest_gap_s']:.0f} ms in chunks of 512; TTFT of the prompt"
        f" {1e3 * whole['ttft_of_the_prompt_s']:.0f} and {1e3 * small['ttft_of_the_prompt_s']:.0f} ms",
        "simulated device",
        "chunks",
    )


def _latency_limits(values: Values) -> Iterator[Claim]:
    whole, large, small = (values[name] for name in ("whole prompts", "chunks of 2,048", "chunks of 512"))
    step = 1e3 * values["decode_step_s"]
    gain = small["strict"] / whole["strict"]
    yield Claim(
        "Sarathi-Serve: capacity under a limit on the time between tokens, chunks against whole prompts",
        "2.6 to 5.6 times",
        Verdict.HOLDS if gain >= 2.6 and small["relaxed"] >= whole["relaxed"] else Verdict.IN_PART,
        f"limit {5 * step:.0f} ms: {gain:.1f} times with chunks of 512 (load {small['strict']:.2f} against"
        f" {whole['strict']:.2f}), {large['strict'] / whole['strict']:.1f} times with chunks of 2,048; limit"
        f" {25 * step:.0f} ms: none (load {small['relaxed']:.2f} against {whole['relaxed']:.2f})",
        "limits of 5 and 25 decode steps on p99, median TTFT at most 2 s, lengths as in the paper, 200 requests,"
        f" simulated 8B on an H100; loads up to 1.2 were tried, as shares of {values['requests_per_s_at_1']:.1f}"
        " requests/s. The gain depends on the limit alone: with a loose limit there is none. The paper's 5.6 times also"
        " compares pipelines over another network",
        "latency_limits",
    )


def _preemptions(values: Values) -> Iterator[Claim]:
    none, fewest, low, apart, safe, fcfs = (
        values[name]
        for name in (
            "priority, no preemption",
            "priority, fewest victims",
            "priority, victims by lowest priority",
            "priority, fewest victims, difference of 2",
            "priority, guaranteed_no_evict",
            "fcfs",
        )
    )
    yield Claim(
        "exercise: a preemption policy with few preemptions that serves urgent requests in time",
        "not stated",
        Verdict.ANSWERED,
        f"`--victim-rule fewest --preempt-priority-difference 2`: {apart['preemptions']:.0f} preemptions of"
        f" {apart['requests']:.0f} requests, {apart['urgent_in_time']:.0%} of the urgent ones in time (p99 TTFT"
        f" {apart['urgent_ttft_p99_s']:.2f} s); without the difference {fewest['preemptions']:.0f}, and"
        f" {low['preemptions']:.0f} with `--victim-rule lowest_priority`",
        f"a KV cache of {values['kv_tokens']:,} tokens at 1.3 times the capacity, simulated 8B on an H100, a tenth of"
        f" the requests urgent, median of three seeds. p99 TTFT of urgent requests: {none['urgent_ttft_p99_s']:.2f} s"
        f" if nothing is preempted by rank, {safe['urgent_ttft_p99_s']:.2f} s with `--capacity guaranteed_no_evict`,"
        f" {fcfs['urgent_ttft_p99_s']:.2f} s under fcfs. p99 latency of the least urgent:"
        f" {apart['batch_e2e_p99_s']:.1f} s, {fewest['batch_e2e_p99_s']:.1f} s without the difference",
        "preemptions",
    )


def _tails(values: Values) -> Iterator[Claim]:
    last = {name: row["e2e_p99_s"] for name, row in values.items()}
    mean = {name: row["e2e_mean_s"] for name, row in values.items()}
    first = {name: row["ttft_p99_s"] for name, row in values.items()}
    best, quick, soon = (min(each, key=each.__getitem__) for each in (last, mean, first))
    yield Claim(
        "exercise: the priority function with the best p99",
        "not stated",
        Verdict.ANSWERED,
        f"p99 latency: {min(last.values()):.1f} to {max(last.values()):.1f} s under all policies; p99 TTFT: `{soon}`"
        f" {first[soon]:.1f} s, sjf {first['sjf']:.1f} s, slo {first['slo']:.1f} s; mean latency: `{quick}`"
        f" {mean[quick]:.1f} s, fcfs {mean['fcfs']:.1f} s",
        f"bursts at 0.9 of the capacity, simulated 8B on an H100, median of three seeds. The longest outputs determine"
        f" the p99 latency, which no order changes by much (best: `{best}`). Order of arrival bounds the longest wait."
        " Shortest first lowers the mean, and the longest prompts pay. With targets per request, `edf` or `slo` serve"
        " more requests in time ([scheduling](scheduling.md#choose-a-policy))",
        "tails",
    )


def _kv_budget(values: Values) -> Iterator[Claim]:
    own, wrong, fp8, int4 = (values[name] for name in ("auto", "counted with 64 query heads", "fp8", "int4"))
    yield Claim(
        "exercise: 80 GB card, model with 40 GB: how many requests?",
        "not stated",
        Verdict.ANSWERED,
        f"{own['requests']['2048']} requests of 2,048 tokens, or {own['requests']['4096']} of 4,096",
        "90 % of the card, 1 GiB for the step, and the KV shape of a 70B model (80 layers, 8 KV heads);"
        " [capacity](capacity.md) has the formula",
        "kv_budget",
    )
    yield Claim(
        "KV formula with the number of attention heads",
        "2 x layers x heads x head_dim x length x bytes",
        Verdict.WRONG,
        f"{wrong['bytes_per_token'] / own['bytes_per_token']:.0f} times too much: {wrong['requests']['2048']} instead"
        f" of {own['requests']['2048']} requests",
        "with grouped-query attention, KV heads count and not query heads",
        "kv_budget",
    )
    ratio = {name: own["bytes_per_token"] / row["bytes_per_token"] for name, row in (("fp8", fp8), ("int4", int4))}
    yield Claim(
        "FP8 and INT4 KV caches hold more requests",
        "2 and 4 times",
        Verdict.IN_PART,
        f"{ratio['fp8']:.2f} and {ratio['int4']:.2f} times: {fp8['requests']['2048']} and {int4['requests']['2048']}"
        " requests",
        "scales and zeros need memory, too; [quantisation](quantisation.md) has the loss of quality",
        "kv_budget",
    )


def _parallel(values: Values) -> Iterator[Claim]:
    one, many = values["one_request_ms"], values["steps_per_s_with_4_micro_batches"]
    busy = values["pipeline_busy_share_by_micro_batches"]
    yield Claim(
        "tensor parallelism for latency, pipeline parallelism for throughput",
        "not stated",
        Verdict.NOT_RUN,
        f"computed for 70B on four H100: {one['tensor']} ms per token of one request by tensors, {one['pipeline']} ms"
        f" by layers; with four micro-batches {many['tensor']} and {many['pipeline']} steps/s",
        f"a pipeline of four stages is busy {busy['1']:.0%} with one micro-batch. Quire divides tensors only. Two ranks"
        " on two cores show nothing: one process uses both cores, too ([tensor parallelism](tensor-parallel.md))",
        "parallel",
    )


def _speculation(values: Values) -> Iterator[Claim]:
    off, ngram, draft = (values[name] for name in ("off", "ngram", "draft"))
    yield Claim(
        "exercise: does speculative decoding improve the first token?",
        "2 to 3 times faster decoding",
        at_least(off["tpot_ms"] / ngram["tpot_ms"], 2.0),
        f"TTFT {off['ttft_ms']:.1f} ms without, {ngram['ttft_ms']:.1f} ms with n-gram and {draft['ttft_ms']:.1f} ms"
        f" with a draft model; time per further token {off['tpot_ms']:.2f}, {ngram['tpot_ms']:.2f} and"
        f" {draft['tpot_ms']:.2f} ms",
        "no: the first token comes from the prompt's own step, and a draft model must compute the prompt, too. One"
        " repetitive request at a time, bundled model on one CPU thread; free text and full batches gain nothing"
        " ([speculation](speculation.md))",
        "speculation",
    )


def _batch_sizes(values: Values) -> Iterator[Claim]:
    rows = {float(load): row for load, row in values["results"].items()}
    best = max(rows, key=lambda load: rows[load]["out_tok_per_s"])
    knee = values["knee"] or best
    first = min(rows)
    yield Claim(
        "exercise: find the best batch size by a load test",
        "not stated",
        Verdict.ANSWERED,
        f"knee at {knee:.0f} users: {rows[knee]['out_tok_per_s']:,.0f} tokens/s, p99 between tokens"
        f" {1e3 * rows[knee]['itl_p99_s']:.0f} ms; most at {best:.0f} users: {rows[best]['out_tok_per_s']:,.0f} and"
        f" {1e3 * rows[best]['itl_p99_s']:.0f} ms; {first:.0f} user: {rows[first]['out_tok_per_s']:,.0f} and"
        f" {1e3 * rows[first]['itl_p99_s']:.0f} ms",
        "`quire bench sweep --users`, bundled model on one CPU thread. The knee is the load with the best ratio of"
        " throughput to latency; with --slo the command searches the highest load within the limits",
        "batch_sizes",
    )


def _flags(values: Values) -> Iterator[Claim]:
    def counted(server: str) -> str:
        flags = values[server]
        same = sum(each == "same name" for each in flags.values())
        missing = [flag for flag, each in flags.items() if "not supported" in each or "not divided" in each]
        return (
            f"{server}: {same} of {len(flags)} have the same name, {len(missing)} no counterpart ({', '.join(missing)})"
        )

    yield Claim(
        "flags of vLLM and TensorRT-LLM for batching and scheduling",
        "must exist",
        Verdict.IN_PART,
        "; ".join(counted(server) for server in values),
        "`quire serve` names the replacement of every other flag ([table](#flags-of-vllm-and-tensorrt-llm))",
        "flags",
    )


_OWN: dict[str, Callable[[Values], Iterator[Claim]]] = {
    "buckets": _buckets,
    "generate": _generate,
    "rows": _rows,
    "windows": _windows,
    "prefixes": _prefixes,
    "chunks": _chunks,
    "latency_limits": _latency_limits,
    "preemptions": _preemptions,
    "tails": _tails,
    "kv_budget": _kv_budget,
    "parallel": _parallel,
    "speculation": _speculation,
    "batch_sizes": _batch_sizes,
    "flags": _flags,
}
_ORDER = (
    (STRATEGIES_PART, "idle slots"),
    ("buckets", "buckets"),
    (STRATEGIES_PART, "100 requests"),
    (STRATEGIES_PART, "bound"),
    (STRATEGIES_PART, "half short"),
    ("generate", "generate"),
    (STRATEGIES_PART, "batch 64"),
    ("rows", "rows"),
    ("windows", "windows"),
    (STRATEGIES_PART, "low load"),
    (STRATEGIES_PART, "memory"),
    ("prefixes", "prefixes"),
    (STRATEGIES_PART, "chunks"),
    ("chunks", "chunks"),
    ("latency_limits", "latency_limits"),
    (STRATEGIES_PART, "capacity"),
    ("preemptions", "preemptions"),
    ("tails", "tails"),
    ("kv_budget", "kv_budget"),
    ("parallel", "parallel"),
    ("speculation", "speculation"),
    ("batch_sizes", "batch_sizes"),
    ("flags", "flags"),
    (STRATEGIES_PART, "others"),
)
"""Parts and topics in the order of the articles."""
