"""Generate, Tokenize, Detokenize and GetModel through a real channel, front end and link."""

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc import aio

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from quire.v1 import generation_pb2 as v1
from quire.v1 import model_pb2, model_pb2_grpc
from shared.columns import from_column
from tests.services.stack import MODEL, TestCore, joined_ids, joined_text, running_stack, tokens_request
from tests.services.tokenizers_for_tests import ADDED, BOS, byte_level

FOX = byte_level().encode("the fox 🙂 ", add_special_tokens=False).ids


def run_one(folder: Path, request: v1.GenerateRequest, tokens_per_step: int = 1) -> tuple[list[v1.Delta], v1.Finished]:
    """The answer of a fresh stack to one request."""

    async def main() -> tuple[list[v1.Delta], v1.Finished]:
        async with running_stack(folder, core=lambda a: TestCore(a, tokens_per_step=tokens_per_step)) as stack:
            return await stack.generate(request)

    return asyncio.run(main())


@pytest.mark.parametrize("tokens_per_step", [1, 5])
def test_an_answer_is_deltas_and_then_finished(tmp_path: Path, tokens_per_step: int) -> None:
    """Ids, text, indices, usage and reason all agree, whether the core sends one token a step or several."""
    deltas, finished = run_one(tmp_path, tokens_request(*FOX, max_tokens=40), tokens_per_step)

    expected = (FOX * 40)[:40]
    assert joined_ids(deltas) == expected
    assert joined_text(deltas) == byte_level().decode(expected)
    indices = [delta.first_index for delta in deltas if delta.token_ids]
    lengths = [len(delta.token_ids) for delta in deltas if delta.token_ids]
    assert indices == [sum(lengths[:i]) for i in range(len(lengths))]
    assert finished.reason == v1.FINISH_REASON_LENGTH
    assert finished.usage == v1.Usage(prompt_tokens=len(FOX), completion_tokens=40)
    assert finished.model == MODEL.name
    assert 0 < finished.timings.first_token.ToNanoseconds() <= finished.timings.total.ToNanoseconds()


def test_a_text_prompt_is_tokenized_with_its_special_tokens(tmp_path: Path) -> None:
    """The core gets the tokenizer's ids for the text, including the beginning-of-sequence token."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            deltas, finished = await stack.generate(
                v1.GenerateRequest(text="the fox", output=v1.OutputOptions(include_special_tokens=True))
            )
            tokenized = await stack.generation.Tokenize(v1.TokenizeRequest(text="the fox"))

            assert joined_text(deltas).startswith("<bos>the fox<bos>the fox")
            assert finished.usage.prompt_tokens == len(tokenized.token_ids)
            assert finished.usage.completion_tokens == 64  # the configured default

    asyncio.run(main())


def test_a_token_that_the_model_lacks_is_refused_by_the_front_end(tmp_path: Path) -> None:
    """A prompt, chat or embedding input with a token that the model lacks is refused by its field.

    A tokenizer may know more tokens than the model. A bad word of such tokens has no effect.
    """
    added = MODEL.vocab_size - 1
    model = link_pb2.ServedModel()
    model.CopyFrom(MODEL)
    model.vocab_size, model.hidden_size = added, 2

    async def main() -> None:
        async with running_stack(tmp_path, core=lambda address: TestCore(address, model=model)) as stack:
            chat = v1.ChatInput(messages=[v1.ChatMessage(role="user", content=ADDED)])
            wrong = f"contains token {added} .'{ADDED}'., which the model"
            for request in (v1.GenerateRequest(text=f"the {ADDED}"), v1.GenerateRequest(chat=chat)):
                with pytest.raises(aio.AioRpcError, match=f"{request.WhichOneof('input')}: {wrong}") as error:
                    await stack.generate(request)
                assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(aio.AioRpcError, match=rf"inputs\[0\].text: {wrong}"):
                await stack.generation.Embed(v1.EmbedRequest(inputs=[v1.EmbedInput(text=ADDED)]))
            assert not stack.core.submissions

            words = v1.SamplingOptions(bad_words=[ADDED, f"the {ADDED}", "the"])
            await stack.generate(v1.GenerateRequest(text="the", sampling=words))
            (submission,) = stack.core.submissions
            told = plan_pb2.SamplingParams.FromString(submission.sampling)
            forbidden = [told.banned_token_ids, *told.bad_words]
            assert byte_level().token_to_id("the") in from_column(told.banned_token_ids)
            assert max(int(from_column(each).max()) for each in forbidden) < added

    asyncio.run(main())


def test_a_conversation_is_rendered_by_the_template(tmp_path: Path) -> None:
    """Chat input runs on exactly the ids that Tokenize gives for it."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            chat = v1.ChatInput(messages=[v1.ChatMessage(role="user", content="hello")])
            tokenized = await stack.generation.Tokenize(v1.TokenizeRequest(chat=chat))
            ids = list(tokenized.token_ids)
            stop = v1.StopOptions(max_tokens=len(ids))
            deltas, _ = await stack.generate(v1.GenerateRequest(chat=chat, stop=stop))

            assert byte_level().decode(ids) == "user: hello\nassistant:"
            assert joined_ids(deltas) == ids

    asyncio.run(main())


