"""Well-formed but wrong results that do not match their plan, as from a faulty worker."""

import dataclasses
import random

import numpy as np

from checks.sim.faults import Fault
from records.rules.oracle import VOCAB
from scheduler_svc.core.interface import events as ev


def malformed(rng: random.Random, answer: ev.StepDone, fault: Fault) -> ev.StepDone:
    """Return the result with an error that the core must detect."""
    rows, tokens = answer.rows, answer.tokens
    needs_rows = fault in (Fault.WRONG_TOKEN, Fault.MISSING_TOKEN)
    if fault is Fault.WRONG_STEP or (needs_rows and not len(rows)):
        # Do not use -1, because -1 could be a valid result for the previous step, which may also be in flight.
        return dataclasses.replace(answer, step=answer.step + rng.choice((-2, 1, 2)))
    if fault is Fault.MISSING_COPY and answer.completed_copies:
        return dataclasses.replace(answer, completed_copies=())
    if fault is Fault.MISSING_COPY:
        return dataclasses.replace(answer, step=answer.step + 1)
    if fault is Fault.WRONG_TOKEN:
        wrong = tokens.copy()
        wrong[rng.randrange(len(wrong))] = rng.choice((-1, VOCAB))
        return dataclasses.replace(answer, tokens=wrong)
    if fault is Fault.MISSING_TOKEN and answer.counts is not None and rng.random() < 0.5:
        return _with_wrong_counts(rng, answer)
    if fault is Fault.MISSING_TOKEN:
        return dataclasses.replace(answer, tokens=tokens[:-1])
    assert fault is Fault.WRONG_ROWS
    if len(rows) and rng.random() < 0.3:
        return dataclasses.replace(answer, rows=rows + np.int32(1))
    if len(rows) and rng.random() < 0.5:
        return _without_first_row(answer)
    more_rows = np.append(rows, np.int32(rows.max() + 1 if len(rows) else 0))
    more = dataclasses.replace(answer, rows=more_rows, tokens=np.append(tokens, np.int32(0)))
    if answer.counts is not None and answer.draft_counts is not None:
        more.counts = np.append(answer.counts, np.int32(1))
        more.draft_counts = np.append(answer.draft_counts, np.int32(0))
    return more


def _without_first_row(answer: ev.StepDone) -> ev.StepDone:
    if answer.counts is None or answer.draft_counts is None:
        return dataclasses.replace(answer, rows=answer.rows[1:], tokens=answer.tokens[1:])
    return dataclasses.replace(
        answer,
        rows=answer.rows[1:],
        tokens=answer.tokens[answer.counts[0] :],
        counts=answer.counts[1:],
        draft_counts=answer.draft_counts[1:],
    )


def _with_wrong_counts(rng: random.Random, answer: ev.StepDone) -> ev.StepDone:
    """Return the result with a row that has more tokens than its drafts allow, or more drafts than planned."""
    assert answer.counts is not None
    assert answer.draft_counts is not None
    at = rng.randrange(len(answer.rows))
    counts, drafts, tokens = answer.counts.copy(), answer.draft_counts.copy(), answer.tokens
    if rng.random() < 0.5:
        drafts[at] = 1 << 20
    else:
        added = int(drafts[at] + 2 - counts[at])
        counts[at] += added
        tokens = np.append(tokens, np.zeros(added, np.int32))
    return dataclasses.replace(answer, tokens=tokens, counts=counts, draft_counts=drafts)


def with_unknown_failure(rng: random.Random, answer: ev.StepDone) -> ev.StepDone:
    """Return the result with the failure of a nonexistent row, which the core must ignore."""
    kind = rng.choice(list(ev.FailureKind))
    made_up = ev.FailedRow(row=rng.choice((-1, 1 << 20)), generation=1, kind=kind, reason="made up")
    return dataclasses.replace(answer, failures=(*answer.failures, made_up))
