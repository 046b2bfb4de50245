"""`/v1/embeddings` and `/pooling`: `Embed` in the forms of OpenAI and vLLM."""

import base64
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.v1 import generation_pb2 as v1
from services.access.principals import CURRENT
from services.calls.context import Services
from services.calls.embeddings import Embedder
from services.http.bodies import parse
from services.http.endpoint import Exchange
from services.http.errors import with_http_names
from services.http.identity import choose_model, choose_request_id
from services.http.prompts import prompts_of
from services.http.sampling import FieldNames, field_names, fill_scheduling
from services.http.schema import EmbeddingBody, PoolingBody
from shared.errors import FieldViolation, InvalidRequestError, QuireError

POOLING = {"last": v1.POOLING_LAST, "mean": v1.POOLING_MEAN}


Vector = str | list[float]
AnswerOf = Callable[[Sequence[Vector], str], dict[str, Any]]
"""Returns the parts of an answer that differ between the paths, from the vectors and the request's id."""


class EmbeddingEndpoint:
    """Endpoint of embeddings."""

    def __init__(self, services: Services, embedder: Embedder) -> None:
        self._services = services
        self._embedder = embedder

    async def embed(self, exchange: Exchange) -> None:
        """Serve `/v1/embeddings`."""
        await self._serve(exchange, await exchange.read(partial(parse, EmbeddingBody)), _embeddings)

    async def pool(self, exchange: Exchange) -> None:
        """Serve `/pooling`."""
        await self._serve(exchange, await exchange.read(partial(parse, PoolingBody)), _pooled)

    async def _serve(self, exchange: Exchange, body: EmbeddingBody, answer_of: AnswerOf) -> None:
        request_id = choose_request_id(exchange, body)
        model = choose_model(self._services, body.model)
        self._check_dimensions(body.dimensions)
        request = v1.EmbedRequest(
            request_id=request_id, pooling=POOLING[body.pooling], omit_normalization=not body.normalize
        )
        for prompt in prompts_of(body.input):
            each = request.inputs.add()
            if isinstance(prompt, str):
                each.text = prompt
            else:
                each.token_ids.ids.extend(prompt)
        if body.kept_prompt_tokens is not None:
            request.truncate_prompt_tokens = body.kept_prompt_tokens
        fill_scheduling(request.scheduling, body)
        is_one = isinstance(body.input, str) or isinstance(body.input[0], int)
        await exchange.run_until_disconnect(
            self._answer(exchange, body, request, model, _names(len(request.inputs), is_one), answer_of)
        )

    async def _answer(
        self,
        exchange: Exchange,
        body: EmbeddingBody,
        request: v1.EmbedRequest,
        model: str,
        names: FieldNames,
        answer_of: AnswerOf,
    ) -> None:
        try:
            embedded = await self._embedder.vectors(request, exchange.caller())
        except QuireError as error:
            raise with_http_names(error, names) from None
        encode = _to_base64 if body.encoding_format == "base64" else _to_list
        vectors = await self._services.slices.run(CURRENT.get().name, map(encode, embedded.vectors))
        await exchange.answer(
            {
                "object": "list",
                **answer_of(vectors, exchange.request_id),
                "model": model,
                "usage": {
                    "prompt_tokens": embedded.prompt_tokens,
                    "total_tokens": embedded.prompt_tokens,
                    "prompt_tokens_details": {"cached_tokens": embedded.cached_prompt_tokens},
                },
            }
        )

    def _check_dimensions(self, wanted: int | None) -> None:
        size = self._services.served_model().hidden_size
        if wanted is not None and size and wanted != size:
            raise InvalidRequestError(
                FieldViolation("dimensions", f"must be {size}, the embedding size of the served model; remove it")
            )


def _embeddings(vectors: Sequence[Vector], _request_id: str) -> dict[str, Any]:
    data = [{"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)]
    return {"data": data}


def _pooled(vectors: Sequence[Vector], request_id: str) -> dict[str, Any]:
    data = [{"object": "pooling", "index": index, "data": vector} for index, vector in enumerate(vectors)]
    return {"id": f"pool-{request_id}", "created": int(time.time()), "data": data}


def _names(count: int, is_one: bool) -> FieldNames:
    """Return the HTTP field names, for a list of inputs or a single input."""
    names = {"inputs": "input"}
    for index in range(count):
        here = f"input[{index}]" if not is_one else "input"
        names |= {f"inputs[{index}].{kind}": here for kind in ("text", "token_ids")} | {f"inputs[{index}]": here}
    return field_names(names)


def _to_list(vector: npt.NDArray[np.float32]) -> Vector:
    values: list[float] = vector.tolist()
    return values


def _to_base64(vector: npt.NDArray[np.float32]) -> Vector:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
