"""The load generator over HTTP: no coordinated omission, every failure by its kind, sessions with their history."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from measure.commands._load import add_generator_flags, add_server_flags, add_workload_flags, base_plan
from measure.load.arrivals import Constant, Gamma, OpenLoop, Users
from measure.load.figures import Slo
from measure.load.generator import Generated, generate, open_target
from measure.load.outcomes import Ending, Outcome
from measure.load.plan import Address, Counters, Plan, Share
from measure.load.prompts import Prompts, Style
from measure.load.report import Report
from measure.load.run import Run, run_plan
from measure.load.workloads import Drawn, Lengths, TraitMix, Workload
from quire_server.cli._parser import OneLineParser
from tests.measure.openai_server import Answer, Reply, Server, answer_all, openai_server

FIXED = Lengths.fixed
WORKLOAD = Drawn(FIXED(8), FIXED(4))


def _plan(arrivals: OpenLoop | Users, workload: Workload = WORKLOAD, **more: Any) -> Plan:
    return replace(Plan(Address(), arrivals, workload, drain_s=20.0), **more)


def _run(plan: Plan, answer: Answer = answer_all) -> tuple[Run, Server]:
    async def work() -> tuple[Run, Server]:
        async with openai_server(answer) as server:
            address = replace(plan.address, url=server.url)
            run = await run_plan(replace(plan, address=address), Slo())
            return run, server

    return asyncio.run(work())


class _Stall:
    """Answers nothing until the given number of requests has arrived, and then everything."""

    def __init__(self, requests: int) -> None:
        self._left = requests
        self._over = asyncio.Event()

    async def __call__(self, body: dict[str, Any], reply: Reply) -> None:
        self._left -= 1
        if self._left == 0:
            self._over.set()
        await self._over.wait()
        await answer_all(body, reply)


def test_a_stall_shows_in_every_request_that_was_due_meanwhile() -> None:
    """The server answers nothing until 30 requests have arrived: none of these 30 has a token before, and all wait."""
    run, _ = _run(_plan(Constant(60.0), sessions=40), _Stall(30))
    stall_end = min(each.message_times_s[0] for each in run.outcomes)
    stalled = run.outcomes[:30]

    assert len(run.outcomes) == 40
    assert stall_end >= run.outcomes[29].intended_s
    assert all(each.ttft_s is not None and each.ttft_s >= stall_end - each.intended_s - 1e-9 for each in stalled)
    assert run.figures.ttft.p50 > 0.1  # Half of the 40 requests were due more than 0.1 s before the thirtieth request.


def test_a_request_that_the_generator_could_not_send_counts_from_its_intended_start() -> None:
    """With two sessions at most and a server that takes 50 ms for each, the generator's queue is in the figures."""

    async def slow(body: dict[str, Any], reply: Reply) -> None:
        await asyncio.sleep(0.05)
        await answer_all(body, reply)

    run, _ = _run(_plan(Constant(100.0), sessions=40, max_in_flight=2), slow)
    last = run.outcomes[-1]

    assert [each.intended_s for each in run.outcomes] == [number / 100 for number in range(40)]
    # Twenty sequential pairs take a second; the last one was due after 0.39 s.
    assert last.ttft_s is not None
    assert last.ttft_s >= 20 * 0.05 - 0.39
    assert last.late_s >= 19 * 0.05 - 0.39
    assert run.held_back >= 20
    assert "requests were sent" not in run.bottleneck
    assert any("sessions began late" in each for each in Report("", "", Slo(), (run,)).warnings())


def test_a_generator_that_cannot_keep_up_says_so() -> None:
    """The generator's event loop is blocked for 30 ms by each of 20 requests per second."""

    async def blocking(body: dict[str, Any], reply: Reply) -> None:
        time.sleep(0.03)  # noqa: ASYNC251 (the server shares the generator's loop)
        await answer_all(body, reply)

    run, _ = _run(_plan(Constant(20.0), sessions=20), blocking)

    assert run.bottleneck
    assert any(each.endswith("use more --processes") for each in Report("", "", Slo(), (run,)).warnings())


