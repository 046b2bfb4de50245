"""Converts exceptions that the user can fix to one line."""

from quire import errors
from quire_server.serve.supervisor import ServeError
from shared.config import ConfigError

_START_SERVER = "start a server with quire serve, or pass its gRPC address with --target"
_NOT_GRPC = "does not speak gRPC; pass the service's gRPC address with --target, not the HTTP one"
_INSTALL_WORKER = 'pip install "$(ls dist/quire_server-*.whl)[worker]"'
"""Installs the worker's requirements from the wheel of `make dist`, because Quire is on no package index."""
_GRPC_FAILURES = (
    ("Failed parsing HTTP/2", _NOT_GRPC),
    ("missing selected ALPN", _NOT_GRPC),
    ("WRONG_VERSION_NUMBER", "does not speak TLS; remove --tls-ca"),
    ("CERTIFICATE_VERIFY_FAILED", "certificate not accepted; pass its CA with --tls-ca"),
    ("not in peer certificate", "certificate issued for another name; pass the name in the certificate with --target"),
    ("Socket closed", "closed the connection; if it uses TLS, pass --tls-ca"),
    ("Connection refused", f"nothing listens there; {_START_SERVER}"),
    ("errors resolving", "host name not found; pass HOST:PORT with --target"),
)
"""Parts of gRPC's messages about failed connections, and their meaning. gRPC has no codes for these failures."""


class CommandError(Exception):
    """The command cannot run. The message is one line and contains the remedy."""


def explain(error: Exception, target: str = "") -> str | None:
    """Return one line for an error that the user can fix, or None for a bug of Quire.

    Args:
        error: the exception that ended the command.
        target: gRPC address that the command called; empty if none.
    """
    match error:
        case CommandError() | ConfigError() | ServeError():
            return one_line(str(error))
        case errors.UnavailableError() if not error.from_server:
            return f"{target or 'server'}: {_unavailable(error.message)}"
        case errors.QuireError():
            hint = f" (try again in {error.retry_after_s:g} s)" if error.retry_after_s is not None else ""
            return f"{error.code}: {one_line(error.message)}{hint}"
        case ModuleNotFoundError() if (error.name or "").split(".")[0] in {"torch", "transformers", "safetensors"}:
            return f"{error.name} is not installed; workers need it: {_INSTALL_WORKER} (make dist builds the wheel)"
        case OSError() if error.filename is not None:
            return f"{error.filename}: {error.strerror}"
    return None


def _unavailable(message: str) -> str:
    """Rewrite a gRPC message about a failed connection as "what is wrong; what to do"."""
    if message.startswith(("failed to connect", "errors resolving")):
        for part, meaning in _GRPC_FAILURES:
            if part in message:
                return meaning
    return f"no answer ({one_line(message)}); {_START_SERVER}"


def one_line(text: str) -> str:
    """Return the text without line breaks."""
    return " ".join(text.split())
