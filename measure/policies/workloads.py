"""Workloads: jobs generated from a seed or read from a trace. Equal arguments give equal jobs.

| workload | jobs | load |
|---|---|---|
| mooncake, azure | those of a trace | share of its requests; more than 1: several copies without common prefixes |
| agents | sessions of many turns with pauses for tools, in a closed loop | users |
| vtc | two tenants that both send more than their half (VTC, OSDI '24) | share of the capacity |
| priorities | a few urgent requests among many that are not | share of the capacity |
| deadlines | requests with targets of their own, which the scheduler learns | share of the capacity |
| stall | short prompts, and one of 100,000 tokens now and then | share of the capacity |
| bursts | conversations that arrive in bursts | share of the capacity |
| prefixes | tenants whose requests share system prompts, which do not all fit into the cache | share of the capacity |
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from measure.load.traces import BLOCK_TOKENS, Recorded, read_trace
from measure.policies.costs import Costs, Work
from measure.policies.jobs import Job, Piece
from shared.config import ConfigError

_OWN, _OUTPUTS, _COPIES = 1 << 40, 1 << 41, 1 << 42
"""Leading names of pieces: those unique to one job, generated ones, and those in copies of a trace."""
_JITTER_S = 3.0
"""Mooncake timestamps are multiples of this."""
_LONGEST_PROMPT = 120_000
_COPY_SHIFT_S = 30.0
"""Copies of a trace begin within this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLoop:
    """Jobs that arrive independently of the scheduler."""

    name: str
    load: float
    jobs: Sequence[Job]

    def first(self) -> Sequence[Job]:
        """See `arena.Workload`."""
        return self.jobs

    def following(self, job: Job, now: float) -> Sequence[Job]:
        """See `arena.Workload`."""
        return ()


# ---------------------------------------------------------------- traces


def read(path: Path, seconds: float) -> list[Recorded]:
    """Return the requests in the first seconds of a trace. Times are relative to its beginning.

    Raises:
        ConfigError: the file is not a trace.
    """
    requests = read_trace(path).requests
    begin = requests[0].time_s
    return [replace(each, time_s=each.time_s - begin) for each in requests if each.time_s - begin <= seconds]


def traced(name: str, recorded: Sequence[Recorded], share: float, costs: Costs, seed: int) -> OpenLoop:
    """Return a share of the requests in a trace, without those that exceed the model's context.

    Prompts of more than 120,000 tokens are left out for every model.
    """
    copies = [1.0] * int(share) + [share - int(share)] * (share > int(share))
    rng = random.Random(seed)
    jobs: list[Job] = []
    for copy, keep in enumerate(copies):
        shift = rng.random() * _COPY_SHIFT_S if copy else 0.0
        for number, each in enumerate(recorded):
            longest = min(_LONGEST_PROMPT, costs.max_model_len - each.output_tokens)
            if rng.random() > keep or each.input_tokens > longest:
                continue
            jitter = rng.random() * _JITTER_S if each.blocks else 0.0
            jobs.append(_of_trace(each, each.time_s + shift + jitter, copy, number))
    return OpenLoop(name=name, load=share, jobs=sorted(jobs, key=lambda job: job.at))


def _of_trace(recorded: Recorded, at: float, copy: int, number: int) -> Job:
    own = copy * _COPIES + number
    left = recorded.input_tokens
    pieces = []
    for block in recorded.blocks[: math.ceil(left / BLOCK_TOKENS)]:
        pieces.append(Piece(copy * _COPIES + block, min(BLOCK_TOKENS, left)))
        left -= pieces[-1].length
    if left:
        pieces.append(Piece(own + _OWN, left))
    return Job(at=at, prompt=tuple(pieces), outputs=Piece(own + _OUTPUTS, recorded.output_tokens))


