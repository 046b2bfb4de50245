"""The state of each KV block of a worker, read block by block from the pool and the block tables."""

from scheduler_svc.core.workers.worker import Worker


def states_of(worker: Worker) -> list[tuple[str, set[int]]]:
    """Return each block's state and the streams of the requests that hold it, read block by block."""
    holders: dict[int, set[int]] = {}
    for row in range(worker.rows.max_rows):
        request = worker.rows.requests[row]
        for block in worker.held_blocks(row).tolist() if request is not None else ():
            assert request is not None
            holders.setdefault(block, set()).add(request.key.stream)
    pool = worker.pool
    free = set(pool._free[: pool.num_free].tolist())
    cached = set(pool._cached.validate())
    found = []
    for block in range(pool.num_blocks):
        held = holders.get(block, set())
        state = "free" if block in free else "cached" if block in cached else "retired"
        found.append((("shared" if len(held) > 1 else "held") if held else state, held))
    return found
