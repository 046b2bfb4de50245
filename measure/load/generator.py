"""The load generator: begins each session at its scheduled time, whatever the server does, and records the responses.

Sessions are prepared ahead of their time. Shortly before a session is due, the generator stops sleeping and only yields
to other tasks, because event-loop timers may be late by a millisecond. Each session is a separate task, so a stalled
server does not delay later sessions. Every outcome includes the generator's own delay.
"""

import asyncio
import gc
import ssl
import time
from array import array
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, replace
from functools import partial

import grpc

from measure.load.arrivals import OpenLoop, Users
from measure.load.grpc_target import GrpcTarget
from measure.load.http1 import Url
from measure.load.http_target import HttpTarget
from measure.load.outcomes import Ending, Outcome
from measure.load.plan import ANSWERED, BEGUN, ENDED, FAILED, TOKENS, Address, Counters, Plan, Share
from measure.load.prompts import Conversation
from measure.load.targets import Answer, Request, RequestCancelledError, RequestFailedError, Target
from measure.load.workloads import Session, Traits, Turn

_PREPARED = 64
"""Number of sessions that are prepared ahead."""
_TIMER_S = 0.0012
"""Largest delay of an event loop timer, in seconds."""
_HELD_BACK_S = 10.0
"""Arrivals stop when a session has waited this long, in seconds, because of the limit on sessions in progress."""
_PROBE_S = 0.01
"""Interval between measurements of the event loop delay, in seconds."""


@dataclass(frozen=True, slots=True)
class Generated:
    """Progress of one process."""

    outcomes: list[Outcome]
    loop_late_s: "array[float]"
    """Delays of the process's event loop. A token may have been recorded this much too late."""
    shortened: int
    """Turns that were truncated or skipped because they exceed the model's context."""
    cpu_s: float
    """CPU time of the process."""
    held_back: int
    """Sessions that waited because too many were open."""


def open_target(address: Address, token: str) -> GrpcTarget | HttpTarget:
    """Return the server; call this on a running event loop.

    Raises:
        OSError: the CA file cannot be read.
    """
    if address.url:
        context = ssl.create_default_context(cafile=address.tls_ca) if address.tls_ca else None
        return HttpTarget(Url.parse(address.url), model=address.model, token=token, tls=context, extra=address.extra)
    secure = None
    if address.tls_ca:
        with open(address.tls_ca, "rb") as file:
            secure = grpc.ssl_channel_credentials(file.read())
    return GrpcTarget(address.grpc, credentials=secure, token=token, connections=address.connections)


async def get_ready(target: Target) -> None:
    """Do in advance what would delay the first requests: connect, and run the garbage collector."""
    await target.connect()
    gc.collect()
    # Later full collections then examine only objects that were created during the run.
    gc.freeze()


async def generate(plan: Plan, share: Share, target: Target, counters: Counters, start: float) -> Generated:
    """Generate one share of a run.

    Args:
        plan: the run.
        share: the part of this process.
        target: the server.
        counters: running totals, and the request to stop.
        start: time of `time.perf_counter` at which the run begins.
    """
    cpu_s = time.process_time()
    generator = _Generator(plan, share, target, counters, start)
    probe = asyncio.create_task(generator.probe())
    try:
        await generator.run()
    finally:
        probe.cancel()
    cpu_s = time.process_time() - cpu_s
    return Generated(generator.outcomes, generator.loop_late_s, generator.shortened, cpu_s, generator.held_back)


