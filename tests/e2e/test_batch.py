"""`quire batch` against a running service: interrupted, refused, and without a server."""

import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from measure.testbed.service import QUIRE, ROOT, Served, free_ports, serve

LINES = 80
NO_PROXY = {**os.environ, "NO_PROXY": "*"}


def batch(*arguments: object, **variables: str) -> "subprocess.Popen[str]":
    """The command, started with further variables in its environment."""
    command = [*QUIRE, "batch", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=NO_PROXY | variables, stdout=pipe, stderr=pipe, text=True)


def read(path: Path) -> list[dict[str, Any]]:
    """The answers in a file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.every(3)
def test_a_killed_batch_goes_on_and_answers_every_line_once(demo: Served, tmp_path: Path) -> None:
    """A batch that is killed twice and restarted has exactly one result per request.

    The answers are those of an undisturbed run. The kills are SIGKILL.
    """
    requests, answers, undisturbed = (tmp_path / name for name in ("in.jsonl", "out.jsonl", "whole.jsonl"))
    with requests.open("w") as file:
        for number in range(LINES):
            body = {"prompt": f"Story {number}: once upon a time", "max_tokens": 24, "temperature": 0}
            simple = {"id": f"id-{number}", **body}
            openai = {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(simple if number % 2 else openai) + "\n")
    for kill_at in (LINES // 4, LINES // 2):
        process = batch(requests, answers, "--target", demo.http, "--concurrency", 4)
        while process.poll() is None and (not answers.exists() or answers.read_bytes().count(b"\n") < kill_at):
            pass
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert kill_at <= answers.read_bytes().count(b"\n") < LINES, "the batch was not killed in its midst"
    process = batch(requests, answers, "--target", demo.http)
    _, told = process.communicate(timeout=120)
    again = batch(requests, answers, "--target", demo.http)
    again.communicate(timeout=120)
    assert batch(requests, undisturbed, "--target", demo.http).wait(120) == 0

    found = read(answers)
    texts = [{_id(answer): _answer_text(answer) for answer in run} for run in (found, read(undisturbed))]
    assert process.returncode == again.returncode == 0, told
    assert sorted(map(_id, found)) == sorted(f"id-{number}" for number in range(LINES))
    assert f"{LINES}/{LINES} done" in told
    assert texts[0] == texts[1]


def test_refusals_are_answers_and_the_exit_code_tells(demo: Served, tmp_path: Path) -> None:
    """A refused request has its error in the file, the others their texts; without a server, stderr has one line."""
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text(
        '{"id": "good", "prompt": "x", "max_tokens": 2}\n{"id": "bad", "prompt": "x", "max_tokens": 99999}\n'
    )
    process = batch(requests, answers, "--target", demo.http, "--quiet")
    _, told = process.communicate(timeout=60)
    found = {answer["id"]: answer for answer in read(answers)}
    with socket.socket() as silent:  # The socket is bound but not listening, so every connection is refused.
        silent.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{silent.getsockname()[1]}"
        nobody = batch(requests, tmp_path / "none.jsonl", "--target", target, "--patience", 0.2, "--quiet")
        _, complaint = nobody.communicate(timeout=60)

    assert process.returncode == 1
    assert "1 of 2 requests failed" in told
    assert found["bad"]["error"]["param"] == "max_tokens"
    assert found["good"]["text"]
    assert nobody.returncode == 1
    assert len(complaint.splitlines()) == 1
    assert "gave up after 0.2 s without success" in complaint


def test_the_address_comes_from_the_environment(demo: Served, tmp_path: Path) -> None:
    """`QUIRE_TARGET` names the HTTP port with its scheme; with the gRPC port, the command ends with one line."""
    requests = tmp_path / "in.jsonl"
    requests.write_text('{"id": "only", "prompt": "x", "max_tokens": 2}\n')
    right = batch(requests, tmp_path / "out.jsonl", QUIRE_TARGET=f"http://{demo.http}")
    right.communicate(timeout=60)
    wrong = batch(requests, tmp_path / "none.jsonl", QUIRE_TARGET=demo.grpc)
    _, complaint = wrong.communicate(timeout=60)

    assert right.returncode == 0
    assert [answer["id"] for answer in read(tmp_path / "out.jsonl")] == ["only"]
    assert wrong.returncode == 1
    assert complaint == (
        f"quire batch: {demo.grpc}: does not speak HTTP/1.1; pass the service's HTTP address with --target, not the"
        " gRPC one\n"
    )


@pytest.mark.every(3)
def test_a_server_that_comes_late_is_waited_for(tmp_path: Path) -> None:
    """While no server listens, the command reports this once, and it continues when a server listens."""
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text('{"id": "only", "prompt": "x", "max_tokens": 2}\n')
    (port,) = free_ports(1)
    process = batch(requests, answers, "--target", f"127.0.0.1:{port}")
    assert process.stderr is not None
    first = process.stderr.readline()
    with serve("demo", f"--http-port={port}"):
        _, told = process.communicate(timeout=120)

    assert first.startswith(f"quire batch: 127.0.0.1:{port}: nothing listens there; start a server with quire serve")
    assert first.endswith("; trying again\n")
    assert told.startswith("1/1 done")
    assert process.returncode == 0


def _id(answer: dict[str, Any]) -> str:
    return str(answer.get("custom_id") or answer["id"])


def _answer_text(answer: dict[str, Any]) -> str:
    return str(answer["text"] if "text" in answer else answer["response"]["body"]["choices"][0]["text"])
