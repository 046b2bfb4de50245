"""Model of step times, learned from the completed steps in a record.

A step's time is a weighted sum of these terms: a constant, the decode rows, the prompt tokens, the tokens whose KV is
read, the drafts, and another constant if there are drafts. No coefficient is negative. They are fitted by iteratively
reweighted least squares of the relative error (Lawson and Hanson, Solving Least Squares Problems, 1974). Non-linear
effects, such as the width of vector units, are corrected afterwards: steps of similar size share a factor. Step times
vary around this mean, and the distribution of this scatter is part of the model. Steps with prompt tokens have a
separate distribution, because they are rare compared with pure decode steps and determine the time to first token.
Steps with drafts have a separate distribution too. Interrupted steps are part of the scatter, but not of the fit.

A machine that other processes use is slower at some times than at others. So the model also learns the pace of the
record: the median, in each half second, of the step times relative to their mean. A simulation has the same
disturbances at the same times.

A step begins when its plan has reached the worker and the previous step is complete. The time of the link is therefore
learned from steps that were planned for an idle worker.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from records.whatif.disk import DiskSample, DiskTimes
from records.whatif.disk import learn as learn_disk
from records.whatif.rows import Shape

Floats = npt.NDArray[np.float64]
MIN_STEPS = 8
"""Minimum number of steps needed to learn a model."""
_CLASS_STEPS = 20
"""Minimum number of steps for a size class to have its own factor."""
_NUM_QUANTILES = 401
"""Enough quantiles for the 99th percentile of latencies that each include several steps."""
_REWEIGHTINGS = 4
_LEAST_SHARE = 0.05
"""Lower limit for a prediction in the fit, as a share of the median step, so that no step has too much weight."""
_LARGEST_RATIO = 20.0
"""Steps with a larger ratio to the median model are excluded from the fit: they were interrupted, or compiled a kernel.

In the scatter, such steps count with this ratio.
"""
_PACE_S = 0.5
"""Length of the interval that one pace value describes, s."""
_PACE_STEPS = 5
"""Number of undisturbed steps added to each interval, so that a few outliers do not change its pace."""
_VERSION = 4


class Sample(NamedTuple):
    """A completed step; times on the core's clock, s."""

    shape: Shape
    planned: float
    previous: float
    """When the result of the previous step came; 0 for the first step."""
    answered: float
    copy_s: float = 0.0
    """Time of the block copies that the worker measured."""
    copy_delay_s: float = 0.0
    """The part of this time that delayed the step."""


Spread: TypeAlias = tuple[tuple[float, tuple[float, ...]], ...]
"""Pairs of a lower limit for the mean step time and the quantiles of time divided by mean from this limit on.

The quantiles are evenly spaced. Their mean is 1 if no step was interrupted. The first limit is 0.
"""
_NOTHING = Shape(0, 0, 0, 0)


class StepTimesError(ValueError):
    """A model of step times cannot be learned or read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How well the model describes the steps that it was learned from."""

    steps: int
    median_error: float
    """Median absolute value of one step's relative error."""
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
    """Per block that is swapped: how much longer the step takes."""
    block_overlap_s: float = 0.0
    """Per block that is swapped: the rest of the copy's time, which overlaps with the step."""
    drafting_s: float = 0.0
    """Per step with drafts, in addition to `draft_s` for each draft."""
    draft_s: float = 0.0
    """Per draft."""
    link_s: float
    """From a plan for an idle worker to the result, without the time of the step itself."""
    factors: dict[str, float] = field(default_factory=dict)
    """By size class: the ratio of step times to the linear model."""
    spreads: dict[str, Spread] = field(default_factory=dict)
    """Scatter of pure decode steps ("decode"), of steps with drafts ("drafts") and of other steps ("prefill").

    Kinds that do not occur in the record are missing.
    """
    pace: tuple[float, ...] = ()
    """Ratio of step times to the mean for each interval since the start of the load; 1 after the last interval."""
    largest: Shape = _NOTHING
    """Largest recorded amount of each kind of work; the model extrapolates beyond it."""
    disk: DiskTimes | None = None
    """None if the record has no jobs of disks."""
    fit: Fit | None = None

    def seconds(self, shape: Shape) -> float:
        """Return the mean time of a step."""
        return self._linear(shape) * self.factors.get(_class(shape), 1.0)

    def pace_at(self, time: float) -> float:
        """Return the pace at a time since the beginning of the load, s."""
        at = int(time / _PACE_S)
        return self.pace[at] if at < len(self.pace) else 1.0

    def scattered(self, shape: Shape, share: float) -> float:
        """Return the quantile `share` (0 to 1) of the duration of such steps."""
        seconds = self.seconds(shape)
        spread = self.spreads.get(_kind(shape)) or next(iter(self.spreads.values()), ((0.0, (1.0,)),))
        quantiles = spread[0][1]
        for begin, following in spread[1:]:
            if seconds < begin:
                break
            quantiles = following
        return seconds * quantiles[min(int(share * len(quantiles)), len(quantiles) - 1)]

    def extrapolates(self, shape: Shape) -> bool:
        """Return whether a step is larger than every step in the record."""
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
        values["disk"] = None if values["disk"] is None else DiskTimes(**values["disk"])
        values["fit"] = None if values["fit"] is None else Fit(**values["fit"])
        return StepTimes(**values)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        if isinstance(error, StepTimesError):
            raise
        raise StepTimesError(
            f"step times: not a model of step times ({error!r}); write one with quire replay RECORD --learn-step-times"
        ) from None


