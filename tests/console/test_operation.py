"""The console in the hands of an operator: keyboard alone, the pointer, drain and resume, and the strategies."""

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256

import grpc
import pytest
from playwright.sync_api import Page

from measure.testbed.service import Served, serve
from quire import Client
from quire.admin.v1 import admin_pb2 as admin
from quire.admin.v1 import admin_pb2_grpc
from tests.console.browser import needs_chromium, opened, shoot, until

pytestmark = needs_chromium
OPERATOR, CALLER = "token-of-an-operator", "token-of-a-caller"
ROWS = 4
MAX_STOPS = 60
FOCUS = """() => {
  const found = document.activeElement
  const name = found === document.body ? "BODY" : found.id || found.textContent.trim()
  return [name, parseFloat(getComputedStyle(found).outlineWidth)]
}"""
DRAIN = """async token => {
  const headers = {"content-type": "application/json", authorization: `Bearer ${token}`}
  const body = JSON.stringify({worker: "worker-0"})
  return (await fetch("/console/api/drain", {method: "POST", headers, body})).status
}"""
OLDEST = """() => {
  const chart = quire.gantt, steps = chart.steps
  let step = steps.first
  while (!steps.get(step).decode[0].length) step += 1
  const [rows, numbers] = steps.get(step).decode
  const {number, start, seconds} = steps.get(step)
  return {x: chart.x(start + seconds / 2), y: (rows[0] + .5) * chart.rowHeight, row: rows[0],
          step: number, name: quire.model.name(numbers[0])}
}"""
"""The first request of the chart: where it decodes first."""
COLOURS = """canvas => {
  const {width, height} = canvas
  const found = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, width, height).data.buffer)
  return new Set(found).size
}"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A service with an operator and a caller who is none."""
    file = tmp_path_factory.mktemp("principals") / "principals.toml"
    hashes = {name: sha256(token.encode()).hexdigest() for name, token in (("operator", OPERATOR), ("caller", CALLER))}
    file.write_text(
        f'[principals.operator]\ntokens = ["{hashes["operator"]}"]\ntenants = ["*"]\nadmin = true\n'
        f'[principals.caller]\ntokens = ["{hashes["caller"]}"]\n'
    )
    with serve("demo", f"--max-num-seqs={ROWS}", f"--principals={file}") as served:
        yield served


@contextmanager
def _console(served: Served) -> Iterator[Page]:
    """The page of an operator, who has typed the token."""
    with opened(served.http, expected="status of 40") as page:
        page.locator("#refusal", has_text="missing credentials").wait_for()
        page.keyboard.type(OPERATOR)
        page.keyboard.press("Enter")
        until(page, "quire.model.load?.workers.length === 1")
        yield page


def _is_draining(served: Served) -> bool:
    with grpc.insecure_channel(served.grpc) as channel:
        operator = admin_pb2_grpc.AdminServiceStub(channel)
        metadata = (("authorization", f"Bearer {OPERATOR}"),)
        (worker,) = operator.ListWorkers(admin.ListWorkersRequest(), metadata=metadata).workers
    return worker.draining


def _focused(page: Page) -> str:
    name: str = page.evaluate(FOCUS)[0]
    return name


def _tab_to(page: Page, wanted: str, key: str = "Tab") -> list[str]:
    """Press Tab until a control has the focus; return the controls that had it before."""
    passed = []
    while (name := _focused(page)) != wanted:
        passed.append(name)
        assert len(passed) < MAX_STOPS, f"{wanted} is not reached: {passed}"
        page.keyboard.press(key)
    return passed


def _type(page: Page, text: str) -> None:
    """Replaces the content of the field that has the focus."""
    page.keyboard.press("Control+A")
    page.keyboard.type(text)


