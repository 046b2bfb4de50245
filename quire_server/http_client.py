"""HTTP client for the commands: connections, and explanations of failed requests."""

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_PASS_ADDRESS = "pass the service's HTTP address with --target"


@dataclass(frozen=True, slots=True)
class Failure:
    """Explanation of a failed request to a server."""

    description: str
    """The problem and the remedy, in one line."""
    permanent: bool
    """Whether a retry with the same address and settings must fail too."""


@dataclass(frozen=True, slots=True)
class Server:
    """Address and credentials of a server."""

    address: str
    """HOST:PORT of HTTP."""
    tls: ssl.SSLContext | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers for every request."""

    def connect(self, timeout_s: float) -> http.client.HTTPConnection:
        """Return a connection, which opens on first use. Proxy settings in the environment are ignored."""
        if self.tls is not None:
            return http.client.HTTPSConnection(self.address, timeout=timeout_s, context=self.tls)
        return http.client.HTTPConnection(self.address, timeout=timeout_s)

    def failure(self, error: OSError | http.client.HTTPException) -> Failure:
        """Explain an exception of a connection to this server."""
        match error:
            case ConnectionRefusedError():
                remedy = f"start a server with quire serve, or {_PASS_ADDRESS}"
                return Failure(f"nothing listens there; {remedy}", permanent=False)
            # A server that restarts, or that speaks another protocol, closes the connection.
            case ConnectionError() | ssl.SSLEOFError() if self.tls is not None:
                return Failure(f"closed the connection; {_PASS_ADDRESS}, not the gRPC one", permanent=False)
            case ConnectionError():
                return Failure("closed the connection; if it uses TLS, pass --tls-ca", permanent=False)
            case http.client.BadStatusLine() | http.client.UnknownProtocol() | http.client.LineTooLong():
                return Failure(f"does not speak HTTP/1.1; {_PASS_ADDRESS}, not the gRPC one", permanent=True)
            case ssl.SSLCertVerificationError():
                reason = error.verify_message
                return Failure(f"certificate not accepted ({reason}); pass its CA with --tls-ca", permanent=True)
            case ssl.SSLError(reason="WRONG_VERSION_NUMBER"):
                return Failure("does not speak TLS; remove --tls-ca", permanent=True)
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return Failure(f"no answer ({reason}); {_PASS_ADDRESS}", permanent=False)


def read_object(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body; an empty object if the body is something else, such as a proxy's HTML page."""
    try:
        value = json.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def is_completion_answer(status: int, answer: Mapping[str, Any]) -> bool:
    """Return whether this answer to a completion request comes from a server with OpenAI's API."""
    return "choices" in answer if status == http.HTTPStatus.OK else isinstance(answer.get("error"), dict)


def problem_of(status: int, answer: Mapping[str, Any]) -> str:
    """Describe an unsuccessful answer, in the server's own words if it is a Quire server."""
    error = answer.get("error")
    if isinstance(error, dict) and error.get("message"):
        return f"answers {status}: {error['message']}"
    return f"returned {status}, which is not a response from Quire; {_PASS_ADDRESS}"
