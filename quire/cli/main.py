"""Entry of the command `quire`: finds the command, parses its flags, runs it, and turns errors into one line.

Exit codes: 0 done, 1 failed, 2 the command line is wrong, 130 interrupted. An error is one line on stderr
that says what to do about it; a traceback means a bug in Quire.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.cli._parser import Namespace, OneLineParser, suggest


class CommandModule(Protocol):
    """What the module of a command offers."""

    EXAMPLES: str

    def configure(self, parser: OneLineParser) -> None:
        """Adds the command's flags."""

    def run(self, options: Namespace) -> int:
        """Does the work; returns the exit code."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command's name, where it lives, and what `quire --help` says about it."""

    name: str
    module: str
    summary: str


COMMANDS = (
    Command("serve", "quire.cli.serve", "serve a model on this machine: every process, one command"),
    Command("generate", "quire.cli.generate", "generate from a prompt and stream the text"),
    Command("chat", "quire.cli.chat", "talk with the model in the terminal"),
    Command("batch", "quire.cli.batch", "answer a file of requests; resumable"),
    Command("frontend", "quire.cli.frontend", "run one front-end process (gRPC and HTTP)"),
    Command("scheduler", "quire.cli.scheduler", "run the scheduler core process"),
    Command("worker", "quire.cli.worker", "run one worker process (the model)"),
    Command("models", "quire.cli.models", "list the models that a service serves"),
    Command("top", "quire.cli.top", "watch a service at work"),
    Command("config", "quire.cli.config", "print the settings in effect and where each comes from"),
    Command("requests", "quire.cli.requests", "list the live requests of a service, tell their stories, end them"),
    Command("workers", "quire.cli.workers", "list the workers of a running service"),
    Command("keys", "quire.cli.keys", "make and rotate the keys between processes"),
    Command("drain", "quire.cli.drain", "make a worker idle, or let it work again"),
    Command("log-level", "quire.cli.log_level", "change how much a running service logs"),
    Command("bench offline", "quire.cli.bench_offline", "send a fixed list of requests through a real service"),
    Command("bench kernels", "quire.cli.bench_kernels", "measure the worker's kernels on this machine's device"),
    Command("bench scheduler", "quire.cli.bench_scheduler", "measure what a step costs the scheduler"),
    Command("bench link", "quire.cli.bench_link", "measure how long workers wait for plans"),
    Command("bench frontend", "quire.cli.bench_frontend", "measure the front end alone"),
    Command("sim", "quire.cli.sim", "simulate the scheduler with faults and check its promises"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = _find(arguments)
    if command is None:
        return _without_command(arguments)
    module: CommandModule = importlib.import_module(command.module)
    name = f"quire {command.name}"
    parser = OneLineParser(name, description=module.__doc__ or "", examples=module.EXAMPLES)
    module.configure(parser)
    options = parser.parse(arguments[len(command.name.split()) :])
    try:
        return module.run(options)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Whoever read our output has enough. What is still buffered must not fail at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        message = _explain(error)
        if message is None:
            raise
        print(f"{name}: {message}", file=sys.stderr)
        return 1


def _find(arguments: Sequence[str]) -> Command | None:
    words = tuple(arguments[:2])
    for command in COMMANDS:
        name = tuple(command.name.split())
        if words[: len(name)] == name:
            return command
    return None


def _without_command(arguments: Sequence[str]) -> int:
    words = [word for word in arguments if not word.startswith("-")]
    if {"-V", "--version"} & set(arguments):
        from quire import __version__

        print(f"quire {__version__}")
        return 0
    groups = {command.name.split()[0] for command in COMMANDS if " " in command.name}
    group = words[0] if words and words[0] in groups else ""
    asks_for_help = bool({"-h", "--help"} & set(arguments))
    if not words or (group and (asks_for_help or len(words) == 1)):
        # Asked for, help is an answer; otherwise it is the remedy for a command line that says nothing.
        print(_overview(group), file=sys.stdout if asks_for_help else sys.stderr)
        return 0 if asks_for_help else 2
    unknown = " ".join(words[:2] if group else words[:1])
    remedy = suggest(unknown, [command.name for command in COMMANDS]) or "see quire --help"
    print(f"quire: there is no command {unknown!r}; {remedy}", file=sys.stderr)
    return 2


def _overview(group: str) -> str:
    commands = [command for command in COMMANDS if not group or command.name.split()[0] == group]
    width = max(len(command.name) for command in commands)
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in commands]
    return "\n".join(
        [
            "Quire serves large language models to other services over gRPC.",
            "",
            f"usage: quire {group or 'COMMAND'} …",
            "",
            *lines,
            "",
            "  quire COMMAND --help explains a command; quire --version prints the version.",
        ]
    )


def _explain(error: Exception) -> str | None:
    """One line for an error that the user can do something about, None for one of ours."""
    from quire.cli._errors import explain

    return explain(error)


if __name__ == "__main__":
    sys.exit(main())
