"""Explains why a request took as long as it did: its time, divided into causes that sum to it.

Without --record-dir the running service is asked, which reads its own record. With --record-dir the files are read
here, also those of a service that has ended. The id of a request is in the answer, the server's log and the trace.
"""

import json
import re
from pathlib import Path

from quire.admin.v1 import admin_pb2
from quire_server.cli._admin import admin_stub
from quire_server.cli._connection import add_target, call_options
from quire_server.cli._errors import CommandError
from quire_server.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire explain req-0123456789abcdef01234567
  quire explain --slowest 20 --since 10m
  quire explain --step worker-0:1234
  quire explain --slowest 5 --json --record-dir /var/lib/quire/record
"""
_TIMEOUT_S = 60.0
_UNITS = {"s": 1, "m": 60, "h": 3600}


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    choice = parser.add_mutually_exclusive_group(required=True)
    choice.add_argument("request", nargs="?", metavar="REQUEST", help="id of a request, live or ended")
    choice.add_argument("--slowest", type=int, metavar="N", help="list the N slowest requests and why they were slow")
    choice.add_argument("--step", metavar="WORKER:N", help="show a step of a worker and the requests in it")
    parser.add_argument("--since", default="10m", metavar="TIME", help="period for --slowest (default: 10m)")
    parser.add_argument("--record-dir", metavar="DIR", help="read the record in this folder or file, without a service")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_target(parser)


def run(options: Namespace) -> int:
    """Ask and print."""
    question = admin_pb2.ExplainRequest()
    if options.slowest is not None:
        question.slowest = max(options.slowest, 0)
        seconds = _seconds(options.since)
        if seconds is None:
            raise CommandError(f"since: {options.since!r} is not a time; use 90s, 10m or 2h")
        question.since.FromSeconds(seconds)
    elif options.step is not None:
        question.step = options.step
    else:
        question.request_id = options.request
    answer = _from_files(question, Path(options.record_dir)) if options.record_dir else _from_service(question, options)
    print(json.dumps(json.loads(answer.json), indent=2) if options.json else answer.text.rstrip())
    return 0


def _from_files(question: admin_pb2.ExplainRequest, place: Path) -> admin_pb2.ExplainResponse:
    from records.commands.record import unreadable
    from records.explain.answers import answer
    from scheduler_svc.recorder.segments import UnreadableRecordError
    from shared.errors import QuireError

    try:
        return answer(question, place).message()
    except (QuireError, UnreadableRecordError) as error:
        raise CommandError(str(error)) from None
    except OSError as error:
        raise CommandError(unreadable(place, error)) from None


def _from_service(question: admin_pb2.ExplainRequest, options: Namespace) -> admin_pb2.ExplainResponse:
    with admin_stub(options) as stub:
        # Reading a large record takes a while.
        return stub.Explain(question, timeout=_TIMEOUT_S, metadata=call_options()["metadata"])


def _seconds(text: str) -> int | None:
    found = re.fullmatch(r"(\d+)([smh]?)", text)
    return None if found is None else int(found[1]) * _UNITS[found[2] or "s"]
