"""Clients that reconnect: requests with an identity are taken over, detached, resumed, submitted twice and dropped.

The core reports when a log begins, ends and is dropped. The retained content is therefore known exactly, and so is the
response to a client that resumes. The reports go to a journal with known content, which a restarted core may recover.
"""

import enum
from dataclasses import dataclass

import numpy as np

from checks.sim.clients import Clients
from checks.sim.journalling import JournalFolder
from checks.sim.stream import Stream
from checks.sim.world import World
from records.rules.oracle import scores_of
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.records import EndReason, Log
from shared.frames import TOKEN_BYTES
from shared.request_spec import RequestSpec

_AGAIN = 0.5
"""Probability of another action on the same request."""
_CHECK_EVERY = 40
"""Number of commits between two checks of the journal."""


class Act(enum.Enum):
    """An action on a request with an identity."""

    RESUME = enum.auto()
    DETACH = enum.auto()
    TAKE_OVER = enum.auto()
    SUBMIT_TWICE = enum.auto()
    DROP = enum.auto()


@dataclass(frozen=True, slots=True)
class _Kept:
    """Content that the core must retain for a request that has ended."""

    spec: RequestSpec
    stream: Stream
    tokens: list[int]
    end: ef.RequestEnded | None


class Returns:
    """All requests with an identity, and the logs that the core retains for them."""

    def __init__(self, world: World, clients: Clients) -> None:
        self._world = world
        self._clients = clients
        self._newest: dict[bytes, Stream] = {}
        """For each request, the stream that currently has it or had it last."""
        self._live: dict[bytes, ef.LogBegun] = {}
        """Requests whose logs have begun and not ended."""
        self._kept: dict[bytes, _Kept] = {}
        self._scored_from: dict[bytes, int] = {}
        """By identity, the first token whose log-probabilities the core has. Earlier ones are lost with a journal."""
        self._answers: list[ef.ResumeAnswered] = []
        self._questions = 0
        self._commits = 0
        self._journal = JournalFolder(world) if world.scenario.traffic.identified else None

    def began(self, stream: Stream) -> None:
        """Schedule an action on a stream with an identity, after its submission."""
        self._newest[stream.identity] = stream
        world = self._world
        delay = world.rng.uniform(0, 2 * stream.demand.max_tokens) * world.scenario.pace.step
        world.agenda.after(delay, self._act, stream.identity)

    def _act(self, identity: bytes) -> None:
        world, stream = self._world, self._newest[identity]
        if stream.end is None and not stream.known:
            return  # The core has died, and its successor does not yet know the request.
        match world.rng.choice(list(Act)):
            case Act.RESUME:
                self._resume(identity)
            case Act.DETACH if stream.end is None:
                stream.cancel_sent = True
                name = stream.name
                world.feed(ev.RequestCancelled(frontend=name.frontend, stream=name.stream, keep=True))
                self._must_be_over(stream)
                world.agenda.after(world.latency(), self._resume, identity)
            case Act.TAKE_OVER if stream.end is None:
                stream.cancel_sent = True
                self._clients.go_on(stream, list(stream.tokens))
                self._must_be_over(stream)
            case Act.SUBMIT_TWICE if stream.end is None:
                twin = self._clients.submit_twin(stream)
                if twin is not None and twin.end is not EndReason.DUPLICATE:
                    raise ViolationError("resume.duplicate", f"a second request of one id: {twin.end}", twin.name)
            case Act.DROP:
                stream.cancel_sent = True
                world.feed(ev.RequestsDropped(identities=(identity, b"nobody's")))
                self._must_be_over(stream)
                if identity in self._kept:
                    raise ViolationError("resume.dropped", "a dropped request is kept", stream.name)
        if world.rng.random() < _AGAIN and not world.healed:
            world.agenda.after(world.scenario.pace.step * world.rng.uniform(0, 50), self._act, identity)

    def _resume(self, identity: bytes) -> None:
        """Resume a request, and continue it if it is not complete."""
        stream, frontend = self._newest[identity], self._clients.any_frontend()
        if frontend is None or (stream.end is None and not stream.known):
            return
        stream.cancel_sent = True
        self._questions += 1
        self._answers.clear()
        self._world.feed(ev.ResumeAsked(frontend=frontend, number=self._questions, identity=identity))
        self._must_be_over(stream)
        if [(answer.frontend, answer.number) for answer in self._answers] != [(frontend, self._questions)]:
            raise ViolationError("resume.answer", f"{len(self._answers)} answers to one question", stream.name)
        log, kept = self._answers[0].log, self._kept.get(identity)
        if (log is None) != (kept is None):
            raise ViolationError("resume.kept", f"a log is {'not' * (log is None)} there against its word", stream.name)
        if log is None or kept is None:
            return
        self._check(log, kept)
        if log.end is None and not self._world.healed:
            self._clients.go_on(stream, kept.tokens)

    def _check(self, log: Log, kept: _Kept) -> None:
        """Check that the log holds the delivered tokens with their log-probabilities, and the end."""
        name, demand = kept.stream.name, kept.stream.demand
        if np.frombuffer(log.tokens, np.int32).tolist() != [*demand.prompt, *kept.tokens]:
            raise ViolationError("resume.tokens", "the log has other tokens than were delivered", name)
        if (log.end is None) != (kept.end is None) or (log.end and kept.end and log.end.reason is not kept.end.reason):
            raise ViolationError("resume.end", f"the log ends with {log.end}, the request with {kept.end}", name)
        first = self._scored_from[kept.spec.identity] if demand.scored else len(kept.tokens)
        if list(log.scores) != [(index, scores_of([kept.tokens[index]])) for index in range(first, len(kept.tokens))]:
            indices = [index for index, _ in log.scores]
            raise ViolationError("resume.scores", f"scores of {indices} for {len(kept.tokens)} tokens", name)

    @staticmethod
    def _must_be_over(stream: Stream) -> None:
        if stream.end is None:
            raise ViolationError("resume.over", "it continues although another client has taken it over", stream.name)

    # ---------------------------------------------------------------- reports from the core

    def answered(self, effect: ef.ResumeAnswered) -> None:
        """Handle the response to a client that resumes its request."""
        self._answers.append(effect)

    def log_begun(self, effect: ef.LogBegun) -> None:
        """Record that a request with an identity is live."""
        identity = effect.spec.identity
        if identity in self._live:
            raise ViolationError("log.begun", f"the log of {identity!r} begins twice")
        self._live[identity] = effect
        num_tokens = len(effect.tokens) // TOKEN_BYTES - effect.spec.num_prompt_tokens
        known = self._scored_from.get(identity, num_tokens) if identity in self._kept else num_tokens
        self._scored_from[identity] = min(known, num_tokens)

    def log_ended(self, effect: ef.LogEnded) -> None:
        """Record that the request is no longer live. The core retains its log until it reports otherwise."""
        begun = self._live.pop(effect.identity, None)
        stream = self._clients.find(StreamName(effect.frontend, effect.stream))
        if begun is None or stream is None or (begun.frontend, begun.stream) != stream.name:
            raise ViolationError("log.ended", f"the log of {effect.identity!r} ends and never began")
        self._kept[effect.identity] = _Kept(begun.spec, stream, list(stream.tokens), effect.end)

    def log_dropped(self, effect: ef.LogDropped) -> None:
        """Record that the core has dropped the log."""
        if self._kept.pop(effect.identity, None) is None or effect.identity in self._live:
            raise ViolationError("log.dropped", f"the log of {effect.identity!r} is dropped and not kept, or live")

    def note(self, effects: list[ef.Effect]) -> None:
        """Write one turn's effects to the journal, and check its content from time to time."""
        if self._journal is None or not effects:
            return
        self._journal.commit(effects)
        self._commits += 1
        if self._commits % _CHECK_EVERY == 0:
            self._check_journal(self._journal.peek(), self._kept | self._live_logs(self._live))

    def core_died(self) -> None:
        """Pass the old core's journal to the new core, or an empty one."""
        live, self._live = self._live, {}
        if self._journal is None:
            return
        if self._world.rng.random() < 0.5:
            self._kept.clear()
            self._journal.empty()
            return
        self._kept |= self._live_logs(live)
        event = self._journal.recover()
        self._check_journal(event, self._kept)
        self._world.feed(event)

    def _live_logs(self, live: dict[bytes, ef.LogBegun]) -> dict[bytes, _Kept]:
        """Return what a new core would retain for live requests."""
        found: dict[bytes, _Kept] = {}
        for identity, begun in live.items():
            stream = self._clients.find(StreamName(begun.frontend, begun.stream))
            if stream is not None:
                found[identity] = _Kept(begun.spec, stream, list(stream.tokens), None)
        return found

    def _check_journal(self, event: ev.LogsRestored, expected: dict[bytes, _Kept]) -> None:
        """Check that a new core gets exactly the expected logs."""
        logs = {log.spec.identity: log for _, log in event.logs}
        if logs.keys() != expected.keys():
            missing, more = expected.keys() - logs.keys(), logs.keys() - expected.keys()
            raise ViolationError("journal.logs", f"the journal lacks {sorted(missing)} and has dropped {sorted(more)}")
        for identity, log in logs.items():
            self._check(log, expected[identity])

    def close(self) -> None:
        """Delete the journal."""
        if self._journal is not None:
            self._journal.close()
