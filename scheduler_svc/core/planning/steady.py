"""Plans steps in which a worker's decode rows only continue.

Most plans for a busy worker are of this kind. They equal the planner's plans, but take a fraction of its time, because
nothing has to be chosen and unchanged values are known from earlier plans (`steady_rows`).
"""

from scheduler_svc.core.interface.arrays import NO_INDICES, NO_NUMBERS
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.planning.state_saves import kept_states, save_states
from scheduler_svc.core.workers.cost_model import StepShape
from scheduler_svc.core.workers.steps_in_flight import StepInFlight
from scheduler_svc.core.workers.worker import Worker


def plan_steady(worker: Worker, step_deadline_s: float, now: float) -> Plan | None:
    """Plan the next step if its decode rows only continue; return None if the planner must plan it.

    Args:
        worker: a worker whose plan is due, and that no waiting request may join in this plan.
        step_deadline_s: maximum time of a step, s.
        now: the time, s.
    """
    rows, in_flight = worker.rows, worker.in_flight
    decodes = rows.decoding
    if (
        decodes is not worker.decoded_rows
        or worker.prefilling
        or worker.pending_leaves
        or worker.speculation.max_drafts
        or worker.trials.running is not None
        or worker.trials.suspended
        or worker.trials.is_due
        or worker.obstacle is not None
        or (in_flight and in_flight[-1].solo is not None)
    ):
        return None
    num_rows = len(decodes)
    outlook = rows.outlook
    if outlook is None or not outlook.plans_left:
        outlook = rows.look_ahead() if num_rows else None
        if outlook is None:
            return None
    num_needed = outlook.num_needy
    if worker.windows is not None:
        num_needed *= 1 + worker.windows.num_tables  # An upper bound; the planner counts them.
    if num_needed > worker.pool.num_available:
        return None
    if worker.swap.pays and worker.swap.wants_room(worker.pool, outlook.num_needy):
        return None
    needy, blocks, windowed = outlook.next_plan(), NO_INDICES, NO_INDICES
    if len(needy):
        blocks, windowed = worker.grow(needy)
    rows.plan_steady(needy, blocks)
    saves = save_states(worker, needy, [])
    if worker.windows is not None:
        worker.release_passed(needy.tolist())
    steady = rows.steady or rows.gather()
    shape = StepShape(num_rows, 0, worker.decoded(decodes))
    least_s, expected_s, allowance = worker.costs.bounds(shape, step_deadline_s)
    step = worker.last_step = worker.last_step + 1
    worker.last_tokens = num_rows
    if worker.swap.caches:
        worker.swap.step_planned(expected_s, 0, worker.costs.block_copy_s)
    kept_checkpoints, kept_places = kept_states(worker)
    in_flight.append(
        StepInFlight(
            step=step,
            rows=decodes,
            generations=steady.generations,
            draft_limits=None,
            prefilled=[],
            pooled=[],
            shape=shape,
            expected_s=expected_s,
            least_s=least_s,
            started=now,
            successor_due=now + worker.timing.lead(least_s),
            goes_on=True,
            chunk_rows=[],
            chunk_generations=NO_NUMBERS,
            chunk_lengths=[],
            solo=None,
            copy_ids=[],
            allowance=allowance,
        )
    )
    worker.capacity.step_planned()
    counters = worker.counters
    counters.steps += 1
    counters.scheduled_tokens += num_rows
    counters.decode_rows += num_rows
    return Plan(
        worker=worker.peer,
        epoch=worker.epoch,
        step=step,
        leaves=NO_INDICES,
        admissions=(),
        append_rows=needy,
        append_blocks=blocks,
        append_windows=windowed if len(windowed) and windowed.max() >= 0 else NO_INDICES,
        chunk_rows=NO_INDICES,
        chunk_lengths=NO_INDICES,
        holds=NO_INDICES,
        releases=NO_INDICES,
        copy_sources=NO_INDICES,
        copy_targets=NO_INDICES,
        draft_rows=NO_INDICES,
        draft_limits=NO_INDICES,
        save_rows=saves.rows,
        save_lengths=saves.lengths,
        save_checkpoints=saves.checkpoints,
        kept_checkpoints=kept_checkpoints,
        kept_places=kept_places,
        num_decodes=num_rows,
        num_tokens=num_rows,
        traced_rows=steady.traced,
    )
