"""Which model a request names, and by which id the request goes."""

from services.context import Services
from services.http.endpoint import Exchange
from services.http.schema import QueuedBody
from services.validation import check_request_id
from shared.errors import InvalidRequestError, ModelNotFoundError
from shared.ids import draw_request_id

REQUEST_ID_HEADER = "x-request-id"


def check_model(services: Services, name: str) -> str:
    """The served model's name.

    Raises:
        ModelNotFoundError: `name` is another one.
        NotReadyError: nothing is served yet.
    """
    served = services.served_model().name
    if name not in ("", served):
        raise ModelNotFoundError(f"the model {name!r} does not exist; this server serves {served!r}")
    return served


def choose_request_id(exchange: Exchange, body: QueuedBody) -> str:
    """The request's id, by body, header or lot; the answer's header will have it.

    Raises:
        InvalidRequestError: it is none. No header of the answer could hold it, either.
    """
    request_id = body.request_id or exchange.headers.get(REQUEST_ID_HEADER, "") or draw_request_id()
    violations = tuple(check_request_id(request_id))
    if violations:
        raise InvalidRequestError(*violations)
    exchange.request_id = request_id
    return request_id
