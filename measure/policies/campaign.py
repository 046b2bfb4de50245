"""Campaign: every scheduler under every load and seed of a workload, one run after the other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from measure.load.traces import Recorded
from measure.policies.arena import Workload, run
from measure.policies.metrics import Result, metrics
from measure.policies.schedulers import Setup, Specification, candidates, make
from measure.policies.workloads import DRAWN, Agents, Drawing, traced

_WITH_PRIORITIES = ("priorities", "deadlines")
"""Workloads whose jobs have priorities or targets that the scheduler may use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """Runs to make."""

    workload: str
    loads: Sequence[float]
    """Loads: fractions of a trace or of the capacity, or numbers of users; see `workloads`."""
    seeds: Sequence[int]
    schedulers: Sequence[Specification]
    setup: Setup
    seconds: float
    recorded: Sequence[Recorded] = ()
    """Requests of the trace, for the workloads that have one."""
    sessions: int = 64
    """Number of agent sessions; at least four per user below 16 users."""

    def make_workload(self, load: float, seed: int) -> Workload:
        """Return the workload for one run."""
        costs = self.setup.costs
        if self.workload in DRAWN:
            drawing = Drawing(
                seconds=self.seconds, load=load, costs=costs, num_workers=self.setup.num_workers, seed=seed
            )
            return DRAWN[self.workload](drawing)
        if self.workload == "agents":
            users = round(load)
            return Agents(users=users, sessions=min(self.sessions, 4 * users), seed=seed)
        return traced(self.workload, self.recorded, load, costs, seed)

    def results(self) -> Iterator[Result]:
        """Yield the result of each run.

        For the policy `best`, settings are searched with the first seed. Further seeds use the best settings found.

        Raises:
            ArenaError: a scheduler does not serve a workload as it should.
        """
        for load in self.loads:
            chosen: dict[Specification, Specification] = {}
            for seed in self.seeds:
                for specification in self.schedulers:
                    if specification in chosen:
                        yield self._run(chosen[specification], load, seed)
                        continue
                    tried = candidates(specification, with_priorities=self.workload in _WITH_PRIORITIES)
                    results = []
                    for each in tried:
                        results.append(self._run(each, load, seed))
                        yield results[-1]
                    chosen[specification] = tried[_best(results)]

    def _run(self, specification: Specification, load: float, seed: int) -> Result:
        workload = self.make_workload(load, seed)
        engine = make(specification, self.setup)
        try:
            outcome = run(engine, workload, self.setup.costs, self.setup.num_workers)
        finally:
            engine.close()
        return {
            "workload": workload.name,
            "scheduler": specification.name,
            "load": workload.load,
            "seed": seed,
            "version": outcome.version,
            "workers": self.setup.num_workers,
            "in_flight": self.setup.in_flight,
            "costs": self.setup.costs.name,
            **metrics(outcome),
        }


def _best(results: Sequence[Result]) -> int:
    """Return the index of the result with the most jobs within targets, then with the shortest TTFT."""

    def rank(at: int) -> tuple[float, float]:
        return (-results[at]["goodput"], results[at]["ttft_s"]["mean"] or 0.0)

    return min(range(len(results)), key=rank)
