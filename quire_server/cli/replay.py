"""Runs the scheduler over a flight record and compares every plan with the recorded one.

With the release that recorded, every plan is equal bit for bit. The first one that differs is named, with what differs.
Of a folder, the replay begins at the first segment of a new scheduler or with a complete snapshot.
"""

from pathlib import Path

from quire_server.cli._errors import CommandError
from quire_server.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire replay ~/.local/state/quire/record
  quire replay incident.record --to 120000
"""


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    parser.add_argument("place", type=Path, metavar="FILE_OR_FOLDER", help="segment, or folder of segments")
    parser.add_argument("--to", type=int, metavar="ENTRY", help="stop after the entry with this number")


def run(options: Namespace) -> int:
    """Run the replay; 1 if a plan differs."""
    from scheduler_svc.recorder.code import code_hash
    from scheduler_svc.recorder.reader import read
    from scheduler_svc.recorder.replay import ReplayError, replay
    from scheduler_svc.recorder.segments import UnreadableRecordError
    from scheduler_svc.recorder.snapshot import SnapshotError

    try:
        outcome = replay(read(options.place), to=options.to)
    except (UnreadableRecordError, ReplayError, SnapshotError, FileNotFoundError) as error:
        raise CommandError(str(error)) from None
    if outcome.skipped:
        print(f"skipped: {outcome.skipped} segments without a complete snapshot")
    if outcome.code != code_hash():
        print(f"note: recorded by other code ({outcome.code}) than this ({code_hash()}); plans may differ")
    counts = f"{outcome.entries} entries, {outcome.steps} steps, {outcome.plans} plans, {outcome.ends} ends of requests"
    if outcome.difference is None:
        print(f"equal: {counts}")
        return 0
    found = outcome.difference
    print(f"differs after {counts}\nentry {found.index}, core time {found.time:.6f}: {found.what}")
    return 1
