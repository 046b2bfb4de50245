"""What a front end reports of finished calls, for the scheduler's record."""

import asyncio
from pathlib import Path

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from services.link.outgoing import Outgoing
from tests.services.stack import Stack, TestCore, running_stack, tokens_request
from tests.services.test_core_link import collect
from tests.services.test_stalled_readers import LONG, gives_no_more_credit, stalled_call


def _reports(core: TestCore) -> list[link_pb2.RequestReport]:
    return [report for message in core.messages for report in message.request_reports]


async def _report(stack: Stack) -> link_pb2.RequestReport:
    await stack.core.saw(lambda core: bool(_reports(core)))
    return _reports(stack.core)[0]


def test_a_finished_call_is_reported_once_with_its_durations(tmp_path: Path) -> None:
    """The report names the stream, and its durations fit into each other."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            await stack.generate(v1.GenerateRequest(text="the fox " * 50, request_id="r"))
            report = await _report(stack)
            await stack.generate(tokens_request(5, 6, 7, max_tokens=2))
            await stack.core.saw(lambda core: len(_reports(core)) == 2)

            assert report.stream == stack.core.submissions[0].stream
            assert 0 < report.tokenise_us <= report.submitted_us
            assert 0 < report.ended_us <= report.finished_us
            assert report.detokenise_us + report.client_us <= report.finished_us - report.ended_us
            assert report.grammar_us < 1000

    asyncio.run(main())


def test_a_client_that_does_not_read_is_the_reason_of_its_time(tmp_path: Path) -> None:
    """While the client reads nothing, the front end waits for it; that time is in the report."""

    async def main() -> None:
        async with (
            running_stack(tmp_path, core=lambda a: TestCore(a, model=LONG, tokens_per_step=5000)) as stack,
            stalled_call(stack, max_tokens=200_000) as call,
        ):
            await stack.core.saw(gives_no_more_credit)
            await collect(call)
            report = await _report(stack)

            assert report.client_before_us + report.client_us > report.finished_us / 2

    asyncio.run(main())


def test_reports_are_bounded() -> None:
    """A front end that cannot send drops reports beyond a bound, and nothing else."""
    outgoing = Outgoing()
    for stream in range(3000):
        outgoing.report_call(link_pb2.RequestReport(stream=stream + 1))
    outgoing.cancel(7)
    messages = [link_pb2.FrontendMessage.FromString(payload) for payload in outgoing.take()]

    assert 0 < sum(len(message.request_reports) for message in messages) < 3000
    assert any(message.cancelled for message in messages)
    assert not outgoing.take()
