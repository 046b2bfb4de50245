"""Codec for frames between the scheduler and front ends: converts bytes to events and effects to bytes.

`Outgoing` collects the messages of one turn for a front end, and encodes them in as few frames as possible. Malformed
submissions are rejected here with INVALID, without affecting other requests in the frame. The core receives only
well-formed requests, and checks them against its limits and the model.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from protos.quire.link.v1 import link_pb2
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.arrays import Int32Array
from shared.columns import MalformedColumnError, from_column, from_columns, joined_column
from shared.errors import InvalidRequestError, QuireError
from shared.frames import (
    LINK_VERSIONS,
    MAX_PART_BYTES,
    MAX_SERVED_SEQUENCE,
    PACKED_BYTES,
    TOKEN_BYTES,
    FrameTooLargeError,
    MalformedFrameError,
)
from shared.logging import get_logger
from shared.packing import Packer, check_part, fitting, in_parts
from shared.prefix_keys import KEY_BYTES
from shared.request_spec import MAX_RETENTION_PRIORITY, MAX_RETENTION_S, Pooling, RequestSpec, read_spec, size_of
from shared.versions import negotiate, spoken

_INT32_MAX = 0x7FFFFFFF
_OVERHEAD = 1024
"""Upper bound of a submission's size without its long fields, in bytes."""
_REASONS = {reason: link_pb2.EndReason.Value(f"END_REASON_{reason.name}") for reason in ef.EndReason}
_POOLINGS = frozenset(Pooling)
_COLUMNS_OF = attrgetter("stream", "token_ids", "block_keys", "block_size")
_STATE_OF = attrgetter("credit", "deadline_ns", "ttft_target_ns", "total_time_target_ns", "accepted", "again")


log = get_logger()


class UnusableSubmissionError(ValueError):
    """An invalid submission; the message is sent to the client."""


@dataclass(slots=True, kw_only=True)
class Incoming:
    """Content of a front end's frame."""

    events: list[ev.Event] = field(default_factory=list)
    refused: list[ef.RequestEnded] = field(default_factory=list)
    """Ends of the invalid submissions."""
    hello: int = 0
    """Negotiated protocol version if the frame has a Hello; otherwise 0."""
    report: link_pb2.MetricReport | None
    snapshot_request: int
    operator_requests: list[link_pb2.OperatorRequest] = field(default_factory=list)
    request_reports: list[link_pb2.RequestReport] = field(default_factory=list)
    """Measurements of finished calls by the front end."""
    traced: list[link_pb2.TracedStream] = field(default_factory=list)
    """Ended streams for which the front end requests spans."""
    ended_orders: tuple[int, ...] = ()
    """Numbers of operator requests whose callers have left."""
    goodbye: bool = False
    """Whether this is the last frame from a front end that is shutting down."""


def decode(peer: ev.Peer, payload: bytes, now: float) -> Incoming:
    """Decode a frame; `now` is used to turn relative deadlines into points in time.

    Raises:
        MalformedFrameError: the frame or one of its columns is malformed.
        UnsupportedVersionError: the Hello of the front end has no common protocol version.
    """
    try:
        message = link_pb2.FrontendMessage.FromString(payload)
        return _incoming(peer, message, now)
    except (DecodeError, MalformedColumnError) as error:
        raise MalformedFrameError(str(error)) from None


def _incoming(peer: ev.Peer, message: link_pb2.FrontendMessage, now: float) -> Incoming:
    # Read only set fields, because most frames contain either submissions or credit.
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
            raise MalformedFrameError("credit_bytes: negative value")
        for stream, credit in zip(streams.tolist(), credits.tolist(), strict=True):
            events.append(ev.CreditGranted(frontend=peer, stream=stream, credit=credit))
    incoming.operator_requests.extend(parts.get("operator_requests", ()))
    incoming.request_reports.extend(parts.get("request_reports", ()))
    incoming.traced.extend(parts.get("traced", ()))
    incoming.ended_orders = tuple(parts.get("ended_orders", ()))
    incoming.goodbye = "goodbye" in parts
    return incoming


