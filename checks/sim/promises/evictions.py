"""Which cached blocks are retained when memory is needed."""

import math
from collections import Counter
from collections.abc import Callable

import numpy as np

from checks.sim.coverage import Limit
from checks.sim.promises.base import Promise, Watched
from checks.sim.sites import Epoch
from checks.sim.stream import Stream, prefix_hashes
from records.rules.violation import StreamName, ViolationError
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.interface.records import EndReason
from scheduler_svc.core.lifecycle.tables import FREE_STATE

_RETAINING = (EndReason.STOP, EndReason.STOP_STRING, EndReason.LENGTH)
_UNKNOWN = -1
"""Hash of an unknown text. It may be retained for ever."""
_MOST_TENANTS = 2
"""Number of tenants that can retain one block at the same time."""
_APART = 2
"""Tolerance in steps, because the exact time at which a block becomes unused is not visible."""


class _Blocks:
    """One worker's blocks in one epoch; times are step numbers."""

    def __init__(self) -> None:
        self.tables: dict[int, list[int]] = {}
        """Blocks by row."""
        self.holders: Counter[int] = Counter()
        self.unused_since: dict[int, int] = {}
        """For each block without a row, the step in which the last row left it."""
        self.shared: set[int] = set()
        """Blocks that were found in the cache and not reassigned to a row for writing since."""
        self.before: dict[int, int] = {}
        """For each shared block, the previous block in the sequence, without which it cannot be found."""
        self.texts: dict[int, int] = {}
        """By shared block, the hash of the tokens up to its end."""
        self.retained: dict[int, float] = {}
        """Shared blocks that are certainly retained, with the time at which the retention ends."""
        self.newest_evicted = 0
        """The latest time since which an evicted block had been unused. Retained blocks do not count."""
        self.evictions: list[tuple[int, int]] = []
        """Step of each eviction, and this time."""
        self.newest_retained_evicted = 0
        """The latest step in which a certainly retained block was evicted."""
        self.times: list[tuple[float, int]] = []
        """Time and step of each plan."""

    def leave(self, row: int, step: int) -> None:
        """Record that a row has ended."""
        for block in self.tables.pop(row):
            self.holders[block] -= 1
            if not self.holders[block]:
                self.unused_since[block] = step

    def find(self, block: int, before: int | None, text: int) -> int | None:
        """Record that a row shares a block found after `before`; return the step since which the block was unused."""
        self.holders[block] += 1
        self.shared.add(block)
        self.texts[block] = text
        if before is not None:
            self.before[block] = before
        return self.unused_since.pop(block, None)

    def write(self, blocks: list[int], is_retained: Callable[[int], bool]) -> None:
        """Record that rows got blocks to write; `is_retained` says for a text whether it may be retained."""
        self.evicted([block for block in blocks if block in self.shared], is_retained)
        for block in blocks:
            self.holders[block] += 1
            self.unused_since.pop(block, None)

    def evicted(self, evicted: list[int], is_retained: Callable[[int], bool]) -> None:
        """Record that shared blocks were evicted before or with the newest plan."""
        now, step = self.times[-1]
        for block in evicted:
            if self.retained.get(block, 0.0) > now:
                self.newest_retained_evicted = step
            if not is_retained(self.texts[block]):
                self.evictions.append((step, self._found_until(block)))
                self.newest_evicted = max(self.newest_evicted, self.evictions[-1][1])
        for block in evicted:
            self._lost(block)

    def newest_evicted_after(self, time: float) -> int:
        """Like `newest_evicted`, but only for evictions in plans that were certainly made after this time."""
        step = next((step for now, step in reversed(self.times) if now < time), 0) + 1 + _APART
        return max((since for at, since in self.evictions if at > step), default=0)

    def _found_until(self, block: int) -> int:
        """Return the step since which a block, or one before it, has been unused.

        A block is evicted together with the first block before it. A row that was not permitted to share the preceding
        blocks has copies of them, so these blocks may have been unused for longer.
        """
        since, before = self.unused_since.get(block, 0), self.before.get(block)
        while before is not None:
            since = min(since, self.unused_since.get(before, since))
            before = self.before.get(before)
        return since

    def _lost(self, block: int) -> None:
        """Record that a block, and the blocks found only through it, are not in the cache."""
        lost = [block]
        for each in lost:
            self.shared.discard(each)
            self.before.pop(each, None)
            self.retained.pop(each, None)
            lost += [after for after, before in self.before.items() if before == each]


