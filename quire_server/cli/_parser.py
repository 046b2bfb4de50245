"""argparse for Quire's commands: one-line errors with a remedy, no abbreviations, examples in --help.

For a command with a process's settings, `--help` lists the common ones by topic and `--help-all` lists all of them.
"""

import argparse
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

Namespace = argparse.Namespace


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr and exit code 2."""

    def __init__(self, prog: str, *, description: str, examples: str) -> None:
        self.remedies: Mapping[str, str] = {}
        """For each flag that only other servers have: what to use instead."""
        self._settings: frozenset[str] = frozenset()
        self._topics: Mapping[str, Sequence[str]] = {}
        super().__init__(
            prog,
            description=description.strip(),
            epilog=f"examples:\n{examples.rstrip()}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # Reject abbreviated flags, because an abbreviation would change its meaning when a flag is added.
            allow_abbrev=False,
            # A command may replace a flag of the shared configuration in order to accept more values.
            conflict_handler="resolve",
        )

    def group_settings(self, settings: Iterable[str], topics: Mapping[str, Sequence[str]]) -> None:
        """List settings by topic in `--help`; settings without a topic appear only in `--help-all`.

        Args:
            settings: names of all settings of the command. The command's other flags are always listed.
            topics: for each topic's title, the names of settings and flags that belong to it.
        """
        self._settings, self._topics = frozenset(settings), topics
        self.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all settings and exit")

    def actions(self) -> Sequence[argparse.Action]:
        """Return the flags and arguments of the command."""
        return self._actions

    def format_help(self, *, shows_all: bool = False) -> str:
        if not self._topics:
            return super().format_help()
        grouped = {name for names in self._topics.values() for name in names}
        own = [action for action in self._actions if action.dest not in self._settings | grouped]
        rare = [action for action in self._actions if action.dest in self._settings - grouped]
        any_setting = argparse.Action([], "settings", nargs="*", metavar="--SETTING VALUE")
        formatter = self._get_formatter()
        formatter.add_usage(None, [*own, any_setting], [])
        formatter.add_text(self.description)
        sections = {"options": own}
        for title, names in self._topics.items():
            sections[title] = [action for name in names for action in self._actions if action.dest == name]
        sections["rare settings"] = rare if shows_all else []
        for title, actions in sections.items():
            formatter.start_section(title)
            formatter.add_arguments(actions)
            formatter.end_section()
        if not shows_all:
            formatter.add_text(f"{len(rare)} rare settings are not listed: see {self.prog} --help-all")
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def parse(self, arguments: Sequence[str]) -> Namespace:
        """Parse the arguments; suggest the closest flag for an unknown one."""
        options, unknown = self.parse_known_args(arguments)
        if unknown:
            word = unknown[0].split("=")[0]
            flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
            hint = self.remedies.get(word.replace("_", "-")) or (suggest(word, flags) if word.startswith("-") else "")
            self.error(f"{unknown[0]}: unknown argument" + (f"; {hint}" if hint else ""))
        return options

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with code 2."""
        one_line = " ".join(message.split())
        print(f"{self.prog}: {one_line}; see {self.prog} --help", file=sys.stderr)
        sys.exit(2)


class _HelpAll(argparse.Action):
    """Prints the help with all settings."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, OneLineParser)
        print(parser.format_help(shows_all=True), end="")
        parser.exit()


def suggest(word: str, known: Iterable[str]) -> str:
    """Return "did you mean …?" for the closest known word, or an empty text if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""
