"""Results of plans fit into frames, and so do the core's messages to front ends about these results."""

import re
from pathlib import Path

import numpy as np
import zmq

from protos.quire.plan.v1 import plan_pb2
from services.streams.logprobs import read_scores
from shared.columns import Int32Array
from shared.frames import (
    MAX_LOGPROBS,
    MAX_PART_BYTES,
    MAX_STEP_TOKENS,
    MAX_STEP_VECTOR_BYTES,
    PLAN_MAX_MESSAGE,
    PLAN_VERSIONS,
)
from shared.sockets import SendOutcome, bind_router, receive_from, send_to
from tests.worker_svc.values import LIMITS
from worker_svc.interface.arrays import NO_IDS, NO_ROWS
from worker_svc.interface.result import RowEmbedding, Scores, StepResult, StepTimings
from worker_svc.link.connection import Link
from worker_svc.link.encoding import encode_result, encode_scores
from worker_svc.link.identity import Identity
from worker_svc.link.session import Welcomed
from worker_svc.outputs.scores import PromptPart, Wanted, sections

LARGEST = (1 << 31) - 1
WAIT_MS = 20_000


def _packed(num_lines: int) -> Int32Array:
    """Log-probabilities as they come from the device, with a different rank in each line."""
    lines = np.zeros((num_lines, 2 + 2 * MAX_LOGPROBS), np.int32)
    lines[:, 0] = np.arange(1, num_lines + 1)
    return lines


def test_log_probabilities_of_a_long_chunk_come_in_parts() -> None:
    """All of a chunk's tokens are there, in order, in messages that a front end's frame takes; so is what follows."""
    parts = (PromptPart(3, 1, MAX_LOGPROBS, 1, 100_000), PromptPart(4, 2, 5, 7, 10))
    messages = list(encode_scores(sections(_packed(100_010), None, np.ones(0, np.bool_), parts)))

    assert max(message.ByteSize() for message in messages) <= MAX_PART_BYTES
    found = {
        (message.row, index): scored.rank
        for message in messages
        for index, scored in enumerate(read_scores(message.scores), message.prompt_index)
    }
    assert found == {(3, 1 + n): 1 + n for n in range(100_000)} | {(4, 7 + n): 100_001 + n for n in range(10)}


def test_the_largest_answer_fits_into_a_frame() -> None:
    """The largest answer fits into a frame.

    The result has every token of the largest step with as many log-probabilities as a request may request. Half of the
    tokens come from separate rows. It also has as many embeddings as a step can complete.
    """
    num_rows = MAX_STEP_TOKENS // 2
    rows = tuple(range(num_rows))
    wanted = Wanted(None, np.arange(num_rows), rows, (LARGEST,) * num_rows, (MAX_LOGPROBS,) * num_rows)  # type: ignore[arg-type]
    prompt = PromptPart(num_rows, LARGEST, MAX_LOGPROBS, LARGEST - MAX_STEP_TOKENS, MAX_STEP_TOKENS - num_rows)
    vector = np.zeros(1024, np.float32)
    result = StepResult(
        step=1 << 60,
        rows=np.full(num_rows, LARGEST),
        tokens=np.full(num_rows, LARGEST, np.int32),
        timings=_timings(),
        completed_copies=NO_IDS,
        scores=sections(_packed(MAX_STEP_TOKENS), wanted, np.ones(num_rows, np.bool_), (prompt,)),
        embeddings=tuple(RowEmbedding(row, LARGEST, vector) for row in range(MAX_STEP_VECTOR_BYTES // vector.nbytes)),
    )
    message = encode_result(result)

    assert (len(message.scores), len(message.embeddings)) == (
        num_rows + -(-(MAX_STEP_TOKENS - num_rows) // 4096),
        MAX_STEP_VECTOR_BYTES // vector.nbytes,
    )
    assert plan_pb2.WorkerMessage(epoch=1 << 63, result=message).ByteSize() <= PLAN_MAX_MESSAGE


def test_an_answer_that_no_frame_takes_ends_the_session_by_name(tmp_path: Path) -> None:
    """It is not sent, so that ZeroMQ does not break the connection without a word; the reason says what is large."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{tmp_path}/w"
    router = bind_router(context, address, max_message=PLAN_MAX_MESSAGE)
    link = Link(address, Identity(worker_id="w", limits=LIMITS, model="m"))
    link.open()
    router.poll(WAIT_MS)
    hello = receive_from(router)
    assert hello is not None
    welcome = plan_pb2.SchedulerMessage(epoch=1, welcome=plan_pb2.Welcome(max_in_flight=2, silence_ms=60_000))
    assert send_to(router, hello[0], welcome.SerializeToString()) is SendOutcome.SENT
    assert Welcomed(1, 2, PLAN_VERSIONS.oldest) in link.receive(WAIT_MS)
    num_lines = tuple((20 + row) << 17 for row in (1, 2, 3))
    scores = Scores(
        rows=(1, 2, 3),
        generations=(1, 1, 1),
        prompt_indices=(1, 1, 1),
        counts=(0, 0, 0),
        firsts=(0, 0, 0),
        num_tokens=num_lines,
        lines=np.zeros((max(num_lines), 2), np.int32),
    )
    lost = link.send_result(
        StepResult(step=9, rows=NO_ROWS, tokens=NO_IDS, timings=_timings(), completed_copies=NO_IDS, scores=scores)
    )
    link.close("the test is over")
    context.destroy(linger=0)
    assert lost is not None
    assert re.search(r"result of plan 9: \d+ bytes exceed .* row 3 has \d+ bytes of", lost.reason)


def _timings() -> StepTimings:
    """Timings of the largest values."""
    largest = (1 << 63) - 1
    return StepTimings(
        received_unix_ns=largest,
        started_unix_ns=largest,
        prepare_ns=largest,
        forward_ns=largest,
        sample_ns=largest,
        idle_before_ns=largest,
        num_tokens=LARGEST,
        copied_blocks=LARGEST,
        copy_ns=largest,
    )
