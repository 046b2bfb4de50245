"""What survives an interrupted batch, and which files are not batches."""

import json
from pathlib import Path
from typing import Any

import pytest

from measure.offline import read_requests
from quire_server.batch.jobs import BatchError, Job, make_answer, read_ids, read_jobs
from quire_server.batch.journal import Journal
from shared.config import ConfigError

OPENAI = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [], "stream": True}}
USAGE = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}


def write(path: Path, *requests: Any) -> Path:
    """A file of requests."""
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def test_both_forms_are_read(tmp_path: Path) -> None:
    """Both forms of lines are read: OpenAI's with a url, and simple ones with a prompt.

    A line without an id gets its number as id. No line may stream.
    """
    path = write(tmp_path / "in.jsonl", OPENAI, {"prompt": "x", "max_tokens": 3}, {"id": 7, "messages": [1]})

    assert list(read_jobs(path)) == [
        Job("a", "/v1/chat/completions", {"messages": []}, simple=False),
        Job("2", "/v1/completions", {"prompt": "x", "max_tokens": 3}, simple=True),
        Job("7", "/v1/chat/completions", {"messages": [1]}, simple=True),
    ]


def test_answers_have_the_form_of_their_requests() -> None:
    """An OpenAI line is answered with status and body, a simple one with text, choices or an error."""
    body = {"choices": [{"text": "hi", "finish_reason": "stop", "index": 0}], "usage": USAGE}
    two = {**body, "choices": [{"message": {"content": text}, "finish_reason": "stop"} for text in "ab"]}
    simple = Job("s", "/v1/completions", {}, simple=True)

    answer = make_answer(Job("a", "/v1/completions", {}, simple=False), 200, "req-1", body)
    assert answer["custom_id"] == "a"
    assert answer["response"] == {"status_code": 200, "request_id": "req-1", "body": body}
    assert make_answer(simple, 200, "", body) == {"id": "s", "text": "hi", "finish_reason": "stop", "usage": USAGE}
    assert [choice["text"] for choice in make_answer(simple, 200, "", two)["choices"]] == ["a", "b"]
    assert make_answer(simple, 400, "", {"error": {"message": "no"}}) == {"id": "s", "error": {"message": "no"}}


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "invalid JSON"),
        ("[]", "JSON object"),
        ('{"id": 1}', "prompt and messages"),
        ('{"custom_id": "a", "body": {}, "url": "/v1/images"}', "/v1/chat/completions"),
        ('{"custom_id": 1, "body": {}}', "custom_id"),
        ('{"id": 1, "prompt": "x"}\n{"id": "1", "prompt": "y"}', "duplicate id"),
    ],
)
def test_files_that_are_no_batches_are_refused(tmp_path: Path, line: str, complaint: str) -> None:
    """Before anything is sent, the line that is wrong is named, and so are ids that occur twice."""
    path = tmp_path / "in.jsonl"
    path.write_text(line + "\n")

    with pytest.raises(BatchError, match=complaint):
        read_ids(path)


def test_a_file_of_the_other_command_is_recognised(tmp_path: Path) -> None:
    """`quire batch` reads text and `quire bench offline` token ids; each names the command that a file belongs to."""
    text = write(tmp_path / "requests.jsonl", {"id": "a", "prompt": "x", "max_tokens": 3})
    tokens = write(tmp_path / "tokens.jsonl", {"prompt_token_ids": [10], "max_tokens": 3})

    with pytest.raises(ConfigError, match="this looks like a file of quire batch"):
        read_requests(text)
    with pytest.raises(BatchError, match="this looks like a file of quire bench offline"):
        read_ids(tokens)


def test_a_piece_of_a_line_is_cut_off(tmp_path: Path) -> None:
    """Wherever an interrupted write stopped, complete results are kept and the next one starts a line."""
    answers = [{"id": str(number), "text": "x" * number} for number in range(3)]
    whole = "".join(json.dumps(answer) + "\n" for answer in answers).encode()
    path = tmp_path / "out.jsonl"
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        with Journal(path) as journal:
            assert len(journal.done) == whole[:length].count(b"\n")
            for answer in answers[len(journal.done) :]:
                journal.append(answer)

        assert path.read_bytes() == whole


def test_two_runs_do_not_share_a_file(tmp_path: Path) -> None:
    """While one run writes, another is refused; a file with other content is never modified."""
    path = tmp_path / "out.jsonl"
    other = write(tmp_path / "other.jsonl", {"text": "my diary"})

    with Journal(path), pytest.raises(BatchError, match="another run"):
        Journal(path)
    with pytest.raises(BatchError, match="not a result"):
        Journal(other)
    assert "my diary" in other.read_text()
    Journal(path).close()