# ---------------------------------------------------------------- agents


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """Agent sessions in a closed loop. Each turn repeats the conversation and adds the result of a tool call."""

    users: int
    sessions: int
    seed: int
    system: int = 2048
    """Leading tokens that all sessions share."""
    first_turn: int = 4096
    """Prompt tokens in the first turn, including the shared ones."""
    output: int = 128
    tool: int = 384
    """Tokens in a tool result."""
    turns: int = 12
    pause_s: float = 3.0
    """Mean duration of a tool call."""
    start_gap_s: float = 0.5
    """Time between the first requests of consecutive users."""
    name: str = "agents"
    _todo: list[int] = field(default_factory=list)

    @property
    def load(self) -> float:
        """See `arena.Workload`."""
        return self.users

    def first(self) -> Sequence[Job]:
        """See `arena.Workload`."""
        self._todo[:] = reversed(range(self.sessions))
        return [
            self._job(self._todo.pop(), 0, user * self.start_gap_s) for user in range(min(self.users, self.sessions))
        ]

    def following(self, job: Job, now: float) -> Sequence[Job]:
        """See `arena.Workload`."""
        if job.turn + 1 < self.turns:
            return [self._job(job.session, job.turn + 1, now + self._pause(job.session, job.turn))]
        return [self._job(self._todo.pop(), 0, now)] if self._todo else []

    def _pause(self, session: int, turn: int) -> float:
        return random.Random(f"{self.seed} {session} {turn}").expovariate(1 / self.pause_s)

    def _job(self, session: int, turn: int, at: float) -> Job:
        pieces = [Piece(_OWN - 1, self.system), Piece(_own(session, 0, _OWN), self.first_turn - self.system)]
        for before in range(turn):
            pieces.append(Piece(_own(session, before, _OUTPUTS), self.output))
            pieces.append(Piece(_own(session, before + 1, _OWN), self.tool))
        return Job(
            at=at,
            prompt=tuple(pieces),
            outputs=Piece(_own(session, turn, _OUTPUTS), self.output),
            session=session,
            turn=turn,
        )


def _own(session: int, turn: int, kind: int) -> int:
    return kind + session * 1000 + turn


# ---------------------------------------------------------------- drawn


def capacity(costs: Costs, prompt: float, outputs: float, num_workers: int = 1) -> float:
    """Return how many requests per second the devices can serve with full rows, for requests of this length."""
    rows = min(costs.max_num_seqs, costs.kv_tokens / (prompt + outputs))
    rate = min(rows / outputs, costs.max_num_batched_tokens / prompt)  # requests that a step completes on average
    work = Work(round(rate * prompt), round(rate * outputs), round(rate * outputs * (prompt + outputs / 2)), 0)
    return rate / costs.seconds(work) * num_workers


def _poisson(rng: random.Random, rate: float, seconds: float) -> Iterable[float]:
    at = rng.expovariate(rate)
    while at < seconds:
        yield at
        at += rng.expovariate(rate)


def _log_normal(rng: random.Random, median: float, sigma: float, most: int) -> int:
    return max(1, min(most, round(rng.lognormvariate(math.log(median), sigma))))


def _drawn(number: int, at: float, prompt: int, outputs: int) -> Job:
    return Job(at=at, prompt=(Piece(_OWN + number, prompt),), outputs=Piece(_OUTPUTS + number, outputs))


def _open(name: str, load: float, jobs: Iterable[Job]) -> OpenLoop:
    ordered = sorted(jobs, key=lambda job: job.at)
    return OpenLoop(name=name, load=load, jobs=ordered)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """Parameters for drawing a workload."""

    seconds: float
    load: float
    """Share of the capacity."""
    costs: Costs
    num_workers: int
    seed: int


def two_tenants(drawing: Drawing) -> OpenLoop:
    """Return two tenants with prompts and outputs of 256 tokens. The second sends twice as many requests."""
    rng = random.Random(drawing.seed)
    rate = drawing.load * capacity(drawing.costs, 256, 256, drawing.num_workers)
    jobs: list[Job] = []
    for tenant, share in (("one", 1 / 3), ("two", 2 / 3)):
        for at in _poisson(rng, rate * share, drawing.seconds):
            jobs.append(replace(_drawn(len(jobs), at, 256, 256), tenant=tenant, group=tenant))
    return _open("vtc", drawing.load, jobs)


def priorities(drawing: Drawing) -> OpenLoop:
    """Return requests of which a tenth are urgent, three tenths normal, and the rest can wait."""
    rng = random.Random(drawing.seed)
    kinds = (("urgent", 2, 0.1, 1.0, 0.05), ("normal", 1, 0.3, 5.0, 0.1), ("batch", 0, 0.6, 60.0, 1.0))
    jobs: list[Job] = []
    for at in _poisson(rng, drawing.load * capacity(drawing.costs, 1300, 260, drawing.num_workers), drawing.seconds):
        name, priority, _, ttft_s, tpot_s = rng.choices(kinds, [kind[2] for kind in kinds])[0]
        job = _drawn(len(jobs), at, _log_normal(rng, 1000, 0.7, 16_000), _log_normal(rng, 200, 0.7, 2000))
        jobs.append(replace(job, priority=priority, group=name, ttft_target_s=ttft_s, tpot_target_s=tpot_s))
    return _open("priorities", drawing.load, jobs)