def _refuse(reply: Reply) -> None:
    reply.refuse(429, "queue_full")


def _hang_up(reply: Reply) -> None:
    reply.writer.write(b"HTTP/1.1 200 OK\r\n")
    reply.hang_up()


def test_a_connection_that_the_server_closes_is_replaced() -> None:
    """A kept connection ends without an answer to the next request, which is sent again; a new one that ends, fails."""
    answered: set[asyncio.StreamWriter] = set()
    hung_up: list[asyncio.StreamWriter] = []

    async def once(body: dict[str, Any], reply: Reply) -> None:
        if reply.writer in answered or len(hung_up) >= 3:
            hung_up.append(reply.writer)
            reply.hang_up()
        else:
            answered.add(reply.writer)
            await answer_all(body, reply)

    run, _ = _run(_plan(Users(1), sessions=5), once)

    assert (run.figures.done, run.figures.failures) == (3, {"connection: ConnectionResetError": 2})
    assert len(hung_up) == 5  # Three connections are reused, then two are new.


@pytest.mark.parametrize(
    ("fail", "kind"),
    [(_refuse, "HTTP 429 queue_full"), (_hang_up, "connection: ConnectionResetError")],
)
def test_failures_are_counted_by_kind(fail: Callable[[Reply], None], kind: str) -> None:
    """Every second request fails; the others count as answered, and only they have latencies."""
    number = 0

    async def every_second(body: dict[str, Any], reply: Reply) -> None:
        nonlocal number
        number += 1
        if number % 2:
            fail(reply)
        else:
            await answer_all(body, reply)

    run, _ = _run(_plan(Users(1), sessions=10), every_second)

    assert run.figures.failures == {kind: 5}
    assert (run.figures.done, run.figures.ttft.count, run.figures.good_share) == (5, 5, 0.5)


async def _error_in_stream(body: dict[str, Any], reply: Reply) -> None:
    await reply.token()
    await reply.event({"error": {"message": "lost", "type": "worker_lost"}})
    await reply.end(0, 1)


async def _half(body: dict[str, Any], reply: Reply) -> None:
    await reply.token()
    reply.writer.write(b"0\r\n\r\n")


async def _silent(body: dict[str, Any], reply: Reply) -> None:
    await reply.token()
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("answer", "kind", "limits"),
    [
        (_error_in_stream, "error in stream worker_lost", {}),
        (_half, "incomplete stream", {}),
        (_silent, "DEADLINE", {"timeout_s": 0.2}),
        (_silent, "unfinished", {"drain_s": 0.2}),
    ],
)
def test_an_answer_that_does_not_end_well_is_a_failure(answer: Answer, kind: str, limits: dict[str, Any]) -> None:
    """An error after the first token, a stream that ends too early or not at all."""
    run, _ = _run(_plan(Constant(50.0), sessions=3, **limits), answer)

    assert run.figures.failures == {kind: 3}
    assert all(each.message_times_s for each in run.outcomes)


def test_an_unreachable_server_is_a_failure_of_each_request() -> None:
    """The run ends, with the kind of failure."""
    plan = _plan(Constant(50.0), sessions=3, address=Address(url="http://127.0.0.1:1"))
    run = asyncio.run(run_plan(plan, Slo()))

    assert run.figures.failures == {"connection: ConnectionRefusedError": 3}