def test_a_stop_string_ends_the_answer_before_it(tmp_path: Path) -> None:
    """The text ends before the match, reason and usage agree, and the core gets the number of counted tokens."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            deltas, finished = await stack.generate(tokens_request(*FOX, max_tokens=400, stop=("🙂 the", "zzz")))

            text = byte_level().decode(FOX * 2)
            assert joined_text(deltas) == text[: text.index("🙂 the")]
            assert finished.reason == v1.FINISH_REASON_STOP
            assert finished.stop_string == "🙂 the"
            assert finished.usage.completion_tokens == len(joined_ids(deltas))
            (match,) = [match for message in stack.core.messages for match in message.stop_matches]
            assert match.keep_tokens == len(joined_ids(deltas))
            assert stack.core.cancelled == []

    asyncio.run(main())


def test_the_request_id_is_echoed(tmp_path: Path) -> None:
    """The client's id, or a drawn one, is in the initial metadata and in Finished."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            for request_id in ("mine-1", ""):
                call = stack.generation.Generate(tokens_request(1, 2, max_tokens=2, request_id=request_id))
                metadata = dict(await call.initial_metadata())
                responses = [response async for response in call]

                assert metadata["quire-request-id"] == (request_id or responses[-1].finished.request_id)
                assert responses[-1].finished.request_id.startswith(request_id or "req-")

    asyncio.run(main())


def test_many_streams_at_once_do_not_mix(tmp_path: Path) -> None:
    """64 concurrent answers are each their own prompt's."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            prompts = [[10 + i, 100 + i, 200 + i] for i in range(64)]
            answers = await asyncio.gather(*(stack.generate(tokens_request(*p, max_tokens=50)) for p in prompts))

            for prompt, (deltas, finished) in zip(prompts, answers, strict=True):
                assert joined_ids(deltas) == (prompt * 50)[:50]
                assert finished.usage.completion_tokens == 50

    asyncio.run(main())


def test_a_credit_of_one_token_is_enough(tmp_path: Path) -> None:
    """With the smallest credit every token is a message of its own, and stop strings do not stall the stream."""

    async def main() -> None:
        async with running_stack(tmp_path, stream_credit=4) as stack:
            deltas, _ = await stack.generate(tokens_request(*FOX, max_tokens=30))
            assert [len(delta.token_ids) for delta in deltas] == [1] * 30
            assert joined_text(deltas) == byte_level().decode((FOX * 30)[:30])

            deltas, _ = await stack.generate(tokens_request(*FOX, max_tokens=30, stop=("the fox 🙂 the fox!",)))
            assert joined_ids(deltas) == (FOX * 30)[:30]

    asyncio.run(main())


def test_detokenize_writes_what_tokenize_read(tmp_path: Path) -> None:
    """Tokenize and Detokenize are inverse; special tokens are written when asked."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            tokenized = await stack.generation.Tokenize(v1.TokenizeRequest(text="naïve 🙂"))
            plain = await stack.generation.Detokenize(v1.DetokenizeRequest(token_ids=tokenized.token_ids))
            full = await stack.generation.Detokenize(
                v1.DetokenizeRequest(token_ids=tokenized.token_ids, include_special_tokens=True)
            )
            bare = await stack.generation.Tokenize(v1.TokenizeRequest(text="naïve 🙂", omit_special_tokens=True))

            assert plain.text == "naïve 🙂"
            assert full.text == "<bos>naïve 🙂"
            assert [BOS, *bare.token_ids] == list(tokenized.token_ids)
            assert tokenized.max_model_len == MODEL.max_model_len

    asyncio.run(main())


def test_get_model_describes_what_the_core_serves(tmp_path: Path) -> None:
    """The answer has the name, the limits and the presence of a chat template."""

    async def main() -> None:
        async with running_stack(tmp_path, chat_template=False) as stack:
            response = await model_pb2_grpc.ModelServiceStub(stack.channel).GetModel(model_pb2.GetModelRequest())

            assert response.model == model_pb2.Model(
                name=MODEL.name,
                architecture=MODEL.architecture,
                max_model_len=MODEL.max_model_len,
                vocab_size=MODEL.vocab_size,
                eos_token_ids=MODEL.eos_token_ids,
                dtype=MODEL.dtype,
                has_chat_template=False,
                fingerprint=MODEL.fingerprint,
            )

    asyncio.run(main())
