"""Cases: which requests run under which settings. Pure and seeded.

Every workload has distinct short prompts and ignores the end token, so that only output lengths matter.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from quire.types import SchedulingOptions

LONGEST = 2048
"""Positions of the bundled model: the tokens that static batching without paging reserves per slot."""
PROMPT_TOKENS = 8
BLOCK_SIZE = 16
MAX_ROWS = 64
"""Slots at equal KV memory: the default of a worker on a CPU."""
LONG_PROMPT = 4096
WHOLE_TOKENS, CHUNKED_TOKENS = LONG_PROMPT + 64, 128
"""Token budgets per step: one holds the whole long prompt, the other a chunk of it."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    output_tokens: int
    prompt_tokens: int = PROMPT_TOKENS
    arrive_s: float = 0.0
    scheduling: SchedulingOptions = field(default_factory=SchedulingOptions)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival."""

    name: str
    title: str
    requests: tuple[Asked, ...]
    slots: int
    """Slots at which the strategies are compared."""

    @property
    def lengths(self) -> list[int]:
        """Output tokens of each request."""
        return [asked.output_tokens for asked in self.requests]

    @property
    def arrives_at_once(self) -> bool:
        """Whether all requests arrive at the start."""
        return not any(asked.arrive_s for asked in self.requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run: a workload and the settings of its service."""

    workload: Workload
    strategy: str
    """static, dynamic or continuous."""
    slots: int
    memory: str = "equal slots"
    """"equal slots", or "equal KV memory": the memory for the workload's slots at the maximum sequence length."""
    settings: Mapping[str, str | int | float] = field(default_factory=dict)
    """Settings in addition to the strategy's. A name may belong to the scheduler, the worker, or both."""
    needs_long_context: bool = False
    """Whether the bundled model has too few positions. Then random weights of the same sizes are used."""

    def all_settings(self) -> dict[str, str | int | float]:
        """Return the settings that differ from the defaults of a service."""
        batching: dict[str, str | int | float] = {"batching": self.strategy, "max_num_seqs": self.slots}
        if self.strategy == "static":
            batching |= {"max_batch_size": self.slots, "max_wait_ms": 10_000.0}
        elif self.strategy == "dynamic":
            batching |= {"max_batch_size": self.slots, "max_wait_ms": 50.0}
        if self.memory == "equal KV memory":
            batching["max_tokens_in_paged_kv_cache"] = self.workload.slots * LONGEST
        return (
            batching
            | {"policy": "fcfs", "prefix_cache": "off", "itl_target_ms": 0.0, "block_size": BLOCK_SIZE}
            | dict(self.settings)
        )


def _repeated(lengths: tuple[int, ...], times: int) -> tuple[Asked, ...]:
    return tuple(Asked(length) for _ in range(times) for length in lengths)


def _exponential(count: int, mean: int, seed: int) -> tuple[Asked, ...]:
    """Lengths from a geometric distribution, scaled to the mean."""
    drawn = np.random.default_rng(seed).geometric(1 / mean, count)
    return _of_mean(np.maximum(1, np.round(drawn * (mean / drawn.mean()))).astype(int), mean)


def _uniform(count: int, mean: int, seed: int) -> tuple[Asked, ...]:
    return _of_mean(np.random.default_rng(seed).integers(1, 2 * mean, count), mean)