@pytest.mark.parametrize("style", list(Style))
def test_a_turn_has_everything_said_before(style: Style) -> None:
    """A turn contains the prompt, the response and the new part; tokens if the server returns their ids."""

    async def ids(body: dict[str, Any], reply: Reply) -> None:
        for _ in range(body["max_tokens"]):
            if "messages" in body:
                await reply.event({"choices": [{"index": 0, "delta": {"content": " a"}}]})
            else:
                await reply.token(token_ids=[7] if body.get("return_token_ids") else [])
        await reply.end(1, body["max_tokens"])

    workload = Drawn(FIXED(5), FIXED(2), turns=FIXED(3))
    _, server = _run(_plan(Users(1), workload, sessions=1, prompts=Prompts(style)), ids)
    prompts = [body["messages"] if style is Style.CHAT else body["prompt"] for body in server.bodies]

    assert len(prompts) == 3
    match style:
        case Style.TOKENS:
            assert [len(prompt) for prompt in prompts] == [5, 5 + 2 + 5, 5 + 2 + 5 + 2 + 5]
            assert prompts[2][: len(prompts[1])] == prompts[1]
            assert prompts[1][5:7] == [7, 7]
        case Style.TEXT:
            assert prompts[1].startswith(prompts[0] + " a a ")
            assert prompts[2].startswith(prompts[1] + " a a ")
            assert len(prompts[0].split()) == 5
        case Style.CHAT:
            assert [message["role"] for message in prompts[2]] == ["user", "assistant"] * 2 + ["user"]
            assert prompts[2][1]["content"] == " a a"
            assert prompts[2][:3] == prompts[1]


def test_sessions_are_measured_as_a_whole() -> None:
    """The last turn has the session's time since its first intended start, even if it is the last that fits."""
    workload = Drawn(FIXED(5), FIXED(2), turns=FIXED(9), pause_s=0.01)
    run, _ = _run(_plan(Users(2), workload, sessions=4, max_model_len=22))
    sessions = [[each for each in run.outcomes if each.session == index] for index in range(4)]

    for session in sessions:
        assert [each.turn for each in session] == [0, 1, 2]
        assert [each.session_s for each in session[:-1]] == [None, None]
        assert session[-1].session_s == pytest.approx(session[-1].ended_s - session[0].intended_s)
    assert run.figures.session.count == 4
    assert run.figures.later_ttft.count == 8


def test_traits_are_sent() -> None:
    """Tenant and priority of each session; over HTTP a higher priority is a lower number, as in vLLM."""
    mix = TraitMix({"a": 1, "b": 1}, {5: 1})
    run, server = _run(_plan(Constant(100.0), sessions=20, traits=mix))

    assert {body["priority"] for body in server.bodies} == {-5}
    assert sorted(body["tenant"] for body in server.bodies) == sorted(each.tenant for each in run.outcomes)
    assert {each.tenant for each in run.outcomes} == {"a", "b"}


def test_cancelled_requests_are_neither_answered_nor_failed() -> None:
    """The client leaves in the middle of the answer."""

    async def long(body: dict[str, Any], reply: Reply) -> None:
        for _ in range(3):
            await reply.token()
        await asyncio.sleep(0.05)
        if not reply.writer.is_closing():
            await reply.end(1, 3)

    mix = TraitMix(cancel_ratio=0.5, seed=1)
    run, _ = _run(_plan(Constant(100.0), sessions=20, traits=mix), long)

    assert 0 < run.figures.cancelled < 20
    assert run.figures.cancelled == sum(mix.draw(index).cancel_at is not None for index in range(20))
    assert run.figures.done == 20 - run.figures.cancelled
    assert run.figures.failed == 0


def test_a_warm_up_is_sent_but_not_counted() -> None:
    """Sessions that begin in the first 0.3 s are not in the results; the number of sessions counts only the others."""
    run, server = _run(_plan(Constant(50.0), warmup_s=0.3, sessions=20))

    assert len(server.bodies) == 35
    assert run.figures.requests == 20
    assert [each.counted for each in run.outcomes] == [False] * 15 + [True] * 20


def test_processes_share_the_sessions() -> None:
    """Two shares have each session once, at the same times and with the same prompts as one process."""
    plan = _plan(Gamma(100.0), sessions=30)
    alone, first = _run(plan)

    async def share(plan: Plan, number: int) -> Generated:
        target = open_target(plan.address, "")
        counters = Counters([0] * Counters.size(2), Share(number, 2))
        try:
            return await generate(plan, Share(number, 2), target, counters, time.perf_counter())
        finally:
            await target.close()

    async def both() -> tuple[list[Outcome], Server]:
        async with openai_server() as server:
            shared = replace(plan, address=Address(url=server.url))
            parts = await asyncio.gather(share(shared, 0), share(shared, 1))
            return sorted((each for part in parts for each in part.outcomes), key=lambda each: each.session), server

    outcomes, second = asyncio.run(both())

    assert [each.session for each in outcomes] == list(range(30))
    assert [each.intended_s for each in outcomes] == [each.intended_s for each in alone.outcomes]
    assert sorted(body["prompt"] for body in second.bodies) == sorted(body["prompt"] for body in first.bodies)


