"""The advice of `quire explain` helps: for each cause, the advised setting under the same load improves the request."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from records.explain.accounting import Account, Cause, CauseKind
from records.explain.advice import advice
from records.explain.facts import Life, StreamKey
from records.rules.model_worker import ModelWorker
from records.whatif.load import Arrival, Member, traced
from records.whatif.simulate import START_S, simulate
from records.whatif.step_times import StepTimes
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import BatchingLimits, CoreConfig, TenantLimits
from scheduler_svc.core.interface.effects import Effect
from scheduler_svc.core.interface.records import Note, NoteKind, RequestEnded
from scheduler_svc.core.memory.token_facts import TokenFacts
from scheduler_svc.core.scheduler import Scheduler

BLOCK = 16
TIMES = StepTimes(
    constant_s=0.005, decode_s=0.001, prefill_s=0.0002, context_s=0.0, prefill_context_s=0.0, block_copy_s=0.0,
    link_s=0.0005,
)  # fmt: skip
CONFIG = CoreConfig(max_num_seqs=64, max_num_batched_tokens=2048, itl_target_s=0.0)


@dataclass(frozen=True, slots=True)
class Case:
    """A load in which one request has a cause, and what the advice changes."""

    kind: CauseKind
    advised: str
    """What the advice must name."""
    config: CoreConfig
    others: tuple[tuple[float, int, int], ...]
    """Arrival, tokens of the prompt and generated tokens of the other requests."""
    victim: tuple[float, int, int]
    change: Callable[[CoreConfig], CoreConfig] = lambda config: config
    blocks: tuple[int, int] = (4096, 4096)
    """KV blocks of each worker, before and after."""
    workers: tuple[int, int] = (1, 1)
    tenant: str = ""
    policy: str = "fcfs"
    detail: str = ""


def _set(**values: object) -> Callable[[CoreConfig], CoreConfig]:
    return lambda config: dataclasses.replace(config, **values)  # type: ignore[arg-type]


_MANY = tuple((0.0, 8, 150) for _ in range(8))
_LONG_PROMPTS = tuple((0.002 * number, 3000, 1) for number in range(5))
CASES = {
    "rows": Case(
        CauseKind.ROWS, "--max-num-seqs", _set(max_num_seqs=2)(CONFIG), _MANY, (0.01, 8, 10), _set(max_num_seqs=16)
    ),
    "a worker more": Case(
        CauseKind.QUEUE, "add a worker", _set(max_num_seqs=2)(CONFIG), _MANY, (0.01, 8, 10), workers=(1, 2)
    ),
    "memory": Case(
        CauseKind.MEMORY, "--kv-cache-memory", CONFIG, tuple((0.0, 300, 150) for _ in range(6)), (0.01, 200, 10),
        blocks=(64, 1024),
    ),
    "budget": Case(
        CauseKind.BUDGET, "--long-prefill-token-threshold", _set(max_num_batched_tokens=128)(CONFIG), _LONG_PROMPTS,
        (0.05, 8, 4), _set(long_prefill_token_threshold=16),
    ),
    "other prompts": Case(
        CauseKind.OTHER_PROMPTS, "--long-prefill-token-threshold", CONFIG,
        tuple((0.05 + 0.1 * number, 1800, 1) for number in range(12)), (0.0, 8, 40),
        _set(long_prefill_token_threshold=64),
    ),
    "steps before": Case(
        CauseKind.STEP_BEFORE, "--long-prefill-token-threshold", CONFIG, ((0.0, 2000, 1),), (0.02, 8, 1),
        _set(long_prefill_token_threshold=64),
    ),
    "neighbours": Case(
        CauseKind.NEIGHBOURS, "--max-num-seqs", CONFIG, tuple((0.02, 8, 400) for _ in range(40)), (0.0, 8, 80),
        _set(max_num_seqs=4),
    ),
    "order": Case(
        CauseKind.ORDER, "--policy fcfs", _set(policy="sjf", max_num_seqs=1)(CONFIG),
        ((0.0, 8, 30), *((0.02 + 0.05 * number, 8, 10) for number in range(20))), (0.01, 8, 60), _set(policy="fcfs"),
        policy="sjf",
    ),
    "batch": Case(
        CauseKind.BATCH, "--batching continuous",
        _set(batching=BatchingLimits(mode="static", max_batch_size=8, max_wait_s=2.0))(CONFIG), (), (0.0, 8, 10),
        _set(batching=BatchingLimits()),
    ),
    "tenant": Case(
        CauseKind.TENANT, "raise max_running", _set(tenant_limits={"a": TenantLimits(max_running=1)})(CONFIG),
        ((0.0, 8, 200),), (0.01, 8, 10), _set(tenant_limits={"a": TenantLimits(max_running=8)}), tenant="a",
    ),
    "preempted": Case(
        CauseKind.PREEMPTED, "--kv-cache-memory", CONFIG, tuple((0.0, 200, 260) for _ in range(3)), (0.01, 200, 120),
        blocks=(72, 1024),
    ),
}  # fmt: skip


@dataclass(slots=True)
class _Watched:
    """When the victim ended, and how often it was preempted."""

    number: int
    ended: float = 0.0
    notes: list[NoteKind] = field(default_factory=list)


class _WatchedScheduler(Scheduler):
    """A core that reports the end of one request."""

    def __init__(self, config: CoreConfig, incarnation: int, facts: TokenFacts, watched: _Watched) -> None:
        self._watched = watched
        super().__init__(config, incarnation, facts)

    def handle(self, event: ev.Event, now: float) -> list[Effect]:
        """Take the time of the end."""
        effects = super().handle(event, now)
        for effect in effects:
            if isinstance(effect, RequestEnded) and effect.stream == self._watched.number:
                self._watched.ended = now
                story = self.story(effect.frontend, effect.stream)
                self._watched.notes = [note.kind for note in story.notes] if story is not None else []
        return effects


def _run(case: Case, config: CoreConfig, blocks: int, workers: int) -> tuple[float, list[NoteKind]]:
    """Return the time of the victim, and the kinds of its notes."""
    arrivals: list[Arrival] = []
    for at, prompt, outputs in (*case.others, case.victim):
        found = traced(at, prompt, outputs, block_size=BLOCK)
        arrivals.append(dataclasses.replace(found, spec=found.spec._replace(tenant=case.tenant)))
    victim = arrivals[-1]
    arrivals.sort(key=lambda each: each.at)
    watched = _Watched(next(number for number, each in enumerate(arrivals) if each is victim))
    members = [
        Member(hello=ModelWorker(b"w/%d" % number, blocks, BLOCK, 64).hello(f"w{number}", ev.HelloReason.STARTED))
        for number in range(workers)
    ]
    members = [
        dataclasses.replace(each, hello=dataclasses.replace(each.hello, max_tokens_per_step=2048)) for each in members
    ]
    simulate(
        arrivals, members, config, TIMES,
        make_core=lambda config, incarnation, facts: _WatchedScheduler(config, incarnation, facts, watched),
    )  # fmt: skip
    return watched.ended - START_S - victim.at, watched.notes


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_advised_setting_improves_the_request(name: str) -> None:
    """The advice for the cause names the change, and the change shortens the request by at least a fifth."""
    case = CASES[name]
    key = StreamKey(b"f", 1)
    note = Note(frontend=b"f", stream=1, time=0.0, kind=NoteKind.ARRIVED, text="arrived")
    life = Life(key=key, request_id="r", notes=(note,), policy=case.policy, tenant=case.tenant)
    told = advice(Account(life, (Cause(case.kind, 1.0),), 1.0, None, None))
    assert case.advised in told

    before, notes = _run(case, case.config, case.blocks[0], case.workers[0])
    after, _ = _run(case, case.change(case.config), case.blocks[1], case.workers[1])

    print(f"{name}: {before:.3f} s, with the advice {after:.3f} s")
    assert after < 0.8 * before
    if case.kind is CauseKind.PREEMPTED:
        assert NoteKind.PREEMPTED in notes
