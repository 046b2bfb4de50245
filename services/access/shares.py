"""Shares: limits on the amount of a front end's resource that one principal may hold.

Each `Share` limits one resource. A principal may hold at most `weight` times the free amount ("dynamic thresholds",
Choudhury and Hahne, 1998). A single principal may therefore hold most of an idle resource, while several principals
with high demand hold equal parts. Some of the resource is always free for principals that hold nothing. No reservations
or settings are needed. A resource with at most `weight` units is too small to divide, so one principal may hold all of
it.

`Turns` grants places to principals in turn, so a principal with many waiting tasks delays another principal by at most
one task.

Connections are counted, heads are parsed and gRPC requests are received before they are known to be worth anything, so
their shares are per client address.
"""

import asyncio
import contextlib
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

from services.errors import RETRY_MS
from shared.errors import OverloadedError
from shared.logging import get_logger

SMALL_REQUEST_BYTES = 64 << 10
"""Maximum size of a request that is parsed immediately, bytes. Larger requests may take a tenth of a second."""
_PAUSE = 8.0
"""Ratio of the pause to the preceding work that blocks the event loop."""

Result = TypeVar("Result")

_LOG_EVERY_S = 60.0
"""Minimum interval between log lines about refusals for one resource, seconds."""


class Share:
    """A resource of this process with a total limit and a limit per principal. Not thread-safe."""

    def __init__(self, name: str, limit: int, *, weight: int) -> None:
        """Create the resource; nothing is held.

        Args:
            name: for errors, logs and metrics.
            limit: the total, in units of the resource.
            weight: maximum ratio of a principal's amount to the free amount.
        """
        self.name = name
        self.limit = limit
        self._held = 0
        self._refusals = 0
        self._weight = weight
        self._of: dict[str, int] = {}
        """Amount held by each principal; principals that hold nothing have no entry."""
        self._logged = -_LOG_EVERY_S

    def take(self, principal: str, amount: int = 1) -> bool:
        """Take an amount for a principal; return whether the principal may have it."""
        mine, free = self._of.get(principal, 0) + amount, self.limit - self._held - amount
        if free < 0 or mine > self._weight * (free + 1):
            self._refusals += 1
            self._log(principal)
            return False
        self._of[principal] = mine
        self._held += amount
        return True

    def give_back(self, principal: str, amount: int = 1) -> None:
        """Return an amount that `take` took."""
        self._held -= amount
        left = self._of[principal] - amount
        if left:
            self._of[principal] = left
        else:
            del self._of[principal]

    @contextlib.contextmanager
    def holding(self, principal: str, amount: int = 1) -> Iterator[None]:
        """Hold an amount for the duration of the `with` block.

        Raises:
            OverloadedError: the principal holds its share.
        """
        if not self.take(principal, amount):
            raise self.exhausted()
        try:
            yield
        finally:
            self.give_back(principal, amount)

    @property
    def largest_part(self) -> int:
        """The maximum amount that a single principal may hold."""
        return min(self.limit, self._weight * (self.limit + 1) // (self._weight + 1))

    def num_held(self) -> int:
        """Return the amount that all principals together hold."""
        return self._held

    def num_refusals(self) -> int:
        """Return the number of refusals so far."""
        return self._refusals

    def exhausted(self) -> OverloadedError:
        """Return the error for a refusal."""
        return OverloadedError(
            f"{self.name}: your share of the limit of {self.limit} is in use; try again later", retry_ms=RETRY_MS
        )

    def _log(self, principal: str) -> None:
        now = time.monotonic()
        if now - self._logged >= _LOG_EVERY_S:
            self._logged = now
            held = self._of.get(principal, 0)
            get_logger().warning(
                "share in use", resource=self.name, principal=principal, held=held, total=self._held, limit=self.limit
            )


class Turns:
    """Places for waiting tasks, given to principals in turn and in order within a principal."""

    def __init__(self, places: int = 1) -> None:
        self._free = places
        self._waiting: OrderedDict[str, OrderedDict[asyncio.Future[None], None]] = OrderedDict()
        """By principal, in the order of their next turns."""

    async def acquire(self, principal: str) -> None:
        """Wait for a place."""
        if self._free:
            self._free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(principal, OrderedDict())[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._leave(principal, turn)
            else:
                self.release()  # The task was cancelled after it had acquired the share.
            raise

    async def begin_work(self, principal: str) -> None:
        """Wait for permission to block the event loop.

        The share is held until the calling task waits again, and then for a pause eight times as long as the work.
        Other tasks run during this pause.
        """
        await self.acquire(principal)
        self.release_after_work()

    def release_after_work(self) -> None:
        """Release the place as described in `begin_work`."""
        loop, began = asyncio.get_running_loop(), time.monotonic()
        loop.call_soon(lambda: loop.call_later(_PAUSE * (time.monotonic() - began), self.release))

    def release(self) -> None:
        """Give a place to the next principal."""
        while self._waiting:
            principal, queue = self._waiting.popitem(last=False)
            while queue:
                turn, _ = queue.popitem(last=False)
                if turn.cancelled():
                    continue  # The cancelled task has not run since.
                turn.set_result(None)
                if queue:
                    self._waiting[principal] = queue
                return
        self._free += 1

    def _leave(self, principal: str, turn: "asyncio.Future[None]") -> None:
        queue = self._waiting.get(principal)
        if queue is not None:
            queue.pop(turn, None)
            if not queue:
                del self._waiting[principal]


class Slices:
    """Long work on the event loop in slices: one slice at a time, in turn by principal, with a pause after each."""

    SLICE_S = 0.002
    _PAUSE = 3.0
    """Duration of the pause, relative to the preceding slice."""

    def __init__(self) -> None:
        self._turns = Turns()

    async def run(self, principal: str, steps: Iterator[Result]) -> list[Result]:
        """Return the results of all steps. Each step is short. The first slice runs immediately."""
        results: list[Result] = []
        is_done = self._run(steps, results)
        while not is_done:
            await self._turns.acquire(principal)
            try:
                is_done = self._run(steps, results)
            finally:
                asyncio.get_running_loop().call_later(self._PAUSE * self.SLICE_S, self._turns.release)
        return results

    def _run(self, steps: Iterator[Result], results: list[Result]) -> bool:
        """Run a slice; return whether it was the last one."""
        end = time.perf_counter() + self.SLICE_S
        for step in steps:
            results.append(step)
            if time.perf_counter() > end:
                return False
        return True


class Pace:
    """Limits each address to a quarter of the event loop's time, after a burst."""

    _PART = 0.25
    _BURST_S = 0.05
    _FEW = 64

    def __init__(self) -> None:
        self.num_unparsed = 0
        """Bytes that wait until their address may use more time."""
        self._paid: dict[str, float] = {}
        """Time at which each address has paid off the event loop time that it used, by address."""
        self._many = self._FEW
        """Number of addresses above which those without debt are dropped."""

    def charge(self, address: str, seconds: float) -> None:
        """Record that an address used time."""
        now = time.monotonic()
        self._paid[address] = max(self._paid.get(address, 0.0), now) + seconds / self._PART
        if len(self._paid) > self._many:
            self._paid = {each: paid for each, paid in self._paid.items() if paid > now}
            self._many = max(self._FEW, 2 * len(self._paid))

    def wait_s(self, address: str) -> float:
        """Return the seconds until the address may use more time; 0 or less for now."""
        return self._paid.get(address, 0.0) - time.monotonic() - self._BURST_S / self._PART


@dataclass(frozen=True, slots=True)
class Shares:
    """The shared resources of one front-end process."""

    calls: Share
    """Calls whose request is complete, over all protocols."""
    body_bytes: Share
    """Bytes of HTTP bodies that are being received or wait to be parsed."""
    large_bodies: Turns
    """The event loop, for parsing a large body."""
    slow_requests: Share
    """gRPC requests that arrive slowly, by address."""
    slices: Slices
    """The event loop, for large answers."""
    connections: Share
    """HTTP connections, by address."""
    parsing: Pace
    """The event loop, for parsing data from HTTP connections, by address."""
    trials: Share
    """Grammars on trial or waiting for a trial."""
    costly_trials: Share
    """Grammars in, or waiting for, a second trial."""

    def __iter__(self) -> Iterator[Share]:
        return iter(
            (self.calls, self.body_bytes, self.slow_requests, self.connections, self.trials, self.costly_trials)
        )


def owner_of(address: str) -> str:
    """Return the key to which a client's address is charged: the address, or the first half of an IPv6 address.

    A machine with IPv6 can usually use all addresses with the same first half.
    """
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    return str(parsed.ipv4_mapped or ipaddress.ip_network((int(parsed), 64), strict=False))


_MAX_BODY_BYTES = 512 << 20
_MAX_SLOW_REQUESTS = 64
"""A request has at most 8 MiB, so that slow requests have as many bytes as HTTP bodies."""
_MAX_TRIALS = 64
_MAX_COSTLY_TRIALS = 16
MOST = 8
"""Weight that allows a single principal to hold eight ninths of a resource."""
_HALF = 1
"""Weight that allows a single principal to hold half of a resource."""


def make_shares(max_calls: int, max_connections: int) -> Shares:
    """Return the resources of a process, with nothing held."""
    return Shares(
        calls=Share("calls in progress", max_calls, weight=MOST),
        body_bytes=Share("bytes of bodies", _MAX_BODY_BYTES, weight=_HALF),
        large_bodies=Turns(),
        slow_requests=Share("slow requests", _MAX_SLOW_REQUESTS, weight=_HALF),
        slices=Slices(),
        connections=Share("connections", max_connections, weight=MOST),
        parsing=Pace(),
        trials=Share("grammars on trial", _MAX_TRIALS, weight=_HALF),
        costly_trials=Share("costly grammars on trial", _MAX_COSTLY_TRIALS, weight=MOST),
    )
