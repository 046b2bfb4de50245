"""Cost of the journal per step: every running request is resumable and gets one token.

    python -m measure.scheduler.journal

*commit* is the journal's wall time in the scheduler's loop. *held back* is the time from the commit until the turn's
frames may be sent. With fsync "step", frames wait until the data is on disk. Planning continues in the meantime.
"""

import argparse
import select
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from scheduler_svc.core.interface import effects as ef
from scheduler_svc.journal.journal import FSYNC_MODES, Journal
from shared.columns import to_column
from shared.request_spec import RequestSpec

_FRONTEND = b"frontend/1"
_PROMPT_TOKENS = 2048
_STEP_S = 0.02


def bench(fsync: str, rows: int, steps: int, folder: Path) -> str:
    """Run one measurement and return a line of the table."""
    journal = Journal(folder / f"{fsync}-{rows}", max_bytes=256 << 20, keep_s=300.0, fsync=fsync)
    prompt = to_column(np.arange(_PROMPT_TOKENS))
    for stream in range(1, rows + 1):
        spec = RequestSpec(
            request_id=f"req-{stream:024d}",
            num_prompt_tokens=_PROMPT_TOKENS,
            max_tokens=1 << 20,
            stop_token_ids=to_column([2]),
            identity=b"%032d" % stream,
        )
        journal.note(ef.LogBegun(frontend=_FRONTEND, stream=stream, spec=spec, tokens=prompt, scores=()))
    begin = time.perf_counter()
    journal.commit()
    arrival_us = (time.perf_counter() - begin) / rows * 1e6
    streams = np.arange(1, rows + 1, dtype=np.int32)
    commits, held = [], []
    written = journal.written
    for index in range(steps):
        tokens = ef.TokensReady(
            frontend=_FRONTEND, streams=streams, first_indices=np.full(rows, index, np.int32), tokens=streams
        )
        begin = time.perf_counter()
        journal.note(tokens)
        journal.commit()
        committed = time.perf_counter()
        position = journal.written
        while journal.durable < position:
            select.select(journal.descriptors, [], [], 1)
            journal.commit()
        held.append(time.perf_counter() - committed)
        commits.append(committed - begin)
        time.sleep(max(0.0, _STEP_S / 4))
    per_step = (journal.written - written) // steps
    journal.close()
    commit, wait = (
        [1e6 * statistics.median(values), 1e6 * sorted(values)[int(0.99 * len(values))]] for values in (commits, held)
    )
    return (
        f"{fsync:<9}{rows:>6}{commit[0]:>12.0f}{commit[1]:>9.0f}{wait[0]:>15.0f}{wait[1]:>9.0f}"
        f"{per_step:>12}{arrival_us:>14.0f}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m measure.scheduler.journal", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--folder", type=Path, default=None, help="where to write; a temporary folder by default")
    options = parser.parse_args()
    print("fsync      rows  commit us      p99   held back us      p99  bytes/step  us an arrival")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for fsync in FSYNC_MODES:
            for rows in options.rows:
                print(bench(fsync, rows, options.steps, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
