"""Frames between scheduler core and front ends: bytes to events, effects to bytes. Knows the protocol, decides nothing.

What one turn of the loop has for a front end travels in one frame: `Outgoing` gathers it. A submission that cannot be
used is answered with INVALID here, so that no other request of its frame suffers, and nothing later on has to doubt
what a request holds.
"""

import hashlib
import math
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from scheduler_svc.core import effects as ef
from scheduler_svc.core import events as ev
from shared.columns import MalformedColumnError, from_column, from_columns, to_column
from shared.frames import LINK_VERSIONS, TOKEN_BYTES, MalformedFrameError
from shared.prefix_keys import KEY_BYTES
from shared.versions import negotiate, spoken

_INT32_MAX = 0x7FFFFFFF
_MAX_GRAMMAR = 1 << 20
_MAX_IDENTITY = 64
_MAX_RESUME_INFO = 64 << 10
_REASONS = {reason: link_pb2.EndReason.Value(f"END_REASON_{reason.name}") for reason in ef.EndReason}
_POOLINGS: dict[int, ev.Pooling] = {pooling.value: pooling for pooling in ev.Pooling}


class UnusableSubmissionError(ValueError):
    """A submission that does not say what a request must; the message is for the client."""


@dataclass(slots=True, kw_only=True)
class Incoming:
    """What a front end's frame says."""

    events: list[ev.Event] = field(default_factory=list)
    refused: list[ef.RequestEnded] = field(default_factory=list)
    """Submissions that cannot be used, each with its end."""
    hello: int = 0
    """The version that is spoken with it, if it says hello; otherwise 0."""
    report: link_pb2.MetricReport | None
    snapshot_request: int
    operator_requests: list[link_pb2.OperatorRequest] = field(default_factory=list)
    goodbye: bool = False
    """It is the last one: the front end ends in order."""


def decode(peer: ev.Peer, payload: bytes, now: float) -> Incoming:
    """Takes a frame apart; `now` turns the time left until a deadline into a point in time.

    Raises:
        MalformedFrameError: the frame does not parse, or its columns do not fit together.
        UnsupportedVersionError: a hello of a front end that speaks no version of ours.
    """
    try:
        message = link_pb2.FrontendMessage.FromString(payload)
        return _incoming(peer, message, now)
    except (DecodeError, MalformedColumnError) as error:
        raise MalformedFrameError(str(error)) from None


def _incoming(peer: ev.Peer, message: link_pb2.FrontendMessage, now: float) -> Incoming:
    # Most frames hold nothing but submissions, or nothing but credit: only what is there is looked at.
    parts: dict[str, Any] = {field.name: value for field, value in message.ListFields()}
    incoming = Incoming(report=parts.get("report"), snapshot_request=parts.get("snapshot_request", 0))
    events = incoming.events
    if "hello" in parts:
        theirs = spoken(message.hello.protocol_version, message.hello.newest_protocol_version)
        incoming.hello = negotiate("link", scheduler=LINK_VERSIONS, peer=theirs, role="front end")
        events.append(ev.FrontendJoined(frontend=peer))
    for submission in parts.get("submissions", ()):
        try:
            events.append(arrival(peer, submission, now))
        except (UnusableSubmissionError, MalformedColumnError) as error:
            incoming.refused.append(_refusal(peer, submission, str(error)))
    for match in parts.get("stop_matches", ()):
        events.append(ev.StopMatched(frontend=peer, stream=match.stream, keep_tokens=match.keep_tokens))
    if "cancelled" in parts:
        for stream in from_column(message.cancelled).tolist():
            events.append(ev.RequestCancelled(frontend=peer, stream=stream))
    if "detached" in parts:
        for stream in from_column(message.detached).tolist():
            events.append(ev.RequestCancelled(frontend=peer, stream=stream, keep=True))
    for question in parts.get("resume_questions", ()):
        events.append(ev.ResumeAsked(frontend=peer, number=question.number, identity=question.identity))
    if "credit_streams" in parts or "credit_bytes" in parts:
        streams, credits = from_columns(message.credit_streams, message.credit_bytes)
        if credits.min() < 0:
            raise MalformedFrameError("negative credit")
        for stream, credit in zip(streams.tolist(), credits.tolist(), strict=True):
            events.append(ev.CreditGranted(frontend=peer, stream=stream, credit=credit))
    incoming.operator_requests.extend(parts.get("operator_requests", ()))
    incoming.goodbye = "goodbye" in parts
    return incoming


