"""What the command line promises: one line for an error, an exit code that means something, help without waiting."""

import importlib
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from measure.testbed.service import QUIRE, ROOT
from quire_server.cli import serve
from quire_server.cli._config import TOPICS
from quire_server.cli._other_servers import REMEDIES
from quire_server.cli._parser import OneLineParser
from quire_server.cli.main import COMMANDS, main
from tests.quire.scripted_server import ScriptedServer, delta, fail, finished, reason, scripted_server

import grpc  # isort: skip


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """Yield a scripted server."""
    with scripted_server() as running:
        yield running


def quire(*arguments: str, **environ: str) -> "subprocess.CompletedProcess[bytes]":
    """Runs the command line to its end."""
    return subprocess.run(
        [*QUIRE, *arguments], cwd=ROOT, env={**os.environ, **environ}, capture_output=True, timeout=120, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["sevre"], 2, "quire: unknown command 'sevre'; did you mean 'serve'?"),
        (["zzz"], 2, "quire: unknown command 'zzz'; see quire --help"),
        (["bench", "ofline"], 2, "quire: unknown command 'bench ofline'; did you mean 'bench offline'?"),
        (
            ["serve", "--max-num-seq", "3"],
            2,
            "quire serve: --max-num-seq: unknown argument; did you mean '--max-num-seqs'?; see quire serve --help",
        ),
        (
            ["serve", "-tp", "2"],
            2,
            "quire serve: -tp: unknown argument; use --tensor-parallel-size; see quire serve --help",
        ),
        (
            ["serve", "demo", "--model", "other"],
            1,
            "quire serve: model: given twice, as 'demo' and with --model; use one",
        ),
        (
            ["serve", "--port", "99999"],
            1,
            "quire serve: http_port (--http-port): 99999 is too large; use at most 65535",
        ),
        (
            ["serve", "--port", "8000", "--http-port", "8001"],
            1,
            "quire serve: http_port: given twice, as --port 8000 and --http-port 8001; use one (--grpc-port is the"
            " other port)",
        ),
        (["serve", "--workers", "0"], 1, "quire serve: workers (--workers): 0 is too small; use at least 1"),
        (
            ["serve", "--kv-cache-memory", "5 pounds"],
            1,
            "quire serve: kv_cache_memory (--kv-cache-memory): '5 pounds' is not a size in bytes; use for example"
            " 512MiB or 2GiB",
        ),
        (
            ["bench", "offline", "--requests", "/nowhere"],
            1,
            "quire bench offline: --requests: /nowhere: cannot be read (No such file or directory); use a file of"
            " JSON lines in UTF-8",
        ),
        (
            ["generate", "x", "--target", "127.0.0.1:1", "--max-tokens", "-1"],
            1,
            "quire generate: INVALID_ARGUMENT: stop.max_tokens: -1 is out of range",
        ),
    ],
)
def test_an_error_is_one_line_with_its_remedy(arguments: list[str], code: int, line: str) -> None:
    """An error prints one line to stderr and nothing to stdout; the exit code is 2 for a wrong command line, else 1."""
    ended = quire(*arguments)

    assert ended.stderr.decode() == line + "\n"
    assert ended.stdout == b""
    assert ended.returncode == code


