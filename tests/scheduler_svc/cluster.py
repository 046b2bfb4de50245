"""The core wired to model workers and readers in virtual time, invariants checked after every event."""

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.interface.records import Note, Notes, QueueNote, WaitReason, to_note
from scheduler_svc.core.scheduler import Scheduler
from shared.columns import to_column
from shared.request_spec import Pooling, RequestSpec

FRONTEND = b"front/1"


@dataclass(slots=True)
class Reader:
    """What a client has received."""

    prompt: list[int]
    max_tokens: int
    stops: set[int]
    tokens: list[int] = field(default_factory=list)
    end: ef.RequestEnded | None = None


class Cluster:
    """Drives one scheduler; every method takes one step in virtual time."""

    def __init__(self, **limits: object) -> None:
        self.all_notes: Notes = []
        """Notes of all requests and queues, in order."""
        config = CoreConfig(**limits)  # type: ignore[arg-type]
        self.core = Scheduler(config, incarnation=1 << 40, notes=self.all_notes)
        self.now = 100.0
        self.readers: dict[int, Reader] = {}
        self.workers: dict[bytes, ModelWorker] = {}
        self.answers: dict[bytes, deque[ev.StepDone]] = {}
        self.plans: list[Plan] = []
        """All that were made, oldest first."""
        self.effects: list[ef.Effect] = []
        self.handle(ev.FrontendJoined(frontend=FRONTEND))

    @property
    def notes(self) -> list[Note]:
        """Notes of all requests, in order."""
        return [to_note(*note) for note in self.all_notes if not isinstance(note, QueueNote)]

    @property
    def obstacles(self) -> list[WaitReason | None]:
        """What held back the queues of the workers, in order."""
        return [note.reason for note in self.all_notes if isinstance(note, QueueNote)]

    def handle(self, event: ev.Event) -> list[ef.Effect]:
        """Feeds one event and checks everything that can be checked."""
        self.now += 0.001
        if isinstance(event, ev.StepDone) and event.worker in self.workers:
            self.workers[event.worker].answered_step = event.step
        effects = self.core.handle(event, self.now)
        self._receive(effects)
        self.core.validate()
        return effects

    def join(self, worker: ModelWorker, worker_id: str = "w", reason: ev.HelloReason = ev.HelloReason.STARTED) -> None:
        """A worker says hello."""
        for effect in self.handle(worker.hello(worker_id, reason)):
            if isinstance(effect, ef.WorkerWelcomed):
                worker.welcome(effect.epoch)
                self.workers[worker.peer] = worker
                self.answers[worker.peer] = deque()

    def submit(
        self,
        stream: int,
        prompt: list[int],
        max_tokens: int,
        *,
        stops: set[int] | None = None,
        credit: int = 1 << 20,
        deadline: float | None = None,
        delivered: tuple[int, ...] = (),
        tenant: str = "",
        request_class: str = "",
        priority: int = 0,
        expected_output_tokens: int = 0,
        ttft_deadline: float | None = None,
        salt: bytes = b"",
        traceparent: str = "",
        grammar: bytes = b"",
        identity: bytes = b"",
        sampling: bytes = b"",
        again: bool = False,
        accepted: bool = False,
        model: str = "",
        total_deadline: float | None = None,
        pooling: Pooling = Pooling.NONE,
        session: bytes = b"",
        ends_session: bool = False,
        retention_s: float = 0.0,
        retention_priority: int = 0,
        expected_pause_s: float = 0.0,
    ) -> Reader:
        """A request arrives, or arrives again with what was `delivered` before."""
        reader = self.readers[stream] = Reader(prompt, max_tokens, stops or set(), list(delivered))
        self.handle(
            ev.RequestArrived(
                frontend=FRONTEND,
                stream=stream,
                spec=RequestSpec(
                    request_id=f"r{stream}",
                    num_prompt_tokens=len(prompt),
                    max_tokens=max_tokens,
                    stop_token_ids=to_column(sorted(reader.stops)),
                    sampling=sampling,
                    grammar=grammar,
                    pooling=pooling,
                    tenant=tenant,
                    request_class=request_class,
                    priority=priority,
                    expected_output_tokens=expected_output_tokens,
                    cache_scope=salt,
                    session=session,
                    ends_session=ends_session,
                    retention_s=retention_s,
                    retention_priority=retention_priority,
                    expected_pause_s=expected_pause_s,
                    model=model,
                    identity=identity,
                    traceparent=traceparent,
                ),
                token_ids=np.array([*prompt, *delivered], np.int32),
                credit=credit,
                deadline=deadline,
                ttft_deadline=ttft_deadline,
                total_deadline=total_deadline,
                again=again,
                accepted=accepted,
            )
        )
        return reader

    def plan(self) -> int:
        """Let the core plan for every worker as far as possible; return the number of plans."""
        return sum(self.plan_for(peer) for peer in self.core.workers())

    def plan_for(self, peer: bytes, most: int = 1 << 30) -> int:
        """Let the core plan for one worker as far as possible, or `most` plans; return the number of plans."""
        count = 0
        while count < most and (plan := self._plan_when_due(peer)) is not None:
            self.answers[peer].append(self.workers[peer].execute(plan))
            count += 1
        return count

    def _plan_when_due(self, peer: bytes) -> Plan | None:
        due = self.core.next_plan_due(self.now)
        if due is not None:
            self.now = due
        plan, effects = self.core.plan(peer, self.now)
        if plan is not None:
            self.plans.append(plan)
        self._receive(effects)
        self.core.validate()
        return plan

    def answer(self) -> int:
        """Pass every worker's oldest result to the core; return the number of results."""
        count = 0
        for peer, answers in list(self.answers.items()):
            if answers and peer in self.core.workers():
                self.handle(answers.popleft())
                count += 1
        return count

    def run(self, max_steps: int = 10_000) -> None:
        """Plans and answers until nothing is left to do."""
        for _ in range(max_steps):
            if not self.plan() + self.answer():
                return
        raise AssertionError("the cluster does not come to rest")

    def story(self, stream: int) -> list[str]:
        """The lines of a request's history."""
        story = self.core.story(FRONTEND, stream)
        return [] if story is None else [line for _, line in story.events]

    def spoil(self, stream: int) -> None:
        """From now on, the row of a stream writes NaN."""
        found = [(worker, row) for worker in self.workers.values() for row in worker.rows.values()]
        worker, row = next((worker, row) for worker, row in found if row.name.stream == stream)
        worker.fail(row.index, spoil=True)

    def lose(self, peer: bytes) -> None:
        """A worker dies with whatever it had in flight."""
        self.answers[peer].clear()
        self.handle(ev.WorkerLost(worker=peer, reason="killed"))

    def _receive(self, effects: list[ef.Effect]) -> None:
        self.effects.extend(effects)
        for effect in effects:
            if isinstance(effect, ef.TokensReady):
                streams, indices = effect.each()
                for stream, index, token in zip(
                    streams.tolist(), indices.tolist(), effect.tokens.tolist(), strict=True
                ):
                    reader = self.readers[stream]
                    assert reader.end is None, "a token after the end"
                    assert index == len(reader.tokens), "a gap or a repeat"
                    reader.tokens.append(token)
            elif isinstance(effect, ef.RequestEnded):
                reader = self.readers[effect.stream]
                assert reader.end is None, "a request ended twice"
                reader.end = effect
