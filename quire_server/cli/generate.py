"""Generates from a prompt on a running server and streams the text to stdout.

The prompt is continued as it is; with --chat it is sent as a user message through the model's chat template. Without a
prompt, or with "-", it is read from stdin. Ctrl-C cancels the request on the server.
"""

import json
import sys
from dataclasses import asdict

from quire.client import Client, Generation
from quire.types import Completion, GenerateOptions, SchedulingOptions
from quire_server.cli._connection import add_target, credentials, token
from quire_server.cli._errors import CommandError
from quire_server.cli._parser import Namespace, OneLineParser
from quire_server.cli._sampling import SAMPLING, add_sampling_flags, given_options

EXAMPLES = """
  quire generate "Once upon a time" --max-tokens 64
  quire generate --chat "What is 3 + 4?" --temperature 0 --target 127.0.0.1:50051
  quire generate --json < prompt.txt
"""

_FORWARDED_OPTIONS = (*SAMPLING, "model", "stop", "stop_token_ids", "ignore_eos", "request_id")
_SCHEDULING = (
    "priority", "tenant", "expected_output_tokens", "ttft_target_s", "total_time_target_s", "cache_scope",
    "request_class", "session_id", "ends_session", "retention_s", "retention_priority", "expected_pause_s",
)  # fmt: skip


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("prompt", nargs="?", help="text of the prompt; without it, or with -, it is read from stdin")
    add_target(parser)
    add("--chat", action="store_true", help="send the text as a user message through the chat template")
    add("--model", metavar="NAME", help="name of the model (default: the served model)")
    add_sampling_flags(parser)
    add("--stop", action="append", metavar="TEXT", help="stop string: end where this text appears; may be repeated")
    add(
        "--stop-token-id",
        dest="stop_token_ids",
        type=int,
        action="append",
        metavar="ID",
        help="stop token: end after this token id; may be repeated",
    )
    add("--ignore-eos", action="store_const", const=True, help="continue after the end-of-sequence token")
    add("--request-id", metavar="ID", help="id of the request (default: chosen by the server)")
    add("--priority", type=int, metavar="N", help="priority; higher runs first if the server's policy uses priorities")
    add("--tenant", metavar="NAME", help="tenant that the request is charged to")
    add(
        "--expected-output-tokens",
        type=int,
        metavar="N",
        help="expected number of generated tokens, a hint for the scheduler",
    )
    add(
        "--ttft-target",
        dest="ttft_target_s",
        type=float,
        metavar="S",
        help="target for the time to first token, in seconds",
    )
    add(
        "--total-time-target",
        dest="total_time_target_s",
        type=float,
        metavar="S",
        help="target for the time to the last token, in seconds; a missed target does not end the request",
    )
    add("--cache-scope", metavar="NAME", help="share cached prompt prefixes only with requests of this scope")
    add("--request-class", metavar="NAME", help="request class configured on the server, which has its own queue order")
    add("--session-id", metavar="NAME", help="session, such as an agent's conversation, that the request is a turn of")
    add("--ends-session", action="store_const", const=True, help="this is the last turn of the session")
    add(
        "--retention",
        dest="retention_s",
        type=float,
        metavar="S",
        help="time after the end of the request for which the server retains its KV, in seconds",
    )
    add("--retention-priority", type=int, metavar="N", help="priority of the retained KV, 0 to 9 (default: 0)")
    add(
        "--expected-pause",
        dest="expected_pause_s",
        type=float,
        metavar="S",
        help="expected time to the next turn of the session, in seconds",
    )
    add("--timeout", type=float, metavar="S", help="deadline of the request, in seconds")
    add("--json", action="store_true", help="print one JSON object with text, token ids, usage and timings")


def run(options: Namespace) -> int:
    """Send the request; raise `quire.errors.QuireError` when it fails."""
    prompt = options.prompt
    if prompt is None and sys.stdin.isatty():
        raise CommandError("prompt: missing; add the text, or - to read it from stdin")
    if prompt in (None, "-"):
        prompt = sys.stdin.read()
    given: GenerateOptions = given_options(options, _FORWARDED_OPTIONS)
    if scheduling := given_options(options, _SCHEDULING):
        given["scheduling"] = SchedulingOptions(**scheduling)
    if options.chat:
        given["messages"] = [{"role": "user", "content": prompt}]
    with (
        Client(options.target, credentials=credentials(options), token=token()) as client,
        client.generate(None if options.chat else prompt, timeout=options.timeout, **given) as generation,
    ):
        if options.json:
            _write(json.dumps(_as_json(generation.result()), ensure_ascii=False) + "\n")
        else:
            _stream(generation)
    return 0


def _stream(generation: Generation) -> None:
    started = False
    try:
        for delta in generation:
            _write(delta.text)
            started = True
    except BaseException:
        if started:  # Start a new line for the error or the shell's prompt.
            _write("\n")
        raise
    _write("\n")


def _write(text: str) -> None:
    # Write UTF-8 bytes in any locale, without newline translation.
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def _as_json(completion: Completion) -> dict[str, object]:
    finished = completion.finished
    return {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": finished.reason.value,
        "stop_string": finished.stop_string,
        "stop_token_id": finished.stop_token_id,
        "usage": asdict(finished.usage),
        "timings": asdict(finished.timings),
        "request_id": finished.request_id,
        "model": finished.model,
    }
