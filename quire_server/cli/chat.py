"""Chats with a running service in the terminal; answers stream as they are generated.

Commands, at the beginning of a line:
  /reset          drop the conversation
  /system TEXT    set the system message from now on
  /retry          answer the last question again
  /history        show the conversation
  /save FILE      write the conversation to a file, as JSON
  /help           list these commands
  /exit           end, as Ctrl-D does

A line that ends in a backslash continues on the next line. Ctrl-C stops only the current answer. The arrow keys bring
back earlier lines, also those of earlier sessions.
"""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from quire.client import Client
from quire.types import GenerateOptions, Message
from quire_server.cli._connection import add_target, credentials, token
from quire_server.cli._errors import explain
from quire_server.cli._parser import Namespace, OneLineParser
from quire_server.cli._sampling import SAMPLING, add_sampling_flags, given_options
from shared.config import state_folder

EXAMPLES = """
  quire chat
  quire chat --system "Answer in one sentence." --temperature 0
  printf 'What is 3 + 4?\\nAnd 5 + 6?\\n' | quire chat
"""
_HISTORY_LINES = 1000
_HELP = (__doc__ or "").partition("Commands")[2].partition("\n\nA line")[0]


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    add_target(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message: how the model should behave")
    add_sampling_flags(parser)


def run(options: Namespace) -> int:
    """Chat until the input ends."""
    given: GenerateOptions = given_options(options, SAMPLING)
    terminal = sys.stdin.isatty()
    with Client(options.target, credentials=credentials(options), token=token()) as client, _line_history(terminal):
        chat = Chat(client, given, system=options.system or "")
        if terminal:
            print("Type /help for the commands, Ctrl-D to end.")
        for line in _lines(terminal):
            if line in ("/exit", "/quit"):
                break
            try:
                chat.take(line)
            except Exception as error:
                message = explain(error, options.target)
                if message is None or not terminal:
                    raise
                print(message, file=sys.stderr)
    return 0


class Chat:
    """One conversation."""

    def __init__(self, client: Client, options: GenerateOptions, *, system: str) -> None:
        self._client = client
        self._options = options
        self._system = system
        self._turns: list[Message] = []

    def take(self, line: str) -> None:
        """Execute a command, or answer a message.

        Raises:
            QuireError: the request failed; the question is dropped.
        """
        command, _, argument = line.partition(" ")
        match command:
            case "/help":
                print("Commands" + _HELP)
            case "/reset":
                self._turns.clear()
            case "/system":
                self._system = argument
            case "/history":
                for turn in self._turns:
                    print(f"{turn['role']}: {turn['content']}")
            case "/save":
                messages = [*self._preamble(), *self._turns]
                Path(argument).expanduser().write_text(
                    json.dumps(messages, ensure_ascii=False, indent=2) + "\n", "utf-8"
                )
            case "/retry":
                self._retry()
            case _ if command.startswith("/"):
                print(f"{command}: unknown command; /help lists the commands", file=sys.stderr)
            case _ if line.strip():
                self._ask(line)

    def _retry(self) -> None:
        if not self._turns:
            print("/retry: no question to answer again; ask one first", file=sys.stderr)
            return
        question = str(self._turns[-2]["content"])
        del self._turns[-2:]
        self._ask(question)

    def _ask(self, question: str) -> None:
        user: Message = {"role": "user", "content": question}
        options: GenerateOptions = {**self._options, "messages": [*self._preamble(), *self._turns, user]}
        text = ""
        with self._client.generate(**options) as generation:
            try:
                for delta in generation:
                    text += delta.text
                    _write(delta.text)
            except KeyboardInterrupt:
                # Keep the partial response. Leaving the call cancels the request on the server.
                pass
            finally:
                if text:
                    _write("\n")
        self._turns += [user, {"role": "assistant", "content": text}]

    def _preamble(self) -> list[Message]:
        return [{"role": "system", "content": self._system}] if self._system else []


def _lines(terminal: bool) -> Iterator[str]:
    """Yield the input lines, with continued lines joined."""
    begun = ""
    while True:
        try:
            line = input(("… " if begun else "> ") if terminal else "")
        except EOFError:
            if terminal:
                print()
            return
        except KeyboardInterrupt:
            if not terminal:
                raise
            print()
            begun = ""
            continue
        if line.endswith("\\"):
            begun += line[:-1] + "\n"
        else:
            yield begun + line
            begun = ""


@contextlib.contextmanager
def _line_history(terminal: bool) -> Iterator[None]:
    """Keep a history of lines for the arrow keys, across sessions."""
    if not terminal:
        yield
        return
    import readline

    state = state_folder()
    with contextlib.suppress(OSError):
        readline.read_history_file(state / "chat-history")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            state.mkdir(parents=True, exist_ok=True, mode=0o700)
            readline.set_history_length(_HISTORY_LINES)
            readline.write_history_file(state / "chat-history")


def _write(text: str) -> None:
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()
