"""Which exceptions are the user's to repair, and the one line that each becomes."""

from quire import errors
from quire.serve.supervisor import ServeError
from shared.config import ConfigError


class CommandError(Exception):
    """A command cannot do what it was asked to; the message is one line and names the remedy."""


def explain(error: Exception) -> str | None:
    """One line for an error that the user can do something about, None for one of ours."""
    match error:
        case CommandError() | ConfigError() | ServeError():
            return one_line(str(error))
        case errors.UnavailableError() if not error.from_server:
            return f"no Quire server answers ({one_line(error.message)}); start one with quire serve"
        case errors.QuireError():
            hint = f" (try again in {error.retry_after_s:g} s)" if error.retry_after_s is not None else ""
            return f"{error.code}: {one_line(error.message)}{hint}"
        case ModuleNotFoundError() if (error.name or "").split(".")[0] in {"torch", "transformers", "safetensors"}:
            return f"{error.name} is not installed; workers need it: pip install 'quire[worker]'"
        case OSError() if error.filename is not None:
            return f"{error.filename}: {error.strerror}"
    return None


def one_line(text: str) -> str:
    """The text without line breaks."""
    return " ".join(text.split())