def deadlines(drawing: Drawing) -> OpenLoop:
    """Return requests with targets of 0.5, 2 or 10 s for the first token, which the scheduler learns."""
    rng = random.Random(drawing.seed)
    kinds = (("0.5 s", 0.5, 0.05), ("2 s", 2.0, 0.05), ("10 s", 10.0, 0.1))
    jobs: list[Job] = []
    for at in _poisson(rng, drawing.load * capacity(drawing.costs, 1300, 260, drawing.num_workers), drawing.seconds):
        name, ttft_s, tpot_s = rng.choice(kinds)
        job = _drawn(len(jobs), at, _log_normal(rng, 1000, 0.7, 16_000), _log_normal(rng, 200, 0.7, 2000))
        told = replace(job, group=name, ttft_target_s=ttft_s, tpot_target_s=tpot_s, tells_targets=True)
        jobs.append(told)
    return _open("deadlines", drawing.load, jobs)


def stall(drawing: Drawing) -> OpenLoop:
    """Return short prompts, and prompts of 100,000 tokens that make up half of the load."""
    rng = random.Random(drawing.seed)
    costs = drawing.costs
    long_prompt = min(100_000, costs.max_model_len - 256, costs.kv_tokens // 2)
    short_rate = drawing.load / 2 * capacity(costs, 256, 128, drawing.num_workers)
    long_rate = drawing.load / 2 / costs.seconds(Work(long_prompt, 0, 0, 0)) * drawing.num_workers
    jobs: list[Job] = []
    for at in _poisson(rng, short_rate, drawing.seconds):
        jobs.append(replace(_drawn(len(jobs), at, rng.randint(64, 448), rng.randint(64, 192)), group="short"))
    for at in _poisson(rng, long_rate, drawing.seconds):
        jobs.append(replace(_drawn(len(jobs), at, long_prompt, 128), group="long"))
    return _open("stall", drawing.load, jobs)


def bursts(drawing: Drawing) -> OpenLoop:
    """Return conversations that arrive at four times the mean rate for 5 s, and at half of it for the next 30 s."""
    rng = random.Random(drawing.seed)
    mean = drawing.load * capacity(drawing.costs, 1155, 211, drawing.num_workers)
    jobs: list[Job] = []
    for at in _poisson(rng, 4 * mean, drawing.seconds):
        if at % 35 >= 5 and rng.random() >= 0.125:
            continue
        prompt, outputs = _log_normal(rng, 1020, 0.5, 16_000), _log_normal(rng, 129, 1.0, 2000)
        jobs.append(_drawn(len(jobs), at, prompt, outputs))
    return _open("bursts", drawing.load, jobs)


def prefixes(drawing: Drawing) -> OpenLoop:
    """Return four tenants with ten system prompts each, which together exceed the KV cache by half.

    Two tenants send twice as many requests as the others. The capacity assumes that half of the system prompts are
    cached.
    """
    rng = random.Random(drawing.seed)
    costs, tenants, each = drawing.costs, 4, 10
    system = round(1.5 * costs.kv_tokens / (tenants * each))
    rate = drawing.load * capacity(costs, system / 2 + 256, 128, drawing.num_workers)
    jobs: list[Job] = []
    for at in _poisson(rng, rate, drawing.seconds):
        tenant = rng.choices(range(tenants), (1, 2, 1, 2))[0]
        job = _drawn(len(jobs), at, rng.randint(128, 384), rng.randint(64, 192))
        common = Piece(_COPIES + tenant * each + rng.randrange(each), system)
        name = f"tenant {tenant}"
        jobs.append(replace(job, prompt=(common, *job.prompt), tenant=name, group=name))
    return _open("prefixes", drawing.load, jobs)


DRAWN: dict[str, Callable[[Drawing], OpenLoop]] = {
    "vtc": two_tenants,
    "priorities": priorities,
    "deadlines": deadlines,
    "stall": stall,
    "bursts": bursts,
    "prefixes": prefixes,
}
TRACED = ("mooncake", "azure")
NAMES = (*TRACED, "agents", *DRAWN)


def trace_of(name: str, path: Path | None, seconds: float) -> list[Recorded]:
    """Return the requests from a workload's trace.

    Raises:
        ConfigError: the trace is missing, invalid, or belongs to another workload.
    """
    if path is None:
        raise ConfigError(f"--trace: the workload {name} needs a trace; pass its file, see docs/arena.md")
    recorded = read(path, seconds)
    has_blocks = any(each.blocks for each in recorded)
    if has_blocks != (name == "mooncake"):
        kind = "Mooncake" if has_blocks else "Azure"
        raise ConfigError(f"--trace: {path}: this is a trace of {kind}; use --workload {kind.lower()}")
    return recorded
