"""Sample mutants of the scheduler core and of the simulator's oracle, and list which of them a check kills.

    python -m checks.mutation                          the same as `make mutants`
    python -m checks.mutation --count 20 --seed 7
    python -m checks.mutation --only planner.py:140    every mutant of that line

Results are stored in a file, from which a later run continues. A mutant whose source has changed since then runs again.
"""

import argparse
import hashlib
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from checks.mutation.hunt import CPU_S, hunt
from checks.mutation.mutators import Mutation, mutant, mutations

CORE = Path("scheduler_svc/core")
RULES = Path("records/rules")
ORACLE = (RULES / "model_worker.py", RULES / "oracle.py")
"""Modules with which the simulator compares the core."""
_PATIENCE = 20
"""Wall clock limit as a multiple of the CPU time limit, because the machine may have other load."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mutation of one file."""

    path: Path
    number: int
    mutation: Mutation

    @property
    def place(self) -> str:
        """Place of the mutation, as file:line."""
        return f"{self.path.name}:{self.mutation.line}"

    @property
    def source(self) -> str:
        """Return the changed source."""
        return mutant(self.path.read_text(), self.number)

    @property
    def name(self) -> str:
        """Name of the mutant, which depends on the module's source."""
        return hashlib.sha256(f"{self.path} {self.number} {self.path.read_text()}".encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one mutant."""

    mutant: str
    """Name of the mutant."""
    place: str
    kind: str
    before: str
    after: str
    killed_by: str
    """The check that killed the mutant; "" if it survived."""
    seconds: float


def main() -> int:
    """Run the mutants; return 1 when fewer than the required share are killed."""
    parser = argparse.ArgumentParser(prog="python -m checks.mutation", description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=240, help="number of mutants (240)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample (1)")
    parser.add_argument("--minutes", type=float, default=1e9, help="minutes after which no further mutant starts")
    parser.add_argument("--again", action="store_true", help="run survivors again, for example with more tests")
    parser.add_argument("--only", default="", metavar="PLACE", help="all mutants whose file:line begins with this")
    parser.add_argument(
        "--kept", type=Path, default=Path("build/mutants.jsonl"), help="file of the results, one line each"
    )
    parser.add_argument("--json", type=Path, help="write the results of this sample to this file")
    parser.add_argument("--share", type=float, default=0.9, help="required share of killed mutants (0.9)")
    options = parser.parse_args()

    chosen = _choose(options.count, options.seed, options.only)
    known = _known(options.kept)
    options.kept.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + 60 * options.minutes
    outcomes: list[Outcome] = []
    if options.again or any(each.name not in known for each in chosen):
        killer = _hunt(ORACLE[0], None)
        if killer:
            sys.exit(f"the core as it is does not survive: {killer}")
    with options.kept.open("a") as file:
        for each in chosen:
            outcome = known.get(each.name)
            if outcome is None or (options.again and not outcome.killed_by):
                if time.monotonic() > until:
                    break
                outcome = _outcome(each)
                print(json.dumps(asdict(outcome)), file=file, flush=True)
                print(f"{len(outcomes) + 1:4}/{len(chosen)} {_line(outcome)}", flush=True)
            outcomes.append(outcome)
    print(summary(outcomes))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1) + "\n")
    survivors = sum(not outcome.killed_by for outcome in outcomes)
    return 0 if survivors <= (1 - options.share) * len(outcomes) else 1


def summary(outcomes: list[Outcome]) -> str:
    """Return the survivors, the checks that killed the others, and one closing line."""
    by = Counter(outcome.killed_by.partition(":")[0] or "survived" for outcome in outcomes)
    survivors = sorted((outcome for outcome in outcomes if not outcome.killed_by), key=lambda each: each.place)
    killed = len(outcomes) - len(survivors)
    lines = [*map(_line, survivors), ", ".join(f"{name} {count}" for name, count in sorted(by.items()))]
    share = killed / max(1, len(outcomes))
    return "\n".join([*lines, f"mutants={len(outcomes)} killed={killed} survived={len(survivors)} share={share:.3f}"])


def _choose(count: int, seed: int, only: str) -> list[Mutant]:
    everything = [
        Mutant(path, number, mutation)
        for path in (*sorted(CORE.rglob("*.py")), *ORACLE)
        for number, mutation in enumerate(mutations(path.read_text()))
    ]
    if only:
        return [each for each in everything if each.place.startswith(only)]
    return random.Random(seed).sample(everything, min(count, len(everything)))


def _known(kept: Path) -> dict[str, Outcome]:
    if not kept.exists():
        return {}
    outcomes = (Outcome(**json.loads(line)) for line in kept.read_text().splitlines())
    return {outcome.mutant: outcome for outcome in outcomes}


def _outcome(one: Mutant) -> Outcome:
    started = time.monotonic()
    killer = _hunt(one.path, one.source)
    seconds = round(time.monotonic() - started, 1)
    change = one.mutation
    return Outcome(one.name, one.place, change.kind, change.before, change.after, killer, seconds)


def _hunt(path: Path, source: str | None) -> str:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as scratch:
        process = context.Process(target=hunt, args=(path, source, theirs, Path(scratch)))
        process.start()
        theirs.close()
        try:
            killer = ours.recv() if ours.poll(_PATIENCE * CPU_S) else "time"
        except EOFError:
            # The mutant reached the time or memory limit.
            killer = "time"
        process.kill()
        process.join()
    return str(killer)


def _line(outcome: Outcome) -> str:
    killer = outcome.killed_by or "SURVIVED"
    return f"{outcome.place:22} {outcome.kind:12} {killer:34.34} {outcome.before}  ->  {outcome.after}"


if __name__ == "__main__":
    sys.exit(main())
