"""Every rule of the public API's comments, as a table: request in, fields that are named out."""

import json
import math

import pytest
from google.protobuf.duration_pb2 import Duration

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from quire.v1 import generation_pb2 as v1
from services.requests.scheduling import MAX_BLOCK_KEYS, MAX_NAME, MAX_TIME_S, block_keys, left_ns
from services.requests.validation import (
    MAX_BAD_WORD,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_REQUEST_ID,
    MAX_STOP_STRING,
    MAX_STOP_STRINGS,
    MAX_TOKEN_SET,
    check_log_size,
    max_scores_bytes,
    resolve_max_tokens,
    validate,
)
from shared.errors import InvalidRequestError, ModelNotFoundError, UnsupportedFieldError
from shared.frames import MAX_LOGPROBS, MAX_PART_BYTES, MAX_SERVED_SEQUENCE
from shared.grammars import MAX_GRAMMAR
from shared.request_spec import RequestSpec
from tests.services.stack import MODEL, PLAIN

VOCAB = MODEL.vocab_size
(EOS,) = MODEL.eos_token_ids


def request(**fields: object) -> v1.GenerateRequest:
    """A valid request with some fields changed."""
    return v1.GenerateRequest(**{"token_ids": v1.TokenIds(ids=[1, 2, 3]), **fields})  # type: ignore[arg-type]


def sampling(**fields: object) -> v1.GenerateRequest:
    """A valid request with sampling options."""
    return request(sampling=v1.SamplingOptions(**fields))  # type: ignore[arg-type]


def stop(**fields: object) -> v1.GenerateRequest:
    """A valid request with stop options."""
    return request(stop=v1.StopOptions(**fields))  # type: ignore[arg-type]


def chat(*messages: tuple[str, str]) -> v1.GenerateRequest:
    """A conversation."""
    turns = [v1.ChatMessage(role=role, content=content) for role, content in messages]
    return v1.GenerateRequest(chat=v1.ChatInput(messages=turns))


TURN = v1.ChatMessage(role="user")


def tools(text: str) -> v1.GenerateRequest:
    """A conversation with tools."""
    return v1.GenerateRequest(chat=v1.ChatInput(messages=[TURN], tools_json=text))


def variables(text: str) -> v1.GenerateRequest:
    """A conversation with template variables."""
    return v1.GenerateRequest(chat=v1.ChatInput(messages=[TURN], template_variables_json=text))


def message(**fields: str) -> v1.GenerateRequest:
    """A conversation of one message with further fields."""
    return v1.GenerateRequest(chat=v1.ChatInput(messages=[v1.ChatMessage(role="user", **fields)]))


def call_with(arguments: str) -> str:
    """Return a message's tool calls: one call with these arguments."""
    return json.dumps([{"type": "function", "function": {"name": "f", "arguments": arguments}}])