class LeastRecentlyUsedGoFirst(Promise):
    """No block that is found in the cache was unused for longer than an evicted one, except for retained blocks.

    No retained block was evicted while another one was in the cache that is not retained. When the retention has ended,
    with its time or with its session, the block is evicted like the others.

    Failed rows and swapped-out KV remove blocks from the cache for other reasons. The check therefore covers only
    workers without host memory, until their first row failure. Retention is only checked with one worker. A block is
    surely retained only if at most two tenants have asked for it, if all tenants together do not retain more than the
    share, and if a row still held the block when the retention began.
    """

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        scenario = self.world.scenario
        # With recurrent state or windows, a block is found only through a boundary, which may be evicted before it.
        has_boundaries = scenario.state_bytes or scenario.windows.num_groups > 1
        self._applies = scenario.shares_prefixes and not has_boundaries and self.config.prefix_cache == "hash"
        self._has_hints = scenario.traffic.retained > 0
        self._tables = watched.tables
        self._wanted: dict[int, float] = {}
        """By hash of a text, the time until which a request wanted to retain its KV."""
        self._tenants: dict[int, set[str]] = {}
        """By hash of a text, the tenants that have ever wanted to retain its KV."""
        self._sessions: dict[int, set[tuple[str, bytes, bytes] | None]] = {}
        """By hash of a text, the sessions of the requests that have wanted this since the last of them ended."""
        self._blocks: dict[Epoch, _Blocks] = {}

    def ended(self, stream: Stream) -> None:
        if stream.end not in _RETAINING:
            return
        now, demand = self.world.now, stream.demand
        session = (demand.tenant, demand.salt, demand.session) if demand.session else None
        if demand.ends_session and session is not None:
            self._session_ended(session, now)
        if not demand.retention_s:
            return
        texts = prefix_hashes(stream.first_tokens(stream.num_known), demand.salt)
        self._wanted[_UNKNOWN] = math.inf
        for text in texts:
            self._wanted[text] = max(self._wanted.get(text, 0.0), now + demand.retention_s)
            self._tenants.setdefault(text, set()).add(demand.tenant)
            self._sessions.setdefault(text, set()).add(session)
        for epoch, blocks in self._blocks.items():
            size, most = epoch.model.block_size, int(self.config.retention_share * epoch.model.num_blocks)
            num_wanted = sum(until > now for until in self._wanted.values())
            if num_wanted // size > most or self.config.max_tokens_in_paged_kv_cache:
                blocks.retained.clear()
                continue
            ours = set(texts)
            for block in blocks.shared:
                if (text := blocks.texts[block]) not in ours:
                    continue
                if len(self._tenants[text]) > _MOST_TENANTS:
                    blocks.retained.pop(block, None)
                elif blocks.holders[block] and stream.end is not EndReason.STOP_STRING:
                    blocks.retained[block] = max(blocks.retained.get(block, 0.0), now + demand.retention_s)

    def _session_ended(self, session: tuple[str, bytes, bytes], now: float) -> None:
        """Record that the retention by a session has ended, for texts that no other request wanted to retain."""
        ended = [text for text, sessions in self._sessions.items() if session in sessions]
        for text in ended:
            if self._sessions[text] == {session}:
                self._wanted[text] = min(self._wanted[text], now)
                del self._sessions[text]
        gone = set(ended)
        for blocks in self._blocks.values():
            blocks.retained = {
                block: until for block, until in blocks.retained.items() if blocks.texts[block] not in gone
            }

    def plan_made(self, plan: Plan, epoch: Epoch) -> None:
        if not self._applies or epoch.failed or epoch.model.num_host_blocks:
            return
        blocks = self._blocks.get(epoch)
        if blocks is None:
            for other in [each for each in self._blocks if each.is_lost]:
                del self._blocks[other]
            blocks = self._blocks[epoch] = _Blocks()
        blocks.times.append((self.world.now, plan.step))
        for row in plan.leaves.tolist():
            blocks.leave(row, plan.step)
        is_alone = self._has_hints and len(self.cluster.epochs) == 1
        newest_evicted, newest_retained_evicted = blocks.newest_evicted, blocks.newest_retained_evicted
        for admission in plan.admissions:
            name = StreamName(admission.frontend, admission.stream)
            table: list[int] = admission.blocks.tolist()
            num_shared = admission.num_computed_tokens // epoch.model.block_size
            blocks.tables[admission.row] = table
            texts = self._texts(name, num_shared, epoch.model.block_size)
            for before, block, text in zip([None, *table], table[:num_shared], texts, strict=False):
                since = blocks.find(block, before, text)
                if since is None:
                    continue
                until, newest = self._wanted.get(text), newest_evicted
                is_over = until is not None and until <= self.world.now
                if until is not None:
                    newest = blocks.newest_evicted_after(until) if is_over and is_alone else 0
                    if newest_evicted:
                        self.seen(Limit.RETENTION_ENDED if is_over else Limit.RETAINED)
                elif newest_evicted:
                    self.seen(Limit.FOUND_AFTER_EVICTION)
                if since + _APART <= newest:
                    what = f"block {block}, unused since step {since}, is found; one of step {newest} is gone"
                    raise ViolationError("evict.order" if until is None else "retain.end", what, name)
                if is_alone and until is None and since + _APART <= newest_retained_evicted:
                    what = f"block {block}, unused since step {since}, is found; a retained one was evicted in step"
                    raise ViolationError("retain.order", f"{what} {newest_retained_evicted}", name)
            # A later admission of this plan may already share these blocks, with their new content.
            blocks.write(table[num_shared:], self._wanted.__contains__)
        given: list[int] = []
        for row, block in zip(plan.append_rows.tolist(), plan.append_blocks.tolist(), strict=True):
            blocks.tables[row].append(block)
            given.append(block)
        # A block shared in this plan is not evicted by the same plan.
        blocks.write(given, self._wanted.__contains__)
        if is_alone:
            # Blocks that were evicted in advance, after the plan was made.
            (device,) = [each.device for each in self._tables().block_maps]
            free = set(np.flatnonzero(device.cells() == FREE_STATE).tolist())
            blocks.evicted(sorted(free & blocks.shared), self._wanted.__contains__)

    def _texts(self, name: StreamName, num_shared: int, size: int) -> list[int]:
        """Return the hashes of the texts of a stream's first blocks; all 0 if no request retains anything."""
        if not self._has_hints or not num_shared:
            return [0] * num_shared
        stream = self.clients.live.get(name)
        if stream is None:
            return [_UNKNOWN] * num_shared
        return prefix_hashes(stream.first_tokens(num_shared * size), stream.demand.salt)[size - 1 :: size]