@pytest.mark.release
def test_the_focus_follows_the_order_of_the_page(served: Served) -> None:
    """Tab visits each control once, from top to bottom, with a visible outline. The first link skips the header."""
    with _console(served) as page:
        page.reload()  # The browser keeps the token until the tab is closed.
        until(page, "quire.model.load?.workers.length === 1 && quire.model.tables !== null")
        visited: list[str] = []
        page.keyboard.press("Tab")
        while (name := _focused(page)) not in visited and name != "BODY":
            visited.append(name)
            assert page.evaluate(FOCUS)[1] >= 2, f"{name}: the focus is not visible"
            page.keyboard.press("Tab")

        expected = ["Skip to the batch", "pause", "theme", "worker", "zoom", "gantt"]
        expected += [
            "Requests of the newest batch as a table",
            "Drain",
            "prompt",
            "max-tokens",
            "copies",
            "temperature",
        ]
        expected += ["Send", "memory-by", "Request", "Tenant", "Blocks", "Tokens", "Share"]
        expected += [f"predict-{name}" for name in ("minutes", "policy", "max_num_seqs", "max_num_batched_tokens")]
        expected += ["predict-workers", "predict-memoryPercent", "Predict", "minutes", "strategy-rows", "Replay"]
        assert visited == [*expected, "Settings of the scheduler"]

        page.reload()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        assert _focused(page) == "batch"


def test_a_request_is_sent_and_explained_by_keyboard_alone(served: Served) -> None:
    """From the token to the answer: no pointer. Escape closes the explanation, and the focus is where it was."""
    with _console(served) as page:
        _tab_to(page, "prompt")
        _type(page, "Keys alone")
        _tab_to(page, "max-tokens")
        _type(page, "40")
        _tab_to(page, "copies")
        _type(page, "2")
        page.keyboard.press("Enter")
        title = page.locator("#answers article strong", has_text="complete after")
        title.wait_for()
        request = title.inner_text().split(":")[0]
        until(page, "quire.gantt.steps?.count > 0 && quire.model.load.running === 0")

        # From the chart.
        _tab_to(page, "gantt", "Shift+Tab")
        page.keyboard.press("ArrowLeft")
        until(page, f"document.getElementById('hover').textContent.includes('{request}')")
        page.keyboard.press("Enter")
        _assert_explained(page, request)
        page.keyboard.press("Escape")
        assert page.is_hidden("#details")
        assert _focused(page) == "gantt"

        # Read the table, which exists for users who cannot see a chart.
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.locator("#requests button").first.wait_for()
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        _assert_explained(page, request)
        page.keyboard.press("Escape")
        assert page.is_hidden("#details")
        assert _focused(page).startswith(request)


def _assert_explained(page: Page, request: str) -> None:
    """The dialog names the request, has its explanation, and holds the focus."""
    page.locator("#explanation", has_text="Times within steps are known").wait_for()
    assert request in page.inner_text("#details-title")
    assert request in page.inner_text("#explanation")
    for _ in range(4):
        assert page.evaluate("document.activeElement === document.body || details.contains(document.activeElement)")
        page.keyboard.press("Tab")


@pytest.mark.release
def test_a_click_on_the_chart_explains_the_request_there(served: Served) -> None:
    """Pointing shows the step and the row; a click opens the request of this row and step, not the newest one."""
    with Client(served.grpc, token=OPERATOR) as client, _console(served) as page:
        for name in ("first", "second"):
            client.generate("Once", max_tokens=30, ignore_eos=True, request_id=f"click-{name}").result()
        until(page, "[...quire.model.requests.values()].some(each => each.id.startsWith('click-second'))")
        until(page, "quire.model.load.running === 0")
        until(page, "quire.gantt.behind < .001")
        place = page.evaluate(OLDEST)
        page.locator("#gantt").hover(position={"x": place["x"], "y": place["y"]})
        until(page, "document.getElementById('hover').textContent.startsWith('Step ')")
        pointed = page.inner_text("#hover")
        page.locator("#gantt").click(position={"x": place["x"], "y": place["y"]})
        _assert_explained(page, "click-first")

    assert place["name"].startswith("click-first")
    assert pointed.startswith(f"Step {place['step']}: 1 decode, 0 prefill")
    assert pointed.endswith(f"row {place['row']}: decode of {place['name']}")


