"""Sessions: conversations whose turns extend each other, recognised by the keys of their blocks.

A request that extends the whole sequence of an earlier one, prompt and answer, continues its session. The key of the
last full block of that sequence, the *tail*, identifies it, also by cache scope. Chat templates may drop the reasoning
from earlier answers, and answers may be shorter than a block. Therefore a longer prompt with the last full block of the
earlier prompt, the *stem*, continues the session, too, unless other sessions had this block before. The last tokens of
a prompt do not count, because they may only open the answer. Clients do nothing for this.

A client may name a session instead. Then its prompts need not extend each other. A name is valid within a tenant and a
cache scope. A client may also announce the pause after a turn, which then replaces the mean pause for this session.

Each request has a slot in a table from its arrival on, and while its session pauses after it. The table has a fixed
size. If it is full, the session that has paused longest is dropped. A tenant with a quarter of the table drops its own.

Chances of return, pauses and growth are learned by tenant and first block, and by tenant. The chance depends on the
turn. A session counts as ended when it has paused for twice the mean pause. If it returns, this is corrected.
"""

import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from scheduler_svc.core.interface.arrays import Float64Array
from scheduler_svc.core.requests.request import Request
from shared.prefix_keys import KEY_BYTES, BlockKey

MAX_SESSIONS = 4096
"""Maximum number of sessions in the table."""
TURNS_AHEAD = np.array([*range(13), 14, 16, 20, 24, 32, 48], np.float64)
"""Turns ahead at which the demand is computed."""
OPENING = 16
"""Number of tokens at the end of a prompt that may only open the answer, so that the next prompt lacks them."""
_TENANT_PART = 4
"""A tenant with this part of the table drops its own sessions if the table is full."""
MIN_FIRST_TURNS = 4
"""Number of first turns after which what was learned about them is used."""
_MAX_KINDS = 1024
"""Maximum number of kinds of sessions. The least recently used one is dropped."""
_NUM_STAGES = 8
"""Stages of a session: turns 1, 2, 3 to 4, 5 to 8, and so on."""
_MAX_EVENTS = 64.0
"""Number of returns and ends per stage after which both counts are halved, so that recent ones count more."""
_MAX_TURNS = 64.0
"""Upper bound on the expected number of further turns."""
_UNKNOWN_PAUSE_S = 60.0
"""Pause after which a session counts as ended before any pause of its kind is known or announced, s."""
_LONGEST_PAUSE_S = 600.0
"""Longer pauses count as this one in the mean, s."""
_PAUSES = 2.0
"""Number of mean pauses after which a session counts as ended."""
_REVIEW_S = 0.25
"""Time between two searches for sessions that have ended, s."""
SessionName = tuple[str, bytes, bytes]
"""Tenant, cache scope, and the client's name for the session."""
_OWN, _SHARED, _GROWTH, _AHEAD, _CHANCE, _PAUSE, _SINCE, _DUE, _STATE, _TENANT = range(10)
"""Columns of the table: own tokens, tokens shared when it began, growth per turn in tokens, expected further turns,
chance of another turn, announced or mean pause in s, start of the pause in s, time at which it counts as ended in s,
state, number of the tenant.
"""
_FREE, _PAUSING, _ACTIVE, _AT_GATE = 0.0, 1.0, 2.0, 3.0
"""Values of the column `_STATE`."""
_STATES = ("", "pausing", "active", "waiting")
"""Their names in views."""


@dataclass(slots=True)
class PauseCounters:
    """Pauses that ended with a return, if the session's kind had returned before; sums in seconds."""

    count: int = 0
    expected_s: float = 0.0
    actual_s: float = 0.0
    error_s: float = 0.0
    """Sum of the absolute differences between both."""


