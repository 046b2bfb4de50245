"""The result of a simulation as text: one line on success, and all details about a failure."""

from checks.sim.simulation import Result
from scheduler_svc.core.interface.effects import Effect
from scheduler_svc.core.interface.events import Event
from scheduler_svc.core.interface.plan import Plan


def render(result: Result, steps: int) -> str:
    """Return the result of one simulation with `steps` steps."""
    failure = result.failure
    if failure is None:
        return f"ok seed={result.seed} events={result.num_events}"
    lines = [
        f"failed seed={result.seed} events={result.num_events}",
        f"violated: {failure.check}: {failure.detail}",
        f"with event {failure.num_events}: {failure.event}",
        f"replay: quire sim --seed {result.seed} --steps {steps}",
    ]
    if failure.request is not None:
        frontend, stream = failure.request
        lines.append(f"story of stream {stream} of {frontend.decode(errors='replace')}:")
        lines += [f"  {time:12.6f}  {what}" for time, what in failure.story]
    if failure.trace:
        lines.append(failure.trace.rstrip())
    return "\n".join(lines)


def line(time: float, what: Event | Effect | Plan) -> str:
    """Return one line of a log: `>` an event, `<` an effect, `=` a plan."""
    if isinstance(what, Plan):
        return f"{time:12.6f} = {_plan(what)}"
    mark = ">" if isinstance(what, Event) else "<"
    return f"{time:12.6f} {mark} {what}".replace("\n", "")


def _plan(plan: Plan) -> str:
    admissions = [
        f"row {a.row}.{a.generation} stream {a.stream} tokens {len(a.token_ids)} computed {a.num_computed_tokens}"
        f" blocks {a.blocks.tolist()}"
        for a in plan.admissions
    ]
    appends = dict(zip(plan.append_rows.tolist(), plan.append_blocks.tolist(), strict=True))
    chunks = dict(zip(plan.chunk_rows.tolist(), plan.chunk_lengths.tolist(), strict=True))
    return (
        f"{plan.worker.decode()} step {plan.step} leaves {plan.leaves.tolist()} admissions {admissions}"
        f" appends {appends} chunks {chunks} holds {plan.holds.tolist()} releases {plan.releases.tolist()}"
        f" out {[copy.copy_id for copy in plan.swap_outs]} in {[copy.copy_id for copy in plan.swap_ins]}"
        f" decodes {plan.num_decodes} tokens {plan.num_tokens}"
    )
