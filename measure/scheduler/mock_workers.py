"""Mock workers of `measure.scheduler.takeover`: real links and row tables around a model that computes nothing.

A step takes a given time. The token at a position follows from the first token of the prompt and the position, so a
front end can check every token. A worker that loses its scheduler retains the KV of its rows, as a real worker does.

One process runs many workers. At SIGTERM it prints one line of JSON: the prompt tokens that were computed in the first
session of each worker, and those in later sessions.
"""

import argparse
import json
import signal
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from shared.logging import configure_logging
from worker_svc.interface.arrays import NO_IDS, Int32Array, IntArray
from worker_svc.interface.limits import Limits
from worker_svc.interface.plan import Plan
from worker_svc.interface.result import StepResult, StepTimings
from worker_svc.link.connection import Link
from worker_svc.link.identity import Identity
from worker_svc.link.session import HelloReason, Lost, PlanArrived, RefusedForGood, Welcomed
from worker_svc.rows.retained import Retained
from worker_svc.rows.table import RowTable

VOCAB = 32_000
BLOCK_SIZE = 16
FINGERPRINT = "f"
MAX_MODEL_LEN = 8192
_FIRST_TOKEN = 3
_STRIDE = 7
_NAP_S = 0.005
"""Maximum time between two looks at all links."""


def token_at(first: IntArray | int, position: IntArray | int) -> IntArray | int:
    """Return the token at a position of a sequence that begins with the token `first`."""
    return _FIRST_TOKEN + (first * _STRIDE + position) % (VOCAB - _FIRST_TOKEN)


class MockWorker:
    """One worker with its link, its rows and its simulated device."""

    def __init__(self, address: str, index: int, limits: Limits, step_s: float) -> None:
        identity = Identity(worker_id=f"mock-{index}", limits=limits, model="mock", fingerprint=FINGERPRINT)
        self._link = Link(address, identity)
        self._limits, self._step_s = limits, step_s
        self._rows = RowTable(limits, torch.device("cpu"))
        self._firsts = np.zeros(limits.max_rows, np.int64)
        self._pending: deque[tuple[float, StepResult, IntArray]] = deque()
        """(end of the step, its result, generations of its rows)."""
        self._free_at = 0.0
        self._retained: tuple[Retained, ...] = ()
        self._has_launched = False
        self.num_sessions = 0
        self.prefilled = [0, 0]
        """Prompt tokens computed in the first session, and in later ones."""
        self._link.open()

    @property
    def next_end(self) -> float:
        """Time at which the oldest step ends; infinite without a step."""
        return self._pending[0][0] if self._pending else float("inf")

    def turn(self, now: float) -> None:
        """Send a result that is due, and handle the events of the link.

        Raises:
            RuntimeError: the scheduler refused this worker.
        """
        if self._pending and self._pending[0][0] <= now:
            _, result, generations = self._pending.popleft()
            self._rows.sampled(result.rows, generations, result.tokens)
            if (lost := self._link.send_result(result)) is not None:
                self._reconnect(lost)
                return
        for event in self._link.receive(0):
            match event:
                case PlanArrived(plan):
                    self._launch(plan, now)
                case Welcomed():
                    self.num_sessions += 1
                case RefusedForGood(reason):
                    raise RuntimeError(f"refused: {reason}")
                case Lost():
                    self._reconnect(event)

    def close(self) -> None:
        """Close the link."""
        self._link.close("the measurement has ended")

    def _launch(self, plan: Plan, now: float) -> None:
        rows = self._rows
        rows.leave(plan)
        rows.change(plan)
        for admission in plan.admissions:
            self._firsts[admission.row] = admission.token_ids[0]
        rows.check_chunks(plan.chunk_rows, plan.chunk_lengths)
        self.prefilled[self.num_sessions > 1] += int(plan.chunk_lengths.sum())
        decoding = rows.decode_rows().copy()
        finished = plan.chunk_rows[rows.advance(plan.chunk_rows, plan.chunk_lengths)]
        sampling = np.sort(np.concatenate([decoding, finished]))
        tokens: Int32Array = np.asarray(token_at(self._firsts[sampling], rows.num_computed[sampling]), np.int32)
        start = max(now, self._free_at)
        idle_ns, self._free_at = int(1e9 * (start - self._free_at)), start + self._step_s
        received_ns = time.time_ns()
        timings = StepTimings(
            received_unix_ns=received_ns,
            started_unix_ns=received_ns,
            prepare_ns=0,
            forward_ns=int(1e9 * self._step_s),
            sample_ns=0,
            idle_before_ns=idle_ns,
            num_tokens=len(decoding) + int(plan.chunk_lengths.sum()),
        )
        result = StepResult(step=plan.step, rows=sampling, tokens=tokens, timings=timings, completed_copies=NO_IDS)
        self._pending.append((self._free_at, result, rows.generation[sampling]))
        self._has_launched = True

    def _reconnect(self, lost: Lost) -> None:
        if lost.hello_reason is not HelloReason.SESSION_LOST:
            raise RuntimeError(f"session lost: {lost.reason}")
        if self._has_launched:
            self._retained = self._rows.retained()
        self._has_launched = False
        self._rows.clear()
        self._pending.clear()
        self._link.open(lost.hello_reason, self._retained)


def main() -> int:
    """Run the workers until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--rows", type=int, required=True, help="rows of each worker")
    parser.add_argument("--step-ms", type=float, required=True)
    parser.add_argument("--row-tokens", type=int, required=True, help="tokens for which a row has KV blocks")
    options = parser.parse_args()
    configure_logging("mock-workers")
    limits = Limits(
        max_rows=options.rows,
        max_tokens_per_step=2048,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        num_blocks=options.rows * (options.row_tokens // BLOCK_SIZE + 1),
        vocab_size=VOCAB,
    )
    has_ended = False

    def end(*_: object) -> None:
        nonlocal has_ended
        has_ended = True

    signal.signal(signal.SIGTERM, end)
    workers = [MockWorker(options.address, index, limits, options.step_ms / 1000) for index in range(options.workers)]
    print("started", flush=True)
    while not has_ended:
        for worker in workers:
            worker.turn(time.monotonic())
        wake = min(worker.next_end for worker in workers)
        time.sleep(max(0.0, min(_NAP_S, wake - time.monotonic())))
    first, later = (sum(worker.prefilled[part] for worker in workers) for part in (0, 1))
    print(json.dumps({"prefilled": first, "prefilled_again": later}), flush=True)
    with ThreadPoolExecutor(len(workers)) as threads:  # Each link waits for its own goodbye to be sent.
        list(threads.map(MockWorker.close, workers))
    return 0


if __name__ == "__main__":
    sys.exit(main())
