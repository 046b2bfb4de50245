"""The console's page and data: served to operators only, from this server only, bounded for each viewer."""

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.quire.link.v1 import link_pb2
from quire import __version__
from quire.admin.v1 import admin_pb2 as admin
from scheduler_svc.core.interface.config import POLICIES
from services.http.console import page
from services.http.console.feed import Feed
from services.link.live_view import MAX_UNREAD_PARTS
from tests.services.stack import MODEL, PATIENCE_S, Stack, running_stack

JSON = {"content-type": "application/json"}
PRINCIPALS = f"""
[principals.search]
tokens = ["{hashlib.sha256(b"s3cret").hexdigest()}"]
[principals.operator]
tokens = ["{hashlib.sha256(b"0p").hexdigest()}"]
admin = true
"""
STATIC = resources.files(page.__package__) / "static"


class _Page(HTMLParser):
    """The addresses that a page loads, and what a strict policy would refuse."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.inline: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collects."""
        values = dict(attrs)
        address = values.get("src") or (values.get("href") if tag == "link" else None)
        if address:
            self.loaded.append(address)
        if (tag == "script" and "src" not in values) or tag == "style":
            self.inline.append(tag)
        self.inline += [name for name in values if name == "style" or name.startswith("on")]


@asynccontextmanager
async def _watching(stack: Stack, **headers: str) -> AsyncIterator[tuple[httpx.Response, AsyncIterator[Any]]]:
    """A view over HTTP and its events."""
    async with stack.http.stream(
        "POST", "/console/api/watch", content='{"tables": true}', headers=JSON | headers, timeout=PATIENCE_S
    ) as response:

        async def events() -> AsyncIterator[Any]:
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line.removeprefix("data: "))

        yield response, events()


def _say(stack: Stack, part: admin.WatchStepsResponse) -> None:
    number = [request.number for message in stack.core.messages for request in message.operator_requests][-1]
    view = link_pb2.View(number=number, response=part.SerializeToString(), steps=len(part.steps))
    stack.core.say(link_pb2.CoreMessage(incarnation=stack.core.incarnation, views=[view]).SerializeToString())


