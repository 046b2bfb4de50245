"""From response messages to what clients give. Pure functions."""

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
    Usage,
)
from quire.v1 import generation_pb2 as pb
from quire.v1 import model_pb2

_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


def read_delta(delta: pb.Delta) -> Delta:
    """A delta as the client gives it."""
    logprobs = read_logprobs(delta.logprobs) if delta.logprobs else ()
    return Delta(delta.choice, delta.first_index, tuple(delta.token_ids), delta.text, logprobs)


def read_logprobs(entries: Iterable[pb.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities, position by position."""
    return tuple(TokenLogprobs(_read_scored(entry.token), tuple(map(_read_scored, entry.top))) for entry in entries)


def read_prompt(prompt: pb.Prompt) -> Prompt:
    """The prompt as the model saw it."""
    return Prompt(tuple(prompt.token_ids), prompt.text, read_logprobs(prompt.logprobs))


def read_choice_finished(finished: pb.ChoiceFinished) -> ChoiceFinished:
    """The end of one of several answers.

    Raises:
        ServerError: a reason that this API does not know.
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
        raise errors.ServerError(f"the server ended with an unknown reason ({reason})")
    return _REASONS[reason]


def read_finished(finished: pb.Finished) -> Finished:
    """The end of a generation.

    Raises:
        ServerError: a reason that this API does not know.
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
    """The vectors of prompts."""
    vectors = tuple(tuple(embedding.values) for embedding in response.embeddings)
    return Embeddings(vectors, _read_usage(response.usage), response.request_id, response.model)


def _read_usage(usage: pb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens, usage.preemptions)


def read_tokenized(response: pb.TokenizeResponse) -> Tokenized:
    """The tokens of a prompt."""
    return Tokenized(tuple(response.token_ids), response.max_model_len)


def read_model(model: model_pb2.Model) -> Model:
    """A served model."""
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
    )


class Events:
    """What a stream of events has said so far; shared by both clients."""

    def __init__(self) -> None:
        self.finished: Finished | None = None
        self.prompt: Prompt | None = None
        self.choices: dict[int, ChoiceFinished] = {}

    def take(self, response: pb.GenerateResponse) -> Delta | None:
        """Takes the next message; returns its delta, if it is one.

        Raises:
            ServerError: a reason that this API does not know.
        """
        match response.WhichOneof("event"):
            case "delta":
                return read_delta(response.delta)
            case "prompt":
                self.prompt = read_prompt(response.prompt)
            case "choice_finished":
                finished = read_choice_finished(response.choice_finished)
                self.choices[finished.choice] = finished
            case "finished":
                self.finished = read_finished(response.finished)
        return None

    def join(self, deltas: Sequence[Delta]) -> Completion:
        """A whole answer from its parts.

        Raises:
            ServerError: the stream ended without saying how.
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
    )


def require_finished(finished: Finished | None) -> Finished:
    """The end of a generation whose stream is over.

    Raises:
        ServerError: the stream ended without saying how.
    """
    if finished is None:
        raise errors.ServerError("the stream ended without a final message")
    return finished


def seconds(duration: Duration) -> float:
    """A duration in seconds."""
    return duration.seconds + duration.nanos / 1e9
