"""Frames between scheduler core and front ends: bytes to events, effects to bytes. Knows the protocol, decides nothing.

What one turn of the loop has for a front end travels in one frame: `Outgoing` gathers it.
"""

from dataclasses import dataclass, field

import numpy as np
from google.protobuf.message import DecodeError

from protos.quire.link.v1 import link_pb2
from scheduler_svc.core import effects as ef
from scheduler_svc.core import events as ev
from shared.columns import MalformedColumnError, from_column, from_columns, to_column
from shared.frames import MalformedFrameError
from shared.prefix_keys import KEY_BYTES

PROTOCOL_VERSION = 1

_MAX_KEYS = 1 << 20


@dataclass(frozen=True, slots=True)
class Incoming:
    """What a front end's frame says."""

    events: list[ev.Event]
    hello: bool
    report: link_pb2.MetricReport | None
    snapshot_request: int
    operator_requests: list[link_pb2.OperatorRequest]


def decode(peer: ev.Peer, payload: bytes, now: float) -> Incoming:
    """Takes a frame apart; `now` turns the time left until a deadline into a point in time.

    Raises:
        MalformedFrameError: the frame does not parse, or its columns do not fit together.
    """
    try:
        message = link_pb2.FrontendMessage.FromString(payload)
        return _incoming(peer, message, now)
    except (DecodeError, MalformedColumnError) as error:
        raise MalformedFrameError(str(error)) from None


def _incoming(peer: ev.Peer, message: link_pb2.FrontendMessage, now: float) -> Incoming:
    events: list[ev.Event] = []
    if message.HasField("hello"):
        if message.hello.protocol_version != PROTOCOL_VERSION:
            raise MalformedFrameError(f"version {message.hello.protocol_version} of the link protocol")
        events.append(ev.FrontendJoined(frontend=peer))
    events += [_arrival(peer, submission, now) for submission in message.submissions]
    events += [
        ev.StopMatched(frontend=peer, stream=match.stream, keep_tokens=match.keep_tokens)
        for match in message.stop_matches
    ]
    events += [ev.RequestCancelled(frontend=peer, stream=stream) for stream in from_column(message.cancelled).tolist()]
    streams, credits = from_columns(message.credit_streams, message.credit_bytes)
    if len(credits) and credits.min() < 0:
        raise MalformedFrameError("negative credit")
    events += [
        ev.CreditGranted(frontend=peer, stream=stream, credit=credit)
        for stream, credit in zip(streams.tolist(), credits.tolist(), strict=True)
    ]
    return Incoming(
        events=events,
        hello=message.HasField("hello"),
        report=message.report if message.HasField("report") else None,
        snapshot_request=message.snapshot_request,
        operator_requests=list(message.operator_requests),
    )


def _arrival(peer: ev.Peer, submission: link_pb2.Submission, now: float) -> ev.RequestArrived:
    if len(submission.block_keys) % KEY_BYTES or len(submission.block_keys) > _MAX_KEYS * KEY_BYTES:
        raise MalformedFrameError("block_keys is no whole number of keys, or too long")
    if submission.stream > np.iinfo(np.int32).max:
        raise MalformedFrameError("a stream number beyond int32")
    return ev.RequestArrived(
        frontend=peer,
        stream=submission.stream,
        request_id=submission.request_id,
        token_ids=from_column(submission.token_ids),
        num_prompt_tokens=submission.num_prompt_tokens,
        max_tokens=submission.max_tokens,
        stop_token_ids=from_column(submission.stop_token_ids),
        sampling=submission.sampling,
        credit=submission.credit,
        deadline=_point_in_time(submission.deadline_ns, now),
        traceparent=submission.traceparent,
        salt=submission.cache_scope,
        block_keys=submission.block_keys,
        block_size=submission.block_size,
        tenant=submission.tenant,
        priority=submission.priority,
        expected_output_tokens=submission.expected_output_tokens,
        ttft_deadline=_point_in_time(submission.ttft_target_ns, now),
        total_deadline=_point_in_time(submission.total_time_target_ns, now),
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

    def add_end(self, effect: ef.RequestEnded) -> None:
        """A stream ended."""
        self._message.ends.add(
            stream=effect.stream,
            reason=link_pb2.EndReason.Value(f"END_REASON_{effect.reason.name}"),
            message=effect.message,
            retry_ms=effect.retry_ms,
            completion_tokens=effect.completion_tokens,
            stop_token_id=effect.stop_token_id,
            cached_prompt_tokens=effect.cached_prompt_tokens,
            preemptions=effect.preemptions,
            queued_ns=max(0, int(effect.queued_s * 1e9)),
        )

    def set_state(self, state: ef.ServiceChanged) -> None:
        """What is served, and whether it can be used."""
        self._message.state.ready = state.ready
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
                )
            )

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
            self._message.streams = to_column(np.concatenate([effect.streams for effect in self._tokens]))
            self._message.first_indices = to_column(np.concatenate([effect.first_indices for effect in self._tokens]))
            self._message.tokens = to_column(np.concatenate([effect.tokens for effect in self._tokens]))
        return self._message.SerializeToString()