class ShownSession(NamedTuple):
    """A session in a view for operators."""

    number: int
    tenant: str
    name: str
    """The client's name for it; empty if it has none."""
    state: str
    """"active", "waiting" (for memory, before its first turn) or "pausing"."""
    turn: int
    num_tokens: int
    """Tokens of its sequence."""
    since: float
    """Core time at which the state began or, if it is active, at which the turn arrived, s."""
    pause_s: float
    """Announced or learned pause, s; 0 if neither is known."""
    end: BlockKey
    """Key of the last block that the next turn certainly repeats; empty while no block is certain."""
    place: tuple[int, int] | None
    """Epoch of the worker that had this block on the device after the last turn, and the block."""


class WindowNeed(NamedTuple):
    """Memory for the windows of one session, in addition to the blocks of its sequence."""

    num_tables: int = 0
    """Number of KV groups with a window."""
    active: int = 0
    """Maximum number of tokens per group while a request of the session runs."""
    pausing: int = 0
    """The same for the end of its sequence, after which the next turn continues."""


NO_WINDOWS = WindowNeed()


class Turn(NamedTuple):
    """A later turn of a session."""

    number: int
    """2 for the second turn."""
    pause_s: float
    """Time since the end of the turn before, s; 0 if that one has not ended."""
    known: int
    """Leading tokens that it shares with the turn before, as far as known."""

    def text(self, num_cached: int) -> str:
        """Return a line for the request's history; `num_cached` of its tokens are cached."""
        line = f"turn {self.number} of its session, after a pause of {self.pause_s:.1f} s"
        if not self.known:
            return line
        usable = min(num_cached, self.known)
        return f"{line}; on arrival, {usable} of the {self.known} tokens that it repeats could be reused"


class Habits:
    """What was learned about the sessions of one kind."""

    __slots__ = ("growth", "left", "num_returns", "pause_s", "returned")

    def __init__(self) -> None:
        self.returned = [0.0] * _NUM_STAGES
        self.left = [0.0] * _NUM_STAGES
        self.num_returns = 0
        self.pause_s = 0.0
        """Mean pause before a return, s."""
        self.growth = 0.0
        """Mean growth of the prompt from turn to turn, tokens."""

    def has_returned(self, turn: int, pause_s: float, growth: float) -> None:
        """Record a return after a turn."""
        self.num_returns += 1
        weight = 1.0 / min(self.num_returns, _MAX_EVENTS)
        self.pause_s += weight * (min(pause_s, _LONGEST_PAUSE_S) - self.pause_s)
        self.growth += weight * (growth - self.growth)
        self._count(self.returned, turn)

    def has_left(self, turn: int) -> None:
        """Record that a session has ended after a turn."""
        self._count(self.left, turn)

    def came_back(self, turn: int) -> None:
        """Correct an end: the session has returned after all."""
        stage = _stage(turn)
        self.left[stage] = max(0.0, self.left[stage] - 1.0)

    def chance(self, turn: int) -> float:
        """Return the chance that another turn follows this one."""
        return self._chance(_stage(turn))

    def turns_ahead(self, turn: int) -> float:
        """Return the expected number of turns that follow this one."""
        ahead, survive = 0.0, 1.0
        for stage in range(_stage(turn), _NUM_STAGES):
            chance = self._chance(stage)
            last = 1 << stage
            num_turns = last - turn + 1 if stage < _NUM_STAGES - 1 else _MAX_TURNS
            stay = chance**num_turns
            ahead += survive * chance * (1.0 - stay) / (1.0 - chance)
            survive *= stay
            turn = last + 1
            if survive < 0.01 or ahead >= _MAX_TURNS:
                break
        return min(_MAX_TURNS, ahead)

    def _chance(self, stage: int) -> float:
        """Return the chance of another turn in a stage. Without events it is 0 in the first stage, a half in others."""
        returned = self.returned[stage]
        return (returned + (0.5 if stage else 0.0)) / (returned + self.left[stage] + 1.0)

    def _count(self, counts: list[float], turn: int) -> None:
        stage = _stage(turn)
        counts[stage] += 1.0
        if self.returned[stage] + self.left[stage] > _MAX_EVENTS:
            self.returned[stage] /= 2.0
            self.left[stage] /= 2.0


