"""The fixed request lists that every peer serves. Prompts are token ids, and sampling is greedy.

| workload | what | figure |
|---|---|---|
| W1 | 32 requests, 32-256 tokens in, 16-256 out, 16 at once | output tokens/s |
| W2 | one request, 64 in, 128 out | decode tokens/s |
| W3 | 32 requests of 512 shared tokens and 32 of their own, 32 out, 16 at once, nothing cached | output tokens/s |
| W3w | the same with a prefix that was served once before | output tokens/s |
| W4 | 8 requests decode (64 in, 300 out); after 3 s one with 2,048 tokens arrives | largest gap between two tokens |
| D1 | one request, 512 in, 128 out | decode tokens/s |
| D16 | 16 requests at once, 512 in, 192 out | decode tokens/s while all 16 decode |
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path

FIRST_TOKEN = 300
"""Lowest token id that is used; lower ids may be special tokens."""
LONG_ARRIVES_S = 3.0
_WARM_UPS = 4


@dataclass(frozen=True, slots=True)
class PeerRequest:
    """One request. Those marked `prime` are served one after the other before the clock starts."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    arrive_s: float = 0.0
    prime: bool = False


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests and the concurrency limit."""

    name: str
    max_concurrency: int
    requests: tuple[PeerRequest, ...]


def workloads(vocab_size: int, seed: int = 1) -> dict[str, Workload]:
    """Return all workloads by name. The same seed gives the same tokens."""
    rng = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(FIRST_TOKEN, vocab_size) for _ in range(count))

    def sharing(prefix: tuple[int, ...]) -> tuple[PeerRequest, ...]:
        return tuple(PeerRequest(prefix + tokens(32), 32) for _ in range(32))

    offline = tuple(PeerRequest(tokens(rng.randint(32, 256)), rng.randint(16, 256)) for _ in range(32))
    cold, warm = tokens(512), tokens(512)
    decoders = tuple(PeerRequest(tokens(64), 300) for _ in range(8))
    warm_ups = tuple(PeerRequest(tokens(48), 8, prime=True) for _ in range(_WARM_UPS))
    lists = (
        Workload("W1", 16, offline),
        Workload("W2", 1, (PeerRequest(tokens(64), 128),)),
        Workload("W3", 16, sharing(cold)),
        Workload("W3w", 16, (PeerRequest(warm + tokens(32), 4, prime=True), *sharing(warm))),
        Workload("W4", 16, (*decoders, PeerRequest(tokens(2048), 16, arrive_s=LONG_ARRIVES_S))),
        Workload("D1", 1, (PeerRequest(tokens(512), 128),)),
        Workload("D16", 16, tuple(PeerRequest(tokens(512), 192) for _ in range(16))),
    )
    return {each.name: Workload(each.name, each.max_concurrency, warm_ups + each.requests) for each in lists}


def write_jsonl(workload: Workload, path: Path) -> None:
    """Write the requests in the format that `quire bench offline --requests` and the adapters read."""
    lines = (
        json.dumps(
            {
                "prompt_token_ids": request.prompt_token_ids,
                "max_tokens": request.max_tokens,
                "ignore_eos": True,
                "arrive_s": request.arrive_s,
                "prime": request.prime,
            }
        )
        for request in workload.requests
    )
    path.write_text("\n".join(lines) + "\n")
