"""Answers to plans fit into frames, and what the core passes on from them fits into its frames to front ends."""

import re
from pathlib import Path

import numpy as np

from protos.quire.plan.v1 import plan_pb2
from services.streams.logprobs import read_scores
from shared.columns import Int32Array, to_column
from shared.frames import MAX_LOGPROBS, MAX_PART_BYTES, MAX_STEP_TOKENS, MAX_STEP_VECTOR_BYTES, PLAN_MAX_MESSAGE
from worker_svc.link.connection import Link
from worker_svc.outputs.scores import PromptPart, Wanted, encode

LARGEST = (1 << 31) - 1


def _packed(num_lines: int) -> Int32Array:
    """Log-probabilities as they come from the device, each line with a rank of its own."""
    lines = np.zeros((num_lines, 2 + 2 * MAX_LOGPROBS), np.int32)
    lines[:, 0] = np.arange(1, num_lines + 1)
    return lines


def test_log_probabilities_of_a_long_chunk_come_in_parts() -> None:
    """All of a chunk's tokens are there, in order, in messages that a front end's frame takes; so is what follows."""
    parts = (PromptPart(3, 1, MAX_LOGPROBS, 1, 100_000), PromptPart(4, 2, 5, 7, 10))
    messages = list(encode(_packed(100_010), None, set(), parts))

    assert max(message.ByteSize() for message in messages) <= MAX_PART_BYTES
    found = {
        (message.row, index): scored.rank
        for message in messages
        for index, scored in enumerate(read_scores(message.scores), message.prompt_index)
    }
    assert found == {(3, 1 + n): 1 + n for n in range(100_000)} | {(4, 7 + n): 100_001 + n for n in range(10)}


def test_the_largest_answer_fits_into_a_frame() -> None:
    """The largest answer fits into a frame.

    It has every token of the largest step with as many log-probabilities as a request may ask for. Half of the tokens
    are from rows of their own. It also has as many embeddings as a step completes.
    """
    num_rows = MAX_STEP_TOKENS // 2
    rows = tuple(range(num_rows))
    wanted = Wanted(None, rows, (LARGEST,) * num_rows, (MAX_LOGPROBS,) * num_rows)  # type: ignore[arg-type]
    prompt = PromptPart(num_rows, LARGEST, MAX_LOGPROBS, LARGEST - MAX_STEP_TOKENS, MAX_STEP_TOKENS - num_rows)
    alive = {(row, LARGEST) for row in rows}
    column = to_column(np.full(num_rows, LARGEST))
    vector = bytes(4096)
    result = plan_pb2.StepResult(
        step=1 << 60,
        rows=column,
        tokens=column,
        scores=encode(_packed(MAX_STEP_TOKENS), wanted, alive, (prompt,)),
        embeddings=[
            plan_pb2.RowEmbedding(row=row, generation=LARGEST, values=vector)
            for row in range(MAX_STEP_VECTOR_BYTES // len(vector))
        ],
    )
    assert plan_pb2.WorkerMessage(epoch=1 << 63, result=result).ByteSize() <= PLAN_MAX_MESSAGE


def test_an_answer_that_no_frame_takes_ends_the_session_by_name(tmp_path: Path) -> None:
    """It is not sent, so that ZeroMQ does not break the connection without a word; the reason says what is large."""
    link = Link(f"ipc://{tmp_path}/w", plan_pb2.Hello(worker_id="w"))
    link.open()
    scores = [plan_pb2.RowScores(row=row, scores=bytes((20 + row) << 20)) for row in (1, 2, 3)]
    lost = link.send_result(plan_pb2.StepResult(step=9, scores=scores))
    link.close("the test is over")
    assert lost is not None
    assert re.search(r"result of plan 9: \d+ bytes exceed .* row 3 has \d+ bytes of", lost.reason)
