"""Front ends with their clients. They submit, read, find stop strings and disconnect, and check what they receive.

A front end receives the core's messages without delay and acts with delay. Its messages are therefore slightly out of
date, as in a real cluster.
"""

import dataclasses
import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from checks.sim.faults import NONE, Fault
from checks.sim.stream import Stream
from checks.sim.traffic import Demand, Traffic
from checks.sim.world import World
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.records import EndReason
from shared.frames import TOKEN_BYTES
from shared.prefix_keys import following_keys, root_key

_MOST_HISTORY = 20
_MOST_LOST = 3
"""Maximum number of a stream's tokens in transit to a front end when the core dies."""


@dataclass(slots=True)
class _Frontend:
    number: int
    peer: ev.Peer
    joined: bool = False
    """Whether the present core knows the front end."""
    streams: dict[int, Stream] = field(default_factory=dict)


class Clients:
    """All front ends and streams.

    Args:
        world: the simulation.
        on_begin: called with every stream that has an identity, after its submission.
        on_end: called with every stream that ends.
    """

    def __init__(self, world: World, on_begin: Callable[[Stream], None], on_end: Callable[[Stream], None]) -> None:
        self._world = world
        self._on_begin = on_begin
        self._on_end = on_end
        self._traffic = Traffic(world.rng, world.scenario.traffic, world.scenario.pace, world.faults)
        self._frontends: dict[ev.Peer, _Frontend] = {}
        self._incarnations = 0
        self._num_streams = 0
        self.live: dict[StreamName, Stream] = {}
        self._history: list[list[int]] = []
        self._deadlines: list[tuple[float, int, Stream]] = []
        self._expecting_end: list[Stream] = []
        self._service: ef.ServiceChanged | None = None
        self._refused = False
        """Whether a request was refused because the queue was full."""

    # ---------------------------------------------------------------- what front ends do

    def start(self) -> None:
        """Let all front ends join, and start the arrival of requests."""
        for number in range(self._world.scenario.num_frontends):
            self._join(number)
        self._world.agenda.after(0.0, self._burst)

    def _join(self, number: int) -> None:
        self._incarnations += 1
        peer = b"front%d/%d" % (number, self._incarnations)
        self._frontends[peer] = _Frontend(number, peer, joined=True)
        self._world.feed(ev.FrontendJoined(frontend=peer))

    def _burst(self) -> None:
        world, shape = self._world, self._world.scenario.traffic
        if world.healed:
            return
        gap = world.rng.expovariate(1 / shape.gap_s)
        for _ in range(world.rng.randint(1, shape.burst)):
            if len(self.live) >= shape.most_live:
                # No request is admitted until the current step ends.
                gap = max(gap, world.scenario.pace.step)
                break
            self._submit_new()
            if self._refused:
                # Clients retry after a refusal that states a retry delay.
                gap *= 5
                break
        self._refused = False
        world.agenda.after(gap, self._burst)

    def _submit_new(self) -> None:
        world = self._world
        frontend = world.rng.choice(list(self._frontends.values()))
        if not frontend.joined:
            return
        self._begin(frontend, self._traffic.draw(world.rng.choice(self._history) if self._history else None))

    def follow(self, name: StreamName) -> None:
        """Submit another request with the prompt of `stream` and a few more tokens."""
        world, stream = self._world, self.live.get(name)
        if stream is None or world.healed:
            return
        frontend = self._frontends[name.frontend]
        drawn = self._traffic.draw(None)
        demand = dataclasses.replace(drawn, prompt=[*stream.demand.prompt, 0], salt=stream.demand.salt, valid=True)
        if frontend.joined and stream.demand.valid:
            self._begin(frontend, demand)

    def _begin(self, frontend: _Frontend, demand: Demand) -> None:
        world = self._world
        stream = self._open(frontend, demand)
        if demand.identified:
            stream.identity = b"id%d" % self._num_streams
        self._submit(stream)
        if demand.identified:
            self._on_begin(stream)
        if demand.cancel_s is not None:
            world.agenda.after(demand.cancel_s, self._cancel, stream)
        if demand.twice:
            world.fault(Fault.SUBMITTED_TWICE)
            world.agenda.after(world.latency(), self._submit_again, stream)
        if not demand.valid:
            world.fault(Fault.INVALID_REQUEST)
        if demand.take_s is None and stream.allowed < demand.max_tokens:
            world.fault(Fault.STALLED_READER)
            if not world.scenario.config.stall_timeout_s:
                # Otherwise the request would occupy its row indefinitely.
                world.agenda.after(world.rng.uniform(10, 200) * world.scenario.pace.step, self._cancel, stream)
        elif demand.take_s is not None and demand.take_s > 5 * world.scenario.pace.step:
            world.fault(Fault.SLOW_READER)
        if stream.starved and demand.take_s is not None:
            world.agenda.after(demand.take_s, self._grant, stream, world.rng.choice((4, 7, 64)))

    def _open(self, frontend: _Frontend, demand: Demand) -> Stream:
        self._num_streams += 1
        stream = Stream(StreamName(frontend.peer, self._num_streams), demand, self._world.now)
        frontend.streams[self._num_streams] = stream
        self.live[stream.name] = stream
        return stream

    def any_frontend(self) -> ev.Peer | None:
        """Return a front end that the core knows, or None."""
        known = [frontend.peer for frontend in self._frontends.values() if frontend.joined]
        return self._world.rng.choice(known) if known else None

    def go_on(self, earlier: Stream, tokens: list[int]) -> None:
        """Submit a request that continues from these tokens, on any front end."""
        peer = self.any_frontend()
        if peer is None:
            return
        stream = self._open(self._frontends[peer], earlier.demand)
        stream.identity = earlier.identity
        stream.go_on_from(tokens)
        self._submit(stream, again=True)
        self._on_begin(stream)
        if self._world.healed:
            self._heal_reader(stream)
        elif stream.starved and stream.end is None and earlier.demand.take_s is not None:
            self._world.agenda.after(earlier.demand.take_s, self._grant, stream, 64)

    def submit_twin(self, stream: Stream) -> Stream | None:
        """Submit another request with the same identity; return its stream."""
        peer = self.any_frontend()
        if peer is None:
            return None
        twin = self._open(self._frontends[peer], stream.demand)
        twin.identity, twin.is_twin = stream.identity, True
        self._submit(twin)
        return twin

    def _submit(self, stream: Stream, *, again: bool = False, accepted: bool = False) -> None:
        if stream.end is not None:
            return
        event = stream.submission(again=again, accepted=accepted)
        if self._service is not None and self._world.rng.random() < 0.5:
            event = self._with_keys(event, self._service)
        stream.begin(self._world.now, accepted=accepted)
        if stream.deadline is not None:
            heapq.heappush(self._deadlines, (stream.deadline, stream.name.stream, stream))
        self._world.feed(event)

    @staticmethod
    def _with_keys(event: ev.RequestArrived, service: ef.ServiceChanged) -> ev.RequestArrived:
        """Add the keys of the prompt's blocks, as a front end computes them."""
        assert service.model is not None
        root = root_key(service.model.fingerprint, event.spec.cache_scope)
        keys = following_keys(root, event.token_ids.tobytes(), service.block_size)
        return dataclasses.replace(event, block_keys=keys, block_size=service.block_size)

    def service_changed(self, effect: ef.ServiceChanged) -> None:
        """Handle a change of the served model."""
        self._service = effect if effect.model is not None and effect.block_size else None

    def _submit_again(self, stream: Stream) -> None:
        if stream.end is None and stream.known and self._world.feed(stream.submission()):
            raise ViolationError("stream.twice", "a second submission had effects", stream.name)

    def _cancel(self, stream: Stream) -> None:
        if stream.end is not None:
            return
        self._world.fault(Fault.CANCEL)
        stream.cancel_sent = True
        if not stream.known:
            self._gone(stream, EndReason.CANCELLED)
            return
        self._world.feed(ev.RequestCancelled(frontend=stream.name.frontend, stream=stream.name.stream))
        self._must_have_ended(stream, EndReason.CANCELLED)

    def _stop(self, stream: Stream) -> None:
        if stream.end is not None or not stream.known or stream.stop_sent:
            return
        self._world.fault(Fault.STOP_STRING)
        stream.stop_sent = True
        name, keep = stream.name, stream.demand.keep_tokens
        self._world.feed(ev.StopMatched(frontend=name.frontend, stream=name.stream, keep_tokens=keep))
        self._must_have_ended(stream, EndReason.STOP_STRING)

    def _grant(self, stream: Stream, credit: int) -> None:
        if stream.end is not None:
            return
        stream.granting = False
        stream.grant(credit, self._world.now)
        if stream.known:
            name = stream.name
            self._world.feed(ev.CreditGranted(frontend=name.frontend, stream=name.stream, credit=credit))

    @staticmethod
    def _must_have_ended(stream: Stream, reason: EndReason) -> None:
        if stream.end is not reason:
            raise ViolationError("stream.ends", f"{reason.name} was asked for, the stream is {stream.end}", stream.name)

    # ---------------------------------------------------------------- what the core says

    def tokens_ready(self, effect: ef.TokensReady) -> None:
        """Handle tokens for the streams of one front end."""
        frontend = self._frontends.get(effect.frontend)
        if frontend is None:
            raise ViolationError("frontend.gone", f"tokens for {effect.frontend!r}, which is gone")
        now = self._world.now
        streams, indices = effect.each()
        for number, index, token in zip(streams.tolist(), indices.tolist(), effect.tokens.tolist(), strict=True):
            stream = frontend.streams.get(number)
            if stream is None:
                raise ViolationError("stream.unknown", f"a token for stream {number} of {effect.frontend!r}")
            stream.take(index, token, now)
            if len(stream.tokens) > stream.allowed:
                what = f"token {index} with credit for {stream.allowed}"
                self._world.broken("stream.credit", what, stream.name)
            if stream.must_end:
                self._expecting_end.append(stream)
            elif stream.eventful:
                self._react(stream)

    def _react(self, stream: Stream) -> None:
        """React to the newest token of a stream, as a front end does."""
        world, demand = self._world, stream.demand
        if demand.take_s is not None:
            stream.untaken += TOKEN_BYTES
            if not stream.granting:
                stream.granting = True
                world.agenda.after(demand.take_s * (0.5 + world.rng.random()), self._take, stream)
        if len(stream.tokens) == demand.cancel_at:
            world.agenda.after(world.latency(), self._cancel, stream)
        if len(stream.tokens) == demand.stop_string_at:
            world.agenda.after(world.latency(), self._stop, stream)

    def _take(self, stream: Stream) -> None:
        taken, stream.untaken = stream.untaken, 0
        self._grant(stream, taken)

    def scores_ready(self, effect: ef.ScoresReady) -> None:
        """Handle log-probabilities for a stream."""
        stream = self.find(StreamName(effect.frontend, effect.stream))
        if stream is None:
            raise ViolationError("stream.unknown", f"scores for stream {effect.stream} of {effect.frontend!r}")
        stream.take_scores(effect)

    def request_ended(self, effect: ef.RequestEnded, justified: Callable[[Stream, EndReason], str | None]) -> None:
        """Handle the end of a stream."""
        stream = self.live.get(StreamName(effect.frontend, effect.stream))
        if stream is None:
            name = StreamName(effect.frontend, effect.stream)
            raise ViolationError("stream.ends_once", f"{effect.reason.name} of a stream that is not live", name)
        self._refused |= effect.reason in (EndReason.QUEUE_FULL, EndReason.TENANT_LIMIT)
        stream.finish(effect, lambda reason: justified(stream, reason))
        self._gone(stream, effect.reason)
        if effect.reason in (EndReason.STOP, EndReason.LENGTH) and stream.tokens:
            if len(self._history) >= _MOST_HISTORY:
                self._history[self._world.rng.randrange(_MOST_HISTORY)] = [*stream.demand.prompt, *stream.tokens]
            else:
                self._history.append([*stream.demand.prompt, *stream.tokens])

    def _gone(self, stream: Stream, reason: EndReason) -> None:
        stream.end = reason
        del self.live[stream.name]
        self._on_end(stream)

    def check_ends(self) -> None:
        """Check that every stream that received its last token also received its end."""
        for stream in self._expecting_end:
            if stream.end is None:
                raise ViolationError("stream.ends", "no end after the last token", stream.name)
        self._expecting_end.clear()

    def check_deadlines(self) -> None:
        """Check that no stream lives past its deadline."""
        while self._deadlines and self._deadlines[0][0] <= self._world.now:
            _, _, stream = heapq.heappop(self._deadlines)
            if stream.end is None and stream.known:
                raise ViolationError("stream.deadline", f"alive after its deadline {stream.deadline}", stream.name)

    def find(self, name: StreamName) -> Stream | None:
        """Return a stream, live or ended."""
        frontend = self._frontends.get(name.frontend)
        return frontend.streams.get(name.stream) if frontend is not None else None

    # ---------------------------------------------------------------- faults

    def lose_one(self) -> None:
        """Replace one front end; its streams are lost."""
        world = self._world
        frontend = world.rng.choice(list(self._frontends.values()))
        world.fault(Fault.FRONTEND_LOST)
        for stream in frontend.streams.values():
            stream.cancel_sent = True
        world.feed(ev.FrontendLost(frontend=frontend.peer))
        for stream in frontend.streams.values():
            if stream.end is None and stream.known:
                raise ViolationError("frontend.lost", "a stream outlives its front end", stream.name)
            if stream.end is None:
                self._gone(stream, EndReason.CANCELLED)
        del self._frontends[frontend.peer]
        self._join(frontend.number)

    def send_unknown_streams(self) -> None:
        """Send events about streams that the core never had or no longer has."""
        world = self._world
        world.fault(Fault.UNKNOWN_STREAM)
        frontend = world.rng.choice(list(self._frontends))
        number = world.rng.choice((0, world.rng.randint(1, self._num_streams + 1)))
        if StreamName(frontend, number) in self.live or not self._frontends[frontend].joined:
            return
        for event in (
            ev.RequestCancelled(frontend=frontend, stream=number),
            ev.StopMatched(frontend=frontend, stream=number, keep_tokens=0),
            ev.CreditGranted(frontend=frontend, stream=number, credit=8),
        ):
            if world.feed(event):
                raise ViolationError("frontend.unknown_stream", f"effects of {event}")

    def send_from_unknown_frontend(self) -> None:
        """Send a request from a front end that the core does not know."""
        world = self._world
        world.fault(Fault.UNKNOWN_FRONTEND)
        stream = Stream(StreamName(b"stranger", 1), self._traffic.draw(None), world.now)
        effects = world.feed(stream.submission())
        if effects != [ef.FrontendUnknown(frontend=b"stranger")]:
            raise ViolationError("frontend.unknown", f"{effects} for a front end without hello")

    def core_died(self) -> None:
        """Connect to a new core: front ends send Hello and submit their streams with all tokens received so far."""
        world = self._world
        self._service = None
        self._deadlines.clear()
        for frontend in self._frontends.values():
            frontend.joined = False
            for stream in frontend.streams.values():
                if stream.end is None:
                    stream.known = False
                    stream.epoch = None
                    stream.forget(min(len(stream.tokens), world.rng.randint(0, _MOST_LOST)))
        for frontend in self._frontends.values():
            world.agenda.after(world.latency(), self._resubmit, frontend)

    def _resubmit(self, frontend: _Frontend) -> None:
        if self._frontends.get(frontend.peer) is not frontend or frontend.joined:
            return
        frontend.joined = True
        self._world.feed(ev.FrontendJoined(frontend=frontend.peer))
        for stream in list(frontend.streams.values()):
            if not stream.known:
                self._submit(stream, again=True, accepted=True)

    def heal(self) -> None:
        """Let every reader read everything, except readers whose requests must end as stalled."""
        self._traffic = Traffic(self._world.rng, self._world.scenario.traffic, self._world.scenario.pace, NONE)
        for stream in list(self.live.values()):
            self._heal_reader(stream)

    def _heal_reader(self, stream: Stream) -> None:
        if stream.demand.take_s is not None or not self._world.scenario.config.stall_timeout_s:
            self._grant(stream, TOKEN_BYTES * stream.demand.max_tokens)
