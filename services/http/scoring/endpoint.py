"""Endpoints of `/rerank` and `/score`."""

import time
from functools import partial
from typing import Any

from quire.v1 import generation_pb2 as v1
from services.calls.context import Services
from services.calls.scoring import Scorer, ScoreRequest, Scores
from services.http.bodies import parse
from services.http.embeddings import POOLING
from services.http.endpoint import Exchange
from services.http.errors import with_http_names
from services.http.identity import choose_model, choose_request_id
from services.http.sampling import FieldNames, field_names, fill_scheduling
from services.http.scoring.schema import RerankBody, ScoreBody, ScoringBody
from shared.errors import QuireError

Json = dict[str, Any]


class ScoringEndpoints:
    """Endpoints that compare texts."""

    def __init__(self, services: Services, scorer: Scorer) -> None:
        self._services = services
        self._scorer = scorer

    async def rerank(self, exchange: Exchange) -> None:
        """Serve `/rerank`."""
        body = await exchange.read(partial(parse, RerankBody))
        request_id, model = choose_request_id(exchange, body), choose_model(self._services, body.model)
        texts = body.texts
        request = _request(body, request_id, (body.query,), texts)
        names = field_names({"queries": "query", "queries[0]": "query"})

        async def answer() -> None:
            scores = await self._scores(exchange, request, names)
            order = sorted(range(len(texts)), key=lambda index: -scores.values[index])
            results: list[Json] = [
                {"index": index, "relevance_score": scores.values[index]} for index in order[: body.top_n or None]
            ]
            if body.return_documents:
                for result in results:
                    result["document"] = {"text": texts[result["index"]]}
            usage = _usage(scores)
            await exchange.answer({"id": f"rerank-{request_id}", "model": model, "results": results, "usage": usage})

        await exchange.run_until_disconnect(answer())

    async def score(self, exchange: Exchange) -> None:
        """Serve `/score`."""
        body = await exchange.read(partial(parse, ScoreBody))
        request_id, model = choose_request_id(exchange, body), choose_model(self._services, body.model)
        first, second = _texts(body.text_1), _texts(body.text_2)
        request = _request(body, request_id, first, second)
        names = {"queries": "text_1", "documents": "text_2"}
        names |= {"queries[0]": "text_1"} if isinstance(body.text_1, str) else {}
        names |= {"documents[0]": "text_2"} if isinstance(body.text_2, str) else {}

        async def answer() -> None:
            scores = await self._scores(exchange, request, field_names(names))
            await exchange.answer(
                {
                    "id": f"score-{request_id}",
                    "object": "list",
                    "created": int(time.time()),
                    "model": model,
                    "data": [
                        {"index": index, "object": "score", "score": value} for index, value in enumerate(scores.values)
                    ],
                    "usage": {"completion_tokens": 0, **_usage(scores)},
                }
            )

        await exchange.run_until_disconnect(answer())

    async def _scores(self, exchange: Exchange, request: ScoreRequest, names: FieldNames) -> Scores:
        try:
            return await self._scorer.score(request, exchange.caller())
        except QuireError as error:
            raise with_http_names(error, names) from None


def _request(body: ScoringBody, request_id: str, queries: tuple[str, ...], documents: tuple[str, ...]) -> ScoreRequest:
    scheduling = v1.SchedulingOptions()
    fill_scheduling(scheduling, body)
    return ScoreRequest(
        request_id=request_id,
        queries=queries,
        documents=documents,
        scheduling=scheduling,
        instruction=body.instruction or "",
        pooling=v1.POOLING_UNSPECIFIED if body.pooling is None else POOLING[body.pooling],
        truncate_prompt_tokens=body.kept_prompt_tokens,
        max_tokens_per_doc=body.max_tokens_per_doc,
    )


def _usage(scores: Scores) -> Json:
    return {
        "prompt_tokens": scores.prompt_tokens,
        "total_tokens": scores.prompt_tokens,
        "prompt_tokens_details": {"cached_tokens": scores.cached_prompt_tokens},
    }


def _texts(given: str | list[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
