"""n > 1, echo, truncation, kept stop strings and whole answers, against a core that repeats the prompt."""

import asyncio
from pathlib import Path

import grpc
import pytest

from protos.quire.plan.v1 import plan_pb2
from quire.v1 import generation_pb2 as v1
from tests.services.stack import TestCore, running_stack, tokens_request
from tests.services.tokenizers_for_tests import byte_level

FOX = byte_level().encode("the fox ", add_special_tokens=False).ids


def test_each_choice_is_a_request_of_its_own_and_they_end_as_one(tmp_path: Path) -> None:
    """Choices share prompt and seed, differ in the number that keys their noise, and each ends once.

    One `Finished` with the usage of all follows.
    """

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            request = tokens_request(*FOX, max_tokens=9)
            request.sampling.n = 3
            responses = [response async for response in stack.generation.Generate(request)]
            sampling = [plan_pb2.SamplingParams.FromString(each.sampling) for each in stack.core.submissions]

            assert [each.choice for each in sampling] == [0, 1, 2]
            assert len({each.seed for each in sampling}) == 1
            tokens: dict[int, list[int]] = {0: [], 1: [], 2: []}
            for response in responses:
                tokens[response.delta.choice].extend(response.delta.token_ids)
            assert tokens == dict.fromkeys(range(3), (FOX * 9)[:9])
            ends = [each.choice_finished for each in responses if each.HasField("choice_finished")]
            assert sorted(end.choice for end in ends) == [0, 1, 2]
            assert all((end.reason, end.completion_tokens) == (v1.FINISH_REASON_LENGTH, 9) for end in ends)
            assert [each.HasField("finished") for each in responses].index(True) == len(responses) - 1
            assert responses[-1].finished.usage == v1.Usage(prompt_tokens=len(FOX), completion_tokens=27)

    asyncio.run(main())


def test_leaving_cancels_every_choice(tmp_path: Path) -> None:
    """A disconnecting client ends all choices of its request."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            request = tokens_request(*FOX, max_tokens=4000)
            request.sampling.n = 4
            call = stack.generation.Generate(request)
            await call.read()
            call.cancel()
            await stack.core.saw(lambda core: sum(len(column) for column in core.cancelled) == 4 * 4)

    asyncio.run(main())


def test_a_whole_answer_is_what_the_stream_would_have_carried(tmp_path: Path) -> None:
    """GenerateOnce gathers every choice, the prompt, usage and ends."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            request = tokens_request(*FOX, max_tokens=5, request_id="mine")
            request.sampling.n = 2
            request.output.echo = True
            answer = await stack.generation.GenerateOnce(v1.GenerateOnceRequest(request=request))
            single = await stack.generation.GenerateOnce(
                v1.GenerateOnceRequest(request=tokens_request(*FOX, max_tokens=9, stop=("fox",)))
            )

            expected = (FOX * 5)[:5]
            assert [(choice.index, list(choice.token_ids)) for choice in answer.choices] == [
                (0, expected),
                (1, expected),
            ]
            assert [choice.text for choice in answer.choices] == [byte_level().decode(expected)] * 2
            assert (list(answer.prompt.token_ids), answer.prompt.text) == (FOX, "the fox ")
            assert answer.usage.completion_tokens == 10
            assert answer.request_id == "mine"
            (choice,) = single.choices
            assert (choice.text, choice.finished.reason) == ("the ", v1.FINISH_REASON_STOP)
            assert choice.finished.stop_string == "fox"
            assert choice.finished.completion_tokens == len(choice.token_ids)

    asyncio.run(main())


@pytest.mark.parametrize(("keep", "text"), [(False, "the "), (True, "the fox")])
def test_a_stop_string_is_kept_or_dropped(tmp_path: Path, keep: bool, text: str) -> None:
    """What is asked for stays in the text."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            request = tokens_request(*FOX, max_tokens=40, stop=("fox",))
            request.stop.include_stop_string = keep
            answer = await stack.generation.GenerateOnce(v1.GenerateOnceRequest(request=request))

            assert answer.choices[0].text == text
            assert answer.choices[0].finished.stop_string == "fox"

    asyncio.run(main())


def test_a_prompt_is_cut_from_the_left(tmp_path: Path) -> None:
    """truncate_prompt_tokens keeps the last tokens."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            request = tokens_request(*FOX, max_tokens=2)
            request.output.truncate_prompt_tokens = 2
            answer = await stack.generation.GenerateOnce(v1.GenerateOnceRequest(request=request))

            assert list(answer.choices[0].token_ids) == FOX[-2:]
            assert answer.usage.prompt_tokens == 2

    asyncio.run(main())


class SmallCore(TestCore):
    """A core whose queue has room for 20 requests or 100 tokens of a tenant."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._state.max_call_requests, self._state.max_call_tokens = 20, 100


@pytest.mark.parametrize(
    ("num_choices", "prompt", "reason"),
    [
        (21, FOX, "21 choices, but at most 20 requests of a tenant can wait (max_queued_requests); use fewer choices"),
        (
            2,
            [5] * 51,
            "2 choices of a prompt with 51 tokens, but at most 100 tokens of a tenant can wait (max_queued_tokens)",
        ),
    ],
)
def test_more_choices_than_can_wait_are_refused_at_once(
    tmp_path: Path, num_choices: int, prompt: list[int], reason: str
) -> None:
    """A retry would fail too, so the error is not one that clients retry. Nothing is submitted."""

    async def main() -> None:
        async with running_stack(tmp_path, core=SmallCore) as stack:
            request = tokens_request(*prompt, max_tokens=1)
            request.sampling.n = num_choices
            with pytest.raises(grpc.RpcError) as refused:
                await stack.generation.GenerateOnce(v1.GenerateOnceRequest(request=request))
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert f"sampling.n: {reason}" in str(refused.value.details())

            body = {"prompt": prompt, "n": num_choices, "max_tokens": 1}
            answer = await stack.http.post("/v1/completions", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, "n")
            assert f"n: {reason}" in error["message"]
            assert "retry-after" not in answer.headers
            assert not stack.core.submissions

    asyncio.run(main())


@pytest.mark.parametrize(
    ("num_prompts", "num_choices", "reason"),
    [
        (8, 3, "n: 3 choices for each of 8 prompts, but at most 20 requests of a tenant can wait"),
        (21, 1, "prompt: 21 prompts, but at most 20 requests of a tenant can wait"),
        (20, 1, ""),
    ],
)
def test_the_prompts_of_a_call_count_together(tmp_path: Path, num_prompts: int, num_choices: int, reason: str) -> None:
    """Each choice of each prompt is a request. A call with as many as can wait is served."""

    async def main() -> None:
        async with running_stack(tmp_path, core=SmallCore) as stack:
            body = {"prompt": ["a"] * num_prompts, "n": num_choices, "max_tokens": 1}
            answer = await stack.http.post("/v1/completions", json=body)
            assert answer.status_code == (400 if reason else 200)
            assert not reason or reason in answer.json()["error"]["message"]

    asyncio.run(main())
