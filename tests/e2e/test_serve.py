"""Promises of `quire serve`: one line when it is ready, a response, and no process left at the end."""

import json
import os
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from measure.testbed.checkpoints import make_checkpoint
from measure.testbed.service import DEFAULTS, QUIRE, ROOT, Served, serve, until
from quire import Client, FinishReason, errors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small checkpoint."""
    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[Served]:
    """One service for the tests that leave it as it is."""
    with serve(checkpoint, "--served-model-name=tiny") as running:
        yield running


def quire(
    *arguments: str, environ: dict[str, str] | None = None, stdin: str = ""
) -> "subprocess.CompletedProcess[bytes]":
    """Runs the command line to its end."""
    return subprocess.run(
        [*QUIRE, *arguments],
        cwd=ROOT,
        env={**os.environ, **DEFAULTS, **(environ or {})},
        input=stdin.encode(),
        capture_output=True,
        timeout=120,
        check=False,
    )


def test_the_ready_line_is_printed_when_the_service_is_ready(served: Served) -> None:
    """When the line appears, readiness is SERVING, one process of each kind is there, and the worker has joined."""
    with grpc.insecure_channel(served.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("", "liveness", "readiness"):
            answer = health.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING, name

    assert [len(served.children(role)) for role in ("scheduler", "worker", "frontend")] == [1, 1, 1]
    assert served.metric("quire_workers") == 1


def test_the_model_is_described(served: Served) -> None:
    """The client learns the name under which the model is served."""
    with Client(served.grpc) as client:
        model = client.get_model()

    assert (model.name, model.architecture) == ("tiny", "LlamaForCausalLM")


def test_the_command_line_streams_what_the_client_gets(served: Served) -> None:
    """`quire generate` prints exactly the text, then an end of line, and nothing else."""
    with Client(served.grpc) as client:
        completion = client.generate("the quick", max_tokens=24, temperature=0.0).result()

    printed = quire("generate", "the quick", "--max-tokens=24", "--temperature=0", f"--target={served.grpc}")

    assert completion.finished.usage.completion_tokens == 24
    assert completion.finished.reason is FinishReason.LENGTH
    assert printed.stdout.decode() == completion.text + "\n"
    assert (printed.returncode, printed.stderr) == (0, b"")


def test_the_command_line_gives_one_json_object(served: Served) -> None:
    """--json prints text, token ids, usage and timings; --chat renders the template; a seed repeats the noise."""
    arguments = ("generate", "-", "--chat", "--json", "--max-tokens=8", "--seed=5", f"--target={served.grpc}")

    first, second = (json.loads(quire(*arguments, stdin="the lazy dog").stdout) for _ in range(2))

    assert first["token_ids"] == second["token_ids"]
    assert len(first["token_ids"]) == first["usage"]["completion_tokens"]
    assert first["timings"]["total_s"] >= first["timings"]["first_token_s"] > 0
    with Client(served.grpc) as client:
        chat = client.tokenize(messages=[{"role": "user", "content": "the lazy dog"}])
    assert first["usage"]["prompt_tokens"] == len(chat.token_ids)


def test_ctrl_c_of_generate_cancels_the_request(served: Served) -> None:
    """Ctrl-C ends the command with exit code 130 and frees the request's rows and blocks."""
    arguments = ["generate", "the", "--max-tokens=900", "--ignore-eos", f"--target={served.grpc}"]
    with subprocess.Popen([*QUIRE, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.read(1)

        command.send_signal(signal.SIGINT)

        assert command.wait(60) == 130
        assert command.stderr.read() == b""
    served.wait_until_empty()


def test_a_refused_request_is_one_line(served: Served) -> None:
    """An error of the server is one line on stderr that names the field, and exit code 1."""
    failed = quire("generate", "", f"--target={served.grpc}")

    assert failed.returncode == 1
    assert failed.stdout == b""
    assert failed.stderr.decode().startswith("quire generate: INVALID_ARGUMENT: text: ")
    assert failed.stderr.count(b"\n") == 1


def test_a_port_in_use_is_one_line(served: Served, checkpoint: Path) -> None:
    """A second service on the first one's port is refused at once, and the first one is not disturbed."""
    port = served.grpc.rpartition(":")[2]

    failed = quire("serve", f"--model={checkpoint}", f"--grpc-port={port}", "--http-port=0")

    assert failed.returncode == 1
    assert failed.stdout == b""
    assert failed.stderr.decode().startswith(f"quire serve: grpc_port: cannot listen on 127.0.0.1:{port} ")
    assert failed.stderr.count(b"\n") == 1
    with Client(served.grpc) as client:
        assert client.generate("the", max_tokens=2, ignore_eos=True).result().finished.usage.completion_tokens == 2


def test_a_model_that_is_not_there_is_one_line() -> None:
    """A wrong --model costs one line that names the setting, and exit code 1."""
    failed = quire("serve", "--model=/nowhere", "--grpc-port=0", "--http-port=0")

    assert failed.returncode == 1
    assert failed.stderr.decode() == (
        "quire serve: model: folder /nowhere does not exist; use 'demo', a checkpoint folder or a hub id\n"
    )


def test_a_model_that_cannot_be_served_is_the_reason_for_the_end(tmp_path: Path) -> None:
    """If only a worker can detect an error, the error also ends the start, with that worker's line as the reason."""
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "llama"}')

    failed = quire("serve", f"--model={tmp_path}", "--grpc-port=0", "--http-port=0")

    assert failed.returncode == 1
    assert failed.stdout == b""
    complaints = [line for line in failed.stderr.decode().splitlines() if not line.startswith("{")]
    assert len(complaints) == 1, complaints
    assert complaints[0].startswith("quire serve: ")
    assert "model: " in complaints[0]


def test_the_sample_and_ctrl_c(checkpoint: Path) -> None:
    """`make run` prints the ready line, a streamed answer, ways to call the server and the console's address.

    Ctrl-C reaches the supervisor alone. The exit code is 0, and no process and no socket is left.
    """
    with serve(checkpoint, "--show-sample", end=False) as served:
        assert served.process.stdout is not None
        lines = []
        for line in served.process.stdout:
            lines.append(line)
            if line.startswith("curl "):
                break
        shown = "".join(lines)
        assert lines[-2] == f"Console: http://{served.http}/\n"
        assert "Once upon a time" in shown
        assert f'quire generate "Once upon a time" --max-tokens 64 --target {served.grpc}' in shown
        assert "from quire import Client" in shown
        assert "grpcurl" in shown
        (address,) = {word for word in served.children("worker")[0].cmdline() if "worker-address" in word}
        sockets = Path(address.partition("ipc://")[2]).parent
        assert sockets.stat().st_mode & 0o777 == 0o700

        os.killpg(served.process.pid, signal.SIGINT)

        assert served.wait() == 0
        assert served.process.stdout.read().strip() == ""
        assert not sockets.exists()


def test_only_callers_with_an_api_key_are_served(checkpoint: Path, tmp_path: Path) -> None:
    """Keys come from flag, variable and file, over gRPC and HTTP; only the process `quire serve` itself shows one."""
    keys = tmp_path / "keys"
    keys.write_text("from-file\n")
    flags = ("--api-key=from-flag", f"--api-key-file={keys}")
    with serve(checkpoint, *flags, environ={"QUIRE_API_KEY": "from-variable"}) as served:
        for key in ("from-flag", "from-variable", "from-file"):
            with Client(served.grpc, token=key) as client:
                assert client.generate("the", max_tokens=2).result().finished is not None
        for key in ("", "wrong"):
            with Client(served.grpc, token=key) as client, pytest.raises(errors.UnauthenticatedError):
                client.generate("the", max_tokens=2).result()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"http://{served.http}/v1/models", timeout=30)
        shown = [
            word for process in served.processes() if process.pid != served.process.pid for word in process.cmdline()
        ]
        assert not any("from-flag" in word or "from-variable" in word for word in shown)


