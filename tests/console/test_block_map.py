"""The page's block map: each block is drawn in its state from the scheduler's tables."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.admin.v1 import admin_pb2 as admin
from records.rules.model_worker import ModelWorker
from scheduler_svc.live_views import to_tables
from scheduler_svc.recorder.step_view import RequestNumbers
from tests.console.browser import needs_chromium, opened, until
from tests.console.scripted import Scripted, scripted
from tests.scheduler_svc.block_states import states_of
from tests.scheduler_svc.cluster import Cluster

pytestmark = needs_chromium
NUM_BLOCKS = 40
STREAM = (1 << 31) - 1
"""The lower bits of a request's number are its stream."""
DRAWN = """() => {
  const grid = quire.blocks.maps.get("w").device
  const context = grid.canvas.getContext("2d")
  return [...grid.cells].map((state, at) => {
    const middle = [(at % grid.columns + .5) * grid.side, (Math.floor(at / grid.columns) + .5) * grid.side]
    const pixel = context.getImageData(...middle, 1, 1).data.join()
    const corner = context.getImageData(middle[0] - grid.side / 2 + 2, middle[1] - grid.side / 2 + 2, 1, 1).data.join()
    return [grid.owners[(state - 3) >> 1] ?? -1, pixel, corner]
  })
}"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Scripted]:
    """Return a front end."""
    with scripted(tmp_path) as found:
        yield found


def test_each_block_is_drawn_as_the_tables_say(served: Scripted) -> None:
    """Free, cached, retired, held and shared blocks each have a colour; held blocks have their owner's colour."""
    cluster, numbers = Cluster(max_num_seqs=6, max_num_batched_tokens=32), RequestNumbers()
    cluster.join(ModelWorker(b"w/1", NUM_BLOCKS, 4, 8))
    for stream in range(12):
        cluster.submit(stream, [1, 2, 3, 4, 5, 6, 7, 8, stream], 20)
    seen: dict[str, set[str]] = {}
    with opened(served.address, expected="getImageData") as page:
        until(page, "quire.model.traceUrl !== undefined && document.getElementById('access').hidden")
        for snapshot in range(30):
            cluster.plan()
            part = admin.WatchStepsResponse(tables=to_tables(cluster.core.tables(), numbers, "fcfs", cluster.now))
            part.tables.time.FromSeconds(snapshot + 1)
            served.say(part)
            until(page, f"quire.model.tables?.time === {snapshot + 1}")
            (worker,) = cluster.core._fleet
            drawn = page.evaluate(DRAWN)
            assert len(drawn) == NUM_BLOCKS
            colours: dict[int, str] = {}
            for (owner, middle, corner), (state, holders) in zip(drawn, states_of(worker), strict=True):
                assert (owner & STREAM in holders) if holders else owner == -1
                if holders:
                    assert colours.setdefault(owner, corner) == corner, "one colour per request"
                seen.setdefault(state, set()).add(middle if state != "held" else "")
            cluster.answer()
    assert seen.keys() == {"free", "cached", "retired", "held", "shared"}
    plain = [seen[state] for state in ("free", "cached", "retired", "shared")]
    assert all(len(colours) == 1 for colours in plain)
    assert len(set.union(*plain)) == 4
