"""Converts response messages to the values that both clients return. Pure functions."""

from collections.abc import Iterable, Sequence

from google.protobuf.duration_pb2 import Duration

from quire import errors
from quire.types import (
    Choice,
    ChoiceFinished,
    Completion,
    Delta,
    Embeddings,
    Finished,
    FinishReason,
    Model,
    Prompt,
    ScoredToken,
    Timings,
    Tokenized,
    TokenLogprobs,
    ToolCall,
    ToolCallDelta,
    Usage,
)
from quire.v1 import generation_pb2 as pb
from quire.v1 import model_pb2

_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


def read_delta(delta: pb.Delta, *, parsed: bool = False) -> Delta:
    """Convert a delta; if `parsed`, take the text from the parts."""
    logprobs = read_logprobs(delta.logprobs) if delta.logprobs else ()
    token_ids = tuple(delta.token_ids)
    if not parsed:
        return Delta(delta.choice, delta.first_index, token_ids, delta.text, logprobs)
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCallDelta] = []
    for part in delta.parts:
        match part.WhichOneof("kind"):
            case "content":
                texts.append(part.content)
            case "reasoning":
                reasoning.append(part.reasoning)
            case "call_begun":
                calls.append(ToolCallDelta(part.call_begun.index, part.call_begun.id, part.call_begun.name))
            case "call_arguments":
                calls.append(ToolCallDelta(part.call_arguments.index, arguments=part.call_arguments.text))
            case "call_ended":
                calls.append(ToolCallDelta(part.call_ended.index, complete=True))
    text = "".join(texts)
    return Delta(delta.choice, delta.first_index, token_ids, text, logprobs, "".join(reasoning), tuple(calls))


def read_logprobs(entries: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """Return the log-probabilities, position by position."""
    return tuple(TokenLogprobs(_read_scored(entry.token), tuple(map(_read_scored, entry.top))) for entry in entries)


def read_prompt(prompt: pb.Prompt) -> Prompt:
    """Return the prompt."""
    return Prompt(tuple(prompt.token_ids), prompt.text, read_logprobs(prompt.logprobs))


def read_choice_finished(finished: pb.ChoiceFinished) -> ChoiceFinished:
    """Return the end of one choice.

    Raises:
        ServerError: the finish reason is unknown to this client.
    """
    stop = finished.WhichOneof("stop")
    return ChoiceFinished(
        choice=finished.choice,
        reason=_read_reason(finished.reason),
        stop_string=finished.stop_string if stop == "stop_string" else None,
        stop_token_id=finished.stop_token_id if stop == "stop_token_id" else None,
        completion_tokens=finished.completion_tokens,
    )


def _read_scored(token: pb.ScoredToken) -> ScoredToken:
    return ScoredToken(token.token_id, token.logprob, token.rank, token.bytes)


def _read_reason(reason: pb.FinishReason.ValueType) -> FinishReason:
    if reason not in _REASONS:
        raise errors.ServerError(f"finish_reason: unknown value {reason} from the server; update this client")
    return _REASONS[reason]


def read_finished(finished: pb.Finished) -> Finished:
    """Return the end of a generation.

    Raises:
        ServerError: the finish reason is unknown to this client.
    """
    stop = finished.WhichOneof("stop")
    return Finished(
        reason=_read_reason(finished.reason),
        stop_string=finished.stop_string if stop == "stop_string" else None,
        stop_token_id=finished.stop_token_id if stop == "stop_token_id" else None,
        usage=_read_usage(finished.usage),
        timings=Timings(
            seconds(finished.timings.queued),
            seconds(finished.timings.first_token),
            seconds(finished.timings.total),
        ),
        request_id=finished.request_id,
        model=finished.model,
    )


def read_embeddings(response: pb.EmbedResponse) -> Embeddings:
    """Return the embeddings."""
    vectors = tuple(tuple(embedding.values) for embedding in response.embeddings)
    return Embeddings(vectors, _read_usage(response.usage), response.request_id, response.model)


def _read_usage(usage: pb.Usage) -> Usage:
    return Usage(
        usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens, usage.preemptions, usage.energy_j
    )


def read_tokenized(response: pb.TokenizeResponse) -> Tokenized:
    """Return the tokens of a prompt."""
    return Tokenized(tuple(response.token_ids), response.max_model_len)


def read_model(model: model_pb2.Model) -> Model:
    """Return the description of a model."""
    return Model(
        name=model.name,
        architecture=model.architecture,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=tuple(model.eos_token_ids),
        dtype=model.dtype,
        has_chat_template=model.has_chat_template,
        fingerprint=model.fingerprint,
        embedding_size=model.embedding_size,
        sampling_defaults=dict(model.sampling_defaults),
    )


class Events:
    """Collects the events of a stream; shared by both clients."""

    def __init__(self, *, parsed: bool | None = None) -> None:
        """Start without events. `parsed` is whether parts replace texts; None uses parts as soon as there are any."""
        self._parsed = parsed
        self.finished: Finished | None = None
        self.prompt: Prompt | None = None
        self.choices: dict[int, ChoiceFinished] = {}

    def take(self, response: pb.GenerateResponse) -> Delta | None:
        """Add the next message; return the delta if the message has one, else None.

        Raises:
            ServerError: the finish reason is unknown to this client.
        """
        match response.WhichOneof("event"):
            case "delta":
                if self._parsed is None and response.delta.parts:
                    self._parsed = True
                return read_delta(response.delta, parsed=bool(self._parsed))
            case "prompt":
                self.prompt = read_prompt(response.prompt)
            case "choice_finished":
                finished = read_choice_finished(response.choice_finished)
                self.choices[finished.choice] = finished
            case "finished":
                self.finished = read_finished(response.finished)
        return None

    def join(self, deltas: Sequence[Delta]) -> Completion:
        """Return the complete answer.

        Raises:
            ServerError: the stream ended without a final message.
        """
        finished = require_finished(self.finished)
        ends = self.choices or {
            0: ChoiceFinished(
                0, finished.reason, finished.stop_string, finished.stop_token_id, finished.usage.completion_tokens
            )
        }
        choices = tuple(_choice([d for d in deltas if d.choice == index], ends[index]) for index in sorted(ends))
        first = choices[0]
        return Completion(first.text, first.token_ids, finished, first.logprobs, choices, self.prompt)


def _choice(deltas: Sequence[Delta], finished: ChoiceFinished) -> Choice:
    return Choice(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finished=finished,
        reasoning="".join(delta.reasoning for delta in deltas),
        tool_calls=_calls([call for delta in deltas for call in delta.tool_calls]),
    )


def _calls(deltas: Sequence[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Return the calls that began among these deltas."""
    begun = {delta.index: delta for delta in deltas if delta.name}
    arguments: dict[int, list[str]] = {index: [] for index in begun}
    complete = {delta.index for delta in deltas if delta.complete}
    for delta in deltas:
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return tuple(
        ToolCall(delta.id, delta.name, "".join(arguments[index]), index in complete)
        for index, delta in sorted(begun.items())
    )


def require_finished(finished: Finished | None) -> Finished:
    """Return the end of a generation whose stream is over.

    Raises:
        ServerError: the stream ended without a final message.
    """
    if finished is None:
        raise errors.ServerError("the stream ended without a final message; send the request again")
    return finished


def seconds(duration: Duration) -> float:
    """Return a duration in seconds."""
    return duration.seconds + duration.nanos / 1e9
