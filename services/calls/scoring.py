"""Scores the relevance of documents for queries, with the method that the setting `score_method` selects.

* embedding: the cosine between the embeddings of query and document.
* yes-no: the model is asked whether the document matches the query. The score is the probability of "yes" relative to
  "no" as the first output token. Qwen3-Reranker is trained for this question.

With the first method, every text becomes a request to the core; with the second, every pair does. When one of these
requests fails or the caller disconnects, all requests of the call end.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from quire.v1 import generation_pb2 as v1
from services.calls.collect import Collector
from services.calls.context import Caller, Services
from services.calls.embeddings import MAX_IN_PROGRESS, Embedder
from services.calls.generation import Generator
from services.calls.together import run_together
from services.calls.tracing import part_of, request_span
from services.text.judge import Judge
from shared import span_names
from shared.errors import FieldViolation, InvalidRequestError
from shared.frames import MAX_LOGPROBS

MAX_DOCUMENTS = 1024
"""Maximum number of documents of a call."""
MAX_TEXT_BYTES = 8 << 20
"""Maximum amount of text in a call, bytes. With yes-no, a query counts once per document."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Pairs of texts to compare."""

    request_id: str
    queries: tuple[str, ...]
    """One query for all documents, or one for each."""
    documents: tuple[str, ...]
    scheduling: v1.SchedulingOptions
    instruction: str = ""
    """Criterion for a relevant document, for the yes-no model; empty for web search."""
    pooling: "v1.Pooling.ValueType" = v1.POOLING_UNSPECIFIED
    """Pooling of embeddings."""
    truncate_prompt_tokens: int | None = None
    """Number of last tokens of each text that are embedded; None for all."""
    max_tokens_per_doc: int | None = None
    """Number of first tokens of each document that are compared; None for all."""


@dataclass(frozen=True, slots=True)
class Scores:
    """One score per document, in order, and the tokens that were computed for them."""

    values: tuple[float, ...]
    prompt_tokens: int
    cached_prompt_tokens: int


