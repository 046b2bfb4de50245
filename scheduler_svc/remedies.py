"""Remedies for each limit of the service, used in explanations of requests and in the present limit.

Each text completes "what helps: …" and names settings or actions.
"""

ROWS = "raise --max-num-seqs or add a worker"
MEMORY = (
    "give workers more KV memory (--kv-cache-memory, --gpu-memory-utilization), add a worker, or lower the max_tokens"
    " of requests"
)
PROMPTS = "bound the chunks of long prompts with --long-prefill-token-threshold, or add a worker"
TURN = (
    "add a worker, or lower --max-queued-requests so that callers are refused early; a priority or a deadline lets"
    " urgent requests go first"
)
DECODE = "add a worker, lower --max-num-seqs, or use faster workers"
CREDIT = "read streams without pauses, or raise --stream-credit"
NO_WORKER = "start a worker, or see why none is ready (`quire workers`, the workers' logs)"
DRAINED = "end the drain of one (`quire drain WORKER --resume`), or start another worker"
GRAMMAR = "reuse grammars, or make them simpler: each new one is compiled once per worker"
BATCH = "use --batching continuous, or a shorter --max-wait-ms"
SESSION = (
    "give workers more KV memory (--kv-cache-memory, --gpu-memory-utilization), add a worker, or set"
    " --session-wait-s 0 if later turns may compute their prefixes again"
)
ALONE = "see the workers' logs: workers died while they computed these requests, so each runs alone"


def tenant(name: str, setting: str) -> str:
    """Return the remedy for a tenant that has reached its limit."""
    whose = f"tenant {name!r}" if name else "the tenant"
    return f"raise {setting} of {whose} in the admission file, or spread its requests over time"
