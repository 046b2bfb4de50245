"""Talks with a running service: a conversation in the terminal, answers streaming as they are made.

Commands, at the beginning of a line:
  /reset          forget the conversation
  /system TEXT    tell the model how to behave, from now on
  /retry          answer the last question again
  /history        show the conversation
  /save FILE      write it to a file, as JSON
  /help           list these
  /exit           end, as Ctrl-D does

A line that ends in a backslash goes on in the next one. Ctrl-C ends the answer that is being made, and nothing else.
The lines that were typed come back with the arrow keys, also the next time.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from quire.cli._connection import add_target, credentials, token
from quire.cli._errors import explain
from quire.cli._parser import Namespace, OneLineParser
from quire.client import Client
from quire.types import GenerateOptions, Message

EXAMPLES = """
  quire chat
  quire chat --system "Answer in one sentence." --temperature 0
  printf 'What is 3 + 4?\\nAnd 5 + 6?\\n' | quire chat
"""
_PASSED_ON = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "seed")
_HISTORY_LINES = 1000
_HELP = (__doc__ or "").partition("Commands")[2].partition("\n\nA line")[0]


def configure(parser: OneLineParser) -> None:
    """Adds the flags."""
    add = parser.add_argument
    add_target(parser)
    add("--system", metavar="TEXT", help="how the model is to behave")
    add("--temperature", type=float, metavar="T", help="0 is greedy (default: 1)")
    add("--top-k", type=int, metavar="K", help="keep the k most likely tokens")
    add("--top-p", type=float, metavar="P", help="keep the smallest set of tokens whose probability reaches p")
    add("--min-p", type=float, metavar="P", help="drop tokens less likely than p times the most likely one")
    add("--max-tokens", type=int, metavar="N", help="most tokens of an answer")
    add("--seed", type=int, metavar="N", help="draw the same noise every time")


def run(options: Namespace) -> int:
    """Talks until there are no more lines."""
    given: GenerateOptions = {  # type: ignore[assignment]  # argparse is not typed
        name: value for name in _PASSED_ON if (value := getattr(options, name)) is not None
    }
    terminal = sys.stdin.isatty()
    with Client(options.target, credentials=credentials(options), token=token()) as client, _line_history(terminal):
        chat = Chat(client, given, system=options.system or "")
        if terminal:
            print("Ctrl-D ends, /help tells more.")
        for line in _lines(terminal):
            if line in ("/exit", "/quit"):
                break
            try:
                chat.take(line)
            except Exception as error:
                message = explain(error)
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
        """Obeys a command, or answers.

        Raises:
            QuireError: there is no answer; the question is forgotten.
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
                Path(argument).expanduser().write_text(json.dumps(messages, ensure_ascii=False, indent=2) + "\n")
            case "/retry":
                self._retry()
            case _ if command.startswith("/"):
                print(f"{command}: there is no such command; /help lists those there are", file=sys.stderr)
            case _ if line.strip():
                self._ask(line)

    def _retry(self) -> None:
        if not self._turns:
            print("there is nothing to answer again", file=sys.stderr)
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
                # What was said stays said; the server stops when the call is left.
                pass
            finally:
                if text:
                    _write("\n")
        self._turns += [user, {"role": "assistant", "content": text}]

    def _preamble(self) -> list[Message]:
        return [{"role": "system", "content": self._system}] if self._system else []


def _lines(terminal: bool) -> Iterator[str]:
    """What is typed, lines that go on joined."""
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
    """Arrow keys bring back earlier lines, those of earlier times, too."""
    if not terminal:
        yield
        return
    import readline

    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "quire"
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