def test_users_never_have_more_requests_than_they_are() -> None:
    """Three users: at most three requests at once, and as many sessions as asked for."""
    live = most = 0

    async def counted(body: dict[str, Any], reply: Reply) -> None:
        nonlocal live, most
        live += 1
        most = max(most, live)
        await asyncio.sleep(0.01)
        live -= 1
        await answer_all(body, reply)

    run, server = _run(_plan(Users(3, think_s=0.01), sessions=20), counted)

    assert most == 3
    assert (len(server.bodies), run.figures.done) == (20, 20)


def test_a_server_that_refuses_unknown_fields_is_measured_without_them() -> None:
    """The probe detects this and reports it, and no request has the field; texts are scaled by the server's counts."""

    async def strict(body: dict[str, Any], reply: Reply) -> None:
        if "ignore_eos" in body:
            reply.refuse(422, "unknown_field")
            return
        for _ in range(body["max_tokens"]):
            await reply.token()
        await reply.end(5 + 2 * len(body["prompt"].split()), body["max_tokens"])

    async def work() -> tuple[Plan, Server]:
        async with openai_server(strict) as server:
            parser = OneLineParser("bench", description="", examples="")
            for add_flags in (add_server_flags, add_workload_flags, add_generator_flags):
                add_flags(parser)
            return await base_plan(parser.parse([f"--url={server.url}"])), server

    plan, server = asyncio.run(work())

    assert not plan.ignore_eos
    assert plan.address.model == "small"
    assert (plan.prompts.scale.per_word, plan.prompts.scale.fixed) == (2.0, 5.0)
    assert len(server.bodies) == 3


def test_a_server_that_counts_only_outside_of_streams_is_measured() -> None:
    """Texts are scaled by token counts from non-streaming responses; the report lists unknown and ignored values."""

    async def terse(body: dict[str, Any], reply: Reply) -> None:
        if not body.get("stream"):
            usage = {"prompt_tokens": 3 * len(body["prompt"].split())}
            answer = json.dumps({"choices": [{"text": " a"}], "usage": usage}).encode()
            reply.writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(answer)}\r\n\r\n".encode() + answer)
            return
        await reply.token()
        await reply.event({"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]})
        await reply.raw(b"data: [DONE]\n\n")
        reply.writer.write(b"0\r\n\r\n")

    async def work() -> Run:
        async with openai_server(terse) as server:
            parser = OneLineParser("bench", description="", examples="")
            for add_flags in (add_server_flags, add_workload_flags, add_generator_flags):
                add_flags(parser)
            plan = await base_plan(parser.parse([f"--url={server.url}"]))
            assert plan.prompts.scale.per_word == 3.0
            return await run_plan(replace(plan, arrivals=Users(2), workload=WORKLOAD, sessions=4), Slo())

    run = asyncio.run(work())
    warnings = Report("", "", Slo(), (run,)).warnings()

    assert run.figures.done == 4
    assert any(each.startswith("4 of 4 responses have fewer tokens than requested") for each in warnings)
    assert any(each.startswith("the server does not report prompt tokens") for each in warnings)


@pytest.mark.release
def test_an_over_saturated_server_ends_the_arrivals() -> None:
    """A server that handles five of twenty requests per second ends a ten-minute run early."""
    free = asyncio.Lock()

    async def slow(body: dict[str, Any], reply: Reply) -> None:
        async with free:
            await asyncio.sleep(0.2)
        await answer_all(body, reply)

    run, _ = _run(_plan(Gamma(20.0), duration_s=600.0, drain_s=1.0), slow)

    assert run.saturated_at_s is not None
    assert run.saturated_at_s < 60
    assert all(each.ending is Ending.DONE or each.failure == "unfinished" for each in run.outcomes)
