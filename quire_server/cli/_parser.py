"""argparse for Quire's commands: one-line errors with a remedy, no abbreviations, examples in --help."""

import argparse
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

Namespace = argparse.Namespace


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr and exit code 2."""

    def __init__(self, prog: str, *, description: str, examples: str) -> None:
        self.remedies: Mapping[str, str] = {}
        """By a flag that does not exist but that users of other servers type: what to do instead."""
        super().__init__(
            prog,
            description=description.strip(),
            epilog=f"examples:\n{examples.rstrip()}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # A working abbreviation would change its meaning when a flag is added.
            allow_abbrev=False,
            # Commands may replace a flag of the shared configuration to accept more values.
            conflict_handler="resolve",
        )

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


def suggest(word: str, known: Iterable[str]) -> str:
    """Return "did you mean …?" for the closest known word, or an empty text if none is close."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""
