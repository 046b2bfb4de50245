"""Options in a URL's query string. Errors contain the option's name."""

from collections.abc import Sequence
from urllib.parse import parse_qsl

from shared.errors import FieldViolation, InvalidRequestError

_MAX_OPTIONS = 64


class Query:
    """Query options of one request; unknown options are ignored."""

    def __init__(self, text: bytes) -> None:
        """Parse the query.

        Raises:
            InvalidRequestError: it has too many options.
        """
        try:
            self._values = dict(parse_qsl(text.decode("latin-1"), max_num_fields=_MAX_OPTIONS))
        except ValueError:
            raise InvalidRequestError(
                FieldViolation("query", f"has more than {_MAX_OPTIONS} options; send fewer")
            ) from None

    def text(self, name: str) -> str:
        """Return an option's value; empty if it is missing."""
        return self._values.get(name, "")

    def flag(self, name: str) -> bool:
        """Return whether an option is true.

        Raises:
            InvalidRequestError: it is neither true nor false.
        """
        return self.choice(name, ("false", "true")) == "true"

    def choice(self, name: str, choices: Sequence[str]) -> str:
        """Return an option's value; the first of `choices` if it is missing.

        Raises: InvalidRequestError: the value is not one of `choices`.
        """
        value = self.text(name).lower() or choices[0]
        if value not in choices:
            raise InvalidRequestError(FieldViolation(name, f"must be {' or '.join(choices)}"))
        return value

    def integer(self, name: str, default: int, *, least: int, most: int = 1 << 31) -> int:
        """Return the value of an option.

        Raises:
            InvalidRequestError: it is not an integer from `least` to `most`.
        """
        text = self.text(name)
        if not text:
            return default
        if not (text.isdecimal() and len(text) <= 10 and least <= int(text) <= most):
            raise InvalidRequestError(FieldViolation(name, f"must be an integer from {least} to {most}"))
        return int(text)