class _Generator:
    def __init__(self, plan: Plan, share: Share, target: Target, counters: Counters, start: float) -> None:
        self.outcomes: list[Outcome] = []
        self.loop_late_s = array("d")
        self.shortened = self.held_back = 0
        self._plan, self._share, self._target, self._counters, self._start = plan, share, target, counters, start
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Begin all sessions and wait for them to end, as long as the plan allows."""
        match self._plan.arrivals:
            case Users() as users:
                for number in range(self._share.number, users.count, self._share.of):
                    self._begin(self._user(number, users))
                await self._wait_for_users()
            case arrivals:
                await self._open_loop(arrivals)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._plan.drain_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def probe(self) -> None:
        """Measure the delay of the event loop until cancelled."""
        while True:
            due = time.perf_counter() + _PROBE_S
            await asyncio.sleep(_PROBE_S)
            self.loop_late_s.append(max(time.perf_counter() - due - 0.001, 0.0))

    # Open loop

    async def _open_loop(self, arrivals: OpenLoop) -> None:
        free = asyncio.Semaphore(max(self._share.part(self._plan.max_in_flight), 1))
        prepared: asyncio.Queue[tuple[int, float, Session] | None] = asyncio.Queue(_PREPARED)
        preparing = asyncio.create_task(self._prepare(arrivals, prepared))
        try:
            while (item := await prepared.get()) is not None:
                index, due_s, session = item
                await self._sleep_until(due_s)
                # At the concurrency limit the generator waits here, but the session's intended start does not change.
                self.held_back += free.locked()
                await free.acquire()
                if self._now() - due_s > _HELD_BACK_S and self._plan.stops_early:
                    self._counters.stop()
                if self._counters.is_stopped:
                    break
                task = self._begin(self._session(index, session, due_s, counted=due_s >= self._plan.warmup_s))
                task.add_done_callback(lambda _: free.release())
        finally:
            preparing.cancel()

    async def _prepare(self, arrivals: OpenLoop, prepared: "asyncio.Queue[tuple[int, float, Session] | None]") -> None:
        async for item in self._schedule(arrivals):
            await prepared.put(item)
        await prepared.put(None)

    async def _schedule(self, arrivals: OpenLoop) -> AsyncIterator[tuple[int, float, Session]]:
        counted = 0
        for index, due_s in enumerate(arrivals.times(self._plan.seed)):
            counted += due_s >= self._plan.warmup_s
            if self._plan.sessions is not None and counted > self._plan.sessions:
                return
            if self._plan.end_s is not None and due_s >= self._plan.end_s:
                return
            if index % self._share.of == self._share.number:
                session = self._plan.workload.session(index)
                if session is None:
                    return
                yield index, due_s, session
                await asyncio.sleep(0)

    # Closed loop

    async def _user(self, number: int, users: Users) -> None:
        due_s, index, done = 0.0, number, 0
        while not self._counters.is_stopped and not self._is_over(due_s):
            session = self._plan.workload.session(index)
            if session is None:
                return
            counted = due_s >= self._plan.warmup_s
            if counted and self._plan.sessions is not None:
                # Assign sessions to users in a fixed way, so that processes need not coordinate.
                if done >= Share(number, users.count).part(self._plan.sessions):
                    return
                done += 1
            await self._sleep_until(due_s)
            await self._session(index, session, due_s, counted=counted)
            due_s, index = self._now() + users.think_s, index + users.count

    def _is_over(self, due_s: float) -> bool:
        return self._plan.end_s is not None and due_s >= self._plan.end_s

    async def _wait_for_users(self) -> None:
        """Wait until all users have finished, or the arrival period is over."""
        while self._tasks and not self._is_over(self._now()) and not self._counters.is_stopped:
            await asyncio.wait(self._tasks, timeout=0.2)

    # Sessions

    def _begin(self, work: Coroutine[None, None, None]) -> "asyncio.Task[None]":
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _session(self, index: int, session: Session, due_s: float, *, counted: bool) -> None:
        traits = self._plan.traits.draw(index)
        conversation = Conversation(self._plan.prompts)
        turns, began_s = self._fitting(session), due_s
        for number, turn in enumerate(turns):
            is_last = number + 1 == len(turns)
            if number:
                due_s = self._now() + turn.pause_s
                await self._sleep_until(due_s)
            prompt = conversation.ask(turn)
            cancelled = traits.cancel_at is not None and number == 0
            request = Request(
                prompt,
                turn.output_tokens,
                self._plan.temperature,
                self._plan.ignore_eos,
                traits.tenant,
                traits.priority,
                timeout_s=self._plan.timeout_s,
                cancel_after=max(1, int((traits.cancel_at or 0.0) * turn.output_tokens)) if cancelled else None,
                keeps_answer=not is_last,
            )
            answer = Answer()
            answer.on_tokens = partial(self._count, answer)
            outcome = await self._request(request, answer, Outcome(index, due_s, 0.0, 0.0, turn=number), traits)
            is_complete = is_last and outcome.ending is Ending.DONE
            session_s = outcome.ended_s - began_s if is_complete else None
            self.outcomes.append(replace(outcome, counted=counted, session_s=session_s))
            if outcome.ending is not Ending.DONE:
                return
            conversation.answered("".join(answer.text), answer.token_ids)

    def _fitting(self, session: Session) -> list[Turn]:
        """Return the turns until the model's context is full."""
        found: list[Turn] = []
        said = 0
        for turn in session.turns:
            fitting = self._fit(turn, said)
            if fitting is None:
                break
            found.append(fitting)
            said += len(fitting.prompt) + fitting.output_tokens
        return found

    def _fit(self, turn: Turn, said: int) -> Turn | None:
        """Return the turn, truncated to the model's context; None if the context is full."""
        if self._plan.max_model_len is None or turn.text:
            return turn
        excess = said + len(turn.prompt) + turn.output_tokens - self._plan.max_model_len
        if excess <= 0:
            return turn
        self.shortened += 1
        if said or self._plan.max_model_len < 2:
            return None
        output = min(turn.output_tokens, self._plan.max_model_len // 2)
        return replace(turn, prompt=turn.prompt[: self._plan.max_model_len - output], output_tokens=output)

    async def _request(self, request: Request, answer: Answer, outcome: Outcome, traits: Traits) -> Outcome:
        ending, failure = Ending.DONE, ""
        self._counters.add(BEGUN)
        sent = time.perf_counter()
        try:
            await self._target.stream(request, answer)
        except RequestCancelledError:
            ending = Ending.CANCELLED
        except RequestFailedError as error:
            ending, failure = Ending.FAILED, str(error)
        except asyncio.CancelledError:
            ending, failure = Ending.FAILED, "unfinished"
        ended = time.perf_counter()
        if not answer.message_times:
            self._counters.add(ANSWERED)
        self._counters.add(ENDED)
        self._counters.add(FAILED, ending is Ending.FAILED)
        times = array("d", (each - self._start for each in answer.message_times))
        return replace(
            outcome,
            sent_s=sent - self._start,
            ended_s=ended - self._start,
            ending=ending,
            failure=failure,
            message_times_s=times,
            prompt_tokens=answer.prompt_tokens,
            cached_tokens=answer.cached_tokens,
            output_tokens=answer.output_tokens,
            asked_tokens=request.max_tokens,
            tenant=traits.tenant,
            priority=traits.priority,
        )

    def _count(self, answer: Answer, tokens: int) -> None:
        self._counters.add(TOKENS, tokens)
        if len(answer.message_times) == 1:
            self._counters.add(ANSWERED)

    # Time

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _sleep_until(self, due_s: float) -> None:
        await asyncio.sleep(max(due_s - self._now() - _TIMER_S, 0.0))
        # An event would be as late as a timer.
        while self._now() < due_s:  # noqa: ASYNC110
            await asyncio.sleep(0)