INVALID: list[tuple[str, v1.GenerateRequest]] = [
    ("input", v1.GenerateRequest()),
    ("text", v1.GenerateRequest(text="")),
    ("text", v1.GenerateRequest(text="x" * (4 * 1024 * 1024 + 1))),
    ("token_ids", v1.GenerateRequest(token_ids=v1.TokenIds())),
    ("token_ids", v1.GenerateRequest(token_ids=v1.TokenIds(ids=[0, VOCAB]))),
    ("token_ids", v1.GenerateRequest(token_ids=v1.TokenIds(ids=[2**32 - 1]))),
    ("token_ids", v1.GenerateRequest(token_ids=v1.TokenIds(ids=[0] * ((1 << 20) + 1)))),
    ("chat.messages", chat()),
    ("chat.messages", chat(*[("user", "hi")] * 4097)),
    ("chat.messages[1].role", chat(("user", "hi"), ("", "hi"))),
    ("chat.messages[0].role", chat(("x" * 65, "hi"))),
    ("chat.messages[0].content", chat(("user", "x" * (4 * 1024 * 1024 + 1)))),
    ("request_id", request(request_id="x" * 129)),
    ("request_id", request(request_id="naïve")),
    ("request_id", request(request_id="a\nb")),
    *[("sampling.temperature", sampling(temperature=value)) for value in (math.nan, math.inf, -math.inf, -0.1, 100.5)],
    *[("sampling.top_p", sampling(top_p=value)) for value in (math.nan, 0.0, -1.0, 1.5, math.inf)],
    *[("sampling.min_p", sampling(min_p=value)) for value in (math.nan, -0.1, 1.5, math.inf)],
    ("sampling.top_k", sampling(top_k=2**31)),
    ("sampling.n", sampling(n=0)),
    ("sampling.n", sampling(n=129)),
    ("sampling.repetition_penalty", sampling(repetition_penalty=math.nan)),
    ("sampling.repetition_penalty", sampling(repetition_penalty=0.0)),
    ("sampling.repetition_penalty", sampling(repetition_penalty=1e-45)),
    ("sampling.repetition_penalty", sampling(repetition_penalty=11.0)),
    ("sampling.presence_penalty", sampling(presence_penalty=math.inf)),
    ("sampling.frequency_penalty", sampling(frequency_penalty=-2.5)),
    ("sampling.typical_p", sampling(typical_p=0.0)),
    ("sampling.logit_bias", sampling(logit_bias={VOCAB: 1.0})),
    ("sampling.logit_bias", sampling(logit_bias={1: 101.0})),
    ("sampling.logit_bias", sampling(logit_bias={1: math.nan})),
    ("sampling.allowed_token_ids", sampling(allowed_token_ids=[VOCAB])),
    ("sampling.banned_token_ids", sampling(banned_token_ids=[VOCAB])),
    ("sampling.banned_token_ids", sampling(allowed_token_ids=[1, 2], banned_token_ids=[2, 1])),
    ("sampling.banned_token_ids", sampling(banned_token_ids=range(VOCAB))),
    ("sampling.bad_words", sampling(bad_words=["x"] * 65)),
    ("sampling.bad_words[1]", sampling(bad_words=["x", ""])),
    ("stop.min_tokens", stop(min_tokens=9, max_tokens=8)),
    ("stop.min_tokens", stop(min_tokens=MODEL.max_model_len + 1)),
    ("stop.max_tokens", stop(max_tokens=0)),
    ("stop.max_tokens", stop(max_tokens=MODEL.max_model_len)),
    ("stop.stop_strings", stop(stop_strings=["x"] * 17)),
    ("stop.stop_strings[1]", stop(stop_strings=["x", ""])),
    ("stop.stop_strings[0]", stop(stop_strings=["é" * 129])),
    ("stop.stop_token_ids", stop(stop_token_ids=[VOCAB])),
    ("stop.stop_token_ids", stop(stop_token_ids=[1] * 65)),
    ("output.logprobs", request(output=v1.OutputOptions(logprobs=21))),
    ("output.prompt_logprobs", request(output=v1.OutputOptions(prompt_logprobs=21))),
    ("output.truncate_prompt_tokens", request(output=v1.OutputOptions(truncate_prompt_tokens=0))),
    ("chat.tools_json", tools("{}")),
    ("chat.tools_json", tools("[1]")),
    ("chat.tools_json", tools("[")),
    ("chat.tools_json", tools("[" * 65 + "]" * 65)),
    ("chat.tools_json", tools("[" + " " * (1 << 20) + "]")),
    ("chat.template_variables_json", variables("[]")),
    ("chat.template_variables_json", variables('{"messages": []}')),
    ("chat.messages[0].tool_calls_json", message(tool_calls_json="x")),
    ("chat.messages[0].tool_calls_json", message(tool_calls_json=f"[{'[' * 70}{']' * 70}]")),
    ("chat.messages[0].tool_calls_json", message(tool_calls_json="[" * 100_000)),
    ("chat.messages[0].tool_calls_json", message(tool_calls_json=call_with("[" * 70 + "]" * 70))),
    ("chat.messages[0].tool_calls_json", message(tool_calls_json=call_with("[" * 100_000))),
    ("chat.messages[0].tool_call_id", message(tool_call_id="x" * 257)),
    ("chat.messages[0].name", message(name="x" * 257)),
    (
        "chat.continue_final_message",
        v1.GenerateRequest(chat=v1.ChatInput(messages=[TURN], continue_final_message=True)),
    ),
    ("resumable", request(resumable=True)),
    ("grammar", request(grammar=v1.Grammar())),
    ("grammar.regex", request(grammar=v1.Grammar(regex=""))),
    ("grammar.json_object", request(grammar=v1.Grammar(json_object=False))),
    ("grammar.choice.choices", request(grammar=v1.Grammar(choice=v1.ChoiceGrammar()))),
    ("grammar.choice.choices", request(grammar=v1.Grammar(choice=v1.ChoiceGrammar(choices=["a", ""])))),
    ("stop.min_tokens", request(grammar=v1.Grammar(regex="a"), stop=v1.StopOptions(min_tokens=1))),
    ("scheduling.priority", request(scheduling=v1.SchedulingOptions(priority=-101))),
    ("scheduling.session_id", request(scheduling=v1.SchedulingOptions(session_id="s" * 129))),
    ("scheduling.tenant", request(scheduling=v1.SchedulingOptions(tenant="t" * 129))),
    ("scheduling.expected_output_tokens", request(scheduling=v1.SchedulingOptions(expected_output_tokens=0))),
    *[
        (f"scheduling.{name}", request(scheduling=v1.SchedulingOptions(ttft_target=first, total_time_target=last)))
        for wrong in (
            Duration(),
            Duration(seconds=-1),
            Duration(nanos=-1),
            Duration(nanos=10**9),
            Duration(seconds=1, nanos=-1),
            Duration(seconds=MAX_TIME_S + 1),
            Duration(seconds=2**63 - 1),
        )
        for name, first, last in (("ttft_target", wrong, None), ("total_time_target", None, wrong))
    ],
    *[
        (f"scheduling.{name}", request(scheduling=v1.SchedulingOptions(retention=first, expected_pause=last)))
        for wrong in (Duration(), Duration(seconds=-1), Duration(nanos=10**9), Duration(seconds=86_401))
        for name, first, last in (("retention", wrong, None), ("expected_pause", None, wrong))
    ],
    (
        "scheduling.retention_priority",
        request(scheduling=v1.SchedulingOptions(retention=Duration(seconds=1), retention_priority=10)),
    ),
    ("scheduling.retention_priority", request(scheduling=v1.SchedulingOptions(retention_priority=1))),
    ("scheduling.cache_scope", request(scheduling=v1.SchedulingOptions(cache_scope="c" * 129))),
    ("scheduling.request_class", request(scheduling=v1.SchedulingOptions(request_class="r" * 129))),
    ("scheduling.tenant", request(scheduling=v1.SchedulingOptions(tenant="\x1b[2Jevil"))),
    ("scheduling.request_class", request(scheduling=v1.SchedulingOptions(request_class="a\nFAKE LINE"))),
    ("scheduling.cache_scope", request(scheduling=v1.SchedulingOptions(cache_scope="\u202eright to left"))),
]