def test_the_page_loads_only_its_own_files(tmp_path: Path) -> None:
    """Every file named by the page and its modules is served under a policy that permits nothing else."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            first = await stack.http.get("/")
            assert first.headers["content-type"] == "text/html; charset=utf-8"
            found = _Page()
            found.feed(first.text)
            assert found.inline == []
            todo, seen = ["/", *found.loaded], set[str]()
            while todo:
                path = todo.pop()
                if path in seen:
                    continue
                seen.add(path)
                response = await stack.http.get(path)
                assert response.status_code == 200, path
                assert response.headers["content-security-policy"] == page.CONTENT_SECURITY_POLICY
                assert response.headers["x-content-type-options"] == "nosniff"
                todo += ["/console/" + name for name in re.findall(r'from "\./([^"]+)"', response.text)]
                again = await stack.http.get(path, headers={"if-none-match": response.headers["etag"]})
                assert (again.status_code, again.content) == (304, b"")
            files = {"/" if file.name == "index.html" else f"/console/{file.name}" for file in STATIC.iterdir()}
            assert seen == files

    asyncio.run(main())
    policy = dict(part.split(" ", 1) for part in page.CONTENT_SECURITY_POLICY.split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == "'none'"
    assert {policy["script-src"], policy["style-src"], policy["connect-src"]} == {"'self'"}


def test_no_file_names_another_server() -> None:
    """The page has no address outside of this server, and no module writes HTML."""
    for file in STATIC.iterdir():
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://[\w.]|url\(", text), file.name
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), file.name


def test_every_policy_can_be_predicted() -> None:
    """The page offers each policy of the scheduler, and explains its order."""
    offered = re.search(r'name="policy">(.*?)</select>', (STATIC / "index.html").read_text("utf-8"))
    assert offered is not None

    assert tuple(re.findall(r"<option>(\w+)</option>", offered[1])) == POLICIES
    orders = (STATIC / "queues.js").read_text("utf-8").partition("ORDERS = {")[2].partition("};")[0]
    assert set(re.findall(r"^  (\w+):", orders, re.MULTILINE)) == set(POLICIES)


@pytest.mark.parametrize("path", ["watch", "drain", "resume", "explain", "strategies", "predict", "service"])
def test_data_is_for_operators_only(tmp_path: Path, path: str) -> None:
    """Without a token, and with that of a client, the data is refused. The page itself holds no data."""
    (tmp_path / "principals.toml").write_text(PRINCIPALS)

    async def main() -> None:
        async with running_stack(tmp_path, principals=str(tmp_path / "principals.toml")) as stack:
            assert (await stack.http.get("/")).status_code == 200
            for headers, status in (({}, 401), ({"authorization": "Bearer s3cret"}, 403)):
                response = await stack.http.post(f"/console/api/{path}", content="{}", headers=JSON | headers)
                assert response.status_code == status
            assert not any(message.operator_requests for message in stack.core.messages)
            async with _watching(stack, authorization="Bearer 0p") as (response, events):
                assert response.status_code == 200
                assert await anext(events) == {"traceUrl": "", "model": MODEL.name, "release": __version__}

    asyncio.run(main())


def test_an_api_key_opens_the_console_of_a_loopback_service(tmp_path: Path) -> None:
    """With API keys, the data needs one of them."""
    (tmp_path / "keys").write_text("first\n")

    async def main() -> None:
        async with running_stack(tmp_path, api_key_file=str(tmp_path / "keys")) as stack:
            refused = await stack.http.post("/console/api/watch", content="{}", headers=JSON)
            assert refused.status_code == 401
            async with _watching(stack, authorization="Bearer first") as (response, _):
                assert response.status_code == 200

    asyncio.run(main())


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"host": "evil.example:8000"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"content-type": "text/plain"}, 415),
        ({}, 400),
    ],
)
def test_other_pages_reach_no_data(tmp_path: Path, headers: dict[str, str], expected: int) -> None:
    """Foreign hosts and origins, and bodies that a page can send without a preflight, are refused."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            response = await stack.http.post("/console/api/watch", content="[]", headers=JSON | headers)
            assert response.status_code == expected
            assert "access-control-allow-origin" not in response.headers
            if "host" in headers:
                assert (await stack.http.get("/", headers=headers)).status_code == 403

    asyncio.run(main())


def test_the_console_can_be_turned_off(tmp_path: Path) -> None:
    """Without the console, neither its page nor its data is there."""

    async def main() -> None:
        async with running_stack(tmp_path, console=False) as stack:
            for path in ("/", "/console/main.js"):
                assert (await stack.http.get(path)).status_code == 404
            assert (await stack.http.post("/console/api/watch", content="{}", headers=JSON)).status_code == 404

    asyncio.run(main())


def test_a_viewer_that_pauses_learns_how_many_steps_it_has_missed(tmp_path: Path) -> None:
    """Steps that a viewer does not read are dropped and counted; received and missed steps together are all steps."""
    num_parts = 40 * MAX_UNREAD_PARTS

    async def main() -> None:
        async with running_stack(tmp_path) as stack, _watching(stack) as (_, events), asyncio.timeout(PATIENCE_S):
            await anext(events)
            for number in range(num_parts):
                part = admin.WatchStepsResponse()
                # Each step uses other rows, so that all rows are sent.
                rows = range(3000 * number, 3000 * (number + 1))
                part.steps.add(worker_id="w", step=number, decode_rows=rows, decode_requests=rows)
                _say(stack, part)
            # The response follows everything that the core sent before.
            while stack.core.unsaid:
                await stack.http.post("/console/api/resume", content='{"worker": "w"}', headers=JSON)
            last = seen = dropped = 0
            while last < num_parts - 1:
                event = await anext(events)
                for step in event.get("steps", ()):
                    last = step["step"]
                    seen += 1
                dropped += event.get("dropped", 0)
            assert dropped > 0
            assert seen + dropped == num_parts

    asyncio.run(main())


