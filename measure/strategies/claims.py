"""Claims in the literature compared with the results of `quire bench strategies`. Pure.

A claim is omitted if its runs are missing. The texts explain what a number means and why it differs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

from measure.strategies import cases
from measure.strategies.bounds import fewest_steps, slots_for, static_steps

Row = dict[str, Any]


class Verdict(StrEnum):
    """What a run says about a claim."""

    HOLDS = "holds"
    IN_PART = "in part"
    WRONG = "wrong"
    UNEQUAL = "not on equal terms"
    NOT_RUN = "not run"
    ANSWERED = "answered"
    """For an exercise, which claims nothing."""


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim and its measured value."""

    claim: str
    claimed: str
    verdict: Verdict
    measured: str
    why: str
    part: str = "strategies"
    """Part of `python -m measure.claims` that measures it."""


def at_least(value: float, full: float, some: float = 1.1) -> Verdict:
    """Return whether a gain reaches the claimed one, or is at least a gain."""
    if value >= full:
        return Verdict.HOLDS
    return Verdict.IN_PART if value >= some else Verdict.WRONG


class _MissingError(Exception):
    """A run that a claim needs is missing."""


class _Results:
    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def find(self, workload: cases.Workload, strategy: str, slots: int = 0, **wanted: object) -> Row:
        """Return the run with these properties; omitted properties have their defaults."""
        properties = {"memory": "equal slots", "policy": "fcfs", "slots": slots or workload.slots} | wanted
        for row in self._rows:
            if (row["workload"], row["strategy"]) == (workload.name, strategy) and all(
                row[name] == value for name, value in properties.items()
            ):
                return row
        raise _MissingError


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Return every claim whose runs exist."""
    return [claim for topic in TOPICS for claim in claims_about(topic, rows)]


def claims_about(topic: str, rows: Sequence[Row]) -> list[Claim]:
    """Return the claims about one topic of `TOPICS`; none if its runs are missing."""
    try:
        return list(TOPICS[topic](_Results(rows)))
    except _MissingError:
        return []


def _speed(first: Row, second: Row) -> float:
    return float(first["out_tok_per_s"] / second["out_tok_per_s"])


def _pictures(results: _Results) -> Iterator[Claim]:
    for workload, text in ((cases.FOUR, "[50, 100, 200, 500]"), (cases.THREE, "[10, 50, 500]")):
        held = results.find(workload, "static-held")
        continuous = results.find(workload, "continuous")
        shortest, longest = min(workload.lengths), max(workload.lengths)
        steps = [end - begin for _, _, begin, end in held["gantt"]]
        yield Claim(
            f"a static batch of {text} tokens leaves the slot of the shortest request idle",
            "90 %" if workload is cases.FOUR else "not stated",
            Verdict.HOLDS,
            f"{1 - min(steps) / max(steps):.0%} of that slot, {held['idle_slot_share']:.1%} of all slots; continuous:"
            f" {continuous['idle_slot_share']:.1%} of all slots",
            f"1 - {shortest}/{longest} of one slot. The gain depends on all slots: {held['steps']:,} steps against"
            f" {continuous['steps']:,}, bound {held['bound_at_equal_slots']:.2f} times",
        )


def _hundred(results: _Results) -> Iterator[Claim]:
    held, continuous = results.find(cases.EQUAL, "static-held"), results.find(cases.EQUAL, "continuous")
    implied = results.find(cases.EQUAL, "continuous", cases.IMPLIED_SLOTS)
    yield Claim(
        "100 requests of 50 tokens in batches of 10: steps of static and of continuous batching",
        "500 and about 120, 4.2 times",
        Verdict.UNEQUAL,
        f"{held['steps']} and {continuous['steps']} at 10 slots; {implied['steps']} at {implied['slots']} slots",
        "5,000 tokens at 10 tokens per step take 500 steps in any order. 120 steps need"
        f" {slots_for(cases.EQUAL.lengths, 120)} slots. 500 static steps imply equal lengths, where no order gains; at"
        " 42 slots they take three rounds of 50 steps",
    )
    for workload, lengths in ((cases.UNIFORM, "1 to 99 tokens"), (cases.EXPONENTIAL, "exponential lengths")):
        held, continuous = results.find(workload, "static-held"), results.find(workload, "continuous")
        padded = results.find(workload, "static-padded")
        yield Claim(
            f"continuous against static batching, 100 requests, 50 tokens on average, {lengths}",
            "3 to 5 times",
            at_least(held["steps"] / continuous["steps"], 3.0),
            f"{held['steps'] / continuous['steps']:.2f} times fewer steps, {_speed(continuous, padded):.2f} times the"
            f" tokens/s of static-padded, {_speed(continuous, held):.2f} of static-held",
            f"at equal slots these lengths allow {held['bound_at_equal_slots']:.2f} times; in order of arrival the last"
            " long request runs on alone",
        )


def _near_the_bound(results: _Results) -> Iterator[Claim]:
    shares = {}
    for workload in cases.COMPARED:
        row = results.find(workload, "continuous")
        shares[workload.name] = row["fewest_steps"] / row["steps"]
    yield Claim(
        "Quire's own aim: continuous batching takes few more steps than the bound at equal slots",
        "at least 90 % of the bound",
        Verdict.HOLDS if min(shares.values()) >= 0.9 else Verdict.IN_PART,
        ", ".join(f"{name} {share:.0%}" for name, share in shares.items()),
        "with exponential lengths a long request that comes late runs on alone. An order that knew all lengths could"
        " start it first",
    )


def _largest_bound(results: _Results) -> float:
    return float(max(results.find(each, "static-held")["bound_at_equal_slots"] for each in cases.COMPARED))


def _halves(results: _Results) -> Iterator[Claim]:
    held, continuous = results.find(cases.HALVES, "static-held"), results.find(cases.HALVES, "continuous")
    yield Claim(
        "half of the outputs short (under 10), half long (over 500): continuous against static",
        "largest gain",
        Verdict.WRONG if held["bound_at_equal_slots"] < _largest_bound(results) else Verdict.HOLDS,
        f"{held['steps'] / continuous['steps']:.2f} times fewer steps, {_speed(continuous, held):.2f} times the"
        " tokens/s",
        f"bound {held['bound_at_equal_slots']:.2f}: about half of the slots are idle in a static batch. The bound is"
        f" {_largest_bound(results):.2f} for exponential lengths, where one long request keeps many short ones' slots",
    )
    yield Claim(
        "latency under continuous and static batching",
        "p50 alike, p99 far better",
        Verdict.IN_PART,
        f"half short: p50 {continuous['e2e_s']['p50']:.2f} s against {held['e2e_s']['p50']:.2f} s, p99"
        f" {continuous['e2e_s']['p99']:.2f} s against {held['e2e_s']['p99']:.2f} s",
        "all requests are there at the start, so latency is mostly waiting, which falls with the number of steps",
    )
    sjf = results.find(cases.HALVES, "continuous", policy="sjf")
    yield Claim(
        "the policy matters: shortest job first",
        "lower mean latency",
        Verdict.HOLDS if sjf["e2e_s"]["p50"] < continuous["e2e_s"]["p50"] else Verdict.WRONG,
        f"p50 {sjf['e2e_s']['p50']:.2f} s under sjf, {continuous['e2e_s']['p50']:.2f} s under fcfs; p99"
        f" {sjf['e2e_s']['p99']:.2f} s and {continuous['e2e_s']['p99']:.2f} s",
        "short requests no longer wait behind long ones; the lengths are given as hints",
    )


def _scaling(results: _Results) -> Iterator[Claim]:
    one, sixteen, many = (results.find(cases.EQUAL, "continuous", slots) for slots in (1, 16, 64))
    yield Claim(
        "throughput of batch 16 and batch 64 against batch 1",
        "10 and 30 times",
        at_least(_speed(many, one), 30.0),
        f"{_speed(sixteen, one):.1f} and {_speed(many, one):.1f} times",
        "a step of one row leaves a GPU mostly idle, a CPU much less. With 64 slots, 100 requests are two rounds, and"
        " the second has 36 rows",
    )
    yield Claim(
        "100 users served one at a time against batched",
        "5 to 20 times",
        at_least(_speed(many, one), 5.0),
        f"{_speed(many, one):.1f} times the tokens/s; p99 {one['e2e_s']['p99']:.2f} s against"
        f" {many['e2e_s']['p99']:.2f} s",
        "one step of 64 rows costs more than a step of one row, but far less than 64 of them",
    )


def _low_load(results: _Results) -> Iterator[Claim]:
    static, dynamic, continuous = (
        results.find(cases.LOW_LOAD, name) for name in ("static-held", "dynamic", "continuous")
    )
    yield Claim(
        "at low load simple batching suffices",
        "no gain",
        Verdict.IN_PART,
        f"tokens/s {static['out_tok_per_s']:.0f} static, {dynamic['out_tok_per_s']:.0f} dynamic,"
        f" {continuous['out_tok_per_s']:.0f} continuous; p50 {static['e2e_s']['p50']:.2f} s,"
        f" {dynamic['e2e_s']['p50']:.2f} s, {continuous['e2e_s']['p50']:.2f} s",
        "true of throughput, which is the rate of arrivals. Static batching makes requests wait for a full batch",
    )


def _chunks(results: _Results) -> Iterator[Claim]:
    whole = results.find(cases.LONG, "continuous", step_tokens=cases.WHOLE_TOKENS)
    chunked = results.find(cases.LONG, "continuous", step_tokens=cases.CHUNKED_TOKENS)
    yield Claim(
        "a prompt of 4,096 tokens stalls the decodes of others; chunked prefill does not let it",
        "no stall",
        Verdict.HOLDS if chunked["itl_s"]["max"] < 0.5 * whole["itl_s"]["max"] else Verdict.IN_PART,
        f"longest time between two tokens {1e3 * whole['itl_s']['max']:.0f} ms in one step,"
        f" {1e3 * chunked['itl_s']['max']:.0f} ms in chunks of 128; time to the prompt's first token"
        f" {whole['ttft_s']['max']:.2f} s and {chunked['ttft_s']['max']:.2f} s",
        "each step takes a chunk and every decode row; the prompt itself pays for it",
    )


def _capacity(results: _Results) -> Iterator[Claim]:
    full, safe = (
        results.find(cases.TIGHT, "continuous", capacity=name) for name in ("max_utilization", "guaranteed_no_evict")
    )
    yield Claim(
        "max_utilization runs more requests at once, guaranteed_no_evict interrupts none",
        "a trade-off",
        Verdict.HOLDS if _interruptions(full) and not _interruptions(safe) else Verdict.IN_PART,
        f"{full['steps']:,} steps, up to {full['most_rows']} rows, {_interruptions(full)} interruptions against"
        f" {safe['steps']:,} steps, up to {safe['most_rows']} rows, {_interruptions(safe)} interruptions",
        "without the guarantee, a request may have to leave its slot and compute its tokens again",
    )


def _interruptions(row: Row) -> int:
    """Return how many steps a request skipped between its first and its last step."""
    return len(row["gantt"]) - len({request for _, request, _, _ in row["gantt"]})


def _memory(results: _Results) -> Iterator[Claim]:
    held = results.find(cases.FOUR, "static-held")
    short = results.find(cases.EQUAL, "continuous")
    yield Claim(
        "KV memory that holds no token",
        "under 4 % paged, 60 to 80 % reserved",
        Verdict.HOLDS if held["kv_waste"] < 0.04 else Verdict.IN_PART,
        f"outputs of 50 to 500: {held['kv_waste']:.1%} paged, {held['reserved_kv_waste']:.1%} reserved; outputs of 50:"
        f" {short['kv_waste']:.1%} and {short['reserved_kv_waste']:.1%}",
        "paging wastes half a block per request on average: 8 tokens, which is under 4 % from about 200 tokens on."
        " Reserving 2,048 positions for short requests wastes more than claimed",
    )
    for workload in (cases.FOUR, cases.EXPONENTIAL):
        padded, held = results.find(workload, "static-padded"), results.find(workload, "static-held")
        paged = results.find(workload, "continuous", cases.MAX_ROWS, memory="equal KV memory")
        yield Claim(
            f"continuous batching with paged KV against static, at equal KV memory ({workload.name})",
            "10 to 20 times",
            at_least(held["steps"] / paged["steps"], 10.0),
            f"{held['steps'] / paged['steps']:.1f} times fewer steps, {_speed(paged, padded):.1f} times the tokens/s of"
            f" static-padded; at most {paged['most_rows']} rows instead of {workload.slots}",
            f"bound {paged['bound']:.1f}: the large claims come from the slots that paging frees, not from the order",
        )


def _others(results: _Results) -> Iterator[Claim]:
    results.find(cases.EQUAL, "continuous")
    rng = np.random.default_rng(0)
    orca = rng.integers(1, 129, 10_000).tolist()
    anyscale = np.clip(np.round(rng.exponential(128, 10_000)), 1, 1536).astype(int).tolist()
    yield Claim(
        "Orca against FasterTransformer (outputs of 1 to 128 tokens)",
        "36.9 times",
        Verdict.NOT_RUN,
        f"not run; bound at 32 equal slots {_bound(orca, 32):.1f} times",
        "at equal latency, not at equal slots: the rest is the larger batch that the latency allows",
    )
    yield Claim(
        "Anyscale: vLLM against static batching (prompts of 512, outputs 128 on average, exponential, up to 1,536)",
        "23 times",
        Verdict.NOT_RUN,
        f"not run; bound at 8 equal slots {_bound(anyscale, 8):.1f} times, at equal KV memory"
        f" {_bound(anyscale, 8) * 2048 / (512 + 128):.1f} times",
        "static reserves 2,048 tokens for a request, which has 640 on average at its end; the rest is the engine",
    )


def _bound(lengths: list[int], slots: int) -> float:
    return static_steps(lengths, slots) / fewest_steps(lengths, slots)


TOPICS: dict[str, Callable[[_Results], Iterator[Claim]]] = {
    "idle slots": _pictures,
    "100 requests": _hundred,
    "bound": _near_the_bound,
    "half short": _halves,
    "batch 64": _scaling,
    "low load": _low_load,
    "chunks": _chunks,
    "capacity": _capacity,
    "memory": _memory,
    "others": _others,
}
"""Claims by topic."""