UNSUPPORTED: list[tuple[str, v1.GenerateRequest]] = [
    ("adapter", request(adapter="lora")),
]


def names(table: list[tuple[str, v1.GenerateRequest]]) -> list[str]:
    """Test ids."""
    return [f"{field}-{index}" for index, (field, _) in enumerate(table)]


@pytest.mark.parametrize(("field", "wrong"), INVALID, ids=names(INVALID))
def test_a_wrong_field_is_named(field: str, wrong: v1.GenerateRequest) -> None:
    """INVALID_ARGUMENT names exactly the field that is wrong, as the proto writes it."""
    with pytest.raises(InvalidRequestError) as error:
        validate(wrong, MODEL, PLAIN, has_chat_template=True)

    assert [violation.field for violation in error.value.violations] == [field]


@pytest.mark.parametrize(("field", "early"), UNSUPPORTED, ids=names(UNSUPPORTED))
def test_an_unsupported_option_is_refused_by_name(field: str, early: v1.GenerateRequest) -> None:
    """A field that this version does not support is never ignored."""
    with pytest.raises(UnsupportedFieldError) as error:
        validate(early, MODEL, PLAIN, has_chat_template=True)

    assert error.value.field == field


def test_time_left_always_fits_the_link() -> None:
    """At any point in time, the core gets between a nanosecond and a year; 0 means no deadline."""
    assert [left_ns(point, now=100.0) for point in (-math.inf, 0.0, 100.0)] == [1, 1, 1]
    assert left_ns(100.5, now=100.0) == 500_000_000
    assert [left_ns(point, now=100.0) for point in (1e30, math.inf)] == [MAX_TIME_S * 10**9] * 2
    assert left_ns(None, now=100.0) == 0


