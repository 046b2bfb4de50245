"""Commands with the address of something else print one line with what is there and what to do."""

import http.server
import importlib
import json
import os
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import trustme

from measure.testbed.service import QUIRE, ROOT
from quire_server.cli._parser import OneLineParser
from quire_server.cli.main import main
from tests.quire.scripted_server import scripted_server

HTTP_COMMANDS = ("batch",)
GRPC_COMMANDS = ("generate", "chat", "models", "workers", "requests", "drain", "log-level", "top")
GIVE_HTTP = "pass the service's HTTP address with --target"
GIVE_GRPC = "pass the service's gRPC address with --target"


@dataclass(frozen=True, slots=True)
class Papers:
    """Certificates of a TLS server, and of an unrelated authority."""

    key: Path
    chain: Path
    ca: Path
    other_ca: Path


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    """Return certificates and keys."""
    folder = tmp_path_factory.mktemp("papers")
    papers = Papers(*(folder / name for name in ("key.pem", "chain.pem", "ca.pem", "other.pem")))
    ca = trustme.CA()
    certificate = ca.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(papers.key))
    papers.chain.write_bytes(b"".join(pem.bytes() for pem in certificate.cert_chain_pems))
    ca.cert_pem.write_to_path(str(papers.ca))
    trustme.CA().cert_pem.write_to_path(str(papers.other_ca))
    return papers


@contextmanager
def http_server(status: int = 404, body: bytes = b"<html>", papers: Papers | None = None) -> Iterator[str]:
    """An HTTP server with a fixed response; yields its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET  # noqa: N815  # the name is the library's

        def log_message(self, *_: object) -> None:
            """Logs nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        # A client that disconnects during a handshake must not cause a traceback.
        server.handle_error = lambda *_: None  # type: ignore[method-assign]
        if papers is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(papers.chain, papers.key)
            server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def grpc_server_with_tls(papers: Papers) -> Iterator[str]:
    """A gRPC server with TLS and without any service; its address."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    credentials = grpc.ssl_server_credentials([(papers.key.read_bytes(), papers.chain.read_bytes())])
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@contextmanager
def grpc_server() -> Iterator[str]:
    """A gRPC server in the clear; its address."""
    with scripted_server() as server:
        yield server.target


class Shell:
    """Run a command in this process and return its output."""

    def __init__(self, folder: Path, capture: pytest.CaptureFixture[str]) -> None:
        self._folder = folder
        self._capture = capture

    def complaint(self, command: str, target: str, *flags: str) -> str:
        """Return a failing command's error line, which must be its only output."""
        code = main([command, *self._arguments(command), "--target", target, *flags])

        out, err = self._capture.readouterr()
        assert (code, out) == (1, "")
        (line,) = err.splitlines()
        prefix = f"quire {command}: {target}: "
        assert line.startswith(prefix)
        return line.removeprefix(prefix)

    def _arguments(self, command: str) -> list[str]:
        requests = self._folder / "requests.jsonl"
        requests.write_text('{"prompt": "x"}\n')
        answers = self._folder / "answers.jsonl"
        arguments = {
            "top": ["--once"],
            # An error that a retry cannot repair is raised at once, regardless of the time limit.
            "batch": [str(requests), str(answers), "--patience", "60", "--quiet"],
            "generate": ["x"],
            "drain": ["worker-0"],
            "log-level": ["debug"],
        }
        return arguments.get(command, [])


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Shell:
    """Return a shell in an empty folder."""
    question = tmp_path / "question"
    question.write_text("hello\n")
    monkeypatch.setattr("sys.stdin", question.open())
    return Shell(tmp_path, capsys)


@pytest.mark.parametrize("command", HTTP_COMMANDS)
def test_http_commands_at_a_grpc_port(command: str, shell: Shell) -> None:
    """No traceback and no raw bytes: the port speaks another protocol."""
    with grpc_server() as target:
        assert shell.complaint(command, target) == f"does not speak HTTP/1.1; {GIVE_HTTP}, not the gRPC one"


@pytest.mark.parametrize("command", GRPC_COMMANDS)
def test_grpc_commands_at_an_http_port(command: str, shell: Shell) -> None:
    """Likewise the other way round."""
    with http_server() as target:
        assert shell.complaint(command, target) == f"does not speak gRPC; {GIVE_GRPC}, not the HTTP one"


@pytest.mark.parametrize("command", HTTP_COMMANDS)
@pytest.mark.parametrize(
    ("status", "body"), [(404, b"<html>"), (200, b"<html>"), (200, b"{}"), (404, b'{"error": "not found"}')]
)
def test_http_commands_at_another_http_server(command: str, status: int, body: bytes, shell: Shell) -> None:
    """A server that answers, but not as Quire does."""
    with http_server(status, body) as target:
        assert shell.complaint(command, target) == f"returned {status}, which is not a response from Quire; {GIVE_HTTP}"


def test_an_error_of_the_server_is_kept(tmp_path: Path) -> None:
    """An error in OpenAI's form is in the answers in the server's own words."""
    requests, answers = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    requests.write_text('{"prompt": "x"}\n')
    with http_server(403, b'{"error": {"message": "Host: not allowed"}}') as target:
        assert main(["batch", str(requests), str(answers), "--target", target]) == 1
    assert json.loads(answers.read_text())["error"] == {"message": "Host: not allowed"}


