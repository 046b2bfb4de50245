"""Bugs in memory management: blocks, block tables, computed tokens, shared prefixes, copied parts of blocks."""

import dataclasses
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from checks.planted.bug import bug, wrap
from checks.sim.aims import (
    both,
    with_faults,
    with_few_words,
    with_limits,
    with_state,
    with_swaps,
    with_traffic,
)
from checks.sim.faults import Fault
from scheduler_svc.core.interface.events import WorkerHello
from scheduler_svc.core.memory import token_facts
from scheduler_svc.core.memory.block_pool import BlockPool
from scheduler_svc.core.memory.partial_blocks import PartialBlocks
from scheduler_svc.core.memory.prefix_cache import PrefixCache
from scheduler_svc.core.memory.recency import RecencyQueue
from scheduler_svc.core.memory.swapping import SwapSpace
from scheduler_svc.core.planning.planner import Planner
from scheduler_svc.core.planning.row_failures import judge
from scheduler_svc.core.requests.request import Request
from scheduler_svc.core.workers import cached_prefixes
from scheduler_svc.core.workers.cached_prefixes import CachedPrefixes
from scheduler_svc.core.workers.fleet import Fleet
from scheduler_svc.core.workers.prefix_publisher import PrefixPublisher
from scheduler_svc.core.workers.worker import Worker


@bug("core", "empty")
def leaked_block(patch: pytest.MonkeyPatch) -> None:
    """The last block of a table is not released."""
    wrap(patch, BlockPool, "release", lambda release, self, blocks, **steps: release(self, blocks[:-1], **steps))


@bug("core")
def double_free(patch: pytest.MonkeyPatch) -> None:
    """The blocks of a table are released twice."""

    def twice(release: Any, self: BlockPool, blocks: Any, **steps: int) -> None:
        release(self, blocks, **steps)
        release(self, blocks, **steps)

    wrap(patch, BlockPool, "release", twice)


@bug("kv.reuse")
def freed_too_early(patch: pytest.MonkeyPatch) -> None:
    """A freed block is handed out although a step in flight may write it."""
    wrap(
        patch,
        BlockPool,
        "release",
        lambda release, self, blocks, last_step, answered_step: release(
            self, blocks, last_step=answered_step, answered_step=answered_step
        ),
    )


@bug("kv.reuse", "kv.exclusive", "kv.prefix")
def swapped_too_early(patch: pytest.MonkeyPatch) -> None:
    """Blocks that a plan copies to the host are free before it is answered."""
    wrap(patch, Worker, "_vacate", lambda vacate, self, row, last_step: vacate(self, row, self.answered_step))


@bug("core", "kv.exclusive", "plan.append", "kv.reuse", "kv.capacity")
def swapped_tables(patch: pytest.MonkeyPatch) -> None:
    """Two rows that get a block in the same step get each other's block."""

    def crossed(issue: Any, self: Planner, decodes: Any) -> Any:
        plan = issue(self, decodes)
        return dataclasses.replace(plan, append_rows=plan.append_rows[::-1])

    wrap(patch, Planner, "_issue", crossed)


@bug("kv.prefix", "plan.chunk", "kv.exclusive")
def computed_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """One token more than there is counts as computed."""

    def more(place: Any, self: Planner, *arguments: Any) -> Any:
        placed = place(self, *arguments)
        return dataclasses.replace(placed, num_computed_tokens=placed.num_computed_tokens + 1)

    wrap(patch, Planner, "_place", more)


@bug("prefix.salt")
def key_without_salt(patch: pytest.MonkeyPatch) -> None:
    """Requests of different cache scopes share prefixes."""
    wrap(patch, cached_prefixes, "root_key", lambda root_key, fingerprint, salt: root_key(fingerprint, b""))


@bug("kv.prefix", "core", aim=with_few_words)
def key_without_parent(patch: pytest.MonkeyPatch) -> None:
    """The key of a block depends only on its own tokens."""

    def following(parent: bytes, token_bytes: bytes, block_size: int) -> bytes:
        width = 4 * block_size
        starts = range(0, len(token_bytes) - width + 1, width)
        return b"".join(sha256(token_bytes[start : start + width]).digest() for start in starts)

    patch.setattr(token_facts, "following_keys", following)


@bug("kv.prefix", "prefix.salt", "core")
def cache_keeps_evicted(patch: pytest.MonkeyPatch) -> None:
    """A block that was reassigned to another request is still found under its old key."""

    def evict(evict: Any, self: BlockPool, count: int) -> None:
        forget = self.cache.forget
        self.cache.forget = lambda blocks: blocks  # type: ignore[method-assign]
        evict(self, count)
        self.cache.forget = forget  # type: ignore[method-assign]

    wrap(patch, BlockPool, "_evict", evict)