def _of_mean(lengths: np.ndarray[tuple[int], np.dtype[np.int64]], mean: int) -> tuple[Asked, ...]:
    """Adjust single lengths by one until the mean matches."""
    for index in range(abs(missing := mean * len(lengths) - int(lengths.sum()))):
        at = int(np.argsort(lengths)[len(lengths) // 2 + index % 5])
        lengths[at] += 1 if missing > 0 else -1
    return tuple(Asked(int(length)) for length in lengths)


def _halves(count: int, seed: int) -> tuple[Asked, ...]:
    """Short (1 to 9 tokens) and long (501 to 600) outputs in random order, with every hint that a policy may use."""
    rng = np.random.default_rng(seed)
    asked = []
    for is_long in rng.permutation([False] * (count // 2) + [True] * (count // 2)).tolist():
        tokens = int(rng.integers(501, 601) if is_long else rng.integers(1, 10))
        scheduling = SchedulingOptions(
            priority=0 if is_long else 1,
            tenant="long" if is_long else "short",
            expected_output_tokens=tokens,
            total_time_target_s=60.0 if is_long else 1.0,
        )
        asked.append(Asked(tokens, scheduling=scheduling))
    return tuple(asked)


def _poisson(count: int, rate: float, tokens: int, seed: int) -> tuple[Asked, ...]:
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count)) - 1 / rate
    return tuple(Asked(tokens, arrive_s=max(0.0, float(time))) for time in times)


FOUR = Workload(
    "50-100-200-500", "outputs of 50, 100, 200 and 500 tokens, 16 times", _repeated((50, 100, 200, 500), 16), 4
)
THREE = Workload("10-50-500", "outputs of 10, 50 and 500 tokens, 12 times", _repeated((10, 50, 500), 12), 3)
EQUAL = Workload("100-equal", "100 requests of 50 tokens", _repeated((50,), 100), 10)
UNIFORM = Workload("100-uniform", "100 requests of 1 to 99 tokens, 50 on average", _uniform(100, 50, 4), 10)
EXPONENTIAL = Workload(
    "100-exponential", "100 requests of 50 tokens on average, exponential", _exponential(100, 50, 1), 10
)
HALVES = Workload("half-short", "half of the outputs under 10 tokens, half over 500", _halves(32, 2), 8)
LOW_LOAD = Workload("low-load", "4 requests per second of 50 tokens", _poisson(24, 4.0, 50, 3), 8)
TIGHT = Workload("short-memory", "32 requests of 100 to 300 tokens in KV for 1,024 tokens",
                 tuple(Asked(100 + 50 * (index % 5)) for index in range(32)), 8)  # fmt: skip
LONG = Workload(
    "long-prompt",
    f"a prompt of {LONG_PROMPT:,} tokens arrives while 8 requests decode",
    (*(Asked(400) for _ in range(8)), Asked(8, prompt_tokens=LONG_PROMPT, arrive_s=0.15)),
    9,
)
COMPARED = (FOUR, THREE, EQUAL, UNIFORM, EXPONENTIAL, HALVES)
"""Workloads that run under every strategy, at equal slots and at equal KV memory."""
IMPLIED_SLOTS = 42
"""Number of slots implied by "120 steps instead of 500" for 100 requests of 50 tokens."""


def all_cases() -> Iterator[Case]:
    """Yield every run, in the order of the report."""
    for workload in COMPARED:
        for strategy in ("static", "dynamic", "continuous"):
            yield Case(workload=workload, strategy=strategy, slots=workload.slots)
        yield Case(workload=workload, strategy="continuous", slots=MAX_ROWS, memory="equal KV memory")
    yield Case(workload=EQUAL, strategy="continuous", slots=IMPLIED_SLOTS)
    for slots in (1, 16, 64):
        yield Case(workload=EQUAL, strategy="continuous", slots=slots)
    for strategy in ("static", "dynamic", "continuous"):
        yield Case(workload=LOW_LOAD, strategy=strategy, slots=LOW_LOAD.slots)
    for policy in ("priority", "sjf", "edf", "fair", "lpm"):
        yield Case(workload=HALVES, strategy="continuous", slots=HALVES.slots, settings={"policy": policy})
    for capacity in ("max_utilization", "guaranteed_no_evict"):
        settings = {"capacity": capacity, "max_tokens_in_paged_kv_cache": 1024}
        yield Case(workload=TIGHT, strategy="continuous", slots=TIGHT.slots, settings=settings)
    for budget in (WHOLE_TOKENS, CHUNKED_TOKENS):
        settings = {"max_num_batched_tokens": budget, "max_model_len": 2 * LONG_PROMPT}
        yield Case(workload=LONG, strategy="continuous", slots=LONG.slots, settings=settings, needs_long_context=True)