def test_every_field_of_the_request_is_read_or_refused() -> None:
    """No option of the proto is unknown to the validation: each appears in a table here or in the valid request."""
    sub_messages = {"sampling", "stop", "output", "scheduling"}
    known = {field.partition("[")[0] for field, _ in INVALID + UNSUPPORTED}
    valid = {
        "sampling.seed", "stop.ignore_eos", "stop.include_stop_string", "output.include_special_tokens", "output.echo",
        "output.parse", "scheduling.ends_session",
    }  # fmt: skip

    missing = [
        f"{parent.name}.{child.name}"
        for parent in v1.GenerateRequest.DESCRIPTOR.fields
        if parent.name in sub_messages and parent.message_type is not None
        for child in parent.message_type.fields
        if f"{parent.name}.{child.name}" not in known | valid
    ]

    assert missing == []


def test_all_violations_are_reported_together() -> None:
    """A client learns of every wrong field at once."""
    wrong = request(
        request_id="é",
        sampling=v1.SamplingOptions(temperature=-1, top_p=2),
        stop=v1.StopOptions(max_tokens=0),
    )
    with pytest.raises(InvalidRequestError) as error:
        validate(wrong, MODEL, PLAIN, has_chat_template=True)

    fields = {violation.field for violation in error.value.violations}
    assert fields == {"request_id", "sampling.temperature", "sampling.top_p", "stop.max_tokens"}


def test_another_model_is_not_found() -> None:
    """The error repeats the name, shortened, and says which model is served."""
    with pytest.raises(ModelNotFoundError) as error:
        validate(request(model="m" * 300), MODEL, PLAIN, has_chat_template=True)

    assert error.value.message == f"model: {'m' * 64!r} does not exist; use 'echo'"


def test_chat_needs_a_template() -> None:
    """A model without a chat template refuses `chat`."""
    with pytest.raises(InvalidRequestError, match="chat: the served model has no chat template"):
        validate(chat(("user", "hi")), MODEL, PLAIN, has_chat_template=False)


def test_defaults_are_those_of_the_comments() -> None:
    """Without options: temperature 1, no truncation, the model's own end, and a random seed and id."""
    first = validate(request(), MODEL, PLAIN, has_chat_template=True)
    second = validate(request(), MODEL, PLAIN, has_chat_template=True)

    assert (first.sampling.temperature, first.sampling.top_p) == (1.0, 1.0)
    assert (first.sampling.top_k, first.sampling.min_p) == (0, 0.0)
    assert first.stop_token_ids == tuple(MODEL.eos_token_ids)
    assert first.max_tokens is None
    assert first.sampling.seed != second.sampling.seed
    assert first.request_id != second.request_id


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    """Values that mean "almost 0" are served as 0; values that make a difference are kept."""
    for given, told in ((1e-45, 0.0), (1e-8, 0.0), (0.5, 0.5), (1e-3, 1e-3)):
        valid = validate(sampling(temperature=given), MODEL, PLAIN, has_chat_template=True)

        assert valid.sampling.temperature == pytest.approx(told)


