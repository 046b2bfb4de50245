"""Shared flags of `quire bench serve` and `quire bench sweep`: server, workload and generator.

Builds the plan from them.
"""

import argparse
import asyncio
import contextlib
import json
import math
import ssl
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire_server.cli._connection import add_target, credentials, http_server_at, token
from quire_server.cli._errors import CommandError, one_line
from quire_server.cli._parser import Namespace, OneLineParser

if TYPE_CHECKING:
    from measure.load.figures import Slo
    from measure.load.plan import Address, Plan
    from measure.load.prompts import Prompts
    from measure.load.run import Progress, Run
    from measure.load.workloads import TraitMix, Workload
    from quire_server.http_client import Server

_WORKLOADS = ("azure-conversation", "azure-code", "mooncake-conversation", "coding-agents")
_LONGEST_PAUSE_S = 60.0
"""Longest pause of an agent without --pause, seconds."""
_DEFAULT_S = 30.0
"""Duration of a run without --duration and --requests, seconds."""


def add_server_flags(parser: OneLineParser) -> None:
    """Add the flags of the server under load."""
    add_target(parser)
    add = parser.add_argument
    add(
        "--url",
        type=_url,
        metavar="URL",
        help="measure a server with OpenAI's API at this URL instead, such as http://HOST:8000",
    )
    add("--model", default="", metavar="NAME", help="model in each request over HTTP (default: the first one listed)")
    add(
        "--prompts",
        choices=("tokens", "text", "chat"),
        help="form of prompts (default: tokens over gRPC, text over HTTP); text of random words has about the length"
        " asked for, as the server counts it",
    )
    add(
        "--vocab-size",
        type=number_of,
        default=1000,
        metavar="N",
        help="over HTTP, token ids are below N (default: 1000)",
    )
    add("--max-model-len", type=number_of, metavar="N", help="over HTTP: truncate prompts to a context of N tokens")
    add(
        "--extra-body",
        type=_json_object,
        default={},
        metavar="JSON",
        help="further fields of each request over HTTP, as a JSON object",
    )
    add(
        "--metrics",
        metavar="HOST:PORT",
        help="HTTP address of the server's /metrics (default: that of --url; none over gRPC)",
    )
    add(
        "--record",
        type=_folder,
        metavar="FOLDER",
        help="folder of the flight record of a Quire server on this machine, such as ~/.local/state/quire/record/50051",
    )


def add_workload_flags(parser: OneLineParser) -> None:
    """Add the flags that describe the requests."""
    add = parser.add_argument
    lengths = "N, LOW-HIGH (uniform) or lognormal:MEAN:CV"
    add("--input", type=_lengths, default="128", metavar="LENGTH", help=f"new prompt tokens: {lengths} (default: 128)")
    add("--output", type=_lengths, default="64", metavar="LENGTH", help=f"generated tokens: {lengths} (default: 64)")
    add("--shared-prefix", type=number_of, metavar="N", help="each prompt begins with N tokens of a shared prefix")
    add("--prefixes", type=number_of, default=1, metavar="N", help="number of different shared prefixes (default: 1)")
    add("--turns", type=_lengths, default="1", metavar="LENGTH", help="turns of a session (default: 1)")
    add(
        "--pause",
        type=non_negative,
        metavar="S",
        help="mean pause between turns, such as a tool's, seconds (default: 0); for agents, the longest (default: 60)",
    )
    add("--long-share", type=share, default=0.0, metavar="P", help="share of sessions that have a long prompt")
    add("--long-input", type=_lengths, default="1024", metavar="LENGTH", help="prompt tokens of these (default: 1024)")
    add("--workload", choices=_WORKLOADS, help="lengths and shared prefixes from published statistics")
    add("--scale", type=positive, default=1.0, metavar="F", help="with --workload: lengths are F times those of the"
        " statistics, for a model with a shorter context (default: 1)")  # fmt: skip
    add("--dataset", type=Path, metavar="FILE", help='prompts from JSON lines: {"prompt": TEXT, "max_tokens": N}')
    add("--tenants", type=_weights, default={}, metavar="A=3,B=1", help="tenants and their weights")
    add("--priorities", type=_weights, default={}, metavar="0=9,5=1", help="priorities and their weights")
    add("--cancel-ratio", type=share, default=0.0, metavar="P", help="share of sessions that the client cancels")
    add("--deadline", type=positive, metavar="S", help="deadline of each request, seconds")
    add("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature (default: 0)")
    add("--stop-at-eos", action="store_true", help="let the model end a response before its requested length")


