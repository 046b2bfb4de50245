"""An explanation as a page of text and as JSON."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from records.explain.accounting import MAX_NEIGHBOURS, Account, Cause, WorstStep
from records.explain.advice import advice
from records.explain.facts import Life, Step, StreamKey
from records.explain.forecasts import outcomes

_WIDTH = 24
_LEAST_SHOWN_S = 0.00005


def page(found: Account) -> str:
    """Return the explanation as text."""
    life = found.life
    lines = [_headline(found)]
    if limit := _reuse_limit(life):
        lines.append(f"{limit}.")
    lines.append("")
    for cause in _shown(found.causes):
        share = cause.seconds / found.total_s if found.total_s else 0.0
        bar = "#" * max(1, round(share * _WIDTH))
        lines.append(f"  {seconds_text(cause.seconds):>10}  {share:>5.1%}  {bar:<{_WIDTH}}  {cause.kind.value}")
        lines += [f"{'':>23}{detail}" for detail in _details(cause, life)]
    if found.worst is not None:
        lines += ["", *_worst(found.worst, life)]
    lines += _forecasts(life)
    helps = advice(found)
    lines += ["", f"What would have helped: {helps}." if helps else "No setting would have made it faster."]
    if found.error_s is not None:
        lines.append(
            f"The link time is divided between both directions with an error of at most {seconds_text(found.error_s)}."
        )
    else:
        lines.append("The front end has not reported on this call, so its part of the time is missing.")
    return "\n".join(lines) + "\n"


def _shown(causes: Sequence[Cause]) -> Sequence[Cause]:
    """Return the causes that are not printed as 0.0 ms; all causes if there are no others."""
    return [cause for cause in causes if cause.seconds >= _LEAST_SHOWN_S] or causes


def as_json(found: Account) -> dict[str, Any]:
    """Return the explanation as a JSON object."""
    life, worst = found.life, found.worst
    return {
        "request_id": life.request_id,
        "choice": life.choice,
        "live": life.until is not None and not life.is_cut,
        "tenant": life.tenant,
        "prompt_tokens": life.num_prompt_tokens,
        "cached_prompt_tokens": life.num_cached_tokens,
        "restored_prompt_tokens": life.num_restored_tokens,
        "loaded_prompt_tokens": life.num_loaded_tokens,
        "unusable_prompt_tokens": life.num_unusable_tokens,
        "prefix_reuse_limit": _reuse_limit(life),
        "completion_tokens": life.num_generated,
        "draft_tokens": life.num_drafted,
        "accepted_draft_tokens": life.num_accepted,
        "energy_j": life.energy_j or None,
        "total_s": found.total_s,
        "link_error_s": found.error_s,
        "causes": [
            {
                "cause": cause.kind.value,
                "seconds": cause.seconds,
                "details": cause.details,
                "requests": [life.name(key) for key, _ in cause.by.most_common(MAX_NEIGHBOURS)],
            }
            for cause in found.causes
        ],
        "worst_step": None
        if worst is None
        else {"seconds": worst.seconds, "num_neighbours": worst.num_neighbours, **step_json(worst.step, life.names)},
        "forecasts": [
            {"of": each.of, "median_s": each.median, "p90_s": each.p90, "real_s": real_s}
            for each, real_s in outcomes(life)
        ],
        "would_have_helped": advice(found),
    }


def step_json(step: Step, names: Mapping[StreamKey, str]) -> dict[str, Any]:
    """Return a step as a JSON object; `names` has the request ids."""

    def name(key: StreamKey) -> str:
        return names.get(key, f"stream {key.stream}")

    return {
        "worker": step.worker_id,
        "step": step.number,
        "tokens": step.num_tokens,
        "decodes": [name(key) for key in sorted(step.decodes)],
        "chunks": {name(key): tokens for key, tokens in step.chunks.items()},
        "swapped_blocks": step.swapped_blocks,
        "plan_to_answer_s": step.answered - step.planned,
        "prepare_s": step.prepare_s,
        "forward_s": step.forward_s,
        "sample_s": step.sample_s,
        "copy_s": step.copy_s,
        "idle_before_s": step.idle_s,
    }


def step_page(step: Step, names: Mapping[StreamKey, str]) -> str:
    values = step_json(step, names)
    lines = [
        f"step {step.number} of {step.worker_id}: {step.num_tokens} tokens,"
        f" {seconds_text(step.answered - step.planned)} from plan to answer",
        f"  idle before {seconds_text(step.idle_s)}, prepare {seconds_text(step.prepare_s)},"
        f" copies {seconds_text(step.copy_s)} ({step.swapped_blocks} blocks),"
        f" forward {seconds_text(step.forward_s)}, sample {seconds_text(step.sample_s)}",
    ]
    for name, tokens in values["chunks"].items():
        lines.append(f"  {tokens:>6} tokens of the prompt of {name}")
    lines += [f"  {1:>6} token of {name}" for name in values["decodes"]]
    return "\n".join(lines) + "\n"


def _headline(found: Account) -> str:
    life = found.life
    so_far = " so far" if life.until is not None else ""
    copied = f", {life.num_restored_tokens} of them copied from host memory" if life.num_restored_tokens else ""
    if life.num_loaded_tokens:
        copied += f" after {life.num_loaded_tokens} were read from disk"
    cached = f" ({life.num_cached_tokens} cached{copied})" if life.num_cached_tokens else ""
    ended = "" if life.until is not None else f", {life.notes[-1].text}"
    if life.is_cut:
        ended = ", how it ended is not recorded"
    prompt = f"prompt of {life.num_prompt_tokens} tokens{cached}"
    drafts = f", {life.num_accepted} of {life.num_drafted} drafts accepted" if life.num_drafted else ""
    energy = f", {life.energy_j:.3g} J" if life.energy_j else ""
    choice = "" if life.choice is None else f", choice {life.choice}"
    return f"{life.request_id}{choice}: {seconds_text(found.total_s)}{so_far}; {prompt}{drafts}{energy}{ended}"


def _reuse_limit(life: Life) -> str:
    """Return what limited the reuse of a cached prefix; empty if nothing did."""
    if not life.num_unusable_tokens:
        return ""
    num_cached = life.num_cached_tokens + life.num_unusable_tokens
    used, which = (f"only {life.num_cached_tokens}", "the others") if life.num_cached_tokens else ("none", "them")
    missing = "the last window of" if life.lacks_window else "a checkpoint of the state after"
    return f"{num_cached} prompt tokens were cached, but {used} could be used, because {missing} {which} was missing"


def _details(cause: Cause, life: Life) -> list[str]:
    lines = list(cause.details[:MAX_NEIGHBOURS])
    if cause.by:
        names = [life.name(key) for key, _ in cause.by.most_common(MAX_NEIGHBOURS)]
        more = len(cause.by) - len(names)
        lines.append(f"requests: {_listed(names, more)}")
    return lines


def _forecasts(life: Life) -> list[str]:
    found = outcomes(life)
    if not found:
        return []
    lines = ["", "Forecast when it arrived at the scheduler:"]
    for each, real_s in found:
        real = "not yet" if real_s is None else f"really {seconds_text(real_s)}"
        lines.append(
            f"  {each.of:<12} within {seconds_text(each.median)} (median), {seconds_text(each.p90)} (90 %); {real}"
        )
    return lines


def _worst(worst: WorstStep, life: Life) -> list[str]:
    step = worst.step
    lines = [
        f"Longest wait for a step: {seconds_text(worst.seconds)}, step {step.number} of {step.worker_id}"
        f" ({step.num_tokens} tokens; forward {seconds_text(step.forward_s)})"
    ]
    if worst.neighbours:
        names = [
            f"{life.name(key)} ({tokens} prompt tokens)" if key in step.chunks else life.name(key)
            for key, tokens in worst.neighbours
        ]
        more = worst.num_neighbours - len(names)
        lines.append(f"  with {_listed(names, more)}")
    return lines


def _listed(names: list[str], more: int) -> str:
    """Return names as text. A name shared by several choices appears once, with the choice numbers."""
    found = [name if count == 1 else f"{name} ({count} choices)" for name, count in Counter(names).items()]
    return ", ".join(found) + (f" and {more} more" if more else "")


def seconds_text(seconds: float) -> str:
    """Return a duration as text, in s or ms."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"
