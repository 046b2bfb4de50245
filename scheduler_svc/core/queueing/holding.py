"""Holding: waiting requests under a key, until an event for this key releases them."""

from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from scheduler_svc.core.queueing.policies import KeyedQueue
from scheduler_svc.core.requests.request import Request

Key = TypeVar("Key", bound=Hashable)


class _Group(Generic[Key]):
    """The requests of one key."""

    __slots__ = ("key", "queue")

    def __init__(self, key: Key, queue: KeyedQueue) -> None:
        self.key = key
        self.queue = queue


class Holding(Generic[Key]):
    """Requests by key, in the policy's order within each key; a key without requests takes no memory."""

    def __init__(self, rank: Callable[[Request], float]) -> None:
        """Start empty; `rank` is the order of the policy."""
        self._rank = rank
        self._groups: dict[Key, _Group[Key]] = {}
        self._members: dict[Request, _Group[Key]] = {}

    def __len__(self) -> int:
        """Return the number of requests."""
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        """Return whether the request is held."""
        return request in self._members

    def __iter__(self) -> Iterator[Request]:
        """Iterate over the requests in the order in which they were held."""
        return iter(self._members)

    def keys(self) -> Iterator[Key]:
        """Iterate over the keys, oldest first."""
        return iter(self._groups)

    def count(self, key: Key) -> int:
        """Return the number of requests for a key."""
        group = self._groups.get(key)
        return 0 if group is None else len(group.queue)

    def add(self, key: Key, request: Request) -> None:
        """Hold a request until its key is released."""
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(key, KeyedQueue(self._rank))
        group.queue.push(request)
        self._members[request] = group

    def discard(self, request: Request) -> None:
        """Remove a request that has finished."""
        group = self._members.pop(request)
        group.queue.discard(request)
        self._drop_empty(group)

    def first(self, key: Key) -> Request | None:
        """Return the first request of a key, or None."""
        group = self._groups.get(key)
        return None if group is None else group.queue.first()

    def take(self, key: Key) -> Request | None:
        """Take out the first request of a key, or return None."""
        group = self._groups.get(key)
        request = None if group is None else group.queue.pop()
        if group is None or request is None:
            return None
        del self._members[request]
        self._drop_empty(group)
        return request

    def release(self, key: Key) -> Iterator[Request]:
        """Take out all requests of a key, one after the other."""
        while (request := self.take(key)) is not None:
            yield request

    def rename(self, key: Key, new_key: Key) -> None:
        """Move the requests of `key` to `new_key`; cheap unless `new_key` is in use."""
        if new_key in self._groups:
            for request in self.release(key):
                self.add(new_key, request)
        elif key in self._groups:
            group = self._groups[new_key] = self._groups.pop(key)
            group.key = new_key

    def move_to_end(self, key: Key) -> None:
        """Make a key with requests the last one."""
        self._groups[key] = self._groups.pop(key)

    def _drop_empty(self, group: _Group[Key]) -> None:
        if not len(group.queue):
            del self._groups[group.key]