def arrival(peer: ev.Peer, submission: link_pb2.Submission, now: float) -> ev.RequestArrived:
    """What a submission says; `now` turns the time left until a deadline into a point in time.

    Raises:
        UnusableSubmissionError: it does not say what a request must.
        MalformedColumnError: a column is none.
    """
    # A field of a message costs a look-up each time, and a long one a copy.
    stream, token_ids, block_keys = submission.stream, submission.token_ids, submission.block_keys
    num_tokens, grammar = len(token_ids) // TOKEN_BYTES, submission.grammar
    if stream > _INT32_MAX:
        raise UnusableSubmissionError("a stream number beyond int32")
    num_prompt_tokens, max_tokens = submission.num_prompt_tokens, submission.max_tokens
    if not 0 < num_prompt_tokens <= num_tokens:
        raise UnusableSubmissionError("the prompt is empty or longer than the tokens given")
    sampling = submission.sampling
    _check_sampling(sampling)
    pooling = _POOLINGS.get(submission.pooling)
    if pooling is None:
        raise UnusableSubmissionError(f"pooling {submission.pooling} is not known")
    if pooling and (max_tokens != 1 or grammar):
        raise UnusableSubmissionError("pooling with tokens to generate, or with a grammar")
    identity, resume_info = submission.identity, submission.resume_info
    if len(identity) > _MAX_IDENTITY or len(resume_info) > _MAX_RESUME_INFO:
        raise UnusableSubmissionError("an identity or resume_info that is too long")
    if len(grammar) > _MAX_GRAMMAR:
        raise UnusableSubmissionError(f"a grammar of more than {_MAX_GRAMMAR} bytes")
    block_size = submission.block_size
    num_keys, rest = divmod(len(block_keys), KEY_BYTES)
    if rest or (num_keys and not 0 < num_keys * block_size <= num_tokens):
        raise UnusableSubmissionError("block_keys is no whole number of keys, or more than the tokens have blocks")
    return ev.RequestArrived(
        frontend=peer,
        stream=stream,
        request_id=submission.request_id,
        token_ids=from_column(token_ids),
        num_prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        stop_token_ids=from_column(submission.stop_token_ids),
        sampling=sampling,
        credit=submission.credit,
        deadline=_point_in_time(submission.deadline_ns, now),
        traceparent=submission.traceparent,
        salt=submission.cache_scope,
        block_keys=block_keys,
        block_size=block_size,
        tenant=submission.tenant,
        request_class=submission.request_class,
        priority=submission.priority,
        computes_whole_prompt=submission.computes_whole_prompt,
        pooling=pooling,
        identity=identity,
        resume_info=resume_info,
        again=submission.again,
        grammar=grammar,
        grammar_key=hashlib.sha256(grammar).digest() if grammar else b"",
        expected_output_tokens=submission.expected_output_tokens,
        ttft_deadline=_point_in_time(submission.ttft_target_ns, now),
        total_deadline=_point_in_time(submission.total_time_target_ns, now),
    )


def _check_sampling(serialized: bytes) -> None:
    """The core passes sampling parameters on unread, so what is wrong with them must be found before."""
    try:
        params = plan_pb2.SamplingParams.FromString(serialized)
    except DecodeError:
        raise UnusableSubmissionError("the sampling parameters do not parse") from None
    if not 0 <= params.temperature < math.inf:
        raise UnusableSubmissionError("a temperature that is negative or not finite")
    if not (0 <= params.top_p <= 1 and 0 <= params.min_p <= 1) or max(params.top_k, params.choice) > _INT32_MAX:
        raise UnusableSubmissionError("top_p, min_p, top_k or choice out of range")


def _refusal(peer: ev.Peer, submission: link_pb2.Submission, message: str) -> ef.RequestEnded:
    return ef.RequestEnded(
        frontend=peer,
        stream=submission.stream,
        request_id=submission.request_id,
        reason=ef.EndReason.INVALID,
        message=message,
    )


def _point_in_time(remaining_ns: int, now: float) -> float | None:
    return now + remaining_ns / 1e9 if remaining_ns else None


