"""Lists, shows and exports the scheduler's flight record, also of a running scheduler.

A record holds every event and every plan of the scheduler, with the workers' timings. It holds no text and no token
ids, unless the scheduler runs with --record-tokens.
"""

import dataclasses
import datetime
import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire_server.cli._errors import CommandError
from quire_server.cli._parser import Namespace, OneLineParser

if TYPE_CHECKING:
    from records.reader import Segment

EXAMPLES = """
  quire record ls ~/.local/state/quire/record/50051
  quire record show ~/.local/state/quire/record/50051 --last 50
  quire record export ~/.local/state/quire/record/50051 --json > record.jsonl
  quire record export ~/.local/state/quire/record/50051 --perfetto timeline.pftrace --last 500000
"""


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    parser.add_argument("action", choices=("ls", "show", "export"), help="list segments, show or export entries")
    parser.add_argument("place", type=Path, metavar="FILE_OR_FOLDER", help="segment, or folder of segments")
    parser.add_argument("--last", type=int, metavar="N", help="only the last N entries (show: default 20)")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="export as JSON lines, the default")
    form.add_argument("--perfetto", type=Path, metavar="FILE", help="export a timeline for ui.perfetto.dev")


def run(options: Namespace) -> int:
    """Run the action."""
    from collections import deque

    from records.reader import read
    from scheduler_svc.recorder.segments import UnreadableRecordError

    if options.perfetto is not None and options.action != "export":
        raise CommandError(f"--perfetto: {options.action} writes no timeline; use quire record export")
    try:
        segments = read(options.place)
    except UnreadableRecordError as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(unreadable(options.place, error)) from None
    if not segments:
        raise CommandError(_no_record(options.place))
    if options.action == "ls":
        for segment in segments:
            num_entries = sum(1 for _ in segment)
            began = datetime.datetime.fromtimestamp(segment.opening.unix_ns / 1e9, datetime.UTC)
            can = "yes" if segment.opening.fresh or segment.snapshot else "no"
            if segment.opening.needs_earlier:
                can = "no, start at an earlier segment"
            damage = f", {segment.left_out} bytes at the end are no complete frame" if segment.left_out else ""
            print(
                f"{segment.path.name}  {began:%Y-%m-%d %H:%M:%S}Z  {segment.path.stat().st_size} bytes"
                f"  entries {segment.opening.first_index}..{segment.opening.first_index + num_entries - 1}"
                f"  replay can start here: {can}{damage}"
            )
        return 0
    if options.perfetto is not None:
        _export_timeline(segments, options)
        return 0
    last = options.last or (20 if options.action == "show" else None)
    lines = (_line(segment, entry, short=options.action == "show") for segment in segments for entry in segment)
    for line in lines if last is None else deque(lines, maxlen=last):
        print(line)
    return 0


def unreadable(place: Path, error: OSError) -> str:
    """Return the error for a record whose file or folder cannot be read."""
    what = "no such file or folder" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
    return f"{error.filename or place}: {what}; use the folder of a scheduler's --record-dir, or a file in it"


def _no_record(place: Path) -> str:
    """Return the error for a folder without segments. It lists the subfolders with segments, one per service."""
    from scheduler_svc.recorder.segments import paths

    records = sorted(each for each in place.glob("*/") if paths(each))
    remedy = f"use one of {', '.join(map(str, records))}" if records else "use the scheduler's --record-dir"
    return f"{place}: no record here; {remedy}"


def _export_timeline(segments: "list[Segment]", options: Namespace) -> None:
    from records.timeline import export

    skip = 0
    if options.last is not None:
        skip = max(0, sum(1 for segment in segments for _ in segment) - options.last)
    try:
        with options.perfetto.open("wb") as file:
            counts = export(segments, file, skip=skip)
    except OSError as error:
        raise CommandError(f"{error.filename or options.perfetto}: {error.strerror}") from None
    print(
        f"{options.perfetto}: {counts.steps} steps, {counts.admissions} admissions, {counts.requests} arrivals,"
        f" {counts.num_bytes} bytes; open it at https://ui.perfetto.dev"
    )


def _line(segment: Any, entry: Any, *, short: bool) -> str:
    opening = segment.opening
    unix = opening.unix_ns / 1e9 + entry.time - opening.core_time
    what = entry.what
    values = {} if what is None else {each.name: getattr(what, each.name) for each in dataclasses.fields(what)}
    kind = "Facts" if what is None else type(what).__name__
    if short:
        text = ", ".join(f"{name}={_plain(value)}" for name, value in values.items() if not _is_empty(value))
        return f"{entry.index} {datetime.datetime.fromtimestamp(unix, datetime.UTC):%H:%M:%S.%f} {kind}: {text[:400]}"
    document = {"index": entry.index, "core_s": entry.time, "unix_s": unix, "kind": kind, **_plain(values)}
    if entry.timings is not None:
        document["timings"] = _plain(entry.timings)
    return json.dumps(document)


def _is_empty(value: Any) -> bool:
    return value is None or (hasattr(value, "__len__") and not len(value))


def _plain(value: Any) -> Any:
    """Convert a value to JSON types; replace token columns by their lengths."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, bytes):
        return value.decode("latin-1") if value.isascii() and b"\0" not in value else value.hex()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return _plain(value._asdict())
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items() if key not in _OPAQUE}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "tolist"):
        return value.tolist() if value.any() else f"{len(value)} values"
    return value


_OPAQUE = {"sampling", "resume_info", "stop_token_ids", "block_keys", "grammar"}
"""Fields of which a record stores only sizes or tags."""
