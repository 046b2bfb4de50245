"""A worker whose steps take a fixed time, with random tokens: two cores cannot feed eight real ones.

    python -m tests.deploy.paced_worker ADDRESS NAME STEP_MS ROWS

On SIGTERM it sends the results of its current steps, says goodbye and exits, like a real worker.
"""

import signal
import sys
import time

import zmq

from measure.scheduler import echo_worker
from protos.quire.plan.v1 import plan_pb2
from shared.frames import PLAN_VERSIONS
from shared.ids import draw_incarnation

VOCAB = 1024
"""Size of the bundled model's vocabulary, whose tokenizer the front end has."""


def main(address: str, name: str, step_ms: str, rows: str) -> int:
    """Serve until SIGTERM."""
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: stopping.append(number))
    echo_worker.VOCAB = VOCAB
    hello = plan_pb2.Hello(
        protocol_version=PLAN_VERSIONS.newest,
        worker_id=name,
        incarnation=draw_incarnation(),
        model=plan_pb2.ModelInfo(
            name="demo", architecture="Paced", fingerprint="paced", max_model_len=1024, vocab_size=VOCAB, dtype="none",
            eos_token_ids=[2],
        ),
        block_size=echo_worker.BLOCK_SIZE,
        num_blocks=4096,
        max_rows=int(rows),
        max_tokens_per_step=512,
        num_kv_groups=1,
        device="none",
    )  # fmt: skip
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    worker = echo_worker.EchoWorker(context, address, hello, float(step_ms) / 1000)
    while not stopping or worker.timeline.next_end() is not None:
        worker.take_frames()
        end = worker.timeline.next_end()
        now = time.monotonic()
        if end is not None and end <= now:
            worker.answer()
            continue
        wait_s = 0.2 if end is None else min(0.2, end - now)
        worker.socket.poll(int(wait_s * 1000))
        if stopping and end is None:
            break
    worker.socket.send(
        plan_pb2.WorkerMessage(epoch=worker.epoch, goodbye=plan_pb2.Goodbye(reason="scaled down")).SerializeToString()
    )
    worker.socket.close(linger=2000)
    context.destroy(linger=0)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