@dataclass(slots=True)
class Outgoing:
    """What one front end is to be told in this turn."""

    _message: link_pb2.CoreMessage = field(default_factory=link_pb2.CoreMessage)
    _tokens: list[ef.TokensReady] = field(default_factory=list)

    def add_tokens(self, effect: ef.TokensReady) -> None:
        """Streams got new tokens."""
        self._tokens.append(effect)

    def add_scores(self, effect: ef.ScoresReady) -> None:
        """Log-probabilities of a stream's tokens."""
        self._message.scores.add(
            stream=effect.stream,
            first_index=effect.first_index,
            of_prompt=effect.of_prompt,
            scores=effect.scores,
        )

    def add_resume(self, effect: ef.ResumeAnswered) -> None:
        """What is kept of a request that a client wants to go on with."""
        reply = self._message.resume_replies.add(number=effect.number, not_found=effect.log is None)
        if effect.log is None:
            return
        log = effect.log
        reply.submission.CopyFrom(to_submission(log.request, log.tokens))
        for index, scores in log.scores:
            reply.scores.add(first_index=index, scores=scores)
        if log.end is not None:
            _encode_end(reply.end, log.end)

    def add_end(self, effect: ef.RequestEnded) -> None:
        """A stream ended."""
        _encode_end(self._message.ends.add(), effect)

    def set_state(self, state: ef.ServiceChanged, log_level: str) -> None:
        """What is served, whether it can be used, and how much is to be logged, if not empty."""
        self._message.state.ready = state.ready
        self._message.state.log_level = log_level
        if state.model is not None:
            self._message.state.model.CopyFrom(
                link_pb2.ServedModel(
                    name=state.model.name,
                    architecture=state.model.architecture,
                    max_model_len=state.max_model_len,
                    vocab_size=state.model.vocab_size,
                    eos_token_ids=state.model.eos_token_ids,
                    dtype=state.model.dtype,
                    fingerprint=state.model.fingerprint,
                    block_size=state.block_size,
                    hidden_size=state.model.hidden_size,
                )
            )

    def set_version(self, version: int) -> None:
        """The version that is spoken from now on."""
        self._message.protocol_version = version

    def set_snapshot(self, request: int, families: list[link_pb2.MetricFamily]) -> None:
        """The answer to a snapshot request."""
        self._message.snapshot.CopyFrom(link_pb2.Snapshot(request=request, families=families))

    def add_reply(self, reply: link_pb2.OperatorReply) -> None:
        """The answer to an operator."""
        self._message.operator_replies.append(reply)

    def encode(self, incarnation: int) -> bytes:
        """The frame."""
        self._message.incarnation = incarnation
        if self._tokens:
            # Two steps of one stream in one turn stay in order; the reader appends entry by entry.
            self._message.streams = b"".join([to_column(effect.streams) for effect in self._tokens])
            self._message.first_indices = b"".join([to_column(effect.first_indices) for effect in self._tokens])
            self._message.tokens = b"".join([to_column(effect.tokens) for effect in self._tokens])
        return self._message.SerializeToString()


def to_submission(request: ev.RequestArrived, tokens: bytes) -> link_pb2.Submission:
    """What is kept of a request whose client may come back, with all tokens that it has."""
    return link_pb2.Submission(
        request_id=request.request_id,
        token_ids=tokens,
        num_prompt_tokens=request.num_prompt_tokens,
        max_tokens=request.max_tokens,
        stop_token_ids=to_column(request.stop_token_ids),
        sampling=request.sampling,
        tenant=request.tenant,
        priority=request.priority,
        expected_output_tokens=request.expected_output_tokens,
        cache_scope=request.salt,
        request_class=request.request_class,
        grammar=request.grammar,
        identity=request.identity,
        resume_info=request.resume_info,
    )


def to_stream_end(effect: ef.RequestEnded) -> link_pb2.StreamEnd:
    """How a stream ended, for its front end."""
    message = link_pb2.StreamEnd()
    _encode_end(message, effect)
    return message


def from_stream_end(end: link_pb2.StreamEnd, request: ev.RequestArrived) -> ef.RequestEnded:
    """The same, read back."""
    return ef.RequestEnded(
        frontend=request.frontend,
        stream=end.stream,
        request_id=request.request_id,
        reason=ef.EndReason[link_pb2.EndReason.Name(end.reason).removeprefix("END_REASON_")],
        message=end.message,
        retry_ms=end.retry_ms,
        completion_tokens=end.completion_tokens,
        stop_token_id=end.stop_token_id,
        cached_prompt_tokens=end.cached_prompt_tokens,
        preemptions=end.preemptions,
        queued_s=end.queued_ns / 1e9,
    )


def _encode_end(message: link_pb2.StreamEnd, effect: ef.RequestEnded) -> None:
    message.stream = effect.stream
    message.reason = _REASONS[effect.reason]
    message.message = effect.message
    message.retry_ms = effect.retry_ms
    message.completion_tokens = effect.completion_tokens
    message.stop_token_id = effect.stop_token_id
    message.cached_prompt_tokens = effect.cached_prompt_tokens
    message.preemptions = effect.preemptions
    message.queued_ns = max(0, int(effect.queued_s * 1e9))
    message.embedding = effect.embedding