class _Session:
    """The parts of a slot that are not in the table."""

    __slots__ = (
        "branch_of", "has_left", "is_over", "kinds", "knows_pause", "length", "name", "number", "place", "prompt",
        "shared", "stem", "stem_length", "tail", "tenant", "total", "turn",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        tenant: str,
        kinds: tuple[Habits, ...],
        turn: int,
        prompt: int,
        shared: int,
        name: SessionName | None,
    ) -> None:
        self.number = number
        self.tenant = tenant
        self.place: tuple[int, int] | None = None
        """Epoch of a worker and device block, where the end of the sequence was after the last turn."""
        self.kinds = kinds
        """What is known about sessions like this one, most specific first."""
        self.turn = turn
        self.prompt = prompt
        """Prompt tokens of the last turn."""
        self.shared = shared
        """Leading tokens that were cached when the session began."""
        self.total = 0
        """Tokens after the last turn."""
        self.tail: BlockKey = b""
        self.length = 0
        """Tokens up to the end of the tail."""
        self.stem: BlockKey = b""
        self.stem_length = 0
        """Tokens up to the end of the stem."""
        self.name = name
        self.branch_of: SessionName | None = None
        """The name of the session whose turn ran concurrently with the first one of this session."""
        self.has_left = False
        self.knows_pause = False
        """Whether the pause in the table is announced or learned, and not a default."""
        self.is_over = False
        """Whether a concurrent turn has ended the session; it is dropped when its own turn ends."""

    @property
    def habits(self) -> Habits:
        """The most specific kind with enough first turns, or the most general one."""
        for kind in self.kinds:
            if kind.returned[0] + kind.left[0] >= MIN_FIRST_TURNS:
                return kind
        return self.kinds[-1]