def arrival(peer: ev.Peer, submission: link_pb2.Submission, now: float) -> ev.RequestArrived:
    """Decode a submission; `now` is used to turn relative deadlines into points in time.

    Raises:
        UnusableSubmissionError: a field is invalid.
        MalformedColumnError: a column is malformed.
    """
    spec = read_spec(submission)
    # Read each field once, because every access costs a lookup, and copies the field if it is long.
    stream, token_ids, block_keys, block_size = _COLUMNS_OF(submission)
    num_tokens, num_prompt_tokens = len(token_ids) // TOKEN_BYTES, spec.num_prompt_tokens
    if stream > _INT32_MAX:
        raise UnusableSubmissionError("stream: exceeds int32")
    if not 0 < num_prompt_tokens <= num_tokens:
        raise UnusableSubmissionError("num_prompt_tokens: the prompt is empty or exceeds token_ids")
    if num_tokens > MAX_SERVED_SEQUENCE:
        raise UnusableSubmissionError(f"token_ids: {num_tokens} tokens exceed the limit of {MAX_SERVED_SEQUENCE}")
    if len(spec.stop_token_ids) % TOKEN_BYTES:
        raise UnusableSubmissionError("stop_token_ids: not a packed array of 32-bit integers")
    if spec.pooling:
        if spec.pooling not in _POOLINGS:
            raise UnusableSubmissionError(f"pooling: unknown mode {spec.pooling}")
        if spec.max_tokens != 1 or spec.grammar:
            raise UnusableSubmissionError("pooling: cannot be combined with generation or a grammar")
    if not (0.0 <= spec.retention_s <= MAX_RETENTION_S and spec.retention_priority <= MAX_RETENTION_PRIORITY):
        raise UnusableSubmissionError("retention_s, retention_priority: out of range")
    if not 0.0 <= spec.expected_pause_s <= MAX_RETENTION_S:
        raise UnusableSubmissionError("expected_pause_s: out of range")
    num_keys, rest = divmod(len(block_keys), KEY_BYTES)
    if rest or (num_keys and not 0 < num_keys * block_size <= num_tokens):
        raise UnusableSubmissionError("block_keys: not a whole number of keys, or more keys than full blocks")
    # Count the tokens that may be generated, because a preempted or resumed request is sent with all its tokens.
    longest = min(max(num_tokens, num_prompt_tokens + spec.max_tokens), MAX_SERVED_SEQUENCE)
    weight = _OVERHEAD + TOKEN_BYTES * longest + len(block_keys) + size_of(spec)
    if weight > MAX_PART_BYTES:
        raise UnusableSubmissionError(
            f"request: may need {weight} bytes, more than the {MAX_PART_BYTES} bytes of a frame; shorten its token sets"
            " or its grammar"
        )
    credit, deadline_ns, ttft_ns, total_ns, accepted, again = _STATE_OF(submission)
    return ev.RequestArrived(
        frontend=peer,
        stream=stream,
        spec=spec,
        token_ids=from_column(token_ids),
        credit=credit,
        deadline=_point_in_time(deadline_ns, now),
        ttft_deadline=_point_in_time(ttft_ns, now),
        total_deadline=_point_in_time(total_ns, now),
        block_keys=block_keys,
        block_size=block_size,
        again=accepted or again,
        accepted=accepted,
    )


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
    """Messages for one front end in one turn."""

    _message: link_pb2.CoreMessage = field(default_factory=link_pb2.CoreMessage)
    _tokens: list[ef.TokensReady] = field(default_factory=list)
    _has_counts: bool = False
    """Whether a stream has several tokens from one step."""

    def add_tokens(self, effect: ef.TokensReady) -> None:
        """Add new tokens of streams."""
        self._tokens.append(effect)
        if effect.counts is not None:
            self._has_counts = True

    def add_scores(self, effect: ef.ScoresReady) -> None:
        """Add log-probabilities of a stream's tokens."""
        if not _is_part(len(effect.scores) + _PART_OVERHEAD, f"log-probabilities of stream {effect.stream}"):
            return
        self._message.scores.add(
            stream=effect.stream,
            first_index=effect.first_index,
            of_prompt=effect.of_prompt,
            scores=effect.scores,
        )

    def add_resume(self, effect: ef.ResumeAnswered) -> None:
        """Add a resumed request's log, or no log if it does not fit into a frame."""
        reply = self._message.resume_replies.add(number=effect.number, not_found=effect.log is None)
        if effect.log is None:
            return
        log = effect.log
        reply.submission.CopyFrom(to_submission(log.spec, log.tokens))
        for index, scores in log.scores:
            reply.scores.add(first_index=index, scores=scores)
        if log.end is not None:
            _encode_end(reply.end, log.end)
        if not _is_part(reply.ByteSize(), f"the log of request {log.spec.request_id}"):
            reply.Clear()
            reply.number, reply.not_found = effect.number, True

    def add_end(self, effect: ef.RequestEnded) -> None:
        """Add the end of a stream."""
        _encode_end(self._message.ends.add(), effect)

    def set_state(self, state: ef.ServiceChanged, log_level: str, leader_number: int = 0) -> None:
        """Set the state of the service, the log level if not empty, and the leader number."""
        self._message.state.leader_number = leader_number
        self._message.state.ready = state.ready
        self._message.state.log_level = log_level
        self._message.state.max_call_requests = state.max_call_requests
        self._message.state.max_call_tokens = state.max_call_tokens
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
        """Set the negotiated protocol version."""
        self._message.protocol_version = version

    def set_snapshot(self, request: int, families: Iterable[link_pb2.MetricFamily]) -> None:
        """Set the reply to a snapshot request, with as many metric families as fit into a frame."""
        snapshot = self._message.snapshot
        snapshot.Clear()
        snapshot.request = request
        snapshot.families.extend(fitting(families))

    def add_reply(self, reply: link_pb2.OperatorReply) -> None:
        self._message.operator_replies.append(reply)

    def add_view(self, view: link_pb2.View) -> None:
        """Add a part of a live view."""
        self._message.views.append(view)

    def encode(self, incarnation: int) -> list[bytes]:
        """Encode the messages as frames, in the order in which to read them.

        Raises:
            FrameTooLargeError: a part does not fit into a frame.
        """
        self._message.incarnation = incarnation
        # Keep entries from different steps of a stream in order, because the receiver appends them one by one.
        if self._tokens:
            message, effects = self._message, self._tokens
            message.streams = joined_column([effect.streams for effect in effects])
            message.first_indices = joined_column([effect.first_indices for effect in effects])
            message.tokens = joined_column([effect.tokens for effect in effects])
            if self._has_counts:
                message.counts = joined_column([_counts(effect) for effect in effects])
        frame = self._message.SerializeToString()
        return [frame] if len(frame) <= PACKED_BYTES else self._split(incarnation)

    def _split(self, incarnation: int) -> list[bytes]:
        """Encode several frames: log-probabilities before their tokens, ends after the tokens."""
        whole = self._message
        # A list with one entry per token can be split anywhere.
        each = [effect.each() for effect in self._tokens]
        streams = joined_column([column for column, _ in each])
        first_indices = joined_column([column for _, column in each])
        tokens = whole.tokens
        packer = Packer(lambda: link_pb2.CoreMessage(incarnation=incarnation))
        head = packer.messages[0]
        head.protocol_version = whole.protocol_version
        if whole.HasField("state"):
            head.state.CopyFrom(whole.state)
        for scores in whole.scores:
            what = f"log-probabilities of stream {scores.stream}"
            packer.message_for(scores.ByteSize(), what).scores.append(scores)
        for part in in_parts(range(len(tokens) // TOKEN_BYTES), _TOKEN_WIDTH):
            cut = slice(TOKEN_BYTES * part.start, TOKEN_BYTES * part.stop)
            message = packer.message_for(_TOKEN_WIDTH * len(part), "tokens")
            message.streams, message.first_indices, message.tokens = streams[cut], first_indices[cut], tokens[cut]
        for end in whole.ends:
            packer.message_for(end.ByteSize(), f"the end of stream {end.stream}").ends.append(end)
        for reply in whole.resume_replies:
            what = f"the log of request {reply.submission.request_id}"
            packer.message_for(reply.ByteSize(), what).resume_replies.append(reply)
        if whole.HasField("snapshot"):
            packer.message_for(whole.snapshot.ByteSize(), "metrics").snapshot.CopyFrom(whole.snapshot)
        for operator_reply in whole.operator_replies:
            message = packer.message_for(operator_reply.ByteSize(), "the answer to an operator")
            message.operator_replies.append(operator_reply)
        for view in whole.views:
            packer.message_for(view.ByteSize(), "a part of a live view").views.append(view)
        return [message.SerializeToString() for message in packer.messages]


_TOKEN_WIDTH = TOKEN_BYTES * 3
"""Size of a token in a frame with its stream and index, in bytes."""
_PART_OVERHEAD = 64
"""Upper bound of the overhead of log-probabilities in a frame, in bytes."""


def _counts(effect: ef.TokensReady) -> Int32Array:
    return np.ones(len(effect.streams), np.int32) if effect.counts is None else effect.counts


def _is_part(size: int, what: str) -> bool:
    """Return whether a part fits into a frame; if not, log which part it is."""
    try:
        check_part(size, what)
    except FrameTooLargeError as error:
        log.error("part of a frame to a front end dropped: too large", error=str(error))
        return False
    return True


def error_reply(number: int, error: QuireError) -> link_pb2.OperatorReply:
    """Return the reply for a failed operator request."""
    reply = link_pb2.OperatorReply(number=number)
    reply.error.reason, reply.error.message = error.reason, error.message
    if isinstance(error, InvalidRequestError):
        (violation,) = error.violations
        reply.error.field, reply.error.message = violation.field, violation.description
    return reply


def to_submission(spec: RequestSpec, tokens: bytes) -> link_pb2.Submission:
    """Return the submission of a resumable request, with `tokens` as its tokens so far."""
    return link_pb2.Submission(token_ids=tokens, **spec._asdict())


def to_stream_end(effect: ef.RequestEnded) -> link_pb2.StreamEnd:
    """Return the message of a stream's end."""
    message = link_pb2.StreamEnd()
    _encode_end(message, effect)
    return message


def from_stream_end(end: link_pb2.StreamEnd, frontend: ev.Peer, spec: RequestSpec) -> ef.RequestEnded:
    """Return the effect that `to_stream_end` encoded."""
    return ef.RequestEnded(
        frontend=frontend,
        stream=end.stream,
        request_id=spec.request_id,
        reason=ef.EndReason[link_pb2.EndReason.Name(end.reason).removeprefix("END_REASON_")],
        message=end.message,
        retry_ms=end.retry_ms,
        completion_tokens=end.completion_tokens,
        stop_token_id=end.stop_token_id,
        cached_prompt_tokens=end.cached_prompt_tokens,
        preemptions=end.preemptions,
        draft_tokens=end.draft_tokens,
        accepted_draft_tokens=end.accepted_draft_tokens,
        energy_j=end.energy_j,
        queued_s=end.queued_ns / 1e9,
        field=end.field,
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
    message.draft_tokens = effect.draft_tokens
    message.accepted_draft_tokens = effect.accepted_draft_tokens
    message.energy_j = effect.energy_j
    message.queued_ns = max(0, int(effect.queued_s * 1e9))
    message.embedding = effect.embedding
    message.field = effect.field
