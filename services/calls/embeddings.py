"""Embeddings: one vector per input prompt.

Each prompt becomes a request to the core that generates no tokens. It is queued, computed and preempted like other
requests, and its end contains the vector. At most `MAX_IN_PROGRESS` prompts per call are submitted at a time, so that
one call does not fill the queue. When one prompt fails or the caller disconnects, all prompts of the call end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from opentelemetry.trace import Span

from protos.quire.link.v1 import link_pb2
from quire.v1 import generation_pb2 as v1
from services.access.principals import CURRENT
from services.calls.context import Caller, LiveRequests, Services, record_outcome
from services.calls.tracing import describe_embedding, request_span
from services.calls.wakeup import Wakeup
from services.errors import error_of
from services.requests.prompts import Prompts
from services.requests.scheduling import block_keys, check_scheduling, due_times, schedule
from services.requests.validation import (
    MAX_TOKEN_IDS,
    Violations,
    check_model,
    check_request_id,
    check_text,
    check_token_ids,
    check_truncation,
    resolve_max_tokens,
)
from services.streams.stream import Stream, StreamRequest
from services.tail import note_stream
from shared.columns import to_column
from shared.errors import FieldViolation, InvalidRequestError, UnsupportedMethodError
from shared.ids import draw_request_id
from shared.request_spec import Pooling, RequestSpec
from shared.telemetry import to_traceparent

MAX_INPUTS = 2048
"""Maximum number of inputs of a call."""
MAX_IN_PROGRESS = 128
"""Maximum number of prompts per call that are submitted to the core at a time."""
_NOT_SUPPORTED = "embeddings: the served model returns no hidden states; serve a model that does"


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """The vectors of a call."""

    vectors: npt.NDArray[np.float32]
    """[num_inputs, embedding_size] float32."""
    request_id: str
    model: str
    prompt_tokens: int
    cached_prompt_tokens: int
    preemptions: int
    energy_j: float


class Embedder:
    """Computes the embeddings of one front-end process."""

    def __init__(self, services: Services, prompts: Prompts, live: LiveRequests) -> None:
        self._services = services
        self._prompts = prompts
        self._live = live

    async def run(self, request: v1.EmbedRequest, caller: Caller) -> v1.EmbedResponse:
        """Return one vector for each input, in order.

        Raises:
            QuireError: an input is invalid or failed.
        """
        embedded = await self.vectors(request, caller)
        response = v1.EmbedResponse(model=embedded.model, request_id=embedded.request_id)
        response.usage.prompt_tokens = embedded.prompt_tokens
        response.usage.cached_prompt_tokens = embedded.cached_prompt_tokens
        response.usage.preemptions = embedded.preemptions
        response.usage.energy_j = embedded.energy_j

        def fill() -> Iterator[None]:
            for vector in embedded.vectors:
                response.embeddings.add().values.extend(vector.tolist())
                yield

        await self._services.slices.run(CURRENT.get().name, fill())
        return response

    async def vectors(self, request: v1.EmbedRequest, caller: Caller) -> Embedded:
        """Return one vector per input, in order; see `run`."""
        services = self._services
        with request_span(services.tracer, caller.traceparent, caller.operation, services.tail) as span:
            model = services.served_model()
            if not model.hidden_size:
                raise UnsupportedMethodError(_NOT_SUPPORTED)
            check_model(request.model, model)
            violations = list(_violations(request, model))
            if violations:
                raise InvalidRequestError(*violations)
            request_id = request.request_id or draw_request_id()
            with (
                self._live.track(caller.principal, request_id),
                record_outcome(services.metrics, caller, request_id, span, operation="embeddings", model=model.name),
            ):
                prompts = await self._encode(request, model)
                num_tokens = sum(map(len, prompts))
                describe_embedding(
                    span, request_id, model=model.name, num_tokens=num_tokens, dimensions=model.hidden_size
                )
                services.check_connected()
                spec = _spec(request, request_id, model, to_traceparent(span))
                services.metrics.prompt_submitted(model.name, spec.tenant, num_tokens)
                ends = await self._compute(self._requests(request, spec, prompts, caller), span)
            vectors = [np.frombuffer(end.embedding, "<f4") for end in ends]
            if not request.omit_normalization:
                vectors = [_normalized(vector) for vector in vectors]
            return Embedded(
                vectors=np.stack(vectors),
                request_id=request_id,
                model=model.name,
                prompt_tokens=num_tokens,
                cached_prompt_tokens=sum(end.cached_prompt_tokens for end in ends),
                preemptions=sum(end.preemptions for end in ends),
                energy_j=sum(end.energy_j for end in ends),
            )

    async def _encode(self, request: v1.EmbedRequest, model: link_pb2.ServedModel) -> list[Sequence[int]]:
        """Return the token ids of each input.

        Raises:
            InvalidRequestError: an input is empty or too long.
        """
        keep = min(request.truncate_prompt_tokens, model.max_model_len - 1)  # 0 means all tokens.
        prompts = []
        for index, each in enumerate(request.inputs):
            field = f"inputs[{index}].{each.WhichOneof('input')}"
            tokens = (await self._prompts.encode(each, model, field))[-keep:]
            resolve_max_tokens(len(tokens), 1, 1, model, field)
            prompts.append(tokens)
        return prompts

    def _requests(
        self, request: v1.EmbedRequest, spec: RequestSpec, prompts: Sequence[Sequence[int]], caller: Caller
    ) -> Iterator[StreamRequest]:
        """Yield the request for each prompt lazily; `spec` contains everything except the prompt."""
        model = self._services.served_model()
        due = due_times(request.scheduling, arrival=caller.arrival, deadline=caller.deadline)
        for prompt in prompts:
            column = to_column(prompt)
            yield StreamRequest(
                spec=spec._replace(num_prompt_tokens=len(prompt)),
                prompt=column,
                credit=self._services.config.stream_credit,
                arrival=caller.arrival,
                due=due,
                block_keys=b"" if spec.pooling == Pooling.MEAN else block_keys(model, spec.cache_scope, column),
                block_size=model.block_size,
            )

    async def _compute(self, requests: Iterator[StreamRequest], span: Span) -> list[link_pb2.StreamEnd]:
        """Run the requests; return each request's end, which contains its vector.

        Raises:
            QuireError: a request failed.
        """
        link, wakeup = self._services.link, Wakeup()
        detokenizer = partial(self._services.tokenizer.detokenizer, skip_special_tokens=True)
        streams: list[Stream] = []
        live: list[Stream] = []
        at_most = min(MAX_IN_PROGRESS, link.max_call_requests)
        try:
            while True:
                while len(live) < at_most and (request := next(requests, None)) is not None:
                    streams.append(Stream(request, detokenizer(), wakeup.ring))
                    live.append(streams[-1])
                    link.submit(streams[-1])
                    note_stream(span, streams[-1].number)
                if not live:
                    return [_checked_end(stream) for stream in streams]
                await wakeup.rung()
                for stream in [each for each in live if each.over]:
                    _checked_end(stream)
                    live.remove(stream)
                    link.release(stream)
        finally:
            for stream in live:
                link.release(stream)


def _spec(request: v1.EmbedRequest, request_id: str, model: link_pb2.ServedModel, parent: str) -> RequestSpec:
    """Return the parts of the specification that all prompts in a call share.

    Raises:
        PermissionDeniedError: the caller may not use the tenant or the cache scope.
    """
    spec = RequestSpec(
        request_id=request_id,
        num_prompt_tokens=0,
        max_tokens=1,
        pooling=Pooling.MEAN if request.pooling == v1.POOLING_MEAN else Pooling.LAST,
        model=model.fingerprint,
        traceparent=parent,
    )
    return schedule(spec, request.scheduling, CURRENT.get())


def _violations(request: v1.EmbedRequest, model: link_pb2.ServedModel) -> Violations:
    yield from check_request_id(request.request_id)
    if not 1 <= len(request.inputs) <= MAX_INPUTS:
        yield FieldViolation("inputs", f"must hold 1 to {MAX_INPUTS} inputs, not {len(request.inputs)}")
    num_ids = sum(len(each.token_ids.ids) for each in request.inputs[:MAX_INPUTS])
    if num_ids > MAX_TOKEN_IDS:
        yield FieldViolation("inputs", f"too many token ids ({num_ids}); use at most {MAX_TOKEN_IDS} in a call")
        return
    for index, each in enumerate(request.inputs[:MAX_INPUTS]):
        field = f"inputs[{index}]"
        match each.WhichOneof("input"):
            case "text":
                yield from check_text(each.text, f"{field}.text")
            case "token_ids":
                yield from check_token_ids(each.token_ids.ids, model.vocab_size, f"{field}.token_ids")
            case _:
                yield FieldViolation(field, "missing; add one of `text` and `token_ids`")
    if request.pooling not in v1.Pooling.values():
        yield FieldViolation("pooling", f"unknown value {request.pooling}; use POOLING_LAST or POOLING_MEAN")
    if request.HasField("truncate_prompt_tokens"):
        yield from check_truncation(request.truncate_prompt_tokens, "truncate_prompt_tokens")
    yield from check_scheduling(request.scheduling)


def _checked_end(stream: Stream) -> link_pb2.StreamEnd:
    """Return the end of a stream that is over.

    Raises:
        QuireError: the stream ended without a vector.
    """
    if stream.error is not None:
        raise stream.error
    assert stream.end is not None, "a stream that is over without an error was ended by the core"
    if stream.end.reason != link_pb2.END_REASON_EMBEDDED:
        raise error_of(stream.end)
    return stream.end


def _normalized(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the vector scaled to length 1; a zero vector is returned unchanged."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / length).astype(np.float32) if length else vector