def test_a_viewer_that_leaves_ends_its_view(tmp_path: Path) -> None:
    """The core is notified when the last view ends."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack, asyncio.timeout(PATIENCE_S):
            async with _watching(stack) as (_, events):
                await anext(events)
            await stack.core.saw(lambda core: any(message.ended_orders for message in core.messages))

    asyncio.run(main())


ROWS = st.dictionaries(st.integers(0, 4), st.integers(10, 13), max_size=4)


@given(st.lists(st.tuples(st.sampled_from("ab"), ROWS, ROWS), max_size=12))
def test_a_viewer_can_restore_the_rows_from_the_changes(
    steps: list[tuple[str, dict[int, int], dict[int, int]]],
) -> None:
    """Each step has only the changed rows, and a viewer that applies them has all rows of every step."""
    feed, known = Feed(), dict[tuple[str, str], dict[int, int]]()
    for worker, decode, waiting in steps:
        part = admin.WatchStepsResponse()
        part.steps.add(
            worker_id=worker,
            decode_rows=decode.keys(),
            decode_requests=decode.values(),
            waiting_rows=waiting.keys(),
            waiting_requests=waiting.values(),
        )
        (step,) = feed.message(part)["steps"]
        for name, expected in (("decode", decode), ("waiting", waiting)):
            rows = known.setdefault((worker, name), {})
            before = dict(rows)
            gone, joined, numbers = step.get(name, ([], [], []))
            for row in gone:
                del rows[row]
            rows.update(zip(joined, numbers, strict=True))
            assert rows == expected
            assert (name in step) == (before != expected)
            assert not any(before.get(row) == number for row, number in zip(joined, numbers, strict=True))


def _load(seconds: int, *workers: str) -> admin.WatchStepsResponse:
    part = admin.WatchStepsResponse()
    part.load.time.FromSeconds(seconds)
    for name in workers:
        part.load.workers.add(worker_id=name)
    return part


def _step(worker: str, *rows: int) -> admin.WatchStepsResponse:
    part = admin.WatchStepsResponse()
    part.steps.add(worker_id=worker, decode_rows=rows, decode_requests=rows)
    return part


def test_the_leader_and_its_standbys_are_shown_if_there_are_any() -> None:
    """A service without standbys has no such line. Leader numbers are text, because they may have 64 bits."""
    feed, part = Feed(), _load(0)
    assert feed.message(part)["load"]["leadership"] is None
    shown = part.load.leadership
    shown.leader, shown.leader_number, shown.seconds = "a-7", (1 << 63) + 1, 3.4
    shown.ready_standbys, shown.other_standbys, shown.lag_bytes = 1, 2, 900

    assert feed.message(part)["load"]["leadership"] == {
        "leader": "a-7", "number": "9223372036854775809", "seconds": 3, "ready": 1, "others": 2, "lag": 900,
    }  # fmt: skip


def test_kinds_of_cache_and_checkpoints_are_shown() -> None:
    """A worker has its kinds and sizes; without checkpoints it has no numbers of them."""
    feed, part = Feed(), _load(0, "w")
    (found,) = part.load.workers
    assert feed.message(part)["load"]["workers"][0]["checkpoints"] is None
    found.cache_kinds.extend(["full", "state"])
    found.block_bytes, found.window_blocks, found.state_bytes = 4096, 3, 512
    found.checkpoints.total, found.checkpoints.used, found.checkpoints.saved = 8, 5, 9
    found.checkpoints.restored, found.checkpoints.evicted = 4, 2

    (shown,) = feed.message(part)["load"]["workers"]
    assert shown["kinds"] == ["full", "state"]
    assert (shown["blockBytes"], shown["windowBlocks"], shown["stateBytes"]) == (4096, 3, 512)
    assert shown["checkpoints"] == {"total": 8, "used": 5, "saved": 9, "restored": 4, "evicted": 2}


def test_sessions_are_shown_with_their_tier_and_expected_return() -> None:
    """Each session of a snapshot has all columns of the page; a time in the past is negative."""
    feed, part = Feed(), admin.WatchStepsResponse()
    part.tables.time.FromSeconds(9)
    part.tables.sessions.add(
        number=1, tenant="a", session_id="agent-7", state="pausing", turn=3, tokens=512, tier="host",
        since_seconds=1.23456, expected_seconds=-2.5,
    )  # fmt: skip
    part.tables.sessions.add(number=2, state="active", turn=1, tokens=64)

    assert feed.message(part)["tables"]["sessions"] == [
        {
            "number": 1, "tenant": "a", "id": "agent-7", "state": "pausing", "turn": 3, "tokens": 512, "tier": "host",
            "since": 1.235, "expected": -2.5,
        },
        {
            "number": 2, "tenant": "", "id": "", "state": "active", "turn": 1, "tokens": 64, "tier": "",
            "since": 0.0, "expected": 0.0,
        },
    ]  # fmt: skip


def test_a_worker_that_left_is_forgotten_after_a_minute() -> None:
    """Its name is sent once, with all rows of a successor with this name; a worker that returns earlier is kept."""
    feed = Feed()
    for worker in ("left", "back"):
        feed.message(_step(worker, 1, 2))
    assert "forgotten" not in feed.message(_load(0, "left", "back"))
    assert "forgotten" not in feed.message(_load(10))
    assert "forgotten" not in feed.message(_load(69, "back"))
    assert feed.message(_load(70, "back"))["forgotten"] == ["left"]
    assert "forgotten" not in feed.message(_load(200, "back"))
    (step,) = feed.message(_step("left", 1, 2))["steps"]
    assert step["decode"] == [[], [1, 2], [1, 2]]
    (step,) = feed.message(_step("back", 1, 2))["steps"]
    assert "decode" not in step


@pytest.mark.parametrize(("path", "name"), [("drain", "worker"), ("resume", "worker"), ("explain", "request")])
def test_text_that_is_not_unicode_is_refused(tmp_path: Path, path: str, name: str) -> None:
    """A lone surrogate in a name is the caller's error."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            body = json.dumps({name: "a\ud800"})
            response = await stack.http.post(f"/console/api/{path}", content=body, headers=JSON)
            assert response.status_code == 400
            assert "lone surrogates" in response.json()["error"]["message"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("strategies", '{"seconds": 60, "rows": 4}'),
        ("explain", '{"request": "r"}'),
        ("predict", '{"seconds": 60, "settings": {"policy": "sjf"}, "workers": 2}'),
    ],
)
def test_a_page_that_leaves_ends_the_work_for_it(tmp_path: Path, path: str, body: str) -> None:
    """The core is notified that nobody waits for a reply any more."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack, asyncio.timeout(PATIENCE_S):
            stack.core.answers_operators = False
            asking = asyncio.create_task(
                stack.http.post(f"/console/api/{path}", content=body, headers=JSON, timeout=PATIENCE_S)
            )
            await stack.core.saw(lambda core: any(message.operator_requests for message in core.messages))
            (number,) = [each.number for message in stack.core.messages for each in message.operator_requests]
            asking.cancel()
            await stack.core.saw(lambda core: any(number in message.ended_orders for message in core.messages))

    asyncio.run(main())


@pytest.mark.parametrize(
    "body",
    [
        '{"settings": {}}',
        '{"seconds": 901}',
        '{"seconds": 60, "settings": ["policy=sjf"]}',
        '{"seconds": 60, "settings": {"policy": {}}}',
        '{"seconds": 60, "workers": 65}',
        '{"seconds": 60, "memoryPercent": 1001}',
    ],
)
def test_a_prediction_that_is_not_valid_is_refused(tmp_path: Path, body: str) -> None:
    """Times, settings, workers and memory beyond their limits never reach the scheduler."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack:
            response = await stack.http.post("/console/api/predict", content=body, headers=JSON)
            assert response.status_code == 400
            assert not any(message.operator_requests for message in stack.core.messages)

    asyncio.run(main())