def test_an_operator_drains_a_worker_and_others_cannot(served: Served) -> None:
    """A request waits while its only worker is drained, and is served when it is resumed; a caller gets 403."""
    with _console(served) as page:
        page.click("button[aria-label='Drain worker-0']")
        page.locator("#confirm-text", has_text="the last worker that takes requests").wait_for()
        page.keyboard.press("Escape")
        assert not _is_draining(served)
        assert page.evaluate(DRAIN, OPERATOR) == 400, "not the last one without a confirmation"
        page.click("button[aria-label='Drain worker-0']")
        page.click("#confirm button[value=drain]")
        page.locator("#order", has_text="worker-0 admits no new requests").wait_for()
        page.locator("#workers td", has_text="drained").wait_for()
        assert _is_draining(served)
        page.click("#playground button[type=submit]")
        until(page, "quire.model.load.waiting > 0 && quire.model.load.running === 0")
        page.click("button[aria-label='Resume worker-0']")
        page.locator("#order", has_text="worker-0 admits requests again").wait_for()
        page.locator("#answers article strong", has_text="complete after").wait_for()
        assert not _is_draining(served)

    with opened(served.http, expected="/console/api/") as page:
        page.locator("#refusal", has_text="missing credentials").wait_for()
        page.fill("#token", CALLER)
        page.keyboard.press("Enter")
        page.locator("#refusal", has_text="principal caller is not an admin").wait_for()
        assert page.evaluate("quire.model.loads.length") == 0
        assert page.locator("#workers button").count() == 0
        assert page.evaluate(DRAIN, CALLER) == 403
    assert not _is_draining(served)


@pytest.mark.release
def test_the_last_minute_is_shown_under_three_strategies(served: Served) -> None:
    """For one minute of short and long requests, table and charts show that continuous batching ends first."""
    with Client(served.grpc, token=OPERATOR) as client, _console(served) as page:
        lengths = [5, 60, 5, 5] * ROWS
        requests = [{"prompt": "Once", "max_tokens": length, "ignore_eos": True} for length in lengths]
        for _ in client.generate_batch(requests):
            pass
        until(page, "quire.model.load.running === 0")
        page.fill("#minutes", "1")
        page.fill("#strategy-rows", str(ROWS))
        page.click("#strategies button")
        page.locator("#strategies-table tr").nth(2).wait_for()

        names = ["static", "dynamic", "continuous"]
        assert page.locator("#strategies-table th").all_inner_texts() == names
        assert page.locator("#strategies-charts figcaption").all_inner_texts() == names
        assert f"with {ROWS} rows per worker" in page.inner_text("#strategies-status")
        for chart in page.locator("#strategies-charts canvas").all():
            assert chart.evaluate(COLOURS) >= 4, "idle, prefill and decode"
        static, dynamic, continuous = page.evaluate("quire.strategies.found.runs.map(run => run.seconds)")
        assert continuous < min(static, dynamic)
        shoot(page, "strategies")


@pytest.mark.release
def test_other_settings_are_predicted_next_to_what_was_measured(served: Served) -> None:
    """With more rows for the last minute's requests, the page shows measured, simulated and predicted values."""
    with Client(served.grpc, token=OPERATOR) as client, _console(served) as page:
        requests = [{"prompt": "Once", "max_tokens": 40, "ignore_eos": True} for _ in range(8 * ROWS)]
        for _ in client.generate_batch(requests):
            pass
        until(page, "quire.model.load.running === 0")
        page.fill("#predict-minutes", "1")
        page.fill("#predict-max_num_seqs", str(4 * ROWS))
        page.click("#predict button")
        page.locator("#predict-table tr").first.wait_for()

        measured, present, predicted = page.evaluate(
            "['measured', 'present', 'predicted'].map(name => quire.prediction.found.runs[name])"
        )
        assert measured["completed"] == present["completed"] == predicted["completed"] >= 8 * ROWS
        assert predicted["ttft"][0] < present["ttft"][0]
        assert "TTFT, median" in page.inner_text("#predict-table")
        assert "no request had a target" in page.inner_text("#predict-notes")


def test_the_first_line_says_what_holds_the_service_back(served: Served) -> None:
    """Idle, and then behind full rows: the state, the remedy, and who waits."""
    with Client(served.grpc, token=OPERATOR) as client, _console(served) as page:
        page.locator("#now", has_text="idle: no request runs or waits").wait_for()
        streams = [client.generate("Once", max_tokens=1500, ignore_eos=True) for _ in range(3 * ROWS)]
        page.locator("#now", has_text=f"{ROWS} of {ROWS} rows busy").wait_for()
        page.locator("#now", has_text="What helps: raise --max-num-seqs or add a worker").wait_for()
        page.locator("#now", has_text="requests wait, the oldest").wait_for()
        page.locator("#memory tbody tr").nth(ROWS - 1).wait_for()
        page.select_option("#memory-by", "tenant")
        page.locator("#memory tbody tr", has_text=f"{ROWS} requests").wait_for()
        for stream in streams:
            stream.cancel()
        page.locator("#now", has_text="idle").wait_for()