def test_running_requests_may_end_before_the_service_does(checkpoint: Path) -> None:
    """SIGTERM during a stream: the stream is completed, then everything ends with exit code 0."""
    with serve(checkpoint, "--grace-period-s=120", end=False) as served, Client(served.grpc) as client:
        generation = client.generate("the", max_tokens=100, ignore_eos=True)
        next(generation)

        served.process.terminate()
        list(generation)

        assert generation.finished is not None
        assert generation.finished.usage.completion_tokens == 100
        assert served.wait() == 0


def test_a_second_ctrl_c_does_not_wait(checkpoint: Path) -> None:
    """A second Ctrl-C ends the service at once, for any grace period."""
    with serve(checkpoint, "--grace-period-s=100000", end=False) as served, Client(served.grpc) as client:
        generation = client.generate("the", max_tokens=900, ignore_eos=True)
        next(generation)
        os.killpg(served.process.pid, signal.SIGINT)
        until(lambda: '"stopping"' in served.log.read_text(), "the service stops")

        os.killpg(served.process.pid, signal.SIGINT)

        assert served.wait() == 130
        with pytest.raises(errors.UnavailableError):
            list(generation)


@pytest.mark.every(3)
def test_several_of_each_work_together_and_die_together(checkpoint: Path) -> None:
    """Two workers and two front ends share one port and have joined when the ready line appears.

    SIGKILL to the supervisor ends all processes.
    """
    with serve(checkpoint, "--workers=2", "--frontends=2", end=False) as served:
        assert served.metric("quire_workers") == 2
        assert served.metric("quire_frontends") == 2
        assert [len(served.children(role)) for role in ("scheduler", "worker", "frontend")] == [1, 2, 2]
        clients = [Client(served.grpc) for _ in range(8)]
        generations = [client.generate("the", max_tokens=8, ignore_eos=True) for client in clients]
        counts = [generation.result().finished.usage.completion_tokens for generation in generations]
        assert counts == [8] * len(clients)
        for client in clients:
            client.close()

        children = served.children()
        served.process.kill()

        _, alive = psutil.wait_procs(children, timeout=60)
        assert len(children) == 5
        assert alive == []