@pytest.mark.parametrize(
    ("wanted", "token_left"),
    [
        (sampling(allowed_token_ids=[EOS]), False),
        (sampling(allowed_token_ids=[EOS, 7], banned_token_ids=[7]), False),
        (sampling(banned_token_ids=[i for i in range(VOCAB) if i != EOS]), False),
        (sampling(allowed_token_ids=[EOS, 7]), True),
        (sampling(), True),
    ],
)
def test_a_least_length_leaves_a_token_to_choose(wanted: v1.GenerateRequest, token_left: bool) -> None:
    """A least length whose other options allow no token is refused by the front end, not by the worker."""
    wanted.stop.min_tokens = 2
    if token_left:
        assert validate(wanted, MODEL, PLAIN, has_chat_template=True).output.min_tokens == 2
        return
    with pytest.raises(InvalidRequestError, match="no other token is allowed"):
        validate(wanted, MODEL, PLAIN, has_chat_template=True)


def test_neutral_values_change_nothing() -> None:
    """A client that always sends n=1 and neutral penalties is served."""
    neutral = sampling(
        n=1, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, typical_p=1.0, temperature=0.0, seed=0
    )
    valid = validate(neutral, MODEL, PLAIN, has_chat_template=True)

    assert valid.sampling.temperature == 0.0
    assert valid.sampling.seed == 0
    assert valid.sampling.presence_penalty == valid.sampling.frequency_penalty == 0
    assert valid.sampling.repetition_penalty == valid.sampling.typical_p == 1


def test_stop_tokens_hold_the_models_own_unless_ignored() -> None:
    """End-of-sequence tokens are added to the client's, or left out when asked."""
    assert validate(stop(stop_token_ids=[5]), MODEL, PLAIN, has_chat_template=True).stop_token_ids == (EOS, 5)
    ignoring = stop(stop_token_ids=[5], ignore_eos=True)
    assert validate(ignoring, MODEL, PLAIN, has_chat_template=True).stop_token_ids == (5,)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "default", "expected"),
    [(10, None, 64, 64), (4090, None, 64, 6), (10, None, 0, 4086), (10, 100, 64, 100), (4095, 1, 64, 1)],
)
def test_max_tokens_that_fits_is_granted(prompt: int, max_tokens: int | None, default: int, expected: int) -> None:
    """The default is bounded by the room left, and is this room if it is 0; a requested number that fits is granted."""
    assert resolve_max_tokens(prompt, max_tokens, default, MODEL, "text") == expected


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"),
    [(0, None, "text"), (4096, None, "text"), (4096, 1, "text"), (4000, 97, "stop.max_tokens")],
)
def test_max_tokens_that_does_not_fit_is_refused(prompt: int, max_tokens: int | None, field: str) -> None:
    """A prompt that is empty or leaves no room, and a max_tokens beyond the room, are refused."""
    with pytest.raises(InvalidRequestError) as error:
        resolve_max_tokens(prompt, max_tokens, 64, MODEL, field="text")

    assert [violation.field for violation in error.value.violations] == [field]


