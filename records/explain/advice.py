"""Derives one sentence, the setting or action that would have helped, from the largest cause that can be avoided."""

from collections.abc import Callable

from records.explain.accounting import Account, Cause, CauseKind
from records.explain.facts import Life
from scheduler_svc import remedies
from scheduler_svc.core.interface.config import PREEMPTIVE_POLICIES

_UNAVOIDABLE = frozenset((CauseKind.LINK, CauseKind.FRONT_END, CauseKind.STEP_BEFORE))
"""Causes that take a few milliseconds in every request."""
_SHORT_S = 0.02
_LEAST_SHARE = 0.1
"""Causes with a smaller share of the total are not worth an advice."""
_ADVICE: dict[CauseKind, str] = {
    CauseKind.FRONT_END: "the front end itself was slow: start more of them (--frontends) or give them more cores",
    CauseKind.TOKENISING: "tokenise on the client and send token ids, or start more front ends (--frontends)",
    CauseKind.GRAMMAR_CHECK: "reuse the same grammar in many requests: a checked one is not checked again",
    CauseKind.QUEUE: f"more requests arrive than are served: {remedies.TURN}",
    CauseKind.ORDER: (
        "later requests were served first by the policy: give this request a higher priority, an earlier deadline or"
        " a smaller expected_output_tokens, or use --policy fcfs"
    ),
    CauseKind.BUDGET: f"other prompts filled the steps: {remedies.PROMPTS}",
    CauseKind.ROWS: f"all rows are taken: {remedies.ROWS}",
    CauseKind.MEMORY: f"KV memory is full: {remedies.MEMORY}",
    CauseKind.TENANT: (
        "its tenant is at its own limit: raise max_running or tokens_per_s of the tenant in the admission file, or"
        " spread the tenant's requests over time"
    ),
    CauseKind.SESSION: f"the working sets of other sessions filled the KV memory: {remedies.SESSION}",
    CauseKind.GRAMMAR: "a new grammar is compiled once per worker: reuse grammars, or make this one simpler",
    CauseKind.PREFIX: "",
    CauseKind.BOUNDARY: "",
    CauseKind.PREFIX_COPY: "its cached prefix had moved to host memory; more KV memory keeps it on the device",
    CauseKind.PREFIX_READ: "its cached prefix had left host memory; more of it (--host-cache) makes reads rarer",
    CauseKind.BATCH: f"the batching mode collects requests: {remedies.BATCH}",
    CauseKind.PLACEMENT: "it waited for another worker's plan; if this happens often, add rows or workers",
    CauseKind.ALONE: "workers died while they computed it, so it runs alone; see the workers' logs for the reason",
    CauseKind.NO_WORKER: f"no worker could serve it: {remedies.NO_WORKER}",
    CauseKind.STEP_BEFORE: f"steps of other requests were long: {remedies.PROMPTS}",
    CauseKind.OWN_PREFILL: "its own prompt takes this long: send a shorter one, or share a prefix that is cached",
    CauseKind.COLD_PREFIX: (
        "its prefix was computed before and evicted: give workers more KV memory (--kv-cache-memory on a CPU) or host"
        " memory (--host-cache), or send requests with the same prefix close together"
    ),
    CauseKind.UNUSABLE_PREFIX: (
        "the first request that diverges from a cached prefix computes it again, and later requests begin where it"
        " diverged: send the first one before the others"
    ),
    CauseKind.OTHER_PROMPTS: (
        "bound other prompts' chunks in each step: set --long-prefill-token-threshold or lower --max-num-batched-tokens"
    ),
    CauseKind.OWN_DECODE: ("its own tokens take this long: request fewer, or use faster workers"),
    CauseKind.NEIGHBOURS: (
        "the other requests in its steps made each token slower: lower --max-num-seqs, or add a worker"
    ),
    CauseKind.SLOW_WORKER: (
        "one worker is slower than usual: drain it (`quire drain`) and see what else runs on its machine"
    ),
    CauseKind.SAMPLING: "sampling takes long: penalties, log-probabilities and grammars cost time per token",
    CauseKind.COPIES: "blocks were copied between device and host: give workers more KV memory",
    CauseKind.WORKER_SILENT: (
        "its worker did nothing for a while, and its process did not end: see what stopped the process, or what else"
        " used its machine; spare workers shorten the wait"
    ),
    CauseKind.SCHEDULER_STALLED: (
        "the scheduler did nothing for a while, and its process did not end: see what stopped the process, or what else"
        " used its machine"
    ),
    CauseKind.SUBMITTED_AGAIN: (
        "its front end and the scheduler lost each other: see the network between them, and the load of the front"
        " end's machine"
    ),
    CauseKind.UNRECORDED: (
        "entries of the record are missing: see the disk of the record (`quire record ls`), and raise --record-bytes"
    ),
    CauseKind.REFUSED: "it was refused: see the message that its client got",
    CauseKind.PREEMPTED: (
        "a more urgent request took its place: give it the same priority or class, raise --preempt-threshold, or give"
        " workers more rows or KV memory"
    ),
    CauseKind.SWAPPED: (
        "its KV was moved to host memory for another request: give workers more KV memory or rows, or give it the"
        " same priority"
    ),
    CauseKind.WORKER_LOST: "its worker was lost: see why that process ended; spare workers shorten the wait",
    CauseKind.SCHEDULER_LOST: "the scheduler ended and was started again: see its log for the reason",
    CauseKind.MOVED: "its worker was drained with --move: drain without it, so that requests finish where they are",
    CauseKind.PREFIX_FAILED: "a row whose KV it shared failed; see the worker's log",
    CauseKind.HELD_CREDIT: "its client read too slowly: read the stream without pauses, or raise --stream-credit",
    CauseKind.HELD_MEMORY: (
        "no block was free for its next token: give workers more KV memory, or use --capacity guaranteed_no_evict"
    ),
    CauseKind.LINK: "time passed between processes: see the load of the scheduler's machine and of the network",
    CauseKind.DETOKENISING: "read token ids instead of text, or start more front ends (--frontends)",
    CauseKind.CLIENT: "its client read the response slowly: read the stream without pauses, from a faster network",
}