@pytest.mark.parametrize(
    "command", ["generate", "chat", "models", "requests", "workers", "drain", "log_level", "batch"]
)
def test_a_command_goes_where_the_environment_says(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`QUIRE_TARGET` stands for `--target` in all of them, and `QUIRE_TLS_CA` for `--tls-ca`."""
    monkeypatch.setenv("QUIRE_TARGET", "10.0.0.5:7")
    monkeypatch.setenv("QUIRE_TLS_CA", "ca.pem")
    parser = OneLineParser(command, description="", examples="")
    importlib.import_module(f"quire_server.cli.{command}").configure(parser)

    assert parser.get_default("target") == "10.0.0.5:7"
    assert parser.get_default("tls_ca") == "ca.pem"


@pytest.mark.parametrize(("command", "target"), [("generate", "127.0.0.1:50051"), ("batch", "127.0.0.1:8000")])
def test_an_empty_variable_is_as_none(command: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `QUIRE_TARGET=`, a command uses its default address."""
    monkeypatch.setenv("QUIRE_TARGET", "")
    parser = OneLineParser(command, description="", examples="")
    importlib.import_module(f"quire_server.cli.{command}").configure(parser)

    assert parser.get_default("target") == target


def test_an_empty_address_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The library of gRPC would report it in several lines."""
    with pytest.raises(SystemExit):
        main(["models", "--target="])

    error = capsys.readouterr().err
    assert error.startswith("quire models: argument --target: the address is empty; use HOST:PORT of the gRPC port; ")
    assert error.count("\n") == 1


def test_a_simulation_needs_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Without time, no simulation would run, and the command would fail without a reason."""
    assert main(["sim", "--minutes=0"]) == 1
    assert capsys.readouterr().err == "quire sim: --minutes: 0 is too small; use a number > 0\n"


def test_a_wrong_choice_names_the_right_ones() -> None:
    """If a setting does not know a value, the error lists the known ones."""
    ended = quire("serve", "--policy", "lifo")

    line = ended.stderr.decode()
    assert line.startswith("quire serve: argument --policy: invalid choice: 'lifo' (choose from ")
    assert "fcfs" in line
    assert line.endswith("; see quire serve --help\n")
    assert (line.count("\n"), ended.returncode) == (1, 2)


def test_a_wrong_environment_variable_is_named() -> None:
    """A setting from the environment that cannot be read is an error that names the variable."""
    ended = quire("scheduler", QUIRE_MAX_NUM_SEQS="many")

    assert ended.stderr.decode() == "quire scheduler: QUIRE_MAX_NUM_SEQS: 'many' is not of type int\n"
    assert ended.returncode == 1


def test_a_worker_without_torch_says_what_to_install() -> None:
    """The base install has the worker's command but not its packages."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from quire_server.cli.main import main; sys.exit(main(['worker', '--model=/tmp']))"
    )

    ended = subprocess.run([QUIRE[0], "-c", code], cwd=ROOT, capture_output=True, timeout=120, check=False)

    assert ended.stderr.decode().splitlines() == [
        "quire worker: torch is not installed; workers need it: "
        'pip install "$(ls dist/quire_server-*.whl)[worker]" (make dist builds the wheel)'
    ]
    assert ended.returncode == 1


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_explains_itself(command: str) -> None:
    """--help shows what the command does, with examples."""
    ended = quire(*command.split(), "--help")

    assert ended.returncode == 0
    assert f"quire {command}" in ended.stdout.decode()
    assert "examples:" in ended.stdout.decode()


def test_the_overview_lists_every_command() -> None:
    """`quire --help` and `quire bench --help` list the commands, `quire` alone does so as an error."""
    everything, group, nothing = quire("--help"), quire("bench", "--help"), quire()

    assert [command.name for command in COMMANDS if command.name not in everything.stdout.decode()] == []
    assert "bench offline" in group.stdout.decode()
    assert "generate" not in group.stdout.decode()
    assert (everything.returncode, group.returncode, nothing.returncode) == (0, 0, 2)
    assert nothing.stdout == b""


def test_help_has_the_common_settings_by_topic_and_help_all_every_one() -> None:
    """`--help-all` hides no setting; `--help` says how many it omits. Every name in a topic is a flag."""
    parser = OneLineParser("quire serve", description="", examples="")
    serve.configure(parser)
    short, everything = parser.format_help(), parser.format_help(shows_all=True)
    flags = {flag: action.dest for flag, action in parser._option_string_actions.items() if flag != "-h"}
    grouped = {name for names in TOPICS.values() for name in names}

    assert [flag for flag in flags if f"  {flag}" not in everything and f", {flag}" not in everything] == []
    assert [title for title in TOPICS if f"\n{title}:\n" not in short] == []
    assert grouped <= set(flags.values())
    assert "--worker-silence-s" not in short
    rare = {dest for dest in flags.values() if f"--{dest.replace('_', '-')} " not in short} - grouped
    assert f"{len(rare)} rare settings are not listed: see quire serve --help-all" in short


@pytest.mark.parametrize(
    ("arguments", "same"),
    [(["help"], ["--help"]), (["help", "bench"], ["bench", "--help"]), (["help", "top"], ["top", "--help"])],
)
def test_help_is_a_command_as_well(arguments: list[str], same: list[str]) -> None:
    """`quire help COMMAND` prints what `quire COMMAND --help` prints, and succeeds."""
    asked, flag = quire(*arguments), quire(*same)

    assert (asked.returncode, asked.stdout) == (0, flag.stdout)


def test_a_command_that_the_wheel_leaves_out_is_not_unknown() -> None:
    """One line says where the command exists."""
    code = (
        "import importlib.util as u, sys; found = u.find_spec\n"
        "u.find_spec = lambda name: None if name.endswith('bench_kernels') else found(name)\n"
        "from quire_server.cli.main import main; sys.exit(main(['bench', 'kernels', '--help']))"
    )
    ended = subprocess.run([QUIRE[0], "-c", code], cwd=ROOT, capture_output=True, timeout=120, check=False)

    said = ended.stderr.decode()
    assert said == "quire: 'bench kernels' is for developers and not installed; run it in the source tree\n"
    assert ended.returncode == 2


def test_help_does_not_wait_for_grpc() -> None:
    """The overview and a command line that is wrong import neither grpc nor the services."""
    code = (
        "import sys\nfrom quire_server.cli.main import main\nmain(['--help']); main(['no-such'])\n"
        "heavy = {'grpc', 'zmq', 'numpy', 'google', 'services', 'scheduler_svc'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )

    ended = subprocess.run([QUIRE[0], "-c", code], cwd=ROOT, capture_output=True, timeout=120, check=False)

    assert ended.returncode == 0, ended.stderr.decode()


@pytest.mark.parametrize(
    "module",
    [
        "quire", "quire.client", "quire.aio", "quire_server.cli.main", "quire_server.cli.serve",
        "quire_server.serve.service", "measure.offline", "quire_server.cli.worker", "services.frontend",
        "scheduler_svc.main", "shared.config",
        "shared.telemetry",
    ],
)  # fmt: skip
def test_the_base_install_never_imports_torch(module: str) -> None:
    """Client, command line, front end, scheduler and what they share work where torch is not installed."""
    code = (
        f"import sys, {module}\n"
        "if hasattr(sys.modules['quire'] if 'quire' in sys.modules else None, 'Client'): pass\n"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )

    ended = subprocess.run([QUIRE[0], "-c", code], cwd=ROOT, capture_output=True, timeout=120, check=False)

    assert ended.returncode == 0, ended.stderr.decode()


def test_text_is_written_byte_by_byte(server: ScriptedServer) -> None:
    """The model's text reaches stdout unchanged, whatever the locale says."""
    server.script = lambda _request, _context: [delta(0, [1], "héé\r\n"), delta(1, [2], "\t☃"), finished()]

    ended = quire("generate", "x", "--target", server.target, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")

    assert ended.stdout.decode() == "héé\r\n\t☃\n"
    assert ended.returncode == 0


def test_an_error_in_mid_stream_starts_on_a_line_of_its_own(server: ScriptedServer) -> None:
    """Output before the error is kept and ends with a line break; the error goes to stderr."""

    def script(_request: object, context: grpc.ServicerContext) -> Iterator[object]:
        yield delta(0, [1], "half")
        fail(context, grpc.StatusCode.UNAVAILABLE, "no worker", reason("NO_WORKER"))

    server.script = script  # type: ignore[assignment]

    ended = quire("generate", "x", "--target", server.target)

    assert ended.stdout == b"half\n"
    assert ended.stderr == b"quire generate: UNAVAILABLE: no worker\n"
    assert ended.returncode == 1


def test_every_flag_of_generate_reaches_the_server(server: ScriptedServer) -> None:
    """The server receives the values of the command line."""
    quire(
        "generate", "x", "--target", server.target, "--max-tokens=5", "--temperature=0", "--top-k=2", "--top-p=0.5",
        "--min-p=0.25", "--seed=7", "--stop=a", "--stop=b", "--stop-token-id=3", "--ignore-eos", "--request-id=r",
        "--model=demo", "--timeout=60", "--priority=3", "--tenant=team", "--expected-output-tokens=9",
        "--ttft-target=0.5", "--total-time-target=90", "--cache-scope=shared", "--request-class=batch",
        "--session-id=agent-7", "--ends-session", "--retention=60", "--retention-priority=2", "--expected-pause=1.5",
    )  # fmt: skip

    (request,) = server.requests
    assert request.text == "x"
    assert (request.request_id, request.model) == ("r", "demo")
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed) == (0, 2, 0.5, 0.25, 7)
    assert sampling.HasField("temperature")
    assert (request.stop.max_tokens, list(request.stop.stop_strings)) == (5, ["a", "b"])
    assert (list(request.stop.stop_token_ids), request.stop.ignore_eos) == ([3], True)
    assert server.deadlines[0] is not None
    scheduling = request.scheduling
    assert (scheduling.priority, scheduling.tenant, scheduling.expected_output_tokens) == (3, "team", 9)
    assert (scheduling.ttft_target.ToMilliseconds(), scheduling.total_time_target.ToMilliseconds()) == (500, 90_000)
    assert (scheduling.cache_scope, scheduling.request_class) == ("shared", "batch")
    assert (scheduling.session_id, scheduling.ends_session) == ("agent-7", True)
    assert (scheduling.retention.ToSeconds(), scheduling.retention_priority) == (60, 2)
    assert scheduling.expected_pause.ToMilliseconds() == 1500


def test_a_reader_that_leaves_ends_the_command_quietly(server: ScriptedServer) -> None:
    """`quire generate … | head` does not end in a traceback, and the request is cancelled."""

    def script(_request: object, context: grpc.ServicerContext) -> Iterator[object]:
        while context.is_active():
            yield delta(0, [1], "many words ")

    server.script = script  # type: ignore[assignment]
    with subprocess.Popen(
        [*QUIRE, "generate", "x", "--target", server.target], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.read(10)
        command.stdout.close()

        assert command.wait(60) == 1
        assert command.stderr.read() == b""
    assert server.cancelled.wait(30)


def test_ctrl_c_is_130(server: ScriptedServer) -> None:
    """An interrupted command says so by its exit code and by nothing else, and cancels the request."""

    def script(_request: object, context: grpc.ServicerContext) -> Iterator[object]:
        while context.is_active():
            yield delta(0, [1], "x")

    server.script = script  # type: ignore[assignment]
    with subprocess.Popen(
        [*QUIRE, "generate", "x", "--target", server.target],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    ) as command:
        assert command.stderr is not None
        assert server.asked.acquire(timeout=60)

        command.send_signal(signal.SIGINT)

        assert command.wait(60) == 130
        assert command.stderr.read() == b""
    assert server.cancelled.wait(30)


@pytest.mark.parametrize("during", ["quire_server.cli.main", "quire_server.cli.generate", "quire.client", "grpc"])
def test_ctrl_c_during_the_imports_of_a_command_prints_nothing(during: str) -> None:
    """The process ends by the signal or with 130, without a traceback, whichever module it was importing."""
    code = (
        "import os, signal, sys, quire_server.entry\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {during!r}: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.argv = ['quire', 'generate', 'x', '--target', '127.0.0.1:1']\n"
        "sys.exit(quire_server.entry.main())\n"
    )
    ended = subprocess.run([QUIRE[0], "-c", code], cwd=ROOT, capture_output=True, timeout=120, check=False)

    assert ended.stderr.decode() == ""
    assert ended.returncode in (-signal.SIGINT, 130)


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["serve", "--help"], ["config"]])
def test_a_terminal_without_unicode_gets_escapes(arguments: list[str]) -> None:
    """A locale that has ASCII only is no reason for a traceback."""
    ended = quire(*arguments, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", QUIRE_SERVED_MODEL_NAME="Größe")

    assert (ended.returncode, ended.stderr) == (0, b"")
    assert ended.stdout.isascii()


@pytest.mark.parametrize(
    ("flag", "ours"),
    [
        ("--use-v2-block-manager", "always paged"),
        ("--num-scheduler-steps=8", "--max-plans-in-flight"),
        ("--enable-lora", "LoRA adapters are not supported"),
        ("--max-batch-prefill-tokens=4096", "--max-num-batched-tokens"),
        ("--waiting-served-ratio=1.2", "--itl-target-ms"),
        ("--batch-scheduler-policy=max_utilization", "--capacity"),
        ("--batch_scheduler_policy", "--capacity"),
        ("--executor-static-batch-size", "--batching static"),
        ("--max_queue_delay_microseconds", "--max-wait-ms"),
        ("--mem-fraction-static", "--gpu-memory-utilization"),
        ("--max_num_seqs=8", "--max-num-seqs"),
    ],
)
def test_a_flag_of_another_server_is_answered_with_ours(
    flag: str, ours: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line names the replacement for a flag of vLLM, TGI, TensorRT-LLM, Triton or SGLang."""
    parser = OneLineParser("quire serve", description="", examples="")
    serve.configure(parser)

    with pytest.raises(SystemExit):
        parser.parse([flag])

    said = capsys.readouterr().err
    assert said.startswith(f"quire serve: {flag}: unknown argument; ")
    assert ours in said
    assert said.count("\n") == 1


def test_other_servers_flags_are_none_of_ours_and_the_remedies_name_ours() -> None:
    """Each flag in the list is unknown to `quire serve`, and each flag that a remedy names exists."""
    parser = OneLineParser("quire serve", description="", examples="")
    serve.configure(parser)
    flags = set(parser._option_string_actions)

    assert flags & set(REMEDIES) == set()
    assert {word.strip(".,;") for text in REMEDIES.values() for word in text.split() if word[:2] == "--"} <= flags
