"""Compare the arena with the real service on five loads of the bundled model.

    python -m measure.studies.arena_validation --json measure/results/arena_validation.json   # three minutes

`quire serve` serves each load of `measure.studies.whatif` with default settings and records it. The arena then serves
the same requests with the step times learned from the record. Its throughput should be within 5 % of the recorded one,
and its mean TTFT within 10 %. The arena has no network, so the recorded link time is added to its TTFT.

Requests come from the record: their times, lengths and shared prefixes. Records are reused if `--records` has them.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from measure.policies.arena import run
from measure.policies.costs import of_service
from measure.policies.jobs import Job, Piece
from measure.policies.metrics import ttft_s
from measure.policies.quire_engine import QuireEngine
from measure.policies.workloads import OpenLoop
from measure.studies.whatif import LOADS, record
from records.whatif.answer import Case, from_record
from records.whatif.load import Arrival
from shared.prefix_keys import KEY_BYTES

_OWN, _OUTPUTS = 1 << 60, 1 << 61
"""Leading names of the pieces that no other request has, and of outputs."""
_THROUGHPUT_ERROR, _TTFT_ERROR = 0.05, 0.10


def jobs(arrivals: Sequence[Arrival]) -> list[Job]:
    """Return a record's requests as jobs; equal prompt blocks become equal pieces."""
    return [_job(number, each) for number, each in enumerate(arrivals)]


def _job(number: int, arrival: Arrival) -> Job:
    keys = arrival.keys
    names = [int.from_bytes(keys[at : at + 7], "little") for at in range(0, len(keys), KEY_BYTES)]
    pieces = [Piece(name, arrival.block_size) for name in names]
    rest = arrival.spec.num_prompt_tokens - len(pieces) * arrival.block_size
    if rest:
        pieces.append(Piece(_OWN + number, rest))
    return Job(at=arrival.at, prompt=tuple(pieces), outputs=Piece(_OUTPUTS + number, arrival.num_outputs))


def compare(name: str, case: Case) -> dict[str, Any]:
    """Serve the requests of a record in the arena; return both results and the errors."""
    assert case.recorded is not None
    costs = of_service(name, case.service)
    engine = QuireEngine(case.service.config, costs, len(case.service.members))
    outcome = run(engine, OpenLoop(name=name, load=1.0, jobs=jobs(case.arrivals)), costs)
    begin = min(each.job.at for each in outcome.served)
    tokens = sum(each.job.num_outputs for each in outcome.served)
    predicted = {
        "throughput": tokens / (outcome.duration_s - begin),
        "ttft_mean": statistics.fmean(map(ttft_s, outcome.served)) + case.service.times.link_s,
    }
    measured = {"throughput": case.recorded.output_tokens_per_s, "ttft_mean": case.recorded.ttft.mean}
    errors = {metric: predicted[metric] / measured[metric] - 1 for metric in measured}
    return {
        "load": name,
        "requests": len(outcome.served),
        "measured": measured,
        "predicted": predicted,
        "error": errors,
        "is_met": abs(errors["throughput"]) <= _THROUGHPUT_ERROR and abs(errors["ttft_mean"]) <= _TTFT_ERROR,
    }


def main() -> None:
    """Record, simulate and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of each load (default: 30)")
    parser.add_argument("--records", type=Path, help="folder of the records (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.records or Path(temporary)
        for load in LOADS:
            place = record((), load, options.duration, folder / load.name.replace(" ", "-"))
            results.append(compare(load.name, from_record(place)))
            print(json.dumps(results[-1]), flush=True)
    if options.json is not None:
        document = {"duration_s": options.duration, "results": results}
        options.json.write_text(json.dumps(document, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