@pytest.mark.parametrize("command", [*HTTP_COMMANDS, "generate", "workers"])
def test_nothing_listens(command: str, shell: Shell) -> None:
    """The remedy is a server, or another address."""
    flags = ["--patience", "0.1"] if command == "batch" else []
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        complaint = shell.complaint(command, f"127.0.0.1:{held.getsockname()[1]}", *flags)

    assert complaint.startswith("nothing listens there; start a server with quire serve, or pass ")


@pytest.mark.parametrize("command", [*HTTP_COMMANDS, "generate", "workers"])
def test_without_tls_at_a_tls_port(command: str, shell: Shell, papers: Papers) -> None:
    """A server that expects TLS hangs up; the remedy is the flag."""
    flags = ["--patience", "0.1"] if command == "batch" else []
    with http_server(papers=papers) if command in HTTP_COMMANDS else grpc_server_with_tls(papers) as target:
        complaint = shell.complaint(command, target, *flags)

    assert complaint.startswith("closed the connection; if it uses TLS, pass --tls-ca")


@pytest.mark.parametrize("command", [*HTTP_COMMANDS, "generate", "workers"])
def test_tls_with_another_ca_is_refused(command: str, shell: Shell, papers: Papers) -> None:
    """A certificate that the given CA has not signed is not accepted."""
    with http_server(papers=papers) if command in HTTP_COMMANDS else grpc_server_with_tls(papers) as target:
        complaint = shell.complaint(command, target, "--tls-ca", str(papers.other_ca))

    assert complaint.startswith("certificate not accepted")
    assert complaint.endswith("; pass its CA with --tls-ca")


def test_tls_at_the_other_protocols_port(shell: Shell, papers: Papers) -> None:
    """With the right CA, the message says that the port speaks another protocol."""
    ca = ["--tls-ca", str(papers.ca)]
    with grpc_server_with_tls(papers) as target:
        complaint = shell.complaint("batch", target, *ca, "--patience", "0.1")
    assert complaint.startswith(f"closed the connection; {GIVE_HTTP}, not the gRPC one")

    with http_server(papers=papers) as target:
        complaint = shell.complaint("workers", target, *ca)
    assert complaint == f"does not speak gRPC; {GIVE_GRPC}, not the HTTP one"


@pytest.mark.parametrize("command", ["batch", "workers"])
def test_tls_at_a_port_without(command: str, papers: Papers, tmp_path: Path) -> None:
    """The remedy is to remove the flag; gRPC's own lines about the handshake are not shown."""
    requests = tmp_path / "requests.jsonl"
    requests.write_text('{"prompt": "x"}\n')
    files = [str(requests), str(tmp_path / "answers.jsonl")] if command == "batch" else []
    arguments = [command, *files, "--tls-ca", str(papers.ca)]
    with http_server() if command == "batch" else grpc_server() as target:
        environ = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
        ended = subprocess.run(
            [*QUIRE, *arguments, "--target", target],
            cwd=ROOT,
            env=environ,
            capture_output=True,
            timeout=120,
            check=False,
        )

    assert ended.stderr.decode() == f"quire {command}: {target}: does not speak TLS; remove --tls-ca\n"
    assert (ended.returncode, ended.stdout) == (1, b"")


@pytest.mark.parametrize(
    ("command", "target", "complaint"),
    [
        ("batch", "localhost", "'localhost' is not HOST:PORT with a port from 1 to 65535"),
        (
            "batch",
            "https://127.0.0.1:8000",
            "'https://127.0.0.1:8000': pass HOST:PORT, and for TLS the CA with --tls-ca",
        ),
        (
            "batch",
            "grpc://127.0.0.1:50051",
            "'grpc://127.0.0.1:50051' is a gRPC address, but this command uses HTTP; use HOST:PORT of the HTTP port",
        ),
        ("batch", "127.0.0.1:http", "'127.0.0.1:http' is not HOST:PORT with a port from 1 to 65535"),
        (
            "workers",
            "http://127.0.0.1:8000",
            "'http://127.0.0.1:8000' is an HTTP address, but this command uses gRPC; use HOST:PORT of the gRPC port",
        ),
        ("workers", "127.0.0.1:99999", "'127.0.0.1:99999' is not HOST:PORT with a port from 1 to 65535"),
        ("workers", "dns:///localhost:0", "'dns:///localhost:0' is not HOST:PORT with a port from 1 to 65535"),
    ],
)
def test_an_address_of_the_wrong_form(
    command: str, target: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused with the command line, before anything is sent."""
    with pytest.raises(SystemExit) as ended:
        main([command, *(["a", "b"] if command == "batch" else []), "--target", target])

    assert ended.value.code == 2
    assert capsys.readouterr().err == f"quire {command}: argument --target: {complaint}; see quire {command} --help\n"


@pytest.mark.parametrize(
    ("command", "given", "target"),
    [
        ("batch", "http://127.0.0.1:8000/", "127.0.0.1:8000"),
        ("batch", "[::1]:8000", "[::1]:8000"),
        ("workers", "grpc://127.0.0.1:50051", "127.0.0.1:50051"),
        ("workers", "dns:///localhost:50051", "dns:///localhost:50051"),
        ("workers", "unix:/run/quire.sock", "unix:/run/quire.sock"),
        ("workers", "localhost", "localhost"),
    ],
)
def test_a_url_of_the_right_protocol_is_an_address(command: str, given: str, target: str) -> None:
    """The scheme is accepted where it names the protocol that the command uses."""
    parser = OneLineParser(command, description="", examples="")
    importlib.import_module(f"quire_server.cli.{command}").configure(parser)

    files = ["a", "b"] if command == "batch" else []
    assert parser.parse([*files, "--target", given]).target == target
