"""Front end of `quire bench link`: submits endless requests and discards their tokens.

The sink implements a front end's link protocol (Hello, submissions with block keys, a report every second), but reads
its socket only when `drain` is called. It does not measure the cost of a real front end.
"""

import time

import numpy as np
import zmq

from protos.quire.link.v1 import link_pb2
from protos.quire.plan.v1 import plan_pb2
from shared.columns import to_column
from shared.frames import LINK_MAX_MESSAGE, LINK_VERSIONS
from shared.ids import draw_incarnation, routing_id
from shared.prefix_keys import following_keys, root_key
from shared.sockets import connect_dealer

REPORT_EVERY_S = 1.0
_PER_FRAME = 256
_ENDLESS_CREDIT = 1 << 31
_FRONTEND_ID = "sink"


class SinkError(Exception):
    """A request ended, or the core does not know this front end."""


class TokenSink:
    """Connection of one front end."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
        incarnation = draw_incarnation()
        self._socket = connect_dealer(
            context, address, identity=routing_id(_FRONTEND_ID, incarnation), max_message=LINK_MAX_MESSAGE
        )
        hello = link_pb2.FrontendHello(
            protocol_version=LINK_VERSIONS.newest, frontend_id=_FRONTEND_ID, incarnation=incarnation
        )
        self._socket.send(link_pb2.FrontendMessage(hello=hello).SerializeToString())
        self._next_report = time.monotonic() + REPORT_EVERY_S
        self._num_submitted = self._num_snapshots = 0
        self._snapshot: link_pb2.Snapshot | None = None
        self.num_tokens = 0
        """Number of tokens received so far."""

    def submit(
        self,
        count: int,
        *,
        max_tokens: int,
        prompt_tokens: int,
        block_size: int,
        fingerprint: str,
        vocab_size: int,
        is_resumable: bool = False,
    ) -> None:
        """Submit requests with prompts of up to `prompt_tokens` tokens, staggered over one block's length."""
        rng = np.random.default_rng(count)
        root = root_key(fingerprint, b"")
        sampling = plan_pb2.SamplingParams(temperature=0.7, top_p=0.9, seed=7).SerializeToString()
        begin, self._num_submitted = self._num_submitted, self._num_submitted + count
        for first in range(begin, begin + count, _PER_FRAME):
            submissions = []
            for stream in range(first, min(first + _PER_FRAME, begin + count)):
                tokens = to_column(rng.integers(3, vocab_size, prompt_tokens - stream % block_size))
                submissions.append(
                    link_pb2.Submission(
                        stream=stream + 1,
                        request_id=f"req-{stream:024d}",
                        token_ids=tokens,
                        num_prompt_tokens=len(tokens) // 4,
                        max_tokens=max_tokens,
                        sampling=sampling,
                        credit=_ENDLESS_CREDIT,
                        block_keys=following_keys(root, tokens, block_size),
                        block_size=block_size,
                        identity=b"%032d" % stream if is_resumable else b"",
                    )
                )
            self._socket.send(link_pb2.FrontendMessage(submissions=submissions).SerializeToString())

    def ask_for_metrics(self) -> None:
        """Request a snapshot of the scheduler's metrics. After some calls to `drain`, `metrics` returns it."""
        self._num_snapshots += 1
        self._snapshot = None
        self._socket.send(link_pb2.FrontendMessage(snapshot_request=self._num_snapshots).SerializeToString())

    @property
    def metrics(self) -> link_pb2.Snapshot | None:
        """Return the requested snapshot; None until it has arrived."""
        return self._snapshot

    def drain(self) -> None:
        """Discard the tokens that have arrived; send a report if it is due.

        Raises:
            SinkError: a request ended, or the scheduler does not know this front end.
        """
        now = time.monotonic()
        if now >= self._next_report:
            self._next_report = now + REPORT_EVERY_S
            self._socket.send(link_pb2.FrontendMessage(report=link_pb2.MetricReport()).SerializeToString())
        while True:
            try:
                message = link_pb2.CoreMessage.FromString(self._socket.recv(zmq.DONTWAIT))
            except zmq.Again:
                return
            if message.unknown:
                raise SinkError("the scheduler no longer knows this front end")
            if message.ends:
                end = message.ends[0]
                raise SinkError(f"a request ended: {link_pb2.EndReason.Name(end.reason)} {end.message}")
            if message.HasField("snapshot") and message.snapshot.request == self._num_snapshots:
                self._snapshot = message.snapshot
            self.num_tokens += len(message.tokens) // 4

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()