class Scorer:
    """Compares texts in one front-end process."""

    def __init__(self, services: Services, generator: Generator, embedder: Embedder, judge: Judge | None) -> None:
        """Create the scorer; with a judge, the method is yes-no."""
        self._services = services
        self._generator = generator
        self._embedder = embedder
        self._judge = judge

    async def score(self, request: ScoreRequest, caller: Caller) -> Scores:
        """Return the scores of the documents.

        Raises:
            QuireError: a field is invalid (`queries` and `documents` are its names), or a part failed.
        """
        self._check(request)
        if request.max_tokens_per_doc is not None:
            most = request.max_tokens_per_doc
            documents = [await self._services.tokenizer.beginning(text, most) for text in request.documents]
            request = replace(request, documents=tuple(documents))
        if self._judge is None:
            return await self._by_embeddings(request, caller)
        return await self._by_answers(request, caller, self._judge)

    def _check(self, request: ScoreRequest) -> None:
        queries, documents = request.queries, request.documents
        violations = []
        if not 1 <= len(documents) <= MAX_DOCUMENTS:
            violations.append(
                FieldViolation("documents", f"must hold 1 to {MAX_DOCUMENTS} texts, not {len(documents)}")
            )
        if len(queries) not in (1, len(documents)):
            what = f"must be one text, or one for each of the {len(documents)} documents, not {len(queries)}"
            violations.append(FieldViolation("queries", what))
        repeats = len(documents) if self._judge is not None and len(queries) == 1 else 1
        size = repeats * sum(len(text.encode()) for text in queries) + sum(len(text.encode()) for text in documents)
        if size > MAX_TEXT_BYTES:
            counted = ", in which the query counts once for each document" if repeats > 1 else ""
            what = f"{size} bytes of text{counted}; use at most {MAX_TEXT_BYTES}, in several requests"
            violations.append(FieldViolation("documents", what))
        if self._judge is None:
            if request.instruction:
                what = "not supported with the server's score method embedding; write it into the query"
                violations.append(FieldViolation("instruction", what))
        else:
            if request.pooling:
                what = "not supported with the server's score method yes-no; remove it"
                violations.append(FieldViolation("pooling", what))
            if request.truncate_prompt_tokens is not None:
                what = "not supported with the server's score method yes-no; use max_tokens_per_doc"
                violations.append(FieldViolation("truncate_prompt_tokens", what))
        if violations:
            raise InvalidRequestError(*violations)

    async def _by_embeddings(self, request: ScoreRequest, caller: Caller) -> Scores:
        texts = (*request.queries, *request.documents)
        wanted = v1.EmbedRequest(
            request_id=request.request_id,
            inputs=[v1.EmbedInput(text=text) for text in texts],
            pooling=request.pooling,
            scheduling=request.scheduling,
        )
        if request.truncate_prompt_tokens is not None:
            wanted.truncate_prompt_tokens = request.truncate_prompt_tokens
        names = [f"queries[{index}]" for index in range(len(request.queries))]
        names += [f"documents[{index}]" for index in range(len(request.documents))]

        def name(field: str) -> str:
            return names[int(field[len("inputs[") :].partition("]")[0])] if field.startswith("inputs[") else field

        try:
            embedded = await self._embedder.vectors(wanted, caller)
        except InvalidRequestError as error:
            raise _renamed(error, name) from None
        vectors = embedded.vectors.astype(np.float64)
        queries, documents = vectors[: len(request.queries)], vectors[len(request.queries) :]
        # The vectors have length 1 only up to float32 rounding, so their products may exceed 1.
        lengths = np.linalg.norm(queries, axis=1) * np.linalg.norm(documents, axis=1)
        cosines = np.sum(queries * documents, axis=1) / np.maximum(lengths, np.finfo(np.float64).tiny)
        return Scores(
            tuple(np.clip(cosines, -1.0, 1.0).tolist()), embedded.prompt_tokens, embedded.cached_prompt_tokens
        )

    async def _by_answers(self, request: ScoreRequest, caller: Caller, judge: Judge) -> Scores:
        repeats = len(request.documents) // len(request.queries)
        pairs = zip(request.queries * repeats, request.documents, strict=True)
        part = replace(caller, operation=part_of(caller.operation, span_names.PROMPT))
        with request_span(self._services.tracer, caller.traceparent, caller.operation):
            calls = [self._pair(request, index, pair, part, judge) for index, pair in enumerate(pairs)]
            answers = await run_together(calls, min(MAX_IN_PROGRESS, self._services.link.max_call_requests))
        return Scores(
            tuple(probability for probability, _ in answers),
            sum(usage.prompt_tokens for _, usage in answers),
            sum(usage.cached_prompt_tokens for _, usage in answers),
        )

    async def _pair(
        self, request: ScoreRequest, index: int, pair: tuple[str, str], caller: Caller, judge: Judge
    ) -> tuple[float, v1.Usage]:
        """Return the probability of "yes" for one pair, and the prompt's usage."""
        query, document = pair
        chat = judge.question(query, document, request.instruction)
        request_id = f"{request.request_id}-{index}"

        async def answer(suffix: str, *allowed: int) -> tuple[dict[int, float], v1.Usage]:
            collector = Collector()
            wanted = v1.GenerateRequest(
                request_id=request_id + suffix,
                chat=chat,
                sampling=v1.SamplingOptions(temperature=0.0, repetition_penalty=1.0, allowed_token_ids=allowed),
                stop=v1.StopOptions(max_tokens=1, ignore_eos=True),
                output=v1.OutputOptions(logprobs=MAX_LOGPROBS),
                scheduling=request.scheduling,
            )
            try:
                await self._generator.run(wanted, caller, collector.send)
            except InvalidRequestError as error:
                raise _renamed(error, lambda field: f"documents[{index}]" if _is_prompt(field) else field) from None
            response = collector.response()
            (position,) = response.choices[0].logprobs
            scores = {token.token_id: token.logprob for token in (*position.top, position.token)}
            return scores, response.usage

        scores, usage = await answer("", judge.yes, judge.no)
        # The log-probability of the more likely word is always present. The other word may not be among the top tokens.
        for token in {judge.yes, judge.no} - scores.keys():
            scores |= (await answer("-other", token))[0]
        difference = scores[judge.no] - scores[judge.yes]
        return 1 / (1 + math.exp(min(difference, 700.0))), usage


def _is_prompt(field: str) -> bool:
    return field.startswith(("chat", "input"))


def _renamed(error: InvalidRequestError, name: Callable[[str], str]) -> InvalidRequestError:
    """Return the error with other names of fields."""
    return type(error)(*(FieldViolation(name(each.field), each.description) for each in error.violations))
