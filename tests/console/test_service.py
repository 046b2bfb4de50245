"""The console of a whole service: the page shows the scheduler's state, and its controls act on the scheduler."""

import re
from pathlib import Path

import grpc
import pytest
from playwright.sync_api import Page

from measure.testbed.service import Served, serve
from quire import Client
from quire.admin.v1 import admin_pb2 as admin
from quire.admin.v1 import admin_pb2_grpc
from tests.console.browser import needs_chromium, opened, shoot, until

pytestmark = needs_chromium
COUNT_STATES = """() => Object.fromEntries(quire.model.tables.maps.map(map => {
  const counts = {}
  map.device.lengths.forEach((length, run) => {
    const state = Math.min(map.device.states[run], 3)
    counts[state] = (counts[state] ?? 0) + length
  })
  return [map.worker, counts]
}))"""


def _workers(served: Served) -> list[admin.Worker]:
    with grpc.insecure_channel(served.grpc) as channel:
        operator = admin_pb2_grpc.AdminServiceStub(channel)
        return list(operator.ListWorkers(admin.ListWorkersRequest()).workers)


def _send(page: Page, *, tokens: int, answers: int) -> str:
    """Sends a request from the playground; its ID."""
    page.fill("#max-tokens", str(tokens))
    page.fill("#copies", str(answers))
    page.click("#playground button[type=submit]")
    title = page.locator("#answers article").first.locator("strong")
    return title.inner_text().split(":")[0]


def test_a_person_sends_a_request_and_follows_it(tmp_path: Path) -> None:
    """A request from the playground appears in the batch and is explained; its blocks are those in the scheduler."""
    with (
        serve("demo", "--max-num-seqs=8", environ={"XDG_STATE_HOME": str(tmp_path)}) as served,
        opened(served.http) as page,
    ):
        until(page, "quire.model.load?.workers.length === 1")
        request = _send(page, tokens=200, answers=12)
        # Eight rows are occupied and four choices wait: in the chart, in the block map and in the queue.
        until(page, "quire.gantt.steps?.get(quire.gantt.steps.count - 1)?.decode[0].length === 8")
        until(page, "quire.model.tables?.queues.some(queue => queue.reason === 'room' && queue.first.length)")
        until(page, "quire.model.tables.maps[0].owners.length === 8")
        page.locator("#answers article strong", has_text="complete after").wait_for()
        until(page, "quire.model.load.running === 0")

        # While the service is idle, the page's snapshot and the scheduler's response are equal.
        until(page, "quire.model.tables.maps[0].owners.length === 0")
        (worker,) = _workers(served)
        counts = page.evaluate(COUNT_STATES)[worker.worker_id]
        assert counts == {"0": worker.free_blocks, "1": worker.cached_blocks}
        assert worker.cached_blocks > 0

        page.locator("#gantt").press("ArrowLeft")
        page.locator("#gantt").press("Enter")
        page.locator("#explanation", has_text="Times within steps are known").wait_for()
        assert request in page.inner_text("#explanation")
        shoot(page, "details")


@pytest.mark.release
def test_the_drafts_of_a_worker_are_shown(tmp_path: Path) -> None:
    """While a worker verifies drafts, its line has the drafts per step and the share that is accepted."""
    with (
        serve("demo", "--speculation=ngram", environ={"XDG_STATE_HOME": str(tmp_path)}) as served,
        opened(served.http) as page,
        Client(served.grpc) as client,
    ):
        until(page, "quire.model.load?.workers.length === 1")
        assert "drafts" not in page.inner_text("#workers")
        client.generate("What is 3 + 4? " * 4, max_tokens=400, temperature=0, ignore_eos=True).result()
        page.locator("#workers td", has_text=re.compile(r"drafts: [\d.]+ per step, \d+ % accepted")).wait_for()


@pytest.mark.release
def test_a_lost_worker_is_an_incident(tmp_path: Path) -> None:
    """A worker that dies and its successor are listed with their times, and marked on the figures' time axis."""
    with serve("demo", environ={"XDG_STATE_HOME": str(tmp_path)}) as served, opened(served.http) as page:
        until(page, "quire.model.load?.workers.length === 1")
        served.children("worker")[0].kill()
        page.locator("#incidents li", has_text="worker lost: worker-0").wait_for()
        page.locator("#incidents li", has_text="worker joined: worker-0").wait_for()


@pytest.mark.release
def test_without_a_token_the_page_asks_for_one(tmp_path: Path) -> None:
    """Without a token, the page shows no data; with a token of the service, it connects."""
    (tmp_path / "keys").write_text("0pen\n")
    with (
        serve("demo", f"--api-key-file={tmp_path}/keys", environ={"XDG_STATE_HOME": str(tmp_path)}) as served,
        opened(served.http, expected="status of 401") as page,
    ):
        page.locator("#refusal", has_text="missing credentials").wait_for()
        assert page.evaluate("quire.model.loads.length") == 0
        page.fill("#token", "wrong")
        page.keyboard.press("Enter")
        page.locator("#refusal", has_text="unknown token").wait_for()
        page.fill("#token", "0pen")
        page.keyboard.press("Enter")
        until(page, "quire.model.loads.length > 0")
        assert page.is_hidden("#access")
