"""Every option of the Python client becomes the field with the same name, and every event becomes a value."""

import json
from typing import get_type_hints

import pytest

from quire import GenerateOptions, _requests, _responses, errors
from quire.v1 import generation_pb2 as pb

OPTIONS: dict[str, tuple[object, str, object]] = {
    "n": (3, "sampling.n", 3),
    "typical_p": (0.5, "sampling.typical_p", 0.5),
    "repetition_penalty": (1.5, "sampling.repetition_penalty", 1.5),
    "presence_penalty": (0.5, "sampling.presence_penalty", 0.5),
    "frequency_penalty": (-0.5, "sampling.frequency_penalty", -0.5),
    "logit_bias": ({5: 1.0}, "sampling.logit_bias", {5: 1.0}),
    "allowed_token_ids": ([1, 2], "sampling.allowed_token_ids", [1, 2]),
    "banned_token_ids": ([3], "sampling.banned_token_ids", [3]),
    "bad_words": (["x"], "sampling.bad_words", ["x"]),
    "min_tokens": (4, "stop.min_tokens", 4),
    "include_stop_string": (True, "stop.include_stop_string", True),
    "logprobs": (0, "output.logprobs", 0),
    "prompt_logprobs": (2, "output.prompt_logprobs", 2),
    "echo": (True, "output.echo", True),
    "truncate_prompt_tokens": (9, "output.truncate_prompt_tokens", 9),
    "json_schema": ({"type": "object"}, "grammar.json_schema", '{"type": "object"}'),
    "regex": ("a+", "grammar.regex", "a+"),
    "ebnf": ("start: x", "grammar.ebnf", "start: x"),
    "choice": (["a"], "grammar.choice.choices", ["a"]),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_the_field_of_its_name(name: str) -> None:
    """With its value, present even where that is zero."""
    value, path, expected = OPTIONS[name]
    message: object = _requests.build_generate("text", **{name: value})  # type: ignore[arg-type]
    *parents, field = path.split(".")
    for parent in parents:
        assert message.HasField(parent)  # type: ignore[attr-defined]
        message = getattr(message, parent)

    found = getattr(message, field)
    assert (type(expected)(found) if isinstance(expected, dict | list) else found) == expected


def test_every_documented_option_is_taken() -> None:
    """`GenerateOptions` and `build_generate` name the same options."""
    taken = set(_requests.build_generate.__annotations__) - {"prompt", "return"}

    assert taken == set(get_type_hints(GenerateOptions))


def test_tools_travel_as_json() -> None:
    """Tools, tool calls and template variables are sent as JSON."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    request = _requests.build_generate(
        None,
        messages=[
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "7", "tool_call_id": "c", "name": "f"},
        ],
        tools=[{"type": "function"}],
        template_variables={"mood": "calm"},
        continue_final_message=True,
    )

    assert json.loads(request.chat.messages[0].tool_calls_json) == [call]
    assert (request.chat.messages[1].tool_call_id, request.chat.messages[1].name) == ("c", "f")
    assert json.loads(request.chat.tools_json) == [{"type": "function"}]
    assert json.loads(request.chat.template_variables_json) == {"mood": "calm"}
    assert request.chat.continue_final_message


@pytest.mark.parametrize(
    "options",
    [{"regex": "a", "ebnf": "b"}, {"json_schema": {1, 2}}, {"logit_bias": {-1: 1.0}}, {"n": -1}],
)
def test_a_value_out_of_range_is_refused_by_the_client(options: dict[str, object]) -> None:
    """It is refused by the name of its field before anything is sent."""
    with pytest.raises(errors.InvalidRequestError):
        _requests.build_generate("text", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt": 5}, "text: must be a string, not int"),
        ({"temperature": "hot"}, "sampling.temperature: must be a number, not str"),
        ({"top_k": "all"}, "sampling.top_k: must be an integer, not str"),
        ({"stop": 5}, "stop.stop_strings: must be a list of strings, not int"),
        ({"stop": ["a", 5]}, "stop.stop_strings: must be a list of strings; one of its values is of another type"),
        ({"prompt": None, "token_ids": "12"}, "token_ids.ids: must be a list of integers, not str"),
        ({"logit_bias": [1]}, "sampling.logit_bias: must be a dict of numbers by token id, not list"),
        ({"prompt": None, "messages": "hi"}, "chat.messages: must be a list of dicts, not str"),
        ({"prompt": None, "messages": ["hi"]}, "chat.messages[0]: must be a dict, not str"),
        ({"scheduling": {"priority": 1}},
         "scheduling: must be a SchedulingOptions, not dict; use quire.SchedulingOptions(priority=1), for example"),
    ],
)  # fmt: skip
def test_a_value_of_the_wrong_type_is_named(options: dict[str, object], message: str) -> None:
    """The message contains the field, its valid values, and the given value."""
    with pytest.raises(errors.InvalidRequestError) as error:
        _requests.build_generate(**{"prompt": "text"} | options)  # type: ignore[arg-type]

    assert str(error.value) == message


def test_events_become_a_completion() -> None:
    """Deltas are joined by choice, log-probabilities and the prompt come along."""
    events = _responses.Events()
    scored = pb.TokenLogprobs(token=pb.ScoredToken(token_id=5, logprob=-0.5, rank=1, bytes=b"x"))
    stream = [
        pb.GenerateResponse(prompt=pb.Prompt(token_ids=[1], text="p")),
        pb.GenerateResponse(delta=pb.Delta(choice=1, token_ids=[5], text="x", logprobs=[scored])),
        pb.GenerateResponse(delta=pb.Delta(choice=0, token_ids=[6], text="y")),
        pb.GenerateResponse(choice_finished=pb.ChoiceFinished(choice=1, reason=pb.FINISH_REASON_STOP, stop_string="!")),
        pb.GenerateResponse(choice_finished=pb.ChoiceFinished(choice=0, reason=pb.FINISH_REASON_LENGTH)),
        pb.GenerateResponse(finished=pb.Finished(reason=pb.FINISH_REASON_LENGTH, usage=pb.Usage(completion_tokens=2))),
    ]

    completion = events.join([delta for response in stream if (delta := events.take(response)) is not None])

    assert completion.text == "y"
    assert [choice.text for choice in completion.choices] == ["y", "x"]
    assert completion.choices[1].logprobs[0].token.logprob == -0.5
    assert completion.choices[1].finished.stop_string == "!"
    assert completion.prompt is not None
    assert completion.prompt.text == "p"
