"""Reported changes in the prefix caches: a reader knows the caches' content, but nothing about protected prompts."""

import random
from collections.abc import Iterable

from records.rules.model_worker import ModelWorker
from scheduler_svc.cache_changes import CacheChanges, Change, Removed, Stored
from scheduler_svc.core.interface import effects as ef
from scheduler_svc.core.interface.plan import Plan
from scheduler_svc.core.workers.worker import Worker
from shared.prefix_keys import KEY_BYTES, SHARED_SCOPE, BlockKey, following_keys, root_key
from tests.scheduler_svc.cluster import Cluster

BLOCK = 4


class Picker:
    """A reader that keeps an index, as an endpoint picker does, and checks every event."""

    def __init__(self) -> None:
        self.index: dict[BlockKey, tuple[int, ...]] = {}

    def take(self, changes: Iterable[Change]) -> None:
        """Apply changes."""
        for change in changes:
            match change:
                case Stored(keys, parent, tokens, size):
                    root = root_key("f", SHARED_SCOPE) if parent is None else parent
                    packed = b"".join(token.to_bytes(4, "little", signed=True) for token in tokens)
                    assert b"".join(keys) == following_keys(root, packed, size), "the tokens are not those of the keys"
                    assert parent is None or parent in self.index, "a block without its parent"
                    for number, key in enumerate(keys):
                        assert key not in self.index, "stored twice"
                        self.index[key] = tokens[number * size : (number + 1) * size]
                case Removed(keys):
                    for key in keys:
                        del self.index[key]


class Reported(Cluster):
    """A cluster whose caches are reported, as the scheduler service does it."""

    def __init__(self) -> None:
        super().__init__()
        self.changes = CacheChanges()
        self.picker = Picker()
        self._plan = self.core.plan
        self.core.plan = self._plan_and_look  # type: ignore[method-assign]

    def _plan_and_look(self, peer: bytes, now: float) -> tuple[Plan | None, list[ef.Effect]]:
        plan, effects = self._plan(peer, now)
        worker = self.core.worker(peer)
        if plan is not None and worker is not None:
            self.changes.observe(worker, [admission.row for admission in plan.admissions])
        return plan, effects

    def collect(self) -> None:
        """Give the picker what has changed."""
        self.picker.take(self.changes.collect(self.core.epochs()))

    def cached(self) -> set[BlockKey]:
        """Return the keys of all blocks in the workers' caches."""
        found: set[BlockKey] = set()
        for peer in self.core.workers():
            worker = self.core.worker(peer)
            assert worker is not None
            found |= _keys(worker)
        return found


def test_a_picker_knows_what_is_in_the_caches_of_all_workers() -> None:
    """Through evictions, shared blocks, preemptions and a lost worker, the index equals the caches at every step."""
    draw = random.Random(5)
    cluster = Reported()
    for name in (b"a", b"b"):
        cluster.join(ModelWorker(peer=name, num_blocks=24, block_size=BLOCK, max_rows=4), worker_id=name.decode())
    heads = [[draw.randrange(9) for _ in range(12)] for _ in range(3)]
    for stream in range(1, 60):
        prompt = draw.choice(heads)[: draw.randrange(4, 13)] + [draw.randrange(9) for _ in range(draw.randrange(1, 9))]
        cluster.submit(stream, prompt, draw.randrange(1, 12), salt=SHARED_SCOPE)
        for _ in range(draw.randrange(4)):
            cluster.plan()
            cluster.answer()
        if stream == 40:
            cluster.lose(b"b")
        cluster.collect()

        assert set(cluster.picker.index) == cluster.cached(), stream
    cluster.run()
    cluster.collect()

    assert set(cluster.picker.index) == cluster.cached()
    late = Picker()
    late.take(cluster.changes.present())
    assert late.index == cluster.picker.index


def test_prompts_of_tenants_are_never_reported() -> None:
    """Blocks of a principal or a scope leave no trace, even if they take the memory of reported blocks."""
    cluster = Reported()
    cluster.join(ModelWorker(peer=b"a", num_blocks=8, block_size=BLOCK, max_rows=2))
    for stream, salt in enumerate([SHARED_SCOPE, b"principal\0tenant", b"scope\0team", b"principal\0tenant"], start=1):
        cluster.submit(stream, [stream] * 20, 4, salt=salt)
        cluster.run()
        changes = cluster.changes.collect(cluster.core.epochs())
        cluster.picker.take(changes)

        assert stream == 1 or not any(isinstance(change, Stored) for change in changes)
    tenants = {key for key in cluster.cached() if key not in cluster.picker.index}

    assert len(tenants) >= 4
    assert set(cluster.picker.index) <= cluster.cached()


def _keys(worker: Worker) -> set[BlockKey]:
    found: set[BlockKey] = set()
    nodes = [worker.pool.cache._root]
    while nodes:
        node = nodes.pop()
        found |= {node.keys[start : start + KEY_BYTES] for start in range(0, len(node.keys), KEY_BYTES)}
        nodes += node.children.values()
    return found
