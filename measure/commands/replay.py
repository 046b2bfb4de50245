"""Replays a flight record through the scheduler and compares the plans with the recorded ones, or simulates changes.

With the release that made the record, every plan is equal bit for bit. The first plan that differs is printed with its
differences. Exit codes: 0 equal, 1 different, 3 equal but the record has gaps, which are listed. In a folder, the
replay begins at the first segment of a new scheduler or with a complete snapshot. Other code may make other plans. Then
the recorded requests are served again in a simulation, and the core's promises are checked there.

With --what-if, --set or --workers, the recorded requests are simulated with other settings. The table shows the numbers
of the record, of a simulation with the same settings, and of one with the changed settings. The names and values of
--set are those of the scheduler's flags. With --step-times, the requests may also be those of a trace: CSV of Azure, or
JSON lines of Mooncake.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from quire_server.cli._errors import CommandError
from quire_server.cli._parser import Namespace, OneLineParser

if TYPE_CHECKING:
    from records.whatif.answer import Case

EXAMPLES = """
  quire replay ~/.local/state/quire/record/50051
  quire replay incident.record --to 120000
  quire replay incident.record --what-if
  quire replay incident.record --set max_num_seqs=128 --set policy=sjf --workers 4
  quire replay incident.record --learn-step-times service.json
  quire replay azure.csv --step-times service.json --workers 8
"""
_INCOMPLETE = 3
"""Exit code if no plan differs but the record lacks entries."""
_TRACES = (".csv", ".jsonl")


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    parser.add_argument("place", type=Path, metavar="FILE_OR_FOLDER", help="segment, folder of segments, or trace")
    parser.add_argument("--to", type=int, metavar="ENTRY", help="stop after the entry with this number")
    parser.add_argument("--what-if", action="store_true", help="simulate the record with its own settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="simulate with this setting; repeatable"
    )
    parser.add_argument("--workers", type=int, metavar="N", help="simulate with N workers, at most 1000")
    parser.add_argument("--seed", type=int, default=0, help="seed for the random variation of step times (default: 0)")
    parser.add_argument("--json", action="store_true", help="print the simulation's results as one JSON object")
    parser.add_argument(
        "--learn-step-times",
        type=Path,
        metavar="FILE",
        help="write the record's settings, workers and step times to FILE and exit",
    )
    parser.add_argument(
        "--step-times", type=Path, metavar="FILE", help="simulate with the step times in FILE; required for a trace"
    )


def run(options: Namespace) -> int:
    """Run the replay or the simulation; return 1 if a plan differs, 3 if none differs but entries are missing."""
    if not options.place.exists():
        raise CommandError(
            f"FILE_OR_FOLDER: {options.place} does not exist; use the folder in --record-dir, by default"
            " ~/.local/state/quire/record/PORT, or .../record/any with a random port"
        )
    simulates = options.what_if or options.set or options.workers is not None or options.step_times is not None
    if simulates or options.learn_step_times is not None or options.place.suffix in _TRACES:
        return _what_if(options)
    if options.json:
        raise CommandError("json: only simulations print JSON; add --what-if, --set or --workers")
    return _replay(options)


def _what_if(options: Namespace) -> int:
    from records.replay import ReplayError
    from records.whatif.answer import compare, from_record, save
    from records.whatif.arrivals import WhatIfError
    from records.whatif.page import as_json, as_text
    from records.whatif.simulate import SimulationError
    from records.whatif.step_times import StepTimesError
    from scheduler_svc.recorder.segments import UnreadableRecordError

    if options.to is not None:
        raise CommandError("--to: a simulation serves the whole record; remove --to")
    try:
        is_trace = options.place.suffix in _TRACES
        case = _from_trace(options) if is_trace else from_record(options.place, options.step_times)
        if options.learn_step_times is not None:
            save(case.service, options.learn_step_times)
            return 0
        found = compare(case, options.set, workers=options.workers, seed=options.seed)
    except (UnreadableRecordError, ReplayError, WhatIfError, StepTimesError, SimulationError, OSError) as error:
        raise CommandError(str(error)) from None
    print(json.dumps(as_json(found), indent=2) if options.json else as_text(found))
    return 0


def _from_trace(options: Namespace) -> "Case":
    from measure.load.traces import BLOCK_TOKENS, read_trace
    from records.whatif.answer import Case, read_service
    from records.whatif.load import traced

    if options.step_times is None:
        raise CommandError(
            "step-times: missing, and a trace has no step times; "
            "learn them with quire replay RECORD --learn-step-times FILE"
        )
    service = read_service(options.step_times)
    requests = read_trace(options.place).requests
    block_size = service.members[0].hello.block_size
    return Case(
        arrivals=[
            traced(
                each.time_s - requests[0].time_s,
                each.input_tokens,
                each.output_tokens,
                each.blocks,
                part_tokens=BLOCK_TOKENS,
                block_size=block_size,
            )
            for each in requests
        ],
        service=service,
    )


def _replay(options: Namespace) -> int:
    from records.reader import read
    from records.replay import ReplayError, replay
    from scheduler_svc.recorder.code import code_hash
    from scheduler_svc.recorder.segments import UnreadableRecordError
    from scheduler_svc.recorder.snapshot import SnapshotError

    try:
        segments = read(options.place)
        code = segments[0].opening.code if segments else code_hash()
        outcome = replay(segments, to=options.to)
    except SnapshotError as error:
        if code == code_hash():
            raise CommandError(str(error)) from None
        print(f"note: recorded by other code ({code}) than this ({code_hash()}), whose snapshots are incompatible")
        return _promises(options)
    except (UnreadableRecordError, ReplayError, FileNotFoundError) as error:
        raise CommandError(str(error)) from None
    for each in outcome.missing:
        until = "the end" if each.until_unix_s is None else _clock(each.until_unix_s)
        print(f"missing: {_clock(each.since_unix_s)} to {until}: {each.what}")
    if code != code_hash():
        print(f"note: recorded by other code ({code}) than this ({code_hash()}); plans may differ")
    counts = f"{outcome.entries} entries, {outcome.steps} steps, {outcome.plans} plans, {outcome.ends} ends of requests"
    if outcome.difference is None:
        print(f"equal{' as far as the record goes' if outcome.missing else ''}: {counts}")
        print(f"identical plans={outcome.plans}")
        return _INCOMPLETE if outcome.missing else 0
    found = outcome.difference
    print(f"differs after {counts}\nentry {found.index}, core time {found.time:.6f}: {found.what}")
    return 1 if code == code_hash() else _promises(options)


def _clock(unix_s: float) -> str:
    """Return a wall clock time as text."""
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3] + " UTC"


def _promises(options: Namespace) -> int:
    """Serve the recorded requests again and check the core's promises; return 1 if a promise is broken."""
    from records.replay import ReplayError
    from records.rules.replayed import check
    from records.whatif.answer import from_record
    from records.whatif.arrivals import WhatIfError
    from records.whatif.simulate import SimulationError
    from records.whatif.step_times import StepTimesError

    try:
        case = from_record(options.place)
        kept = check(case.arrivals, case.service)
    except (ReplayError, WhatIfError, StepTimesError, SimulationError) as error:
        raise CommandError(str(error)) from None
    except AssertionError as error:
        print(f"a promise is broken: {error or 'an invariant of the core'}")
        return 1
    print(f"promises hold: {kept.requests} requests served again, {kept.plans} plans, {kept.tokens} tokens")
    return 0
