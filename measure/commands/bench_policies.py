"""Compares scheduling policies, including a peer's scheduler, in virtual time with one cost model for all.

Every scheduler gets the same jobs and the same simulated devices; see docs/arena.md. Quire's side is the real core. A
scheduler is KIND:POLICY, optionally with settings: quire:fcfs, quire:default+itl_target_ms=50. `default` is the policy
that quire serve has without a flag.

Workloads: `mooncake` and `azure` replay a trace (--trace); `agents` are sessions in a closed loop (--users); `vtc` (two
tenants), `priorities`, `deadlines`, `stall` (prompts of 100,000 tokens between short ones) and `bursts` are drawn. For
drawn workloads, --share is a share of the capacity. For a trace, it is a share of the requests.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from quire_server.cli._errors import CommandError
from quire_server.cli._parser import Namespace, OneLineParser

if TYPE_CHECKING:
    from measure.policies.campaign import Campaign
    from measure.policies.costs import Costs

EXAMPLES = """
  quire bench policies --workload mooncake --trace conversation_trace.jsonl --share 0.4,0.5 --json policies.json
  quire bench policies --workload agents --users 16,24,32 --schedulers quire:fcfs,quire:lpm
  quire bench policies --workload stall --seconds 120 --schedulers quire:default,quire:default+itl_target_ms=50
