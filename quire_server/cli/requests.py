"""Lists the live requests of a running service, shows the events of one, or cancels one.

The events tell when a request arrived, where and when it ran, whether and why it was preempted, and how it ended. They
are also available for requests that ended recently. The id is in the answer, in the server's log and in the trace.
"""

from datetime import datetime

from quire.admin.v1 import admin_pb2
from quire_server.cli._admin import admin_stub
from quire_server.cli._connection import add_target, call_options
from quire_server.cli._parser import Namespace, OneLineParser

EXAMPLES = """
  quire requests
  quire requests --story req-0123456789abcdef01234567
  quire requests --cancel req-0123456789abcdef01234567
"""


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument("--story", metavar="ID", help="print the events of a request")
    choice.add_argument("--cancel", metavar="ID", help="cancel a request; its client gets CANCELLED")
    parser.add_argument(
        "--limit", type=int, default=100, metavar="N", help="maximum number of requests to list (default: 100)"
    )
    add_target(parser)


def run(options: Namespace) -> int:
    """List requests, show one request's events, or cancel one request."""
    with admin_stub(options) as stub:
        if options.story is not None:
            stories = stub.GetStory(admin_pb2.GetStoryRequest(request_id=options.story), **call_options()).stories
            for number, story in enumerate(stories):
                _print_story(story, first=number == 0)
        elif options.cancel is not None:
            cancel = admin_pb2.CancelRequestRequest(request_id=options.cancel)
            print(f"{stub.CancelRequest(cancel, **call_options()).cancelled} ended")
        else:
            listed = stub.ListRequests(admin_pb2.ListRequestsRequest(limit=options.limit), **call_options())
            state = stub.GetSchedulerState(admin_pb2.GetSchedulerStateRequest(), **call_options())
            _print_requests(listed, state)
    return 0


def _print_requests(listed: admin_pb2.ListRequestsResponse, state: admin_pb2.GetSchedulerStateResponse) -> None:
    row = "{:<32} {:<8} {:<16} {:>8} {:>7} {:>13} {:>7}  {}".format
    print(row("request", "state", "worker", "age", "prompt", "generated", "paused", "tenant"))
    for each in listed.requests:
        generated = f"{each.generated_tokens}/{each.max_tokens}"
        age = f"{each.age.ToMilliseconds() / 1000:.1f} s"
        name, worker = each.request_id, each.worker_id or "-"
        print(row(name, each.state, worker, age, each.prompt_tokens, generated, each.preemptions, each.tenant))
    print(f"{state.running_requests} running, {state.waiting_requests} waiting")


def _print_story(story: admin_pb2.Story, *, first: bool) -> None:
    if not first:
        print()
    begin = story.events[0].time.ToNanoseconds() if story.events else 0
    for event in story.events:
        moment = event.time.ToNanoseconds()
        clock = datetime.fromtimestamp(moment / 1e9).strftime("%H:%M:%S.%f")[:-3]
        print(f"{clock}  +{(moment - begin) / 1e9:<9.3f} {event.what}")
    if story.live:
        print("it is still live")
