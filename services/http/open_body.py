"""Base class of the bodies of the Responses and the Messages API."""

from pydantic import ConfigDict

from services.http.schema import Body


class OpenBody(Body):
    """A JSON object whose unknown fields are ignored.

    Both APIs get new optional fields with each version of their clients, and agents send all of them. A request
    that Quire cannot serve is still refused, with the name of the field.
    """

    model_config = ConfigDict(extra="ignore")