def learn(samples: Sequence[Sample], begin: float | None = None, disk_samples: Sequence[DiskSample] = ()) -> StepTimes:
    """Learn a model.

    Args:
        samples: completed steps.
        begin: core time at the start of the load, from which slow periods are learned; None to learn none.
        disk_samples: completed jobs of disks.

    Raises:
        StepTimesError: there are too few steps.
    """
    if len(samples) < MIN_STEPS:
        raise StepTimesError(
            f"step times: the record has {len(samples)} answered steps; at least {MIN_STEPS} are needed"
        )
    # The worker measures copies. The fit describes the rest of the step, because a few copies have little weight in it.
    num_copied = sum(each.shape.copied_blocks for each in samples)
    measures_copies = any(each.copy_s for each in samples)
    shapes = [each.shape._replace(copied_blocks=0) if measures_copies else each.shape for each in samples]
    features = np.array([[1.0, *shape, shape.drafts > 0] for shape in shapes])
    planned, previous, answered = np.array([(s.planned, s.previous, s.answered - s.copy_delay_s) for s in samples]).T
    was_idle = planned >= previous
    link_s, keep = 0.0, np.ones(len(samples), np.bool_)
    coefficients = np.zeros(features.shape[1])
    # The first fit has the link time as an additional coefficient. The second fit uses the link time to estimate when
    # each step began.
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
        block_copy_s=(
            sum(each.copy_delay_s for each in samples) / max(1, num_copied)
            if measures_copies
            else float(coefficients[5])
        ),
        block_overlap_s=sum(each.copy_s - each.copy_delay_s for each in samples) / max(1, num_copied),
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
        disk=learn_disk(disk_samples),
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
            # Move towards the trial solution until the first coefficient becomes zero.
            share = float(np.min(solution[negative] / (solution[negative] - trial[negative] + 1e-300)))
            solution = solution + share * (trial - solution)
            passive &= solution > 1e-15
            solution[~passive] = 0.0
        solution = np.where(passive, trial, 0.0)
    return solution


def _class(shape: Shape) -> str:
    """Return a step's size class: its decode rows, prompt tokens and drafts, each rounded to a power of two."""
    return f"{shape.decodes.bit_length()}+{shape.prefill.bit_length()}+{shape.drafts.bit_length()}"


def _factors(
    classes: Sequence[str], durations: Floats, linear: Floats, keep: npt.NDArray[np.bool_]
) -> dict[str, float]:
    """Return a factor per class that corrects the sum of its step times; rare classes share one factor."""
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
    """Return the pace in each interval, and the pace for each step.

    The pace in an interval is the median over its steps, so a single interrupted step does not affect it.

    Args:
        times: start of each step since the start of the load, `[n]`.
        durations: time of each step, `[n]`.
        mean: mean time that the model predicts for each step, `[n]`.
        keep: whether each step was part of the fit, `[n]`.
    """
    at = np.maximum(times / _PACE_S, 0).astype(np.int64)
    number = int(at.max()) + 1
    ratios, order = durations / mean, np.argsort(at, kind="stable")
    bounds = np.searchsorted(at[order], np.arange(number + 1))
    prior = np.full(_PACE_STEPS, np.median(ratios))
    pace = np.array(
        [np.median(np.concatenate([ratios[order[begin:end]], prior])) for begin, end in pairwise(bounds.tolist())]
    )
    # Normalise the mean slowdown to 1, so that the total of the step times stays the same.
    pace *= float(durations[keep].sum() / (mean * pace[at])[keep].sum())
    return tuple(pace.tolist()), pace[at]


def _kind(shape: Shape) -> str:
    if shape.prefill:
        return "prefill"
    return "drafts" if shape.drafts else "decode"


def _spread(mean: Floats, ratios: Floats, keep: npt.NDArray[np.bool_]) -> Spread:
    """Return the scatter of short, medium and long steps.

    The scatter differs, because an interruption adds a fixed time, which is a larger share of a short step.

    Args:
        mean: mean time that the model predicts for each step, `[n]`.
        ratios: time of each step divided by its mean, `[n]`.
        keep: whether each step was part of the fit, `[n]`.
    """
    bounds = [0.0, *np.quantile(mean, (1 / 3, 2 / 3)).tolist()] if len(mean) >= 3 * _NUM_QUANTILES else [0.0]
    found = []
    for begin, end in zip(bounds, [*bounds[1:], float("inf")], strict=True):
        inside = (mean >= begin) & (mean < end)
        if not inside.any():
            continue
        quantiles = np.quantile(ratios[inside], (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES)
        # The mean excludes interrupted steps, so add their time here.
        level = float(ratios[inside].mean() / ratios[inside & keep].mean()) if (inside & keep).any() else 1.0
        found.append((begin, tuple((quantiles * (level / quantiles.mean())).tolist())))
    return tuple(found)