def add_generator_flags(parser: OneLineParser) -> None:
    """Add the flags for the generator and the report."""
    add = parser.add_argument
    add("--seed", type=int, default=0, metavar="N", help="seed of times, lengths and prompts (default: 0)")
    add("--slo", action="append", default=[], metavar="NAME=MS", help="limit of good requests: ttft_ms, itl_ms"
        " (for 99 %% of a request's gaps), tpot_ms or e2e_ms; may be repeated")  # fmt: skip
    add("--processes", type=number_of, default=1, metavar="N", help="processes that generate the load (default: 1)")
    add("--max-in-flight", type=number_of, default=1024, metavar="N", help="maximum of open sessions (default: 1024)")
    add("--connections", type=number_of, default=1, metavar="N", help="gRPC connections per process (default: 1)")
    add("--drain", type=non_negative, default=60.0, metavar="S", help="time for requests after the last arrival"
        " (default: 60); then they fail as `unfinished`")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the report to this file as JSON")
    add("--html", type=Path, metavar="FILE", help="write the report to this file as a page with plots")
    add("--quiet", action="store_true", help="print no progress")


def slo_of(options: Namespace) -> "Slo":
    """Return the latency limits from the flags."""
    from measure.load.figures import Slo

    try:
        return Slo.parse(options.slo)
    except ValueError as error:
        raise CommandError(f"--slo: {error}") from None


def metrics_of(options: Namespace) -> "Server | None":
    """Return the server to scrape `/metrics` from, or None without one."""
    if options.metrics:
        return http_server_at(options, options.metrics, tls=bool(options.tls_ca))
    if options.url:
        from measure.load.http1 import Url

        url = Url.parse(options.url)
        return http_server_at(options, url.address, tls=url.tls)
    return None


def workload_of(options: Namespace, seed: int) -> "Workload":
    """Return the workload that the flags describe."""
    from measure.load.traces import PUBLISHED, CodingAgents
    from measure.load.workloads import Drawn, Mixed, read_prompts

    if options.scale != 1.0 and not options.workload:
        raise CommandError("--scale: only named workloads are scaled; add --workload or --agents, or remove --scale")
    if options.dataset is not None:
        return read_prompts(options.dataset, options.output.high or round(options.output.mean))
    if options.workload:
        published = PUBLISHED[options.workload]
        if isinstance(published, CodingAgents):
            return published.workload(seed, options.scale, _LONGEST_PAUSE_S if options.pause is None else options.pause)
        return published.workload(seed, options.scale)
    usual = Drawn(
        options.input,
        options.output,
        seed,
        options.turns,
        options.pause or 0.0,
        options.prefixes,
        prefix_tokens=options.shared_prefix or 0,
    )
    if not options.long_share:
        return usual
    return Mixed(usual, replace(usual, inputs=options.long_input, seed=seed + 1), options.long_share, seed)


def traits_of(options: Namespace, seed: int) -> "TraitMix":
    """Return the traits that the flags describe."""
    from measure.load.workloads import TraitMix

    try:
        priorities = {int(name): weight for name, weight in options.priorities.items()}
    except ValueError:
        raise CommandError("--priorities: a priority is not a number; write 0=9,5=1") from None
    return TraitMix(options.tenants, priorities, options.cancel_ratio, seed)


async def base_plan(options: Namespace) -> "Plan":
    """Return a plan without load, with the server's address and what the server reports about its model.

    Raises:
        CommandError: the server cannot be reached, or refuses.
        QuireError: the same, over gRPC.
    """
    from measure.load.arrivals import Users
    from measure.load.plan import Address, Plan
    from measure.load.prompts import Prompts, Style
    from measure.load.workloads import Listed

    if options.url:
        address, prompts, ignore_eos = await _ask_http(options)
        max_model_len = options.max_model_len
    else:
        from quire.aio import AsyncClient

        async with AsyncClient(options.target, credentials=credentials(options), token=token()) as client:
            model = await client.get_model(timeout=10)
        address = Address(grpc=options.target, tls_ca=options.tls_ca or "", connections=options.connections)
        prompts = Prompts(Style(options.prompts or "tokens"), model.vocab_size)
        max_model_len, ignore_eos = model.max_model_len, not options.stop_at_eos
    return Plan(
        address=address,
        arrivals=Users(1),
        workload=Listed(()),
        prompts=prompts,
        max_model_len=max_model_len,
        max_in_flight=options.max_in_flight,
        timeout_s=options.deadline,
        drain_s=options.drain,
        temperature=options.temperature,
        ignore_eos=ignore_eos,
    )


