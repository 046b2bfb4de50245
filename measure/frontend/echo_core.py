"""Scheduler core without computation: sends tokens for every submission as fast as credit and pace allow.

The echo core implements the real link protocol, so that a real front end can be measured and tested without scheduler,
worker or model. Each step gives the same number of tokens to every stream with credit, in one columnar message per
front end. The output repeats the prompt.
"""

import argparse
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from types import FrameType

import zmq

from protos.quire.link.v1 import link_pb2
from quire.admin.v1 import admin_pb2
from shared.columns import from_column, from_columns, to_column
from shared.frames import LINK_MAX_MESSAGE, TOKEN_BYTES
from shared.ids import draw_incarnation
from shared.sockets import SendOutcome, bind_router, endpoint, receive_from, send_to

_MAX_CATCH_UP_S = 0.05
"""Longest delay after which a late step is caught up, in seconds."""


@dataclass(slots=True)
class EchoStream:
    """A submitted request."""

    number: int
    prompt: list[int]
    sent: int
    max_tokens: int
    credit: int

    def take(self, count: int) -> list[int]:
        """Return the next tokens of the output."""
        prompt, begin = self.prompt, self.sent
        self.sent += count
        self.credit -= count * TOKEN_BYTES
        if count == 1:
            return [prompt[begin % len(prompt)]]
        return [prompt[i % len(prompt)] for i in range(begin, self.sent)]


@dataclass(slots=True)
class EchoFrontend:
    """A front end that has sent hello."""

    streams: dict[int, EchoStream] = field(default_factory=dict)
    backlog: deque[bytes] = field(default_factory=deque)
    """Messages that the socket did not accept. The front end gets no tokens until these messages are sent."""