def test_a_process_that_dies_is_replaced(checkpoint: Path) -> None:
    """After any process dies, a new one replaces it and the service responds again.

    In the meantime no other process can take the service's port.
    """
    with serve(checkpoint) as served:
        for deaths, role in enumerate(("scheduler", "frontend", "worker"), 1):
            dead = served.pid(role)
            os.kill(dead, signal.SIGKILL)
            host, _, port = served.grpc.rpartition(":")
            with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
                stranger.bind((host, int(port)))
            until(lambda: served.log.read_text().count('"process died"') == deaths, "a process has died")  # noqa: B023
            until(lambda: _answers(served), "the service responds")

            assert served.pid(role) != dead
        assert served.log.read_text().count('"process died"') == deaths


def test_bench_offline_times_every_token(checkpoint: Path, tmp_path: Path) -> None:
    """The benchmark runs its requests through its own service and reports tokens and times line by line."""
    requests = tmp_path / "requests.jsonl"
    lines = [
        {"prompt_token_ids": [10, 11, 12], "max_tokens": 6, "ignore_eos": True, "prime": True},
        {"prompt_token_ids": [10, 11, 12], "max_tokens": 6, "ignore_eos": True, "arrive_s": 0.2},
        {"prompt_token_ids": list(range(10, 200)), "max_tokens": 3, "ignore_eos": True},
    ]
    requests.write_text("\n".join(map(json.dumps, lines)))
    result = tmp_path / "result.json"
    cores = os.cpu_count() or 1

    done = quire(
        "bench", "offline", f"--model={checkpoint}", f"--requests={requests}", "--max-concurrency=2",
        f"--json={result}", "--dtype=fp32", "--quantization=none", "--max-num-batched-tokens=64",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(result.read_text())
    assert report["out_tokens"] == 9
    assert [len(tokens) for tokens in report["tokens"]] == [6, 6, 3]
    assert [len(times) for times in report["times"]] == [0, 6, 3]
    assert report["tokens"][0] == report["tokens"][1]
    assert report["times"][1][0] >= 0.2
    assert all(times == sorted(times) for times in report["times"])
    assert report["out_tok_per_s"] == pytest.approx(9 / report["wall_s"])
    assert set(report["ttft_s"]) == {"p50", "p99"}
    assert set(report["itl_s"]) == {"p50", "p99", "max"}
    assert set(report["cpu_s"]) == {"scheduler", "worker-0", "frontend-0"}
    assert all(0 < used < cores * report["wall_s"] for used in report["cpu_s"].values())


def test_bench_offline_names_what_is_wrong_with_a_request(checkpoint: Path, tmp_path: Path) -> None:
    """A request that the service refuses ends the benchmark in one line."""
    requests = tmp_path / "requests.jsonl"
    lines = [{"prompt_token_ids": [10], "max_tokens": 2}, {"prompt_token_ids": [10, 99_999], "max_tokens": 2}]
    requests.write_text("\n".join(map(json.dumps, lines)))

    done = quire("bench", "offline", f"--model={checkpoint}", f"--requests={requests}")

    assert done.returncode == 1
    assert done.stdout == b""
    assert (
        done.stderr.decode().splitlines()[-1].startswith("quire bench offline: INVALID_ARGUMENT: token_ids: id 99999")
    )


def _answers(served: Served) -> bool:
    with Client(served.grpc) as client:
        try:
            return bool(client.generate("the", max_tokens=2, timeout=10).result())
        except errors.QuireError:
            return False
