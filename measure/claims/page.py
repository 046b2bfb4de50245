"""Tables of docs/strategies.md, from the results. The text between the tables is written by hand."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from measure.claims.parts import COMPUTED, LIVE, STRATEGIES_PART, VIRTUAL
from measure.claims.table import claims
from measure.strategies import report
from measure.strategies.claims import Claim
from measure.testbed.service import ROOT

PAGE = ROOT / "docs" / "strategies.md"
PLOTS = ROOT / "docs" / "plots"
_MOST_BY_OTHERS = 0.05


def filled(page: str, parts: Mapping[str, Any], strategies: Mapping[str, Any]) -> str:
    """Return the page with tables from these results.

    Args:
        page: the present page.
        parts: results by part.
        strategies: document of `quire bench strategies`.
    """
    found = claims(parts, strategies["results"])
    tables = {
        "claims": _table(found),
        "details": _details(found),
        "parts": _parts(parts, strategies),
        "flags": _flags(parts["flags"]["values"]) if "flags" in parts else "",
        "runs": report.markdown_table(strategies["results"]),
    }
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        page = re.sub(f"{begin}.*?{end}", lambda _: f"{begin}\n\n{table}\n\n{end}", page, flags=re.DOTALL)  # noqa: B023
    return page


def _table(found: Sequence[Claim]) -> str:
    head = ["| | claim | claimed | verdict | measured here | part |", "|--:|---|---|---|---|---|"]
    lines = [
        f"| {number} | {each.claim} | {each.claimed} | {each.verdict} | {each.measured} | `{each.part}` |"
        for number, each in enumerate(found, 1)
    ]
    return "\n".join(head + lines)


def _details(found: Sequence[Claim]) -> str:
    head = ["| | conditions, and why |", "|--:|---|"]
    return "\n".join(head + [f"| {number} | {each.why} |" for number, each in enumerate(found, 1)])


def _parts(parts: Mapping[str, Any], strategies: Mapping[str, Any]) -> str:
    lines = ["| parts | what runs | depends on the machine |", "|---|---|---|"]
    for names, text, depends in (
        (COMPUTED, "arithmetic, `quire capacity`, and the parser of `quire serve`", "no"),
        (VIRTUAL, "Quire's scheduler on a simulated H100 with 8B in bf16 ([arena](arena.md))", "no"),
        (LIVE, "the real service with the bundled model on a CPU", "times do"),
    ):
        lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {text} | {depends} |")
    machines = [
        f"`{name}` on {parts[name]['machine']} ({_others(parts[name]['cpu_share_of_other_programs'])})"
        for name in LIVE
        if name in parts and name != STRATEGIES_PART
    ]
    machines.append(
        f"`{STRATEGIES_PART}` on {strategies['machine']} ({_others(strategies['cpu_share_of_other_programs'])})"
    )
    return "\n".join([*lines, "", f"Measured: {', '.join(machines)}."])


def _others(share: float | None) -> str:
    if share is None:
        return "other programs' CPU time unknown"
    return f"other programs used {share:.0%} of the CPU time" + (
        ": compare no times" if share > _MOST_BY_OTHERS else ""
    )


def _flags(values: Mapping[str, Mapping[str, str]]) -> str:
    lines = ["| server | flag | in Quire |", "|---|---|---|"]
    for server, flags in values.items():
        lines += [f"| {server} | `{flag}` | {_linked(text)} |" for flag, text in flags.items()]
    return "\n".join(lines)


def _linked(text: str) -> str:
    return re.sub(r"--[a-z-]+", lambda flag: f"`{flag[0]}`", text)
