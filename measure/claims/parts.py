"""The studies by name, and the JSON file with their results."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from measure.strategies import other_work
from measure.testbed.service import QUIRE, ROOT

RESULTS = ROOT / "measure" / "results" / "claims.json"
STRATEGIES = ROOT / "measure" / "results" / "strategies.json"
STRATEGIES_PART = "strategies"
VIRTUAL = ("windows", "prefixes", "chunks", "latency_limits", "preemptions", "tails", "rows")
"""Parts in virtual time. Their results depend on the code only."""
COMPUTED = ("buckets", "kv_budget", "parallel", "flags")
"""Parts that only compute."""
LIVE = ("generate", "speculation", "batch_sizes", STRATEGIES_PART)
"""Parts with real processes. Their times depend on the machine."""
NAMES = (*COMPUTED, *VIRTUAL, *LIVE)


def run_part(name: str) -> dict[str, Any]:
    """Run a study; return its result with the machine and its other work."""
    before, begin = other_work.now(), time.monotonic()
    values = _studies()[name]()
    found: dict[str, Any] = {"seconds": round(time.monotonic() - begin), "values": values}
    if name in LIVE:
        found["machine"] = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
        share = other_work.share_of_others(before, other_work.now(), os.cpu_count() or 1)
        found["cpu_share_of_other_programs"] = None if share is None else round(share, 3)
    return found


def read() -> dict[str, Any]:
    """Return the results by part; empty if the file does not exist."""
    return dict(json.loads(RESULTS.read_text("utf-8"))["parts"]) if RESULTS.exists() else {}


def write(parts: Mapping[str, Any]) -> None:
    """Write the results, in the order of the parts."""
    ordered = {name: parts[name] for name in NAMES if name in parts}
    document = {"command": "python -m measure.claims", "parts": ordered}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


def _studies() -> Mapping[str, Callable[[], Mapping[str, object]]]:
    from measure.claims import computed, live, virtual

    return {
        "buckets": computed.buckets,
        "kv_budget": computed.kv_budget,
        "parallel": computed.parallel,
        "flags": computed.flags,
        "windows": virtual.windows,
        "prefixes": virtual.prefixes,
        "chunks": virtual.chunks,
        "latency_limits": virtual.latency_limits,
        "preemptions": virtual.preemptions,
        "tails": virtual.tails,
        "rows": virtual.rows,
        "generate": live.generate,
        "speculation": live.speculation,
        "batch_sizes": live.batch_sizes,
        STRATEGIES_PART: _strategies,
    }


def _strategies() -> dict[str, object]:
    """Run `quire bench strategies`, which writes a file of its own."""
    subprocess.run([*QUIRE, "bench", "strategies", "--json", str(STRATEGIES)], cwd=ROOT, check=True)
    return {}


def strategies() -> dict[str, Any]:
    """Return the results of `quire bench strategies`."""
    return dict(json.loads(Path(STRATEGIES).read_text("utf-8")))
