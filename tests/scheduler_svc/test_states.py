"""The table of a request's states: it is complete, documented, and the only way to change a state."""

import ast
from pathlib import Path

import pytest

from checks.sim.coverage import Coverage
from checks.sim.scenario import draw
from checks.sim.simulation import Simulation
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.lifecycle.states import RequestEvent, RequestStates
from scheduler_svc.core.queueing.backlog import Backlog
from scheduler_svc.core.queueing.policies import make_policy
from scheduler_svc.core.queueing.tenants import Tenants
from scheduler_svc.core.requests.request import Request, RequestState, Wait
from tests.scheduler_svc.cluster import FRONTEND, Cluster
from tests.scheduler_svc.requests import make_request

ROOT = Path(__file__).resolve().parents[2]
Seen = set[tuple[RequestState, RequestEvent]]
TABLE = RequestStates.TRANSITIONS
OWNED = {
    "state",
    "wait",
    "stranded_since",
    "first_planned",
    "attempts",
    "preemptions",
    "num_cached_prompt_tokens",
}
"""Fields of a request that change only with its state."""


def _states() -> RequestStates:
    tenants = Tenants({})
    return RequestStates(Backlog(make_policy("fcfs", {}, {}), tenants), tenants, [])


def test_every_state_is_reached_and_every_request_can_end() -> None:
    """Each state has a way from ARRIVED, and each one but FINISHED a way to FINISHED."""
    reached = {RequestState.ARRIVED}
    for _ in RequestState:
        reached |= {transition.to for (state, _), transition in TABLE.items() if state in reached}

    assert reached == set(RequestState)
    assert {state for state, event in TABLE if event is RequestEvent.END} == reached - {RequestState.FINISHED}
    assert {event for _, event in TABLE} == set(RequestEvent)


@pytest.mark.parametrize("state", RequestState)
@pytest.mark.parametrize("event", RequestEvent)
def test_a_transition_that_is_not_in_the_table_fails(state: RequestState, event: RequestEvent) -> None:
    """The error names the request, its state and the event, and the state stays as it was."""
    states, request = _states(), make_request(7, state=state)
    if (state, event) in TABLE:
        return

    with pytest.raises(AssertionError, match=f"request r7: {event.name} is not possible in {state.name}"):
        states._apply(request, event)
    assert request.state is state


def _owned_writes(path: Path) -> set[str]:
    """Return the request fields in `OWNED` that a module assigns, except on its own objects."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr in OWNED:
            owner = ast.unparse(node.value)
            if owner != "self" and not owner.endswith("counters"):
                found.add(node.attr)
    return found


def test_no_other_module_writes_what_belongs_to_the_state() -> None:
    """The state and its fields are assigned in one module, and all of them are."""
    core = ROOT / "scheduler_svc" / "core"
    writes = {path.relative_to(core).as_posix(): _owned_writes(path) for path in core.rglob("*.py")}

    assert {name for name, fields in writes.items() if fields} == {"lifecycle/states.py"}
    assert writes["lifecycle/states.py"] == OWNED


def test_the_page_shows_the_table() -> None:
    """docs/scheduling-proofs.md contains the code's table, row by row; a failure prints it."""
    states = [f"* `{state.name}`: it {state.value}." for state in RequestState]
    events = [f"* `{event.name}`: {event.value}." for event in RequestEvent]
    rows = [
        f"| {state.name} | {event.name} | {transition.to.name} | {(transition.leave.__doc__ or '').rstrip('.')} |"
        for (state, event), transition in TABLE.items()
    ]
    table = ["| from | event | to | action |", "|---|---|---|---|", *rows]
    page = (ROOT / "docs" / "scheduling-proofs.md").read_text("utf-8")

    for part in (states, events, table):
        assert "\n".join(part) in page, "\n".join(part)


# ---------------------------------------------------------------- every transition happens


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The transitions that the test has made so far."""
    found: Seen = set()
    apply = RequestStates._apply

    def record(self: RequestStates, request: Request, event: RequestEvent, outcome: str = "") -> None:
        found.add((request.state, event))
        apply(self, request, event, outcome)

    monkeypatch.setattr(RequestStates, "_apply", record)
    return found


RARE = {
    (RequestState.ARRIVED, RequestEvent.END),
    (RequestState.STARVED, RequestEvent.STARVE),
    (RequestState.STRANDED, RequestEvent.STARVE),
    (RequestState.ENDING, RequestEvent.STARVE),
}
"""Transitions that simulations hardly make; each has a test below."""
MOST_SIMULATIONS = 60
"""Number of simulations in which all transitions must occur; about fifteen usually suffice."""


@pytest.mark.every(3)
def test_simulations_make_every_transition_that_is_not_rare(seen: Seen) -> None:
    """No transition stands in the table that nothing exercises."""
    for seed in range(MOST_SIMULATIONS):
        Simulation(draw(seed), Coverage()).run(1000)
        if seen >= set(TABLE) - RARE:
            break

    assert set(TABLE) - seen - RARE == set()


def test_a_request_that_comes_back_complete_ends_on_arrival(seen: Seen) -> None:
    """It has all of its tokens already."""
    cluster = Cluster()
    reader = cluster.submit(1, [1, 2], 3, delivered=(5, 6, 7))

    assert reader.end is not None
    assert reader.end.reason is ef.EndReason.LENGTH
    assert (RequestState.ARRIVED, RequestEvent.END) in seen


def test_too_little_credit_leaves_a_request_starved(seen: Seen) -> None:
    """A byte of credit is not a token; the client has read, so it is not stalled."""
    cluster = Cluster(stall_timeout_s=10.0)
    reader = cluster.submit(1, [1, 2], 3, credit=0)
    for _ in range(3):
        cluster.now += 6.0
        cluster.handle(ev.CreditGranted(frontend=FRONTEND, stream=1, credit=1))
        cluster.handle(ev.TimePassed())

    assert reader.end is None
    assert cluster.core.stats().waiting == 1
    assert (RequestState.STARVED, RequestEvent.STARVE) in seen


def test_a_stranded_request_may_be_starved_when_a_worker_serves_it(seen: Seen) -> None:
    """A late token has used up its credit meanwhile."""
    states, request = _states(), make_request(7)
    states._tenants.arrived(request, 1.0)
    states.wait(request, Wait(1.0))
    states._backlog.discard(request)  # The planner also calls this when it takes a request from the queue.
    states.strand(request, 2.0)
    request.allowed = len(request.tokens)
    states.wait(request, Wait(3.0))

    assert request.state is RequestState.STARVED
    assert (states.num_waiting, len(states.stranded), len(states._backlog)) == (1, 0, 0)
    assert (RequestState.STRANDED, RequestEvent.STARVE) in seen
    states.validate({request.key: request})


def test_a_lost_last_step_may_leave_a_request_without_credit(seen: Seen) -> None:
    """Its worker is lost, its attempt has ended, and its client reads no more."""
    states = _states()
    request = make_request(7, prompt=10, generated=2, allowed=12, state=RequestState.ENDING, traceparent="t")
    states._tenants.arrived(request, 1.0)
    states._tenants.started(request, 5.0, 1.0)
    states.wait(request, Wait(2.0), "worker lost")

    assert request.state is RequestState.STARVED
    assert request.preemptions == 1
    assert states._effects == [ef.AttemptEnded(frontend=b"f", stream=7, outcome="worker lost")]
    assert (RequestState.ENDING, RequestEvent.STARVE) in seen
    states.validate({request.key: request})
