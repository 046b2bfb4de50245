"""Model name and request id of an HTTP request."""

from services.calls.context import Services
from services.http.endpoint import Exchange
from services.http.schema import ScheduledBody
from services.requests.validation import check_model, check_request_id
from shared.errors import InvalidRequestError
from shared.ids import draw_request_id

REQUEST_ID_HEADER = "x-request-id"


def choose_model(services: Services, name: str) -> str:
    """Return the name of the served model.

    Raises:
        ModelNotFoundError: `name` is another model.
        NotReadyError: no model is served yet.
    """
    served = services.served_model()
    check_model(name, served)
    return served.name


def choose_request_id(exchange: Exchange, body: ScheduledBody) -> str:
    """Return the request's id: from the body, from the header, or a random one.

    Raises:
        InvalidRequestError: the id is not valid in a response header.
    """
    request_id = body.request_id or exchange.headers.get(REQUEST_ID_HEADER, "") or draw_request_id()
    violations = tuple(check_request_id(request_id))
    if violations:
        raise InvalidRequestError(*violations)
    exchange.request_id = request_id
    return request_id