def advice(found: Account) -> str:
    """Return what would have helped; empty if no setting or action would have."""
    cause = next((each for each in found.causes if each.kind not in _UNAVOIDABLE or each.seconds >= _SHORT_S), None)
    if cause is None or cause.seconds < _LEAST_SHARE * found.total_s:
        return ""
    special = _SPECIAL.get(cause.kind)
    return (special(cause, found.life) if special is not None else "") or _ADVICE[cause.kind]


def _tenant(cause: Cause, life: Life) -> str:
    which = "tokens_per_s" if any("rate" in detail for detail in cause.details) else "max_running"
    tenant = f"tenant {life.tenant!r}" if life.tenant else "its tenant"
    return f"{tenant} is at its own limit: {remedies.tenant(life.tenant, which)}"


def _worker(cause: Cause, life: Life) -> str:
    workers = sorted({step.worker_id for step in life.steps if step.holds(life.key)})
    return f"{' and '.join(workers)} is slower than usual: drain it (`quire drain`) and see what else runs there"


def _preempted(_cause: Cause, life: Life) -> str:
    """Return advice for a request that was preempted for lack of memory, if the policy preempts only then.

    Empty if a priority may have been the reason.
    """
    if not life.policy or life.policy in PREEMPTIVE_POLICIES:
        return ""
    return (
        "the KV memory was full and it arrived last: give workers more of it (--kv-cache-memory), lower --max-num-seqs,"
        " or use --capacity guaranteed_no_evict"
    )


def _drained(_cause: Cause, life: Life) -> str:
    """Return advice for a request that found only drained workers; empty if that was not the reason."""
    return f"all workers were drained: {remedies.DRAINED}" if life.met_drain else ""


def _refused(_cause: Cause, life: Life) -> str:
    tenant = f"tenant {life.tenant!r}" if life.tenant else "its tenant"
    return {
        "tenant_limit": f"{tenant} is at its own limit: raise its max_queued in the admission file",
        "queue_full": "the queue was full: add a worker, raise --max-queued-requests, or let the client retry later",
        "deadline": "its deadline could not be met: allow more time, or add a worker",
        "no_worker": "no worker could serve it: start one, or see why none is ready (`quire workers`)",
        "shutdown": "the service was shutting down: let the client try again",
    }.get(life.end, "")


def _unusable(_cause: Cause, life: Life) -> str:
    """Return advice for a request that lacked a checkpoint; empty if it lacked a window."""
    if life.lacks_window:
        return ""
    return (
        "its checkpoint was replaced, or it is the first request that diverges there: raise --state-checkpoints if"
        " quire_state_checkpoints_evicted_total grows quickly, or keep replaced states with --host-cache"
    )


_SPECIAL: dict[CauseKind, Callable[[Cause, Life], str]] = {
    CauseKind.TENANT: _tenant,
    CauseKind.SLOW_WORKER: _worker,
    CauseKind.PREEMPTED: _preempted,
    CauseKind.SWAPPED: _preempted,
    CauseKind.REFUSED: _refused,
    CauseKind.NO_WORKER: _drained,
    CauseKind.UNUSABLE_PREFIX: _unusable,
}
