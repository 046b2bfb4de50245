"""Steps in which decode rows only continue have the planner's plans."""

import dataclasses
import random

import numpy as np
import pytest

from records.rules.model_worker import ModelWorker
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.planning.steady import plan_steady
from tests.scheduler_svc.cluster import Cluster


def _content(plan: Plan) -> dict[str, object]:
    found = {each.name: getattr(plan, each.name) for each in dataclasses.fields(plan)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in found.items()}


def _serve(seed: int, in_flight: int) -> tuple[list[str], dict[int, list[int]]]:
    """Serve random requests; return the plans, and the tokens of each request."""
    rng = random.Random(seed)
    cluster = Cluster(max_num_batched_tokens=64, max_plans_in_flight=in_flight)
    cluster.join(ModelWorker(b"w/1", 24, 4, 4))
    for stream in range(12):
        cluster.submit(stream, [rng.randrange(50) for _ in range(rng.randrange(1, 20))], rng.randrange(1, 40))
        for _ in range(rng.randrange(12)):
            cluster.plan()
            cluster.answer()
    for _ in range(600):
        cluster.plan()
        cluster.answer()
    return [repr(_content(plan)) for plan in cluster.plans], {
        stream: reader.tokens for stream, reader in cluster.readers.items()
    }


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_steady_plans_equal_those_of_the_planner(seed: int, in_flight: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With requests that arrive, end, need blocks and are preempted, all plans are the same without the short cut."""
    steady: list[bool] = []

    def counted(*arguments: object) -> Plan | None:
        plan = plan_steady(*arguments)  # type: ignore[arg-type]
        steady.append(plan is not None)
        return plan

    monkeypatch.setattr("scheduler_svc.core.scheduler.plan_steady", counted)
    with_steady = _serve(seed, in_flight)
    monkeypatch.setattr("scheduler_svc.core.scheduler.plan_steady", lambda *_: None)

    assert _serve(seed, in_flight) == with_steady
    assert any(steady), "no plan took the short cut, so nothing was compared"