class EchoCore:
    """Core without a scheduler; `step` does everything that is due."""

    def __init__(
        self,
        address: str,
        model: link_pb2.ServedModel | None,
        *,
        tokens_per_step: int = 1,
        step_interval_s: float = 0.0,
    ) -> None:
        """Create the core.

        Without a model, the echo core reports that no worker has joined yet. It makes a step every `step_interval_s` on
        average and catches up on late ones.
        """
        self._context = zmq.Context()
        self._socket = bind_router(self._context, address, max_message=LINK_MAX_MESSAGE)
        self.address = endpoint(self._socket)
        self.incarnation = draw_incarnation()
        self._state = link_pb2.ServiceState(ready=model is not None, model=model)
        self._tokens_per_step = tokens_per_step
        self._step_interval_s = step_interval_s
        self._next_step = 0.0
        self._frontends: dict[bytes, EchoFrontend] = {}

    def step(self, timeout_ms: int) -> None:
        """Read messages, wait up to `timeout_ms` for the first one, and make a step when one is due."""
        self._wait(timeout_ms)
        while (message := receive_from(self._socket)) is not None:
            self.handle(message[0], link_pb2.FrontendMessage.FromString(message[1]))
        now = time.monotonic()
        due = now >= self._next_step
        if due:
            self._next_step = max(self._next_step + self._step_interval_s, now - _MAX_CATCH_UP_S)
        for peer, frontend in list(self._frontends.items()):
            if due and not frontend.backlog:
                self._make_tokens(frontend)
            self._send(peer, frontend)

    def close(self) -> None:
        """Close the sockets without goodbye, as if the process had been killed."""
        self._socket.close(linger=0)
        self._context.term()

    def _wait(self, timeout_ms: int) -> None:
        """Wait for the next message or the next step, whichever comes first."""
        frontends = self._frontends.values()
        if any(frontend.backlog for frontend in frontends):
            timeout_ms = 1
        elif any(self.allowance(stream) > 0 for frontend in frontends for stream in frontend.streams.values()):
            left_ms = max(self._next_step - time.monotonic(), 0.0) * 1e3
            if 0 < left_ms < 1:
                time.sleep(left_ms / 1e3)
            timeout_ms = min(timeout_ms, int(left_ms))
        self._socket.poll(timeout_ms, zmq.POLLIN)

    def handle(self, peer: bytes, message: link_pb2.FrontendMessage) -> None:
        """Handle one message of a front end."""
        answer = link_pb2.CoreMessage(incarnation=self.incarnation)
        if message.HasField("hello"):
            self._frontends[peer] = EchoFrontend()
            answer.state.CopyFrom(self._state)
        frontend = self._frontends.get(peer)
        if frontend is None:
            answer.unknown = True
            send_to(self._socket, peer, answer.SerializeToString())
            return
        for submission in message.submissions:
            self.submit(frontend, submission, answer)
        for number in from_column(message.cancelled).tolist():
            self._end(frontend, number, link_pb2.END_REASON_CANCELLED, answer)
        for match in message.stop_matches:
            self._end(frontend, match.stream, link_pb2.END_REASON_STOP_STRING, answer, match.keep_tokens)
        numbers, credits = from_columns(message.credit_streams, message.credit_bytes)
        for number, credit in zip(numbers.tolist(), credits.tolist(), strict=True):
            stream = frontend.streams.get(number)
            if stream is not None:
                stream.credit += credit
        if message.HasField("report"):
            answer.state.CopyFrom(self._state)
        if message.snapshot_request:
            answer.snapshot.request = message.snapshot_request
            answer.snapshot.families.extend(message.report.families)
        for request in message.operator_requests:
            self.operate(answer.operator_replies.add(number=request.number))
        if answer.HasField("state") or answer.ends or answer.operator_replies:
            frontend.backlog.append(answer.SerializeToString())

    def operate(self, reply: link_pb2.OperatorReply) -> None:
        """Fill in the reply to an operator: there are no workers."""
        reply.response.Pack(admin_pb2.ListWorkersResponse())

    def allowance(self, stream: EchoStream) -> int:
        """Return the number of tokens that the stream gets in this step."""
        return min(self._tokens_per_step, stream.credit // TOKEN_BYTES, stream.max_tokens - stream.sent)

    def submit(self, frontend: EchoFrontend, submission: link_pb2.Submission, answer: link_pb2.CoreMessage) -> None:
        """Accept a request; append immediate replies to `answer`."""
        tokens = from_column(submission.token_ids).tolist()
        frontend.streams[submission.stream] = EchoStream(
            number=submission.stream,
            prompt=tokens[: submission.num_prompt_tokens],
            sent=len(tokens) - submission.num_prompt_tokens,
            max_tokens=submission.max_tokens,
            credit=submission.credit,
        )

    def _end(
        self,
        frontend: EchoFrontend,
        number: int,
        reason: link_pb2.EndReason.ValueType,
        answer: link_pb2.CoreMessage,
        keep_tokens: int | None = None,
    ) -> None:
        stream = frontend.streams.pop(number, None)
        if stream is not None:
            kept = stream.sent if keep_tokens is None else keep_tokens
            answer.ends.add(stream=number, reason=reason, completion_tokens=kept)

    def _send(self, peer: bytes, frontend: EchoFrontend) -> None:
        while frontend.backlog:
            outcome = send_to(self._socket, peer, frontend.backlog[0])
            if outcome is SendOutcome.GONE:
                del self._frontends[peer]
            if outcome is not SendOutcome.SENT:
                return
            frontend.backlog.popleft()

    def _make_tokens(self, frontend: EchoFrontend) -> None:
        streams: list[int] = []
        first_indices: list[int] = []
        counts: list[int] = []
        tokens: list[int] = []
        message = link_pb2.CoreMessage(incarnation=self.incarnation)
        for stream in list(frontend.streams.values()):
            count = self.allowance(stream)
            if count > 0:
                streams.append(stream.number)
                first_indices.append(stream.sent)
                counts.append(count)
                tokens += stream.take(count)
            if stream.sent >= stream.max_tokens:
                self._end(frontend, stream.number, link_pb2.END_REASON_LENGTH, message)
        if not streams and not message.ends:
            return
        message.streams = to_column(streams)
        message.first_indices = to_column(first_indices)
        if self._tokens_per_step > 1:
            message.counts = to_column(counts)
        message.tokens = to_column(tokens)
        frontend.backlog.append(message.SerializeToString())


def main(arguments: list[str]) -> int:
    """Run an echo core process until it gets a signal."""
    parser = argparse.ArgumentParser(prog="python -m measure.frontend.echo_core", description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, default=1 << 20)
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument("--step-interval-s", type=float, default=0.0)
    options = parser.parse_args(arguments)
    model = link_pb2.ServedModel(
        name="echo",
        architecture="EchoForCausalLM",
        max_model_len=options.max_model_len,
        vocab_size=options.vocab_size,
        dtype="none",
        fingerprint="0" * 64,
    )
    core = EchoCore(
        options.address, model, tokens_per_step=options.tokens_per_step, step_interval_s=options.step_interval_s
    )
    stopping = False

    def stop(_number: int, _frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    print(f"listening {core.address}", flush=True)
    while not stopping:
        core.step(timeout_ms=100)
    core.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
