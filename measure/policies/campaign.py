"""Campaign: every scheduler over every load and seed of a workload, one run after the other."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from measure.load.traces import Recorded
from measure.policies.arena import Workload, run
from measure.policies.metrics import Result, metrics
from measure.policies.schedulers import Setup, Specification, make
from measure.policies.workloads import DRAWN, Agents, Drawing, traced

MakeWorkload = Callable[[float, int], Workload]
"""Makes a workload of a load and a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """What to run."""

    workload: str
    loads: Sequence[float]
    """Shares of a trace or of the capacity, or users; see `workloads`."""
    seeds: Sequence[int]
    schedulers: Sequence[Specification]
    setup: Setup
    seconds: float
    recorded: Sequence[Recorded] = ()
    """Requests of the trace, for the workloads that have one."""
    sessions: int = 64
    """Sessions of the agents, at least four per user for fewer than 16 users."""

    def make_workload(self, load: float, seed: int) -> Workload:
        """Return the jobs of one run."""
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

        Raises:
            ArenaError: a scheduler does not serve a workload as it should.
        """
        for load in self.loads:
            for seed in self.seeds:
                for specification in self.schedulers:
                    yield self._run(specification, load, seed)

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
