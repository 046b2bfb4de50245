"""Forecasts for a request at its arrival, compared with the real times."""

from typing import NamedTuple

from records.explain.facts import Life
from scheduler_svc.core.interface.records import NoteKind
from scheduler_svc.core.requests.prediction import Forecasted, read_text

_MOMENTS = {
    "row": (NoteKind.ADMITTED,),
    "first token": (NoteKind.FIRST_TOKEN,),
    "end": (NoteKind.ENDED,),
}


class Outcome(NamedTuple):
    """A forecast time and the real one, in seconds after the request's arrival at the scheduler."""

    forecast: Forecasted
    real_s: float | None
    """None if the event has not happened yet."""


def outcomes(life: Life) -> list[Outcome]:
    """Return a request's forecasts with their outcomes; empty without forecasts."""
    arrival = life.notes[0].time
    forecast = next((note for note in life.notes if note.kind is NoteKind.FORECAST), None)
    if forecast is None:
        return []
    found = []
    for each in read_text(forecast.text):
        moment = next((note.time for note in life.notes if note.kind in _MOMENTS[each.of]), None)
        found.append(Outcome(each, None if moment is None else moment - arrival))
    return found
