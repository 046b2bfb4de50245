"""Requests for a prompt alone: `max_tokens` 0 with `echo` or with log-probabilities of the prompt."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from quire.v1 import generation_pb2 as v1
from tests.services.stack import MODEL, running_stack
from tests.services.tokenizers_for_tests import EOS

PROMPT = [5, 6, EOS, 7]


def request(**output: Any) -> v1.GenerateRequest:
    """Return a request with `max_tokens` 0. The echo core repeats the prompt, so a stop token ends the output."""
    return v1.GenerateRequest(
        token_ids=v1.TokenIds(ids=PROMPT),
        stop=v1.StopOptions(max_tokens=0, stop_token_ids=[5]),
        output=v1.OutputOptions(**output),
    )


@pytest.mark.parametrize("output", [{"echo": True}, {"prompt_logprobs": 1}])
@pytest.mark.parametrize("choices", [1, 2])
def test_a_prompt_alone_has_no_output_in_grpc(tmp_path: Path, output: dict[str, Any], choices: int) -> None:
    """The answer is the prompt and its end: no delta, no generated token in the usage, reason LENGTH."""

    async def check() -> None:
        async with running_stack(tmp_path) as stack:
            wanted = request(**output)
            wanted.sampling.n = choices
            events = [each async for each in stack.generation.Generate(wanted)]
            kinds = [each.WhichOneof("event") for each in events]
            assert kinds == ["prompt", *["choice_finished"] * (choices if choices > 1 else 0), "finished"]
            assert list(events[0].prompt.token_ids) == PROMPT
            assert len(events[0].prompt.logprobs) == (len(PROMPT) if "prompt_logprobs" in output else 0)
            finished = events[-1].finished
            assert (finished.reason, finished.WhichOneof("stop")) == (v1.FINISH_REASON_LENGTH, None)
            assert (finished.usage.prompt_tokens, finished.usage.completion_tokens) == (len(PROMPT), 0)

            once = await stack.generation.GenerateOnce(v1.GenerateOnceRequest(request=wanted))
            assert [each.finished.completion_tokens for each in once.choices] == [0] * choices
            assert not any(each.token_ids or each.text for each in once.choices)

    asyncio.run(check())


def test_a_prompt_alone_has_no_output_for_routers_and_chats(tmp_path: Path) -> None:
    """The protocol of vLLM's routers and chats with prompt_logprobs have the same rule."""

    async def check() -> None:
        async with running_stack(tmp_path) as stack:
            engine = pb_grpc.VllmEngineStub(stack.channel)
            params = pb.SamplingParams(max_tokens=0, prompt_logprobs=1)
            tokens = pb.TokenizedInput(input_ids=PROMPT)
            wanted = pb.GenerateRequest(tokenized=tokens, sampling_params=params, stream=True)
            (only,) = [each async for each in engine.Generate(wanted)]
            assert (list(only.complete.output_ids), only.complete.finish_reason) == ([], "length")
            assert list(only.complete.input_logprobs.token_ids) == PROMPT

            chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 0, "prompt_logprobs": 0}
            answer = (await stack.http.post("/v1/chat/completions", json=chat)).json()
            (choice,) = answer["choices"]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
            assert len(choice["prompt_logprobs"]) == answer["usage"]["total_tokens"]

    asyncio.run(check())


def test_no_tokens_without_the_prompt_is_an_error_that_names_the_remedy(tmp_path: Path) -> None:
    """Without echo and prompt_logprobs there would be nothing to return."""

    async def check() -> None:
        async with running_stack(tmp_path) as stack:
            with pytest.raises(aio.AioRpcError) as refused:
                await stack.generation.GenerateOnce(v1.GenerateOnceRequest(request=request()))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "0 needs echo or prompt_logprobs" in str(refused.value.details())
            for extra in ({}, {"logprobs": 1}):
                body = {"model": MODEL.name, "prompt": PROMPT, "max_tokens": 0, **extra}
                answer = await stack.http.post("/v1/completions", json=body)
                assert answer.status_code == 400
                assert answer.json()["error"]["param"] == "max_tokens"
                assert "0 needs echo" in answer.json()["error"]["message"]
            minimum = request(echo=True)
            minimum.stop.min_tokens = 1
            with pytest.raises(aio.AioRpcError, match="min_tokens"):
                await stack.generation.GenerateOnce(v1.GenerateOnceRequest(request=minimum))
            assert not stack.core.submissions

    asyncio.run(check())


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": PROMPT, "prompt_logprobs": 20, "n": 128}, "prompt_logprobs"),
        ("/v1/completions", {"prompt": PROMPT, "echo": True, "logprobs": 20, "n": 128}, "logprobs"),
        ("/v1/completions", {"prompt": [PROMPT] * 256, "prompt_logprobs": 4}, "prompt_logprobs"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "prompt_logprobs": 20, "n": 128},
            "prompt_logprobs",
        ),
    ],
)
def test_log_probabilities_of_prompts_are_bounded(tmp_path: Path, path: str, body: dict[str, Any], field: str) -> None:
    """Each choice repeats them, so a small request could have an answer of any size."""

    async def check() -> None:
        async with running_stack(tmp_path) as stack:
            response = await stack.http.post(path, json={"max_tokens": 1, **body})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, field)
            assert error["message"].startswith(f"{field}: too many log-probabilities of prompts: n x prompts x ")

    asyncio.run(check())
