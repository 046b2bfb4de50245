"""Model of step times, learned from the answered steps of a record.

The time of a step is a sum of products: a constant, the decode rows, the prompt tokens, the tokens whose KV is read,
the drafts, and one more constant if there are drafts. No coefficient is negative. They are fitted by least squares of
the relative error, iteratively reweighted (Lawson and Hanson, Solving Least Squares Problems, 1974). Effects that are
not linear, such as the width of vector units, are corrected afterwards: steps of about the same size have a common
factor. Around this mean, steps scatter; the scatter of the record is part of the model. Steps with prompt tokens have a
scatter of their own: they are few compared with steps that only decode, and they decide the time to the first token. So
have steps with drafts. Interrupted steps are part of the scatter, but not of the fit.

A machine that other processes use is slower at some times than at others. So the model also learns the pace of the
record, which is the median of its steps in each half second. A simulation has the same disturbances at the same times.

A step begins when its plan has reached the worker and the step before is answered. So the time of the link is learned
from steps that were planned for an idle worker.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from records.whatif.rows import Shape

Floats = npt.NDArray[np.float64]
MIN_STEPS = 8
"""Fewest steps from which a model is learned."""
_CLASS_STEPS = 20
"""Steps of a size class from which on it has a factor of its own."""
_NUM_QUANTILES = 401
"""Enough for the 99th percentile of latencies, each of which is made of several steps."""
_REWEIGHTINGS = 4
_LEAST_SHARE = 0.05
"""Share of the median step that a prediction counts at least, so that no step has too much weight."""
_LARGEST_RATIO = 20.0
"""Ratio to the median model from which on a step is left out of the fit: it was interrupted, or compiled a kernel.

In the scatter it counts with this ratio.
"""
_PACE_S = 0.5
"""Length of one value of the pace."""
_PACE_STEPS = 5
"""Undisturbed steps that are added to those of a value, so that a few steps that scatter are no pace."""
_VERSION = 3


class Sample(NamedTuple):
    """An answered step; times of the core's clock, s."""

    shape: Shape
    planned: float
    previous: float
    """When the step before was answered; 0 for the first one."""
    answered: float


Spread: TypeAlias = tuple[tuple[float, tuple[float, ...]], ...]
"""From this mean time on, the quantiles of the ratio of a step's time to the mean.

The quantiles have equal distances. Their mean is 1 if no step was interrupted. The first time is 0.
"""
_NOTHING = Shape(0, 0, 0, 0)


