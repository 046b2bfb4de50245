"""One sentence on what would have helped a request: a setting or an action, from its largest cause."""

from collections.abc import Callable

from scheduler_svc.explain.accounting import Account, Cause, CauseKind
from scheduler_svc.explain.facts import Life

_ADVICE: dict[CauseKind, str] = {
    CauseKind.FRONT_END: "the front end itself was slow: start more of them (--frontends) or give them more cores",
    CauseKind.TOKENISING: "tokenise on the client and send token ids, or start more front ends (--frontends)",
    CauseKind.GRAMMAR_CHECK: "reuse the same grammar in many requests: a checked one is not checked again",
    CauseKind.QUEUE: (
        "more requests arrive than are served: add a worker, or lower --max-queued-requests so that callers are"
        " refused early; a priority or a deadline lets urgent requests go first"
    ),
    CauseKind.ROWS: "all rows are taken: raise --max-num-seqs if memory allows, or add a worker",
    CauseKind.MEMORY: (
        "KV memory is full: give workers more of it (--kv-cache-memory, --gpu-memory-utilization), add a worker, or"
        " lower the max_tokens of requests"
    ),
    CauseKind.TENANT: (
        "its tenant is at its own limit: raise max_running or tokens_per_s of the tenant in the admission file, or"
        " spread the tenant's requests over time"
    ),
    CauseKind.GRAMMAR: "a new grammar is compiled once per worker: reuse grammars, or make this one simpler",
    CauseKind.PREFIX: (
        "it waited for a prefix that another request computed, which saved computing it twice; nothing to do"
    ),
    CauseKind.BATCH: "the batching mode collects requests: use --batching continuous, or a shorter --max-wait-ms",
    CauseKind.PLACEMENT: "it waited for another worker's plan; if that is frequent, add rows or workers",
    CauseKind.ALONE: "workers died while they computed it, so it runs alone; see the workers' logs for the reason",
    CauseKind.NO_WORKER: "no worker could serve it: start one, or see why none is ready (`quire workers`)",
    CauseKind.STEP_BEFORE: "steps of other requests were long: lower --max-num-batched-tokens for shorter steps",
    CauseKind.OWN_PREFILL: "its own prompt takes this long: send a shorter one, or share a prefix that is cached",
    CauseKind.COLD_PREFIX: (
        "its prefix had been computed before and was gone: give workers more KV memory (--kv-cache-memory), or send"
        " requests with the same prefix close together"
    ),
    CauseKind.OTHER_PROMPTS: (
        "bound other prompts' chunks in each step: set --long-prefill-token-threshold or lower --max-num-batched-tokens"
    ),
    CauseKind.OWN_DECODE: (
        "its own tokens take this long: ask for fewer, or use faster workers; fewer rows per worker (--max-num-seqs)"
        " make each token faster"
    ),
    CauseKind.SLOW_WORKER: (
        "one worker is slower than usual: drain it (`quire drain`) and see what else runs on its machine"
    ),
    CauseKind.SAMPLING: "sampling takes long: penalties, log-probabilities and grammars cost time per token",
    CauseKind.COPIES: "blocks were copied between device and host: give workers more KV memory",
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
    CauseKind.CLIENT: "its client took the answer slowly: read the stream without pauses, from a faster network",
}


def advice(found: Account) -> str:
    """Return what would have helped."""
    if not found.causes:
        return "nothing: it took no time"
    first = found.causes[0]
    special = _SPECIAL.get(first.kind)
    return (special(first, found.life) if special is not None else "") or _ADVICE[first.kind]


def _tenant(cause: Cause, life: Life) -> str:
    which = "tokens_per_s" if any("rate" in detail for detail in cause.details) else "max_running"
    tenant = f"tenant {life.tenant!r}" if life.tenant else "its tenant"
    return f"{tenant} is at its own limit: raise its {which} in the admission file, or spread its requests over time"


def _worker(cause: Cause, life: Life) -> str:
    workers = sorted({step.worker_id for step in life.steps if step.holds(life.key)})
    return f"{' and '.join(workers)} is slower than usual: drain it (`quire drain`) and see what else runs there"


_SPECIAL: dict[CauseKind, Callable[[Cause, Life], str]] = {
    CauseKind.TENANT: _tenant,
    CauseKind.SLOW_WORKER: _worker,
}
