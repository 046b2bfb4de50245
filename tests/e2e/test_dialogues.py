"""Dialogues in the form of Codex's and Claude Code's requests, replayed against a real service.

`dialogues/*.json` hold the headers, the first request of each thread (the agent and its sub-agents), and what each
later request adds the model's last turn and the tools' results or the user's text, so it extends the previous one. The
replay sends each request as the client would, and the model's response is fixed.
"""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from measure.testbed.service import Served, serve
from tests.e2e.reciting_model import make_reciting_model

DIALOGUES = Path(__file__).parent / "dialogues"
THOUGHT = "I think first."
TEXT = "One moment."
ARGUMENTS = '{"cmd": "ls", "command": "ls"}'
HIT_RATE = 0.9
"""Minimum fraction of cached tokens in the prompts in a dialogue's second half."""
SUMMARY = ("part.added", "text.delta", "text.done", "part.done")
"""Events of the reasoning, of which Codex requests a summary."""
BLOCKS = 4 * 16
"""Number of tokens at the end of the previous prompt that may differ in the next one or fill no whole block."""

Json = dict[str, Any]


def says(tool: str) -> list[str]:
    """Return the pieces of an answer with reasoning, text and a call."""
    call = ["<tool_call>\n", '{"name": "', tool, '", "arguments": ', ARGUMENTS, "}\n", "</tool_call>"]
    return ["<think>", THOUGHT, "</think>", TEXT, *call]


def requests_of(dialogue: Json) -> Iterator[tuple[str, bool, Json]]:
    """Yield thread, whether tokens are only counted, and body of each request."""
    number = count()
    for step in dialogue["requests"]:
        body = dialogue["threads"][step["thread"]]
        body[dialogue["grows"]] += step["add"]
        yield (
            step["thread"],
            step.get("count", False),
            json.loads(json.dumps(body).replace("#####", f"{next(number):05x}")),
        )


def events_of(response: httpx.Response) -> list[Json]:
    """Return a stream's events, each named by the type in its data."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.fixture(scope="module", params=[("codex", "exec_command"), ("claude_code", "Bash")], ids=["codex", "claude"])
def replayed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Served]]:
    """Return the name of a dialogue, and a service whose model calls one of its tools."""
    name, tool = request.param
    model = make_reciting_model(tmp_path_factory.mktemp("model"), says(tool))
    with serve(model, "--parser=hermes", "--served-model-name=demo") as served:
        yield name, served


@pytest.mark.drawn(1)
def test_a_dialogue_replays(replayed: tuple[str, Served]) -> None:
    """Each request of an agent and its sub-agent is answered in the vendor's form.

    The part that a prompt repeats from the previous one comes from the prefix cache: more than 90 % in the second half.
    """
    name, served = replayed
    dialogue = json.loads((DIALOGUES / f"{name}.json").read_text())
    prompts: dict[str, list[tuple[int, int]]] = {}
    counted = 0
    with httpx.Client(base_url=f"http://{served.http}", headers=dialogue["headers"], timeout=120) as client:
        for thread, only_count, body in requests_of(dialogue):
            path = dialogue["path"]
            if only_count:
                kept = {key: body[key] for key in ("model", "messages", "system", "tools", "thinking")}
                counted = client.post(f"{path}/count_tokens?beta=true", json=kept).json()["input_tokens"]
                continue
            response = client.post(f"{path}?beta=true" if name == "claude_code" else path, json=body)
            events = events_of(response)
            check = check_messages if name == "claude_code" else check_responses
            prompt, cached = check(events, calls=thread != "title")
            seen = prompts.setdefault(thread, [])
            repeated = seen[-1][0] - BLOCKS if seen else 0
            assert cached >= repeated, f"{thread}: request {len(seen) + 1}: {cached} of {repeated} cached"
            seen.append((prompt, cached))
            if thread == "main":
                assert counted <= prompt
    assert len(prompts["main"]) >= 20
    assert len(prompts["explorer"]) >= 3
    later = prompts["main"][len(prompts["main"]) // 2 :]
    assert sum(cached for _, cached in later) > HIT_RATE * sum(prompt for prompt, _ in later)
    assert served.count_logged("handler failed") == 0


def check_responses(events: list[Json], *, calls: bool) -> tuple[int, int]:
    """Check a response's events with reasoning, text and a call; return its prompt tokens and cached tokens."""
    assert calls
    items = [
        ("reasoning", *(f"reasoning_summary_{name}" for name in SUMMARY)),
        ("message", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"),
        ("function_call", "function_call_arguments.delta", "function_call_arguments.done"),
    ]
    expected = ["created", "in_progress"]
    for _, *inner in items:
        expected += ["output_item.added", *inner, "output_item.done"]
    assert names(events, "response.") == [*expected, "completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == [kind for kind, *_ in items]
    assert output[0]["summary"][0]["text"] == THOUGHT
    assert output[1]["content"][0]["text"] == TEXT
    assert json.loads(output[2]["arguments"]) == json.loads(ARGUMENTS)
    usage = events[-1]["response"]["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert 0 < usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"]
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def check_messages(events: list[Json], *, calls: bool) -> tuple[int, int]:
    """Check a message's events; return its prompt tokens and cached tokens."""
    blocks = [("thinking", "thinking_delta"), ("text", "text_delta"), ("tool_use", "input_json_delta")]
    begun = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    if calls:
        inner = ["content_block_start", "content_block_delta", "content_block_stop"] * len(blocks)
        assert names(events) == ["message_start", *inner, "message_delta", "message_stop"]
        assert begun == [kind for kind, _ in blocks]
        deltas = [event for event in events if event["type"] == "content_block_delta"]
        assert {(event["index"], event["delta"]["type"]) for event in deltas} == {
            (index, delta) for index, (_, delta) in enumerate(blocks)
        }
        arguments = "".join(event["delta"].get("partial_json", "") for event in deltas)
        assert json.loads(arguments) == json.loads(ARGUMENTS)
    else:
        assert begun == ["text"]
    first, last = events[0]["message"]["usage"], events[-2]["usage"]
    assert events[-2]["delta"]["stop_reason"] == ("tool_use" if calls else "end_turn")
    cached = last["cache_read_input_tokens"]
    assert first["input_tokens"] == last["input_tokens"] + cached
    assert last["output_tokens"] > 0
    return first["input_tokens"], cached


def names(events: list[Json], prefix: str = "") -> list[str]:
    """Return the event types; list successive deltas once."""
    types = [event["type"].removeprefix(prefix) for event in events]
    return [kind for index, kind in enumerate(types) if not kind.endswith("delta") or types[index - 1] != kind]
