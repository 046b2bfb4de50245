"""The front-end process: how it starts, what it prints, how it exits, and what it never imports."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.v1 import generation_pb2 as v1
from quire.v1 import generation_pb2_grpc
from tests.services.stack import MODEL, joined_ids, tokens_request
from tests.services.tokenizers_for_tests import byte_level, write_model

ROOT = Path(__file__).parents[2]
WAIT_S = 30


def start(module: str, *arguments: str) -> "subprocess.Popen[str]":
    """A process of ours."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def first_line(process: "subprocess.Popen[str]") -> str:
    """The first line on stdout."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def frontend(folder: Path, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A front-end process; killed at the end if it is still running."""
    model = write_model(folder / "model", byte_level())
    process = start(
        "quire_server.cli.main",
        "frontend",
        f"--frontend-address=ipc://{folder}/core",
        f"--model={model}",
        "--grpc-port=0",
        "--http-port=0",
        *arguments,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def echo_core(folder: Path) -> Iterator[None]:
    """An echo core process."""
    process = start("measure.frontend.echo_core", f"--address=ipc://{folder}/core", f"--vocab-size={MODEL.vocab_size}")
    try:
        first_line(process)
        yield
    finally:
        process.kill()
        process.communicate()


def grpc_target(line: str) -> str:
    """The address in the line that says where it listens."""
    return line.partition("grpc=")[2].split()[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_listens_and_ends_on_a_signal(tmp_path: Path, number: signal.Signals) -> None:
    """One line on stdout with the real ports, without a core being there; a signal ends the process with status 0."""
    with frontend(tmp_path) as process:
        line = first_line(process)
        host, _, port = grpc_target(line).partition(":")
        socket.create_connection((host, int(port)), timeout=WAIT_S).close()
        process.send_signal(number)
        out, _ = process.communicate(timeout=WAIT_S)

        assert line.startswith("listening grpc=127.0.0.1:")
        assert " http=127.0.0.1:" in line
        assert out == ""
        assert process.returncode == 0


def test_running_answers_may_end_within_the_grace_period(tmp_path: Path) -> None:
    """After SIGTERM a live stream goes on to its end, a new call is refused, and the process exits 0."""

    async def main(target: str, process: "subprocess.Popen[str]") -> list[v1.GenerateResponse]:
        async with aio.insecure_channel(target) as channel:
            stub = generation_pb2_grpc.GenerationServiceStub(channel)
            call = stub.Generate(tokens_request(5, 6, max_tokens=4000), wait_for_ready=True)
            responses = [await call.read()]
            process.send_signal(signal.SIGTERM)
            while isinstance(response := await call.read(), v1.GenerateResponse):
                responses.append(response)
        async with aio.insecure_channel(target) as channel:
            late = generation_pb2_grpc.GenerationServiceStub(channel).Generate(tokens_request(5))
            with pytest.raises(aio.AioRpcError) as error:
                await late.read()
            assert error.value.code() == grpc.StatusCode.UNAVAILABLE
        return [response for response in responses if isinstance(response, v1.GenerateResponse)]

    with echo_core(tmp_path), frontend(tmp_path, "--stream-credit=64") as process:
        target = grpc_target(first_line(process))
        asyncio.run(until_ready(target))
        responses = asyncio.run(main(target, process))
        process.communicate(timeout=WAIT_S)

        assert joined_ids([response.delta for response in responses[:-1]]) == [5, 6] * 2000
        assert responses[-1].HasField("finished")
        assert process.returncode == 0


async def until_ready(target: str) -> None:
    """Waits until the service is ready."""
    async with aio.insecure_channel(target) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service="readiness"))
        async for response in watch:
            if response.status == health_pb2.HealthCheckResponse.SERVING:
                return


@pytest.mark.every(3)
@pytest.mark.parametrize("flag", ["grpc-port", "http-port"])
def test_a_port_in_use_is_one_clear_line(tmp_path: Path, flag: str) -> None:
    """The process exits 1 and names setting and address."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with frontend(tmp_path, f"--{flag}={port}") as process:
            out, err = process.communicate(timeout=WAIT_S)

    ours = [line for line in err.splitlines() if line.startswith("quire")]
    assert out == ""
    assert len(ours) == 1
    assert f"{flag.replace('-', '_')}: cannot listen on 127.0.0.1:{port}" in ours[0]
    assert "Traceback" not in err
    assert process.returncode == 1


@pytest.mark.every(3)
def test_a_bad_model_is_one_clear_line(tmp_path: Path) -> None:
    """A folder that is no checkpoint ends the process with status 1 and one line."""
    (tmp_path / "empty").mkdir()
    with frontend(tmp_path, f"--model={tmp_path}/empty") as process:
        _, err = process.communicate(timeout=WAIT_S)

    assert process.returncode == 1
    assert err.splitlines() == [
        f"quire frontend: model: {tmp_path}/empty contains no config.json; use the folder of a Hugging Face checkpoint"
    ]


@pytest.mark.parametrize("flag", ["--stream-credit=3", "--default-max-tokens=-1", "--max-concurrent-requests=0"])
def test_a_setting_that_cannot_work_is_one_clear_line(tmp_path: Path, flag: str) -> None:
    """A configuration under which no stream could ever move is refused at the start, by name."""
    with frontend(tmp_path, flag) as process:
        _, err = process.communicate(timeout=WAIT_S)

    assert process.returncode == 1
    setting = flag.partition("=")[0]
    assert err.startswith(f"quire frontend: {setting[2:].replace('-', '_')} ({setting}): ")
    assert len(err.splitlines()) == 1


@pytest.mark.every(3)
def test_several_processes_share_a_port(tmp_path: Path) -> None:
    """A second front end may listen on the first one's ports."""
    with frontend(tmp_path) as first:
        line = first_line(first)
        port = grpc_target(line).rpartition(":")[2]
        http = line.rpartition(":")[2]
        with frontend(tmp_path, f"--grpc-port={port}", f"--http-port={http}", "--frontend-id=second") as second:
            assert first_line(second) == line


def test_services_import_neither_torch_nor_transformers() -> None:
    """Every module of the front end can be imported without the heavy packages."""
    script = (
        "import pkgutil, importlib, sys, services\n"
        "for module in pkgutil.iter_modules(services.__path__):\n"
        "    importlib.import_module('services.' + module.name)\n"
        "heavy = ('torch', 'transformers', 'triton', 'scheduler_svc', 'worker_svc')\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )

    assert done.stdout.strip() == "[]"
