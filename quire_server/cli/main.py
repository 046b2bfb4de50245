"""Entry point of the command `quire`: selects the command, parses its flags, runs it, and prints errors as one line.

Exit codes: 0 success, 1 failure, 2 invalid command line, 130 interrupted. An error is one line on stderr that contains
the remedy. A traceback means a bug in Quire.
"""

import importlib
import importlib.util
import io
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire_server.cli._parser import Namespace, OneLineParser, suggest


class CommandModule(Protocol):
    """Interface of a command's module."""

    EXAMPLES: str

    def configure(self, parser: OneLineParser) -> None:
        """Add the command's flags."""

    def run(self, options: Namespace) -> int:
        """Run the command; return the exit code."""


@dataclass(frozen=True, slots=True)
class Command:
    """Name, module and summary of a command."""

    name: str
    module: str
    summary: str


COMMANDS = (
    Command("serve", "quire_server.cli.serve", "serve a model on this machine: start all processes with one command"),
    Command("generate", "quire_server.cli.generate", "generate from a prompt and stream the text"),
    Command("chat", "quire_server.cli.chat", "chat with the model in the terminal"),
    Command("batch", "quire_server.cli.batch", "send the requests in a file and write the results; resumable"),
    Command("frontend", "quire_server.cli.frontend", "run one front-end process (gRPC and HTTP)"),
    Command("scheduler", "quire_server.cli.scheduler", "run the scheduler core process"),
    Command("worker", "quire_server.cli.worker", "run one worker process (the model)"),
    Command("models", "quire_server.cli.models", "list the models that a service serves"),
    Command("top", "quire_server.cli.top", "show live statistics of a running service"),
    Command("config", "quire_server.cli.config", "print the effective settings and their sources"),
    Command("requests", "quire_server.cli.requests", "list live requests, show the events of one, or cancel one"),
    Command("explain", "records.commands.explain", "explain why a request was slow, or list the slowest ones"),
    Command("workers", "quire_server.cli.workers", "list the workers of a running service"),
    Command("capacity", "quire_server.cli.capacity", "compute how many requests fit on a card"),
    Command("download", "quire_server.cli.download", "download a model from the hub into a folder"),
    Command("keys", "quire_server.cli.keys", "create, rotate and revoke the keys between processes"),
    Command("drain", "quire_server.cli.drain", "drain a worker, or resume it"),
    Command("log-level", "quire_server.cli.log_level", "change the log level of a running service"),
    Command("bench serve", "measure.commands.bench_serve", "measure a running server under load, over gRPC or HTTP"),
    Command("bench sweep", "measure.commands.bench_sweep", "find the highest load that keeps stated limits"),
    Command("bench offline", "measure.commands.bench_offline", "send fixed requests to a service that it starts"),
    Command("bench kernels", "measure.commands.bench_kernels", "measure the worker's kernels on this machine's device"),
    Command("bench scheduler", "measure.commands.bench_scheduler", "measure the scheduler's CPU time per step"),
    Command("bench link", "measure.commands.bench_link", "measure how long workers wait for plans"),
    Command("bench strategies", "measure.commands.bench_strategies", "compare static and continuous batching"),
    Command("bench policies", "measure.commands.bench_policies", "compare scheduling policies in virtual time"),
    Command("bench frontend", "measure.commands.bench_frontend", "measure the front end alone"),
    Command("record", "records.commands.record", "list, show and export the scheduler's flight record"),
    Command("replay", "measure.commands.replay", "run the scheduler over a flight record and compare its plans"),
    Command("completion", "quire_server.cli.completion", "print a script that completes commands and flags in bash"),
    Command("sim", "checks.commands.sim", "simulate the scheduler with faults and check its invariants"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        # Escape characters that the locale's encoding lacks, instead of failing with a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    # At lower levels gRPC itself logs failed handshakes.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    command = _find(arguments)
    if command is None:
        return _without_command(arguments)
    module: CommandModule = importlib.import_module(command.module)
    name = f"quire {command.name}"
    parser = OneLineParser(name, description=module.__doc__ or "", examples=module.EXAMPLES)
    module.configure(parser)
    options = parser.parse(arguments[len(command.name.split()) :])
    try:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # `quire_server.entry` sets this.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return module.run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe. Flushing buffered output at exit must not raise an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        message = _explain(error, getattr(options, "target", ""))
        if message is None:
            raise
        print(f"{name}: {message}", file=sys.stderr)
        return 1


def installed_commands() -> list[Command]:
    """Return the installed commands; the wheel omits developers' commands (see tools/dist.py)."""
    return [command for command in COMMANDS if _is_installed(command)]


def _is_installed(command: Command) -> bool:
    try:
        return importlib.util.find_spec(command.module) is not None
    except ModuleNotFoundError:  # The package of the command is not installed.
        return False


def _find(arguments: Sequence[str]) -> Command | None:
    words = tuple(arguments[:2])
    for command in COMMANDS:
        name = tuple(command.name.split())
        if words[: len(name)] == name and _is_installed(command):
            return command
    return None


def _without_command(arguments: Sequence[str]) -> int:
    words = [word for word in arguments if not word.startswith("-")]
    if {"-V", "--version"} & set(arguments):
        from quire import __version__

        print(f"quire {__version__}")
        return 0
    groups = {command.name.split()[0] for command in installed_commands() if " " in command.name}
    group = words[0] if words and words[0] in groups else ""
    asks_for_help = bool({"-h", "--help"} & set(arguments))
    if not words or words == [group]:
        # Help goes to stdout if it was requested, and to stderr if the command line was empty.
        print(_overview(group), file=sys.stdout if asks_for_help else sys.stderr)
        return 0 if asks_for_help else 2
    unknown = " ".join(words[:2] if group else words[:1])
    if unknown in {command.name for command in COMMANDS}:
        print(f"quire: {unknown!r} is for developers and not installed; run it in the source tree", file=sys.stderr)
        return 2
    remedy = suggest(unknown, [command.name for command in installed_commands()]) or "see quire --help"
    print(f"quire: unknown command {unknown!r}; {remedy}", file=sys.stderr)
    return 2


def _overview(group: str) -> str:
    commands = [command for command in installed_commands() if not group or command.name.split()[0] == group]
    width = max(len(command.name) for command in commands)
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in commands]
    return "\n".join(
        [
            "Quire serves large language models to other services over gRPC.",
            "",
            f"usage: quire {group or 'COMMAND'} ...",
            "",
            *lines,
            "",
            "  quire help COMMAND explains a command; quire --version prints the version.",
        ]
    )


def _explain(error: Exception, target: str) -> str | None:
    """Return one line for an error that the user can fix, or None for a bug of Quire."""
    from quire_server.cli._errors import explain

    return explain(error, target)


if __name__ == "__main__":
    sys.exit(main())
