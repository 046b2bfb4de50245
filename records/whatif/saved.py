"""Stores a service as a file: its settings, workers, step-time model and draft acceptance.

`quire replay RECORD --learn-step-times FILE` writes the file. Other requests, for example from a trace, can then be
simulated on this service without the record.
"""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from records.replay import ReplayError, to_config
from records.whatif import step_times
from records.whatif.acceptance import Acceptance
from records.whatif.load import Member
from records.whatif.step_times import StepTimes, StepTimesError
from scheduler_svc.core.interface import events as ev
from scheduler_svc.core.interface.config import CoreConfig

_FACTS = (
    "worker_id",
    "block_size",
    "num_blocks",
    "max_rows",
    "max_tokens_per_step",
    "num_host_blocks",
    "num_disk_blocks",
    "block_bytes",
    "device",
    "max_draft_tokens",
)
"""Fields of a hello that a simulation needs, in addition to its model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A service to simulate."""

    config: CoreConfig
    members: list[Member]
    times: StepTimes
    acceptance: Acceptance | None = None
    """None if the workers verify no drafts."""


def to_json(service: Service) -> str:
    """Return the service as JSON. The times at which workers joined and left are not stored."""
    hellos = {member.hello.worker_id: member.hello for member in service.members}.values()
    workers = [
        {"model": dataclasses.asdict(hello.model), **{name: getattr(hello, name) for name in _FACTS}}
        for hello in hellos
    ]
    times = json.loads(step_times.to_json(service.times))
    acceptance = None if service.acceptance is None else dataclasses.asdict(service.acceptance)
    config = dataclasses.asdict(service.config)
    values = {"step_times": times, "acceptance": acceptance, "workers": workers, "config": config}
    return json.dumps(values, indent=2)


def from_json(text: str) -> Service:
    """Return the service in a JSON text.

    Raises:
        StepTimesError: the text is not a service of this release.
    """
    try:
        values: dict[str, Any] = json.loads(text)
        times = step_times.from_json(json.dumps(values["step_times"]))
        config = to_config(json.dumps(values["config"]))
        members = [Member(hello=_hello(worker)) for worker in values["workers"]]
        acceptance = values["acceptance"]
        if acceptance is not None:
            following = tuple((*map(float, each),) for each in acceptance["following"])
            acceptance = Acceptance(**{**acceptance, "following": following})
    except (ValueError, TypeError, KeyError) as error:
        if isinstance(error, StepTimesError | ReplayError):
            raise
        raise StepTimesError(
            f"step times: not a file of step times ({error!r}); write one with quire replay RECORD --learn-step-times"
        ) from None
    return Service(config=config, members=members, times=times, acceptance=acceptance)


def _hello(values: dict[str, Any]) -> ev.WorkerHello:
    model = dict(values["model"])
    model["eos_token_ids"] = tuple(model["eos_token_ids"])
    facts = {name: values[name] for name in _FACTS}
    return ev.WorkerHello(worker=facts["worker_id"].encode(), model=ev.ModelFacts(**model), **facts)