def test_the_heaviest_request_fits_into_a_frame() -> None:
    """The largest valid request, with all tokens that it can reach, fits into a frame, and so does its log."""
    model = link_pb2.ServedModel(block_size=1, fingerprint="f" * 64, max_model_len=MAX_SERVED_SEQUENCE)
    prompt = bytes(4 * MAX_SERVED_SEQUENCE)
    sampling = plan_pb2.SamplingParams(
        allowed_token_ids=bytes(4 * MAX_TOKEN_SET),
        banned_token_ids=bytes(4 * MAX_TOKEN_SET),
        bias_token_ids=bytes(4 * MAX_BIASES),
        bias_values=bytes(4 * MAX_BIASES),
        # At most one token per byte, with and without a space before the word.
        bad_words=[bytes(4 * (MAX_BAD_WORD + 1))] * (2 * MAX_BAD_WORDS),
        stop_token_ids=bytes(4 * 1024),
    )
    submission = link_pb2.Submission(
        token_ids=prompt,
        sampling=sampling.SerializeToString(),
        grammar=bytes(2 * MAX_GRAMMAR),
        resume_info=bytes(2 * MAX_STOP_STRING * MAX_STOP_STRINGS),
        block_keys=block_keys(model, b"", prompt),
        stop_token_ids=bytes(4 * 1024),
        request_id="r" * MAX_REQUEST_ID,
        tenant="t" * MAX_NAME,
        request_class="c" * MAX_NAME,
        cache_scope=bytes(2 * MAX_NAME),
        session=bytes(MAX_NAME),
    )
    assert len(submission.block_keys) == 32 * MAX_BLOCK_KEYS
    assert submission.ByteSize() < MAX_PART_BYTES


def test_a_log_takes_no_more_than_is_counted_for_it() -> None:
    """The counted size of a token's log-probabilities is at least their size in the log."""
    scores = plan_pb2.TokenScores(
        logprobs=bytes(4), ranks=bytes(4), top_token_ids=bytes(4 * MAX_LOGPROBS), top_logprobs=bytes(4 * MAX_LOGPROBS)
    ).SerializeToString()
    reply = link_pb2.ResumeReply()
    for index in range(1000):
        reply.scores.add(first_index=MAX_SERVED_SEQUENCE + index, scores=scores)
    assert reply.ByteSize() <= 1000 * max_scores_bytes(MAX_LOGPROBS)


def _spec(max_tokens: int) -> RequestSpec:
    return RequestSpec(request_id="r", num_prompt_tokens=1000, max_tokens=max_tokens)


@pytest.mark.parametrize(("resumable", "logprobs", "max_tokens"), [(True, 20, 50_000), (True, 0, 200_000)])
def test_a_log_that_fits_into_a_frame_is_kept(resumable: bool, logprobs: int, max_tokens: int) -> None:
    """Long outputs with log-probabilities can be resumable, as long as a frame can hold what is retained."""
    wanted = request(request_id="r", resumable=resumable, output=v1.OutputOptions(logprobs=logprobs))
    check_log_size(validate(wanted, MODEL, PLAIN, has_chat_template=False), _spec(max_tokens))


def test_a_log_that_no_frame_takes_is_refused_with_the_remedy() -> None:
    """A resumable request with too many log-probabilities is refused by its field, with the number that fits.

    A request that is not resumable may have as many.
    """
    output = v1.OutputOptions(logprobs=20)
    valid = validate(request(request_id="r", resumable=True, output=output), MODEL, PLAIN, has_chat_template=False)
    with pytest.raises(InvalidRequestError, match="lower stop") as refused:
        check_log_size(valid, _spec(100_000))
    assert [violation.field for violation in refused.value.violations] == ["output.logprobs"]
    check_log_size(validate(request(output=output), MODEL, PLAIN, has_chat_template=False), _spec(100_000))


@pytest.mark.parametrize(
    "text", ["\x1b[31m" * 70, " ".join(f"[{number}, {number + 1})" for number in range(70)), "{" * 999]
)
def test_brackets_inside_strings_are_text(text: str) -> None:
    """Arguments of a tool call may contain any text, such as colours of a terminal or half-open intervals."""
    asked = message(tool_calls_json=call_with(json.dumps({"path": "a.txt", "content": text})))

    assert validate(asked, MODEL, PLAIN, has_chat_template=True).num_choices == 1