@bug("kv.prefix", aim=with_limits(prefix_cache="radix"))
def copy_not_sent(patch: pytest.MonkeyPatch) -> None:
    """The matching part of a block counts as computed but is not copied."""
    wrap(
        patch,
        Planner,
        "_issue",
        lambda issue, self, decodes: dataclasses.replace(
            issue(self, decodes), copy_sources=np.zeros(0, np.intp), copy_targets=np.zeros(0, np.intp)
        ),
    )


@bug("kv.prefix", aim=with_limits(prefix_cache="radix"))
def copied_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """A partial copy counts one token too many."""

    def more(find: Any, self: PartialBlocks, before: bytes, tokens: bytes) -> Any:
        match = find(self, before, tokens)
        if match is not None and 4 * match.num_tokens < len(tokens):
            match = match._replace(num_tokens=match.num_tokens + 1)
        return match

    wrap(patch, PartialBlocks, "find", more)


@bug("kv.reuse", "kv.prefix", "plan.copy", aim=with_limits(prefix_cache="radix"))
def source_not_kept(patch: pytest.MonkeyPatch) -> None:
    """The source block of a copy may be reused before the copy is made."""
    patch.setattr(BlockPool, "read", lambda self, blocks, **steps: None)


@bug(
    "kv.spoilt",
    "kv.reuse",
    aim=lambda scenario: with_limits(prefix_cache="radix")(with_faults(Fault.SPOILT_ROW)(scenario)),
)
def unproven_copied(patch: pytest.MonkeyPatch) -> None:
    """Blocks are copied from before a token was sampled from them."""

    def proven(publish: Any, self: PrefixPublisher, row: int, request: Any, blocks: Any, num_computed: int) -> None:
        publish(self, row, request, blocks, num_computed)
        num_full = num_computed // self._rows.block_size
        self._prove(request, blocks[:num_full], num_full * self._rows.block_size)

    wrap(patch, PrefixPublisher, "_publish", proven)


@bug("prefix.salt", aim=with_limits(prefix_cache="radix"))
def copied_across_salts(patch: pytest.MonkeyPatch) -> None:
    """Parts of first blocks are copied across cache scopes."""
    for name in ("match_partial", "prove"):
        wrap(patch, PrefixCache, name, lambda call, self, root, *arguments: call(self, b"", *arguments))


@bug("kv.spoilt", aim=with_faults(Fault.SPOILT_ROW))
def spoilt_is_shared(patch: pytest.MonkeyPatch) -> None:
    """KV of a failed row stays in the prefix cache."""
    patch.setattr(BlockPool, "distrust", lambda self, blocks: None)


@bug("stream.reason", aim=with_faults(Fault.SPOILT_ROW))
def readers_are_blamed(patch: pytest.MonkeyPatch) -> None:
    """A request whose row failed because of another request's KV ends, as if it were the cause."""

    def blaming(*arguments: Any) -> Any:
        verdict = judge(*arguments)
        verdict.ends += verdict.again + verdict.alone
        verdict.again, verdict.alone = [], []
        return verdict

    patch.setattr("scheduler_svc.core.scheduler.judge", blaming)


@bug("plan.pooling")
def mean_begins_in_the_middle(patch: pytest.MonkeyPatch) -> None:
    """A request with mean pooling skips the cached or swapped part of its prompt."""
    patch.setattr(Request, "starts_over", False)

    def from_the_cache(match: Any, self: CachedPrefixes, request: Request) -> Any:
        whole, request.computes_whole_prompt = request.computes_whole_prompt, False
        found = match(self, request)
        request.computes_whole_prompt = whole
        return found

    wrap(patch, CachedPrefixes, "match", from_the_cache)


@bug("state.prefix", aim=both(with_few_words, with_state))
def state_is_shared(patch: pytest.MonkeyPatch) -> None:
    """Requests for a recurrent model skip the cached part of their prompt."""

    def sharing(join: Any, self: Fleet, hello: WorkerHello) -> Any:
        joined = join(self, hello)
        joined.prefixes.enabled = True
        return joined

    wrap(patch, Fleet, "join", sharing)


@bug("state.prefix", aim=both(with_swaps, with_state))
def state_is_swapped(patch: pytest.MonkeyPatch) -> None:
    """Preempted requests of a model with recurrent state continue from their swapped KV."""

    def swapping(join: Any, self: Fleet, hello: WorkerHello) -> Any:
        joined = join(self, hello)
        joined.swap = joined.prefixes._swap = SwapSpace(hello.num_host_blocks)
        return joined

    wrap(patch, Fleet, "join", swapping)


@bug("evict.order", aim=both(with_limits(prefix_cache="hash", num_workers=1), with_faults(), with_traffic(families=4)))
def newest_evicted_first(patch: pytest.MonkeyPatch) -> None:
    """The most recently used blocks are evicted first."""

    def newest(self: RecencyQueue, most: int) -> Any:
        groups = self._groups or self._higher[min(self._higher)]
        number, group = next(reversed(groups.items()))
        return self._present(number, group)[-most:]

    patch.setattr(RecencyQueue, "oldest", newest)
