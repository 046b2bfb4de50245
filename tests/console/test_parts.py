"""Parts of the page that few services have: kinds of cache, the leader and its standbys, and sessions of agents."""

from pathlib import Path

from quire.admin.v1 import admin_pb2 as admin
from tests.console.browser import needs_chromium, opened, shoot, until
from tests.console.scripted import scripted

pytestmark = needs_chromium
CONNECTED = "quire.model.traceUrl !== undefined && document.getElementById('access').hidden"
BEFORE = "getComputedStyle(document.querySelector('#sessions td'), '::before').content"
BAND = """(at) => [...document.querySelectorAll('#sessions tbody tr')[at].querySelectorAll('.band i')].map(part => [
  part.className, getComputedStyle(part).backgroundColor, part.offsetWidth > 0
])"""


def _load(seconds: int) -> admin.WatchStepsResponse:
    part = admin.WatchStepsResponse()
    part.load.time.FromSeconds(seconds)
    part.load.workers.add(
        worker_id="w", device="cpu", running_requests=3, rows=8, total_blocks=100, free_blocks=40, cached_blocks=10
    )
    return part


def _tables(seconds: int) -> admin.WatchStepsResponse:
    part = admin.WatchStepsResponse()
    part.tables.time.FromSeconds(seconds)
    return part


def test_the_kinds_of_cache_of_a_worker_are_shown_with_their_memory(tmp_path: Path) -> None:
    """Blocks of each kind, states in use, and what happened to checkpoints; nothing with full attention only."""
    with scripted(tmp_path) as served, opened(served.address) as page:
        until(page, CONNECTED)
        part = _load(1)
        (worker,) = part.load.workers
        worker.cache_kinds.append("full")
        served.say(part)
        page.locator("#workers td", has_text="50 of 100, 10 cached").wait_for()
        assert "attention" not in page.inner_text("#workers")

        worker.cache_kinds.extend(["window", "state"])
        worker.block_bytes, worker.window_blocks, worker.state_bytes = 1 << 20, 12, 1536
        worker.checkpoints.total, worker.checkpoints.used, worker.checkpoints.saved = 8, 5, 9
        worker.checkpoints.restored, worker.checkpoints.evicted = 4, 2
        served.say(part)
        page.locator("#workers td", has_text="full attention 38 blocks (38.0 MiB)").wait_for()
        text = page.inner_text("#workers")
        assert "windows 12 blocks (12.0 MiB); recurrent state 3 of 8 rows (4.5 KiB)" in text
        assert "checkpoints 5 of 8: 9 saved, 4 restored, 2 evicted" in text


def test_the_leader_is_red_while_no_standby_is_ready(tmp_path: Path) -> None:
    """The line is absent without standbys. Its colour changes with the number of standbys that are ready."""
    colour = "getComputedStyle(document.getElementById('leader')).borderLeftColor"
    with scripted(tmp_path) as served, opened(served.address) as page:
        until(page, CONNECTED)
        part = _load(1)
        served.say(part)
        until(page, "quire.model.load")
        assert page.is_hidden("#leader")

        shown = part.load.leadership
        shown.leader, shown.leader_number, shown.seconds, shown.other_standbys = "a-7", (1 << 63) + 1, 7300.0, 1
        served.say(part)
        page.locator("#leader", has_text="Leader: a-7 under number 9223372036854775809 for 2 h.").wait_for()
        assert "Standbys: none ready, 1 copying." in page.inner_text("#leader")
        red = page.evaluate(colour)

        shown.ready_standbys, shown.other_standbys = 1, 0
        served.say(part)
        page.locator("#leader", has_text="Standbys: 1 ready.").wait_for()
        assert page.evaluate(colour) != red


def test_sessions_are_bands_of_their_states(tmp_path: Path) -> None:
    """A band has a part with its own colour for each state of a session, and the line says where the KV is."""
    states = [("active", ""), ("pausing", "device"), ("pausing", "host"), ("pausing", "disk"), ("pausing", "")]
    with scripted(tmp_path) as served, opened(served.address) as page:
        until(page, CONNECTED)
        served.say(_tables(1))
        page.locator("#sessions td", has_text="No session is known.").wait_for()
        page.set_viewport_size({"width": 420, "height": 900})
        assert page.evaluate(BEFORE) == "none", "a cell without a title has none on a narrow screen"
        page.set_viewport_size({"width": 1280, "height": 900})
        for number, (state, tier) in enumerate(states):
            part = _tables(100 + 20 * number)
            part.tables.sessions.add(
                number=1, tenant="team", session_id="agent-7", state=state, turn=3, tokens=512, tier=tier,
                since_seconds=20.0, expected_seconds=-4.0 if number == len(states) - 1 else 9.0,
            )  # fmt: skip
            part.tables.sessions.add(number=2, state="waiting", turn=1, tokens=64, since_seconds=1.0)
            served.say(part)
            until(page, f"quire.model.tables?.time === {100 + 20 * number}")
        page.locator("#sessions td", has_text="pauses for 20 s, its end was evicted, late by 4 s").wait_for()
        parts = page.evaluate(BAND, 0)
        line = page.locator("#sessions tbody tr").first.locator("td").all_inner_texts()[:4]
        other = page.locator("#sessions tbody tr").nth(1).inner_text()
        shoot(page, "sessions")

    assert [kind for kind, _, _ in parts] == ["active", "device", "host", "disk", "evicted"]
    assert len({colour for _, colour, _ in parts}) == len(states)
    assert all(is_visible for _, _, is_visible in parts)
    assert line == ["agent-7", "team", "3", "512"]
    assert "waits for memory for 1 s" in other
    assert "(no tenant)" in other
