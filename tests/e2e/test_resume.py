"""If clients and front ends die during a response, the response continues as if they had not."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from typing import Self

import grpc
import pytest

from measure.testbed.service import PATIENCE_S, ROOT, Served, serve
from quire import AsyncClient, Client, Completion, _calls, errors
from quire.v1 import generation_pb2 as v1
from quire.v1.generation_pb2_grpc import GenerationServiceStub

OPTIONS = {"max_tokens": 300, "temperature": 1.0, "seed": 11, "ignore_eos": True}
PROMPT = "Once upon a time"
CLIENT = """
    import json, sys
    from quire import Client

    target, request_id, resume, known = sys.argv[1], sys.argv[2], sys.argv[3] == "resume", json.loads(sys.argv[4])
    client = Client(target)
    if resume:
        generation = client.resume(request_id, from_tokens=known["tokens"], from_text_bytes=known["bytes"])
    else:
        generation = client.generate(**json.loads(sys.argv[5]), request_id=request_id, resumable=True)
    for delta in generation:
        print(json.dumps([delta.choice, delta.first_index, delta.token_ids, delta.text]), flush=True)
    print(json.dumps(["end", generation.finished.usage.completion_tokens]), flush=True)
"""


def client_process(target: str, request_id: str, *arguments: str) -> "subprocess.Popen[str]":
    """A client in a separate process."""
    command = [sys.executable, "-c", textwrap.dedent(CLIENT), target, request_id, *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


class Received:
    """What a client had on its screen."""

    def __init__(self, num_choices: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_choices)]
        self.texts = [""] * num_choices
        self.usage: int | None = None

    def read(self, process: "subprocess.Popen[str]", lines: int | None = None) -> None:
        """Reads so many lines, or all."""
        assert process.stdout is not None
        while lines is None or lines > 0:
            line = process.stdout.readline()
            if not line:
                return
            choice, *rest = json.loads(line)
            if choice == "end":
                self.usage = rest[0]
                continue
            first, tokens, text = rest
            assert first == len(self.tokens[choice]), "a token is missing or repeated"
            self.tokens[choice] += tokens
            self.texts[choice] += text
            lines = None if lines is None else lines - 1

    def known(self) -> str:
        """For the client that comes after."""
        return json.dumps({"tokens": list(map(len, self.tokens)), "bytes": [len(t.encode()) for t in self.texts]})


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """Yield a service for all tests of this file."""
    with serve("demo", "--frontends=2", "--dtype=float32") as running:
        yield running


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"stop": ["zzz", "e w"], "max_tokens": 120, "n": 2}])
def test_a_client_that_is_killed_resumes(served: Served, options: dict[str, object]) -> None:
    """A client that is killed twice and resumes on any front end gets exactly an undisturbed run's output.

    A completed answer can be resumed again.
    """
    request = {"prompt": PROMPT, **OPTIONS, **options}
    with Client(served.grpc) as client:
        whole = client.generate(**request).result()  # type: ignore[arg-type]
    received = Received(len(whole.choices))
    name = f"killed-{len(options)}"

    process = client_process(served.grpc, name, "generate", "{}", json.dumps(request))
    for lines in (7, 11):
        received.read(process, lines)
        process.kill()
        received.read(process)  # Read the output that was still on its way to the screen.
        process.wait()
        process = client_process(served.grpc, name, "resume", received.known())
    received.read(process)
    assert process.wait() == 0

    assert [tuple(tokens) for tokens in received.tokens] == [choice.token_ids for choice in whole.choices]
    assert received.texts == [choice.text for choice in whole.choices]
    assert received.usage == whole.finished.usage.completion_tokens
    with Client(served.grpc) as client:
        again = client.resume(name).result()
        assert [choice.text for choice in again.choices] == received.texts
        assert [choice.finished for choice in again.choices] == [choice.finished for choice in whole.choices]
        with pytest.raises(errors.DuplicateRequestError):
            client.generate("another", request_id=name, resumable=True).result()
        client.cancel(name)
        with pytest.raises(errors.RequestNotFoundError):
            client.resume(name).result()


def test_the_client_goes_on_by_itself_when_a_front_end_dies(served: Served) -> None:
    """Eight resumable streams lose their front ends; their outputs equal those of undisturbed runs."""

    async def run(*, disturb: bool) -> list[Completion]:
        options = OPTIONS | {"max_tokens": 200, "logprobs": 1}
        async with AsyncClient(served.grpc) as client:
            streams = [
                client.generate(PROMPT, **(options | {"seed": seed}), resumable=True)  # type: ignore[arg-type]
                for seed in range(8)
            ]
            answers = [asyncio.create_task(stream.result()) for stream in streams]
            if disturb:
                one = client.generate(PROMPT, **OPTIONS)  # type: ignore[arg-type]
                await anext(one)
                assert not any(answer.done() for answer in answers), "no stream is left to disturb"
                for child in served.children("frontend"):
                    os.kill(child.pid, signal.SIGKILL)
            return await asyncio.gather(*answers)

    calm, disturbed = asyncio.run(run(disturb=False)), asyncio.run(run(disturb=True))

    for undisturbed, resumed in zip(calm, disturbed, strict=True):
        assert resumed.token_ids == undisturbed.token_ids
        assert resumed.text == undisturbed.text
        assert len(resumed.logprobs) == 200
        worst = max(
            abs(a.token.logprob - b.token.logprob) for a, b in zip(resumed.logprobs, undisturbed.logprobs, strict=True)
        )
        assert worst < 1e-3
    with grpc.insecure_channel(served.grpc) as channel:  # The next test needs a front end that listens.
        grpc.channel_ready_future(channel).result(PATIENCE_S)


class _Relay:
    """A TCP relay before a server. Connections can go dark: they stay open, and nothing passes any more."""

    def __init__(self, target: str) -> None:
        self._target = target.split(":")
        self._dark: set[int] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.count = 0
        """Connections so far."""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()

    def go_dark(self) -> None:
        """Let nothing pass on the connections that there are."""
        self._dark.update(range(self.count))

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, self.count = self.count, self.count + 1
        there, back = await asyncio.open_connection(*self._target)
        self._writers += [writer, back]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pass_on(number, reader, back))
            tasks.create_task(self._pass_on(number, there, writer))

    async def _pass_on(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if number not in self._dark:
                    writer.write(data)


def test_the_client_goes_on_when_its_network_dies_without_a_word(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open connection that carries no data is treated as lost; the output equals that of an undisturbed run."""
    quick = {"grpc.keepalive_time_ms": 1000, "grpc.keepalive_timeout_ms": 1000, "grpc.http2.ping_timeout_ms": 1000}
    options = tuple((name, quick.get(name, value)) for name, value in _calls.CHANNEL_OPTIONS)
    monkeypatch.setattr(_calls, "CHANNEL_OPTIONS", options)

    async def main() -> tuple[Completion, list[int]]:
        async with _Relay(served.grpc) as relay, AsyncClient(relay.address) as client:
            calm = await client.generate(PROMPT, **OPTIONS).result()  # type: ignore[arg-type]
            stream = client.generate(PROMPT, **OPTIONS, resumable=True)  # type: ignore[arg-type]
            tokens = list((await anext(stream)).token_ids)
            relay.go_dark()
            async for delta in stream:
                tokens += delta.token_ids
            assert relay.count == 2
            return calm, tokens

    calm, resumed = asyncio.run(asyncio.wait_for(main(), 120))

    assert tuple(resumed) == calm.token_ids


def test_an_impossible_resumption_is_refused_with_the_reason(served: Served) -> None:
    """The id is unknown or was not resumable, or the client claims more tokens than exist."""
    with grpc.insecure_channel(served.grpc) as channel:
        stub = GenerationServiceStub(channel)
        plain = v1.GenerateRequest(request_id="plain", text=PROMPT, stop=v1.StopOptions(max_tokens=3))
        list(stub.Generate(plain))
        kept = v1.GenerateRequest(request_id="kept", text=PROMPT, resumable=True, stop=v1.StopOptions(max_tokens=3))
        list(stub.Generate(kept))
        for request, code in (
            (v1.ResumeRequest(request_id="plain"), grpc.StatusCode.NOT_FOUND),
            (v1.ResumeRequest(), grpc.StatusCode.INVALID_ARGUMENT),
            (v1.ResumeRequest(request_id="kept", from_tokens=[4]), grpc.StatusCode.INVALID_ARGUMENT),
        ):
            with pytest.raises(grpc.RpcError) as error:
                list(stub.Resume(request))
            assert error.value.code() == code
        assert [len(r.response.delta.token_ids) for r in stub.Resume(v1.ResumeRequest(request_id="kept"))] == [3, 0]
