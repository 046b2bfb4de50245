"""The commands for people, against a running service."""

import json
import subprocess
from pathlib import Path

import pytest

from measure.testbed.service import QUIRE, ROOT, Served
from quire import Client
from quire.errors import CancelledError


def quire(*arguments: str, typed: str = "") -> str:
    """What a command that must succeed writes."""
    run = subprocess.run(
        [*QUIRE, *arguments], cwd=ROOT, input=typed, capture_output=True, text=True, timeout=120, check=False
    )
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


def test_a_conversation_in_the_terminal(demo: Served, tmp_path: Path) -> None:
    """Questions get answers, and the conversation is remembered, saved, and forgotten on command."""
    saved = tmp_path / "chat.json"
    typed = f"What is 3 + 4?\n/retry\nWhat is \\\n5 + 6?\n/save {saved}\n/reset\n/history\n/exit\nnever\n"
    answers = quire("chat", "--target", demo.grpc, "--temperature", "0", typed=typed).splitlines()
    turns = json.loads(saved.read_text())

    assert len(answers) == 3
    assert "7" in answers[0]
    assert answers[0] == answers[1]
    assert [turn["role"] for turn in turns] == ["user", "assistant", "user", "assistant"]
    assert turns[2]["content"] == "What is \n5 + 6?"
    assert [turns[1]["content"], turns[3]["content"]] == answers[1:]


def test_models_and_workers_are_listed(demo: Served) -> None:
    """The served model with its figures, for people and for programs; the worker, its process and its device."""
    table = quire("models", "--target", demo.grpc).splitlines()
    (model,) = json.loads(quire("models", "--json", "--target", demo.grpc))

    assert table[1].split() == ["demo", "Qwen3ForCausalLM", model["dtype"], "2048", "1024", "yes", "-"]
    assert model["eos_token_ids"] == [2]
    _, worker = quire("workers", "--target", demo.grpc).splitlines()
    assert worker.startswith("worker-0 ")
    pid, device = worker.split()[-2:]
    assert Path("/proc", pid).exists()
    assert device == "cpu"


def test_an_operator_sees_and_ends_requests(demo: Served) -> None:
    """A live request is listed with its worker, can be cancelled by its id, and has a history from arrival to end.

    Its client gets CANCELLED.
    """
    with Client(demo.grpc) as client:
        generation = client.generate("Once upon a time", max_tokens=2000, ignore_eos=True, request_id="long-story")
        next(generation)
        listed = quire("requests", "--target", demo.grpc)
        ended = quire("requests", "--cancel", "long-story", "--target", demo.grpc)
        with pytest.raises(CancelledError):
            generation.result()
    story = quire("requests", "--story", "long-story", "--target", demo.grpc)
    events = [line.split(maxsplit=2)[2] for line in story.splitlines()]

    assert any(line.split()[:3] == ["long-story", "running", "worker-0"] for line in listed.splitlines())
    assert "1 running" in listed
    assert ended == "1 ended\n"
    assert events[0] == "arrived"
    assert events[1].startswith("forecast: row within ")
    assert events[2].startswith("admitted to worker-0")
    assert events[3] == "first token"
    assert len(events) == 5
    assert events[4].startswith("ended: cancelled")


def test_the_log_level_of_a_running_service_can_be_changed(demo: Served) -> None:
    """At debug, every process logs a request; at warning, no process logs even its end."""

    def services_that_tell(request_id: str) -> set[str]:
        with Client(demo.grpc) as client:
            client.generate("hello", max_tokens=2, request_id=request_id).result()
        lines = [line for line in demo.log_lines() if line.get("request_id") == request_id]
        return {line["service"] for line in lines if line["level"] == "debug"}

    assert services_that_tell("at-info") == set()
    assert quire("log-level", "debug", "--target", demo.grpc) == "log level debug, before info\n"
    number = 0
    while len(services_that_tell(f"at-debug-{number}")) < 3:
        number += 1
    assert quire("log-level", "warning", "--target", demo.grpc) == "log level warning, before debug\n"
    assert services_that_tell("at-warning") == set()
    assert "at-warning" not in demo.log.read_text()
    assert quire("log-level", "info", "--target", demo.grpc) == "log level info, before warning\n"


def test_requests_that_nobody_knows(demo: Served) -> None:
    """An unknown request id has neither a story nor an end."""
    for flag in ("--story", "--cancel"):
        command = [*QUIRE, "requests", flag, "nobody", "--target", demo.grpc]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)

        assert run.returncode == 1
        assert run.stderr.startswith("quire requests: NOT_FOUND: ")


def test_top_shows_the_service(demo: Served) -> None:
    """One reading names the worker and its blocks."""
    text = quire("top", "--once", "--every", "0.1", "--target", demo.grpc)

    assert "1 workers" in text
    assert "worker-0         serving  [" in text