async def _ask_http(options: Namespace) -> "tuple[Address, Prompts, bool]":
    """Return an HTTP server, its prompts, and whether it accepts `ignore_eos`; ask it where flags leave this open."""
    from measure.load.generator import open_target
    from measure.load.http_target import HttpTarget
    from measure.load.plan import Address
    from measure.load.prompts import PROBE_WORDS, Prompts, Style, TextScale, probe
    from measure.load.targets import RequestFailedError

    address = Address(url=options.url, model=options.model, tls_ca=options.tls_ca or "", extra=options.extra_body)
    style, ignore_eos = Style(options.prompts or "text"), not options.stop_at_eos
    prompts = Prompts(style, options.vocab_size)
    try:
        async with contextlib.AsyncExitStack() as stack:
            if not address.model:
                listing = open_target(address, token())
                stack.push_async_callback(listing.close)
                assert isinstance(listing, HttpTarget)
                address = replace(address, model=await listing.model())
            target = open_target(address, token())
            stack.push_async_callback(target.close)
            assert isinstance(target, HttpTarget)
            short, long = (probe(style, count) for count in PROBE_WORDS)
            try:
                tokens = await target.count_tokens(short, ignore_eos=ignore_eos)
            except RequestFailedError as error:
                if not ignore_eos or not str(error).startswith("HTTP 4"):
                    raise
                ignore_eos = False
                tokens = await target.count_tokens(short, ignore_eos=False)
                note = "does not accept ignore_eos; responses may be shorter than --output"
                print(f"{options.url}: {note}", file=sys.stderr)
            if style is not Style.TOKENS:
                counted = await target.count_tokens(long, ignore_eos=ignore_eos)
                scale = TextScale.of_probes((PROBE_WORDS[0], tokens), (PROBE_WORDS[1], counted))
                prompts = replace(prompts, scale=scale)
    except (RequestFailedError, OSError, ssl.SSLError) as error:
        remedy = "use --url with the URL of a server with OpenAI's API, without /v1; some servers also need --model"
        raise CommandError(f"{options.url}: {one_line(str(error) or type(error).__name__)}; {remedy}") from None
    return address, prompts, ignore_eos


def length_of_run(options: Namespace, *, is_finite: bool) -> tuple[float | None, int | None]:
    """Return the duration and the number of sessions, each None if unlimited.

    Args:
        options: the flags.
        is_finite: whether the workload itself ends.
    """
    duration_s: float | None = options.duration
    if duration_s is None and options.requests is None and not is_finite:
        duration_s = _DEFAULT_S
    return duration_s, options.requests


async def measured(options: Namespace, plan: "Plan", slo: "Slo", prefix: str) -> "Run":
    """Run a plan with the generator, metrics and record that the flags specify; show the progress after a prefix.

    Raises:
        CommandError: a generating process failed, or the record cannot be read.
    """
    from measure.load.run import GeneratorError, run_plan
    from scheduler_svc.recorder.segments import UnreadableRecordError

    progress = _ProgressLine(quiet=options.quiet, prefix=prefix)
    try:
        return await run_plan(
            plan,
            slo,
            token=token(),
            processes=options.processes,
            metrics=metrics_of(options),
            record=options.record,
            watch=progress.update,
        )
    except (GeneratorError, UnreadableRecordError) as error:
        raise CommandError(str(error)) from None
    finally:
        progress.close()


class _ProgressLine:
    """Progress line that is redrawn on a terminal. Prints nothing elsewhere."""

    def __init__(self, *, quiet: bool, prefix: str = "") -> None:
        self._shown = sys.stderr.isatty() and not quiet
        self._prefix = prefix

    def update(self, progress: "Progress") -> None:
        """Show the progress."""
        if self._shown:
            counts = f"{progress.begun} sent   {progress.in_flight} in flight   {progress.ended} ended"
            rest = f"{progress.failed} failed   {progress.tokens_per_s:,.0f} tokens/s"
            sys.stderr.write(f"\r\x1b[K{self._prefix}{progress.time_s:5.0f} s   {counts}   {rest}")
            sys.stderr.flush()

    def close(self) -> None:
        """Remove the line."""
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def write_report(options: Namespace, as_json: Mapping[str, Any], as_html: Callable[[], str]) -> None:
    """Write the report files that the flags name."""
    if options.json is not None:
        options.json.write_text(json.dumps(as_json, indent=1) + "\n", "utf-8")
    if options.html is not None:
        options.html.write_text(as_html(), "utf-8")


def what_requests_ask(options: Namespace) -> str:
    """Describe the workload in words."""
    if options.workload:
        return str(options.workload)
    if options.dataset is not None:
        return str(options.dataset.name)
    return f"{options.input} prompt and {options.output} output tokens"


def run_loop(work: Any) -> Any:
    """Run a coroutine on the event loop with the least overhead."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def _url(text: str) -> str:
    """Check and return a URL, without the path of the API."""
    from measure.load.http1 import Url

    try:
        Url.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL; use http://HOST:PORT") from None
    return text.rstrip("/").removesuffix("/v1")


def _folder(text: str) -> Path:
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder; use the --record-dir of the server's scheduler")
    return folder


def _lengths(text: str) -> Any:
    from measure.load.workloads import Lengths

    try:
        return Lengths.parse(text)
    except ValueError:
        message = f"{text!r} is not a length; use N, LOW-HIGH or lognormal:MEAN:CV"
        raise argparse.ArgumentTypeError(message) from None


def number_of(text: str) -> int:
    """Parse a number of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return value


def non_negative(text: str) -> float:
    """Parse a number of at least 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value


def positive(text: str) -> float:
    """Parse a number above 0."""
    value = non_negative(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def share(text: str) -> float:
    """Parse a number from 0 to 1."""
    value = non_negative(text)
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction; use a number from 0 to 1")
    return value


def _weights(text: str) -> dict[str, float]:
    weights = {}
    for part in text.split(","):
        name, _, weight = part.partition("=")
        if not name:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of weights; write NAME=WEIGHT,NAME=WEIGHT")
        weights[name] = positive(weight or "1")
    return weights


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