"""
_AGENT_KV_TOKENS = 131_072


def configure(parser: OneLineParser) -> None:
    """Add the flags."""
    add = parser.add_argument
    add("--workload", required=True, metavar="NAME", help="mooncake, azure, agents, vtc, priorities, deadlines, …")
    add("--trace", type=Path, metavar="FILE", help="trace of Mooncake (JSON lines) or Azure (CSV), plain or .gz")
    add("--seconds", type=float, default=600.0, metavar="S", help="jobs of the first S seconds (default: 600)")
    add("--share", default="", metavar="F,…", help="shares of the trace (default: 0.4), or of the capacity (0.9)")
    add("--users", default="16", metavar="N,…", help="numbers of users of the agents (default: 16)")
    add("--sessions", type=int, default=64, metavar="N", help="maximum number of sessions over all users (default: 64)")
    add(
        "--schedulers",
        default="quire:default",
        metavar="KIND:POLICY,…",
        help="schedulers to compare (default: quire:default)",
    )
    add("--workers", type=int, default=1, metavar="N", help="number of devices (default: 1)")
    add(
        "--in-flight",
        type=int,
        default=1,
        metavar="N",
        help="maximum number of steps in flight per device, 1 or 2 (default: 1)",
    )
    add("--costs", default="8b-h100", metavar="NAME|FILE", help="step costs: 8b-h100, 70b-4xh100 or a JSON file")
    add("--kv-tokens", type=int, metavar="N", help="tokens of the KV cache (default: those of --costs; agents 131072)")
    add("--host-tokens", type=int, default=0, metavar="N", help="tokens in host memory (default: 0)")
    add("--disk-tokens", type=int, default=0, metavar="N", help="tokens on disk, with --host-tokens (default: 0)")
    add(
        "--disk-bandwidth",
        type=float,
        metavar="GB/s",
        help="bandwidth of the disk (default: that of --costs; presets 3)",
    )
    add("--seed", type=int, default=1, metavar="N", help="first seed (default: 1)")
    add("--seeds", type=int, default=1, metavar="N", help="number of seeds (default: 1)")
    add("--vllm-python", type=Path, metavar="PATH", help="Python with vLLM (default: that of make arena-vllm)")
    add("--json", type=Path, metavar="FILE", help="write the results to this file")
    add("--html", type=Path, metavar="FILE", help="write a page with tables to this file")


def run(options: Namespace) -> int:
    """Run every scheduler, print a line for each run, and write the files."""
    from measure.policies.arena import ArenaError
    from measure.policies.page import page
    from measure.policies.report import HEADER, line

    campaign = _campaign(options)
    results = []
    print(HEADER)
    try:
        for result in campaign.results():
            results.append(result)
            print(line(result), flush=True)
            if options.json is not None:  # Write after each run, so that the results survive an interruption.
                options.json.write_text(json.dumps({"results": results}, indent=1) + "\n", "utf-8")
    except ArenaError as error:
        raise CommandError(str(error)) from None
    if options.html is not None:
        options.html.write_text(page(results), "utf-8")
    return 0


def _campaign(options: Namespace) -> "Campaign":
    import dataclasses

    from measure.policies.campaign import Campaign
    from measure.policies.costs import read_costs
    from measure.policies.schedulers import VLLM_PYTHON, Setup, check, parse
    from measure.policies.workloads import NAMES, TRACED, trace_of

    if options.workload not in NAMES:
        raise CommandError(f"--workload: unknown workload {options.workload!r}; use one of {', '.join(NAMES)}")
    for name in ("seconds", "sessions", "workers", "seeds", "kv_tokens"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise CommandError(f"--{name.replace('_', '-')}: {value} is too small; use a number above 0")
    if options.in_flight not in (1, 2):
        raise CommandError(f"--in-flight: {options.in_flight} is not supported; use 1 or 2")
    costs = read_costs(options.costs)
    kv_tokens = options.kv_tokens or (min(_AGENT_KV_TOKENS, costs.kv_tokens) if options.workload == "agents" else 0)
    if options.host_tokens < 0:
        raise CommandError(f"--host-tokens: {options.host_tokens} is negative; use 0 or more")
    costs = dataclasses.replace(
        costs, kv_tokens=kv_tokens or costs.kv_tokens, host_tokens=options.host_tokens or costs.host_tokens
    )
    costs = _with_disk(costs, options)
    setup = Setup(
        costs=costs,
        num_workers=options.workers,
        in_flight=options.in_flight,
        vllm_python=options.vllm_python or VLLM_PYTHON,
    )
    schedulers = [parse(text) for text in options.schedulers.split(",")]
    for each in schedulers:
        check(each, setup)
    is_traced = options.workload in TRACED
    if options.workload == "agents":
        loads = _numbers("--users", options.users)
    else:
        loads = _numbers("--share", options.share or ("0.4" if is_traced else "0.9"))
    if not is_traced and options.trace is not None:
        raise CommandError(f"--trace: the workload {options.workload} has no trace; remove the flag")
    return Campaign(
        workload=options.workload,
        loads=loads,
        seeds=range(options.seed, options.seed + options.seeds),
        schedulers=schedulers,
        setup=setup,
        seconds=options.seconds,
        recorded=trace_of(options.workload, options.trace, options.seconds) if is_traced else (),
        sessions=options.sessions,
    )


def _with_disk(costs: "Costs", options: Namespace) -> "Costs":
    """Return the costs with the disk of the flags."""
    import dataclasses

    if options.disk_tokens < 0:
        raise CommandError(f"--disk-tokens: {options.disk_tokens} is negative; use 0 or more")
    bandwidth = options.disk_bandwidth
    if bandwidth is not None:
        if not 0 < bandwidth < float("inf"):
            raise CommandError(f"--disk-bandwidth: {bandwidth:g} is not valid; use a number above 0")
        if not (options.disk_tokens or costs.disk_tokens):
            raise CommandError("--disk-bandwidth: there is no disk; add --disk-tokens and --host-tokens")
        if not costs.kv_token_bytes:
            raise CommandError("--disk-bandwidth: the bytes of a token are not known; add kv_token_bytes to --costs")
        block_bytes = costs.block_size * costs.kv_token_bytes
        costs = dataclasses.replace(costs, disk_block_s=block_bytes / (bandwidth * 1e9))
    costs = dataclasses.replace(costs, disk_tokens=options.disk_tokens or costs.disk_tokens)
    if costs.disk_tokens and not costs.host_tokens:
        raise CommandError("--disk-tokens: blocks pass through host memory; add --host-tokens")
    if costs.disk_tokens and not costs.disk_block_s:
        raise CommandError("--disk-tokens: the time of the disk is not known; add disk_block_s to --costs")
    return costs


def _numbers(flag: str, text: str) -> list[float]:
    try:
        found = [float(each) for each in text.split(",")]
    except ValueError:
        found = [0.0]
    if not all(0 < each < float("inf") for each in found):
        raise CommandError(f"{flag}: {text!r} is not a list of numbers above 0; write for example 0.4,0.5")
    return found