class Sessions:
    """The sessions of one core."""

    def __init__(self) -> None:
        """Start without sessions."""
        self._kinds: OrderedDict[tuple[str, bytes], tuple[Habits, ...]] = OrderedDict()
        """By tenant and first block, most specific first; with an empty key for the tenant alone."""
        self._sessions: list[_Session | None] = []
        """By slot."""
        self._table = np.zeros((64, 10))
        """By slot, see `_OWN` and the following columns."""
        self._free: list[int] = []
        self._pausing: OrderedDict[int, None] = OrderedDict()
        """Slots of pausing sessions, the longest pause first."""
        self._pausing_of: dict[int, OrderedDict[int, None]] = {}
        """The same by number of the tenant; tenants without pausing sessions have no entry."""
        self._tails: dict[BlockKey, int] = {}
        """Slots by the tail of their sequence."""
        self._stems: dict[BlockKey, int] = {}
        """Slots by the stem of their sequence; the newest if several sequences have the same."""
        self._named: dict[SessionName, int] = {}
        """Slots by name."""
        self._branches: dict[SessionName, list[int]] = {}
        """Slots by the name of the session that they are branches of; names without branches have no entry."""
        self._lengths: Counter[int] = Counter()
        """Number of tails and stems by the number of tokens up to their end."""
        self._reviewed = 0.0
        self._next_number = 1
        self.num_later_turns = 0
        """Number of requests that continued a session."""
        self.pauses = PauseCounters()
        self.num_lost_tokens = 0
        """Tokens that such requests repeated, but that were not cached when they were admitted."""

    @property
    def num_active(self) -> int:
        """Number of sessions with a request that has passed the gate."""
        return int(np.count_nonzero(self._table[:, _STATE] == _ACTIVE))

    @property
    def num_pausing(self) -> int:
        """Number of sessions that pause and have not paused for so long that they count as ended."""
        return int(np.count_nonzero((self._table[:, _STATE] == _PAUSING) & np.isfinite(self._table[:, _DUE])))

    # ---------------------------------------------------------------- life of a session

    def arrived(self, request: Request, now: float) -> Turn | None:
        """Assign a new request to the session that it continues, or to a new one; return a later turn."""
        kinds = self._kinds_of(request)
        named = self._named.get(name) if (name := session_name(request)) is not None else None
        slot, known = self._find(request, can_return=named is not None or kinds[-1].num_returns > 0) or (-1, 0)
        if named is not None:
            slot = named
        if slot < 0:
            self._begin(request, kinds, now, 1, name)
            return None
        session = self._session(slot)
        if self._table[slot, _STATE] == _AT_GATE:
            # The session has not started yet. Another request with its name is a first turn, too.
            self._begin(request, kinds, now, session.turn, None)
            return None
        self.num_later_turns += 1
        request.repeated_tokens = known
        if self._table[slot, _STATE] != _PAUSING:
            # Two requests continue one sequence. The second is a branch with its own session.
            self._begin(request, kinds, now, session.turn + 1, None)
            if name is not None and request.session >= 0:
                self._session(request.session).branch_of = name
                self._branches.setdefault(name, []).append(request.session)
            return Turn(session.turn + 1, 0.0, known)
        pause_s = now - float(self._table[slot, _SINCE])
        if session.knows_pause:
            expected_s = float(self._table[slot, _PAUSE])
            self.pauses.count += 1
            self.pauses.expected_s += expected_s
            self.pauses.actual_s += pause_s
            self.pauses.error_s += abs(pause_s - expected_s)
        for kind in session.kinds:
            if session.has_left:
                kind.came_back(session.turn)
            kind.has_returned(session.turn, pause_s, max(0, len(request.tokens) - session.prompt))
        session.has_left = False
        session.turn += 1
        if name is not None and session.name is None:
            session.name = name
            self._named[name] = slot
        session.prompt = len(request.tokens)
        self._resume(slot)
        request.session = slot
        self._write(slot, session, request, _ACTIVE, now, self._tenant(slot))
        return Turn(session.turn, pause_s, known)

    def started(self, request: Request) -> None:
        """Count the tokens that a later turn repeats but did not find in the prefix cache when it was admitted."""
        self.num_lost_tokens += max(0, request.repeated_tokens - request.num_cached_prompt_tokens)

    def ended(
        self,
        request: Request,
        num_tokens: int,
        now: float,
        *,
        is_complete: bool,
        find: Callable[[int], tuple[int, int] | None] = lambda _: None,
    ) -> None:
        """Record the end of a request: its session pauses.

        Args:
            request: the request.
            num_tokens: prompt and generated tokens that count.
            now: the time, s.
            is_complete: whether the request has ended by itself.
            find: returns the place of the block that ends after so many tokens of the request.
        """
        slot, request.session = request.session, -1
        if slot < 0:
            return
        session = self._session(slot)
        if is_complete:
            tail, at = _last_key(request, num_tokens - 1)  # The next prompt may not repeat the last token.
            # Without a token of the answer, other sessions may have the same tail.
            if at > request.spec.num_prompt_tokens:
                self._set_tail(slot, session, tail, at)
                session.total = num_tokens
            stem, at = _last_key(request, request.spec.num_prompt_tokens - OPENING)
            if at > session.shared:
                self._set_stem(slot, session, stem, at)
                session.total = num_tokens
            session.place = find(session.length if session.tail else session.stem_length)
            if request.spec.ends_session:
                self._finish(slot)
                if (name := session_name(request)) is not None:
                    for other in [*self._branches.get(name, ()), *([self._named[name]] if name in self._named else ())]:
                        self._end_concurrent(other)
                return
        if session.is_over:
            self._finish(slot)
            return
        if self._table[slot, _STATE] == _AT_GATE:
            self._drop(slot)  # The session has not started. A retry is a first turn again.
            return
        if session.name is not None:
            session.total = num_tokens
        elif not (session.tail or session.stem):
            self._drop(slot)
            return
        self._pausing[slot] = None
        self._pausing_of.setdefault(self._tenant(slot), OrderedDict())[slot] = None
        self._write(slot, session, request, _PAUSING, now, self._tenant(slot))

    def number(self, request: Request) -> int | None:
        """Return the number of a live request's session; None without one."""
        return self._session(request.session).number if request.session >= 0 else None

    def time_passed(self, now: float) -> None:
        """Count the sessions as ended that have paused for long."""
        if now < self._reviewed + _REVIEW_S:
            return
        self._reviewed = now
        due = self._table[: len(self._sessions), _DUE]
        for slot in np.flatnonzero(due < now).tolist():
            self._left(slot)

    # ---------------------------------------------------------------- what the gate needs

    def begins(self, request: Request) -> bool:
        """Return whether a request is probably the first turn of several."""
        session = self._sessions[request.session] if request.session >= 0 else None
        if session is None or session.turn > 1 or request.spec.ends_session:
            return False
        habits = session.habits
        num_first_turns = habits.returned[0] + habits.left[0]
        return num_first_turns >= MIN_FIRST_TURNS and 2.0 * habits.returned[0] >= num_first_turns

    def wait_at_gate(self, request: Request) -> None:
        """Record that a request waits for room, so that its working set does not count."""
        self._table[request.session, _STATE] = _AT_GATE

    def pass_gate(self, request: Request) -> None:
        """Record that a request has left the gate."""
        if request.session >= 0:
            self._table[request.session, _STATE] = _ACTIVE

    def own_demand(self, request: Request, windows: WindowNeed = NO_WINDOWS) -> Float64Array:
        """Return the tokens that the session of a request needs in the next turns, by `TURNS_AHEAD`; see `demand`."""
        rows = self._table[request.session : request.session + 1]
        return np.where(rows[0, _AHEAD] >= TURNS_AHEAD, _needs(rows, windows)[0], 0.0)

    def sequence_part(self, windows: WindowNeed) -> float:
        """Return which part of the memory that the sessions need is for their sequences; the rest is for windows."""
        table = self._table[: len(self._sessions)]
        needs = _needs(table, windows)[:, 0].sum() if windows.num_tables else 0.0
        return float(table[:, _OWN].sum() / needs) if needs else 1.0

    def demand(self, horizon_s: float, now: float, windows: WindowNeed = NO_WINDOWS) -> dict[int, Float64Array]:
        """Return the tokens that the sessions will need in the next turns, by the number of their tenant.

        Args:
            horizon_s: pausing sessions count with the chance that they return within this time.
            now: the time, s.
            windows: the memory for windows, which counts like further tokens.

        Returns:
            arrays by `TURNS_AHEAD`.
        """
        table = self._table[: len(self._sessions)]
        weights = _weights(table, horizon_s, now)
        counted = np.flatnonzero(weights > 0.01)
        if not len(counted):
            return {}
        table, weights = table[counted], weights[counted]
        tokens = _needs(table, windows)
        tokens *= weights[:, None] * (table[:, _AHEAD, None] >= TURNS_AHEAD)
        tenants = table[:, _TENANT]
        if (tenants == tenants[0]).all():
            return {int(tenants[0]): tokens.sum(0)}
        return {int(tenant): tokens[tenants == tenant].sum(0) for tenant in np.unique(tenants)}

    def shown(self, most: int) -> list[ShownSession]:
        """Return at most `most` sessions for operators: active ones first, then those that pause for a shorter time."""
        table = self._table[: len(self._sessions)]
        state = table[:, _STATE]
        is_shown = (state == _ACTIVE) | (state == _AT_GATE) | ((state == _PAUSING) & np.isfinite(table[:, _DUE]))
        slots = np.flatnonzero(is_shown)
        slots = slots[np.lexsort((-table[slots, _SINCE], -state[slots]))][:most]
        return [self._shown(slot) for slot in slots.tolist()]

    def _shown(self, slot: int) -> ShownSession:
        session, row = self._session(slot), self._table[slot]
        return ShownSession(
            number=session.number,
            tenant=session.tenant,
            name="" if session.name is None else session.name[2].decode(errors="replace"),
            state=_STATES[int(row[_STATE])],
            turn=session.turn,
            num_tokens=max(session.prompt, session.total),
            since=float(row[_SINCE]),
            pause_s=float(row[_PAUSE]) if session.knows_pause else 0.0,
            end=session.tail or session.stem,
            place=session.place,
        )

    def validate(self) -> None:
        """Check that slots, tails and their lengths agree."""
        states = self._table[: len(self._sessions), _STATE]
        assert len(self._sessions) <= MAX_SESSIONS
        assert sorted(self._free) == np.flatnonzero(states == _FREE).tolist()
        assert sorted(self._pausing) == np.flatnonzero(states == _PAUSING).tolist()
        of_tenants = [(tenant, slot) for tenant, slots in self._pausing_of.items() for slot in slots]
        assert sorted(of_tenants) == sorted((self._tenant(slot), slot) for slot in self._pausing)
        assert all(self._pausing_of.values())
        assert sorted(self._free) == [slot for slot, each in enumerate(self._sessions) if each is None]
        tails = {each.tail: slot for slot, each in enumerate(self._sessions) if each is not None and each.tail}
        assert tails == self._tails
        names = {each.name: slot for slot, each in enumerate(self._sessions) if each is not None and each.name}
        assert names == self._named
        branches = [(each.branch_of, slot) for slot, each in enumerate(self._sessions) if each and each.branch_of]
        assert sorted(branches) == sorted((name, slot) for name, slots in self._branches.items() for slot in slots)
        assert all(self._branches.values())
        stems = {each.stem: slot for slot, each in enumerate(self._sessions) if each is not None and each.stem}
        assert stems == self._stems
        ends = [each.length for each in self._sessions if each is not None and each.tail]
        ends += [each.stem_length for each in self._sessions if each is not None and each.stem]
        assert self._lengths == Counter(ends)

    # ----------------------------------------------------------------

    def _find(self, request: Request, *, can_return: bool) -> tuple[int, int] | None:
        """Return the slot of the session that the request continues, and the tokens that it repeats; None without one.

        Args:
            request: the request.
            can_return: whether to look for sessions whose blocks were evicted, which costs more.
        """
        if not self._lengths:
            return None
        num_cached = len(request.tokens) - request.wait.uncached
        for size, keys in request.keys.items():
            # The tail or stem of a cached session is the last block found, or shortly before it.
            last = KEY_BYTES * (num_cached // size)
            ends: Iterable[int] = range(last, max(0, last - (OPENING // size + 3) * KEY_BYTES), -KEY_BYTES)
            found = self._ending(request, keys, size, ends) if last else None
            if found is not None or not can_return:
                return found
            ends = range(KEY_BYTES, len(keys) + 1, KEY_BYTES)
            if len(self._lengths) < len(keys) // KEY_BYTES:
                ends = [KEY_BYTES * (length // size) for length in self._lengths]
            found = self._ending(request, keys, size, ends)
            if found is not None:
                return found
        return None

    def _ending(self, request: Request, keys: bytes, size: int, ends: Iterable[int]) -> tuple[int, int] | None:
        """Return the longest session that the request continues and that ends with one of these keys, as `_find` does.

        Args:
            request: the request.
            keys: its keys.
            size: tokens per block.
            ends: ends of some of its keys, bytes.
        """
        num_tokens = len(request.tokens)
        tails, stems = self._tails, self._stems
        found = [(end, slot) for end in ends if (slot := tails.get(keys[end - KEY_BYTES : end])) is not None]
        found = [each for each in found if self._session(each[1]).total < num_tokens]
        if not found:
            found = [(end, slot) for end in ends if (slot := stems.get(keys[end - KEY_BYTES : end])) is not None]
            found = [each for each in found if self._session(each[1]).prompt < num_tokens]
        if not found:
            return None
        end, slot = max(found)
        return slot, end // KEY_BYTES * size

    def _session(self, slot: int) -> _Session:
        session = self._sessions[slot]
        assert session is not None
        return session

    def _begin(
        self, request: Request, kinds: tuple[Habits, ...], now: float, turn: int, name: SessionName | None
    ) -> None:
        """Give a request a slot of its own, unless all sessions are active."""
        number = tenant_number(request.spec.tenant)
        slot = self._take_slot(number)
        if slot is None:
            return
        if name is not None:
            self._named[name] = slot
        shared = max(0, len(request.tokens) - request.wait.uncached)
        session = self._sessions[slot] = _Session(
            self._next_number, request.spec.tenant, kinds, turn, len(request.tokens), shared, name
        )
        self._next_number += 1
        request.session = slot
        self._write(slot, session, request, _ACTIVE, now, number)

    def _take_slot(self, tenant: int) -> int | None:
        if self._free:
            return self._free.pop()
        slot = len(self._sessions)
        if slot == MAX_SESSIONS:
            if not self._pausing:
                return None
            own = self._pausing_of.get(tenant, ())
            oldest = next(iter(own if len(own) >= MAX_SESSIONS // _TENANT_PART else self._pausing))
            self._left(oldest)
            self._drop(oldest)
            return self._free.pop()
        self._sessions.append(None)
        if slot == len(self._table):
            self._table = np.concatenate((self._table, np.zeros_like(self._table)))
        return slot

    def _kinds_of(self, request: Request) -> tuple[Habits, ...]:
        """Return what is known about the sessions with the request's tenant and first block, and of its tenant."""
        tenant = request.spec.tenant
        key = tenant, next(iter(request.keys.values()), b"")[:KEY_BYTES]
        kinds = self._kinds.get(key)
        if kinds is None:
            general = self._kinds.get((tenant, b""))
            if general is None:
                general = self._kinds[tenant, b""] = (Habits(),)
            if key[1]:
                kinds = self._kinds[key] = (Habits(), *general)
            else:
                kinds = general
            while len(self._kinds) > _MAX_KINDS:
                self._kinds.popitem(last=False)
        else:
            self._kinds.move_to_end(key)
        return kinds

    def _write(self, slot: int, session: _Session, request: Request, state: float, now: float, tenant: int) -> None:
        """Write a session into the table as of now; `tenant` is the number of its tenant."""
        habits, turn = session.habits, session.turn
        is_pausing = state == _PAUSING
        # The later prompts of a named session may be shorter than the tokens that it shared when it began.
        own = max(0, (session.total if is_pausing else len(request.tokens)) - session.shared)
        session.knows_pause = request.spec.expected_pause_s > 0.0 or habits.num_returns > 0
        pause_s = request.spec.expected_pause_s or habits.pause_s or _UNKNOWN_PAUSE_S / _PAUSES
        pause_s = max(pause_s, 1e-3)
        due = now + _PAUSES * pause_s if is_pausing else np.inf
        ahead, chance = (habits.turns_ahead(turn), habits.chance(turn)) if habits.num_returns else (0.0, 0.0)
        self._table[slot] = (own, session.shared, habits.growth, ahead, chance, pause_s, now, due, state, tenant)

    def _tenant(self, slot: int) -> int:
        return int(self._table[slot, _TENANT])

    def _resume(self, slot: int) -> None:
        """Record that a session does not pause any more."""
        del self._pausing[slot]
        tenant = self._tenant(slot)
        del self._pausing_of[tenant][slot]
        if not self._pausing_of[tenant]:
            del self._pausing_of[tenant]

    def _finish(self, slot: int) -> None:
        self._left(slot)
        self._drop(slot)

    def _end_concurrent(self, slot: int) -> None:
        """End a session after a turn that ran concurrently was marked as the last one of the name."""
        if self._table[slot, _STATE] == _PAUSING:
            self._finish(slot)
        else:
            self._session(slot).is_over = True

    def _left(self, slot: int) -> None:
        session = self._sessions[slot]
        assert session is not None
        self._table[slot, _DUE] = np.inf
        if not session.has_left:
            session.has_left = True
            for kind in session.kinds:
                kind.has_left(session.turn)

    def _set_tail(self, slot: int, session: _Session, tail: BlockKey, length: int) -> None:
        self._clear_tail(session)
        other = self._tails.get(tail)
        if other is not None:
            # Equal sequences. Only the newest of them is continued.
            owner = self._sessions[other]
            assert owner is not None
            self._clear_tail(owner)
            if other in self._pausing and owner.name is None:
                self._left(other)
                self._drop(other)
        session.tail, session.length = tail, length
        self._tails[tail] = slot
        self._lengths[length] += 1

    def _clear_tail(self, session: _Session) -> None:
        if session.tail:
            del self._tails[session.tail]
            self._forget_length(session.length)
            session.tail = b""

    def _set_stem(self, slot: int, session: _Session, stem: BlockKey, length: int) -> None:
        self._clear_stem(session)
        other = self._stems.get(stem)
        if other is not None:
            self._clear_stem(self._session(other))
        session.stem, session.stem_length = stem, length
        self._stems[stem] = slot
        self._lengths[length] += 1

    def _clear_stem(self, session: _Session) -> None:
        if session.stem:
            del self._stems[session.stem]
            self._forget_length(session.stem_length)
            session.stem = b""

    def _forget_length(self, length: int) -> None:
        self._lengths[length] -= 1
        if not self._lengths[length]:
            del self._lengths[length]

    def _drop(self, slot: int) -> None:
        session = self._sessions[slot]
        assert session is not None
        self._clear_tail(session)
        self._clear_stem(session)
        if session.name is not None:
            del self._named[session.name]
        if session.branch_of is not None:
            branches = self._branches[session.branch_of]
            branches.remove(slot)
            if not branches:
                del self._branches[session.branch_of]
        if slot in self._pausing:
            self._resume(slot)
        self._sessions[slot] = None
        self._table[slot] = 0.0
        self._table[slot, _DUE] = np.inf
        self._free.append(slot)


def tenant_number(tenant: str) -> int:
    """Return a number for a tenant. Tenants with equal numbers share their part of the memory."""
    return zlib.crc32(tenant.encode())


def session_name(request: Request) -> SessionName | None:
    """Return the name of the session that the client has given; None without one."""
    spec = request.spec
    return (spec.tenant, spec.cache_scope, spec.session) if spec.session else None


def _needs(table: Float64Array, windows: WindowNeed) -> Float64Array:
    """Return the tokens that each session needs, by `TURNS_AHEAD`."""
    tokens: Float64Array = table[:, _OWN, None] + table[:, _GROWTH, None] * TURNS_AHEAD
    if windows.num_tables:
        most = np.where(table[:, _STATE] == _PAUSING, windows.pausing, windows.active)
        tokens += windows.num_tables * np.minimum(tokens + table[:, _SHARED, None], most[:, None])
    return tokens


def _weights(table: Float64Array, horizon_s: float, now: float) -> Float64Array:
    """Return how much of each session counts: 1 while it is active, its chance of return while it pauses."""
    state, chance, pause = table[:, _STATE], table[:, _CHANCE], table[:, _PAUSE]
    with np.errstate(under="ignore", divide="ignore", invalid="ignore"):
        stays = chance * np.exp(-(now - table[:, _SINCE]) / pause)
        returns = stays * -np.expm1(-horizon_s / pause) / (stays + 1.0 - chance)
    return np.where(state == _ACTIVE, 1.0, np.where(state == _PAUSING, np.nan_to_num(returns), 0.0))


def _last_key(request: Request, most: int) -> tuple[BlockKey, int]:
    """Return the key of the last full block within the first `most` tokens, and the tokens up to its end, or none."""
    key, end = b"", 0
    for size, keys in request.keys.items():
        number = min(len(keys) // KEY_BYTES, max(0, most) // size)
        if number * size > end:
            key, end = keys[KEY_BYTES * (number - 1) : KEY_BYTES * number], number * size
    return key, end


def _stage(turn: int) -> int:
    return min((turn - 1).bit_length(), _NUM_STAGES - 1)