class StepTimesError(ValueError):
    """A model of step times cannot be learned or read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How well the model describes the steps that it was learned from."""

    steps: int
    median_error: float
    """Median of the relative error of one step, without regard to its sign."""
    p90_error: float
    total_error: float
    """Relative error of the sum of all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """The model; all times in seconds."""

    constant_s: float
    decode_s: float
    """Per decode row."""
    prefill_s: float
    """Per prompt token."""
    context_s: float
    """Per token whose KV a decode row reads."""
    prefill_context_s: float
    """Per pair of a prompt token and a token whose KV it reads."""
    block_copy_s: float
    """Per block that is swapped."""
    drafting_s: float = 0.0
    """Of a step with drafts, in addition to that of its drafts."""
    draft_s: float = 0.0
    """Per draft."""
    link_s: float
    """From a plan for an idle worker to its answer, without the step."""
    factors: dict[str, float] = field(default_factory=dict)
    """By size class of steps: the ratio of their time to the linear model."""
    spreads: dict[str, Spread] = field(default_factory=dict)
    """Scatter of steps that only decode ("decode"), of those with drafts ("drafts") and of others ("prefill").

    Only those that the record has.
    """
    pace: tuple[float, ...] = ()
    """By time since the beginning of the load: the ratio of the time of steps to the mean; 1 after the last one."""
    largest: Shape = _NOTHING
    """The largest values in the record; beyond them the model extrapolates."""
    fit: Fit | None = None

    def seconds(self, shape: Shape) -> float:
        """Return the mean time of a step."""
        return self._linear(shape) * self.factors.get(_class(shape), 1.0)

    def pace_at(self, time: float) -> float:
        """Return the pace at a time since the beginning of the load, s."""
        at = int(time / _PACE_S)
        return self.pace[at] if at < len(self.pace) else 1.0

    def scattered(self, shape: Shape, share: float) -> float:
        """Return the time of a step that is longer than this share of such steps, 0 to 1."""
        seconds = self.seconds(shape)
        spread = self.spreads.get(_kind(shape)) or next(iter(self.spreads.values()), ((0.0, (1.0,)),))
        quantiles = spread[0][1]
        for begin, following in spread[1:]:
            if seconds < begin:
                break
            quantiles = following
        return seconds * quantiles[min(int(share * len(quantiles)), len(quantiles) - 1)]

    def extrapolates(self, shape: Shape) -> bool:
        """Return whether a step is larger than all steps of the record."""
        largest = self.largest
        return (
            shape.decodes > 1.25 * largest.decodes
            or shape.prefill > 1.25 * largest.prefill
            or shape.drafts > 1.25 * largest.drafts
        )

    def _linear(self, shape: Shape) -> float:
        return (
            self.constant_s
            + self.decode_s * shape.decodes
            + self.prefill_s * shape.prefill
            + self.context_s * shape.context
            + self.prefill_context_s * shape.prefill_context
            + self.block_copy_s * shape.copied_blocks
            + self.draft_s * shape.drafts
            + (self.drafting_s if shape.drafts else 0.0)
        )


def to_json(times: StepTimes) -> str:
    """Return the model as JSON."""
    return json.dumps({"version": _VERSION, **asdict(times), "largest": list(times.largest)}, indent=2)


def from_json(text: str) -> StepTimes:
    """Return the model in a JSON text.

    Raises:
        StepTimesError: the text is not a model of this release.
    """
    try:
        values: dict[str, Any] = json.loads(text)
        if values.pop("version") != _VERSION:
            raise StepTimesError("step times: written by another release; learn them again with --learn-step-times")
        values["largest"] = Shape(*values["largest"])
        values["spreads"] = {
            kind: tuple((begin, tuple(quantiles)) for begin, quantiles in spread)
            for kind, spread in values["spreads"].items()
        }
        values["pace"] = tuple(values["pace"])
        values["fit"] = None if values["fit"] is None else Fit(**values["fit"])
        return StepTimes(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, StepTimesError):
            raise
        raise StepTimesError(
            f"step times: not a model of step times ({error!r}); write one with quire replay RECORD --learn-step-times"
        ) from None


def learn(samples: Sequence[Sample], begin: float | None = None) -> StepTimes:
    """Learn a model.

    Args:
        samples: answered steps.
        begin: core time at the beginning of the load, to learn the pace from then on; None for no pace.

    Raises:
        StepTimesError: there are too few steps.
    """
    if len(samples) < MIN_STEPS:
        raise StepTimesError(
            f"step times: the record has {len(samples)} answered steps; at least {MIN_STEPS} are needed"
        )
    features = np.array([[1.0, *each.shape, each.shape.drafts > 0] for each in samples])
    planned, previous, answered = np.array([(s.planned, s.previous, s.answered) for s in samples]).T
    was_idle = planned >= previous
    link_s, keep = 0.0, np.ones(len(samples), np.bool_)
    coefficients = np.zeros(features.shape[1])
    # First with the link as one more coefficient; then the start of each step is known better.
    for _ in range(2):
        durations = answered - np.maximum(previous, planned)
        design = np.column_stack([features, was_idle])
        found = _fit(design[keep], durations[keep])
        keep = durations < _LARGEST_RATIO * np.maximum(design @ found, 1e-9)
        link_s = float(found[-1])
    durations = np.maximum(answered - np.maximum(previous, planned + link_s), 1e-6)
    coefficients = _fit(features[keep], durations[keep])
    linear = np.maximum(features @ coefficients, 1e-9)
    classes = [_class(each.shape) for each in samples]
    factors = _factors(classes, durations, linear, keep)
    mean = linear * np.array([factors.get(each, 1.0) for each in classes])
    errors = np.abs(durations / mean - 1)
    pace: tuple[float, ...] = ()
    of_steps = np.ones(len(samples))
    if begin is not None:
        pace, of_steps = _pace(answered - durations - begin, durations, mean, keep)
    ratios = np.minimum(durations / mean / of_steps, _LARGEST_RATIO)
    kinds = np.array([_kind(each.shape) for each in samples])
    return StepTimes(
        constant_s=float(coefficients[0]),
        decode_s=float(coefficients[1]),
        prefill_s=float(coefficients[2]),
        context_s=float(coefficients[3]),
        prefill_context_s=float(coefficients[4]),
        block_copy_s=float(coefficients[5]),
        draft_s=float(coefficients[6]),
        drafting_s=float(coefficients[7]),
        link_s=link_s,
        factors=factors,
        spreads={
            kind: _spread(mean[kinds == kind], ratios[kinds == kind], keep[kinds == kind])
            for kind in sorted(set(kinds.tolist()))
        },
        pace=pace,
        largest=Shape(*(max(each.shape[at] for each in samples) for at in range(len(Shape._fields)))),
        fit=Fit(
            steps=len(samples),
            median_error=float(np.median(errors)),
            p90_error=float(np.percentile(errors, 90)),
            total_error=float(mean.sum() / durations.sum() - 1),
        ),
    )


def _fit(design: Floats, durations: Floats) -> Floats:
    """Return the coefficients, none negative, that minimise the squares of the errors relative to the prediction.

    Errors relative to the measured time would favour steps that were short by chance.
    """
    typical = float(np.median(durations))
    predicted = np.full(len(durations), max(typical, 1e-6))
    coefficients = np.zeros(design.shape[1])
    for _ in range(_REWEIGHTINGS):
        weights = 1 / predicted
        weighted = design * weights[:, None]
        scale = np.maximum(weighted.max(axis=0), 1e-30)
        coefficients = non_negative_least_squares(weighted / scale, durations * weights) / scale
        predicted = np.maximum(design @ coefficients, _LEAST_SHARE * typical)
    return coefficients


def non_negative_least_squares(design: Floats, target: Floats) -> Floats:
    """Return the `x >= 0` that minimises `|design @ x - target|`, by the active set method of Lawson and Hanson."""
    gram, right = design.T @ design, design.T @ target
    number = design.shape[1]
    solution = np.zeros(number)
    passive = np.zeros(number, np.bool_)
    tolerance = 1e-9 * max(1.0, float(np.abs(right).max(initial=0.0)))
    for _ in range(3 * number):
        gradient = right - gram @ solution
        gradient[passive] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        passive[best] = True
        for _ in range(number):
            trial = np.zeros(number)
            trial[passive] = np.linalg.lstsq(gram[np.ix_(passive, passive)], right[passive], rcond=None)[0]
            negative = passive & (trial <= 0)
            if not negative.any():
                break
            # Walk towards the trial until the first coefficient becomes zero.
            share = float(np.min(solution[negative] / (solution[negative] - trial[negative] + 1e-300)))
            solution = solution + share * (trial - solution)
            passive &= solution > 1e-15
            solution[~passive] = 0.0
        solution = np.where(passive, trial, 0.0)
    return solution


def _class(shape: Shape) -> str:
    """Return the size class of a step: powers of two of its decode rows, prompt tokens and drafts."""
    return f"{shape.decodes.bit_length()}+{shape.prefill.bit_length()}+{shape.drafts.bit_length()}"


def _factors(
    classes: Sequence[str], durations: Floats, linear: Floats, keep: npt.NDArray[np.bool_]
) -> dict[str, float]:
    """Return by class the factor with which the sum of its steps is right; the same one for all rare classes."""
    members: dict[str, list[int]] = {}
    for at, each in enumerate(classes):
        if keep[at]:
            members.setdefault(each, []).append(at)
    rest = [at for found in members.values() if len(found) < _CLASS_STEPS for at in found]
    common = float(durations[rest].sum() / linear[rest].sum()) if len(rest) >= _CLASS_STEPS else 1.0
    return {
        each: float(durations[found].sum() / linear[found].sum()) if len(found) >= _CLASS_STEPS else common
        for each, found in members.items()
    }


def _pace(
    times: Floats, durations: Floats, mean: Floats, keep: npt.NDArray[np.bool_]
) -> tuple[tuple[float, ...], Floats]:
    """Return the pace by time, and that of each step.

    The pace of a while is the median of its steps: a single interrupted step belongs to the scatter.

    Args:
        times: begin of each step since the beginning of the load, `[n]`.
        durations: time of each step, `[n]`.
        mean: mean time of such steps, `[n]`.
        keep: whether they were part of the fit, `[n]`.
    """
    at = np.maximum(times / _PACE_S, 0).astype(np.int64)
    number = int(at.max()) + 1
    ratios, order = durations / mean, np.argsort(at, kind="stable")
    bounds = np.searchsorted(at[order], np.arange(number + 1))
    prior = np.full(_PACE_STEPS, np.median(ratios))
    pace = np.array(
        [np.median(np.concatenate([ratios[order[begin:end]], prior])) for begin, end in pairwise(bounds.tolist())]
    )
    # The pace of all steps together is 1, so that the sum of their times stays right.
    pace *= float(durations[keep].sum() / (mean * pace[at])[keep].sum())
    return tuple(pace.tolist()), pace[at]


def _kind(shape: Shape) -> str:
    if shape.prefill:
        return "prefill"
    return "drafts" if shape.drafts else "decode"


def _spread(mean: Floats, ratios: Floats, keep: npt.NDArray[np.bool_]) -> Spread:
    """Return the scatter of short, middle and long steps.

    They differ because an interruption adds time, which is a larger ratio of a short step.

    Args:
        mean: mean time of such steps, `[n]`.
        ratios: their time relative to it, `[n]`.
        keep: whether they were part of the fit, `[n]`.
    """
    bounds = [0.0, *np.quantile(mean, (1 / 3, 2 / 3)).tolist()] if len(mean) >= 3 * _NUM_QUANTILES else [0.0]
    found = []
    for begin, end in zip(bounds, [*bounds[1:], float("inf")], strict=True):
        inside = (mean >= begin) & (mean < end)
        if not inside.any():
            continue
        quantiles = np.quantile(ratios[inside], (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES)
        # Interrupted steps are no part of the mean time, so they are added to it here.
        level = float(ratios[inside].mean() / ratios[inside & keep].mean()) if (inside & keep).any() else 1.0
        found.append((begin, tuple((quantiles * (level / quantiles.mean())).tolist())))
    return tuple(found)
