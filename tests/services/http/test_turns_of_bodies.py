"""Large bodies are parsed in turn, and calls with many choices start in turn: both block the event loop."""

import asyncio
import contextlib
from functools import partial
from pathlib import Path

from services.access.shares import SMALL_REQUEST_BYTES, Shares, Turns, make_shares
from services.http import bodies
from services.http.endpoint import ClientGoneError, Exchange
from services.http.schema import CompletionBody
from tests.services.stack import PATIENCE_S, running_stack

SMALL = b'{"prompt": "small"}'
LARGE = b'{"prompt": [%s]}' % b",".join([b"1"] * SMALL_REQUEST_BYTES)


async def received(
    shares: Shares,
    principal: str,
    body: bytes,
    leaves: asyncio.Event | None = None,
    waits: asyncio.Event | None = None,
) -> CompletionBody:
    """Read and parse a received body; set `waits` when it waits for its turn. Its client may disconnect."""
    leaves, waits = leaves or asyncio.Event(), waits or asyncio.Event()

    messages: list[dict[str, object]] = [{"type": "http.request", "body": body}]

    async def receive() -> dict[str, object]:
        if not messages:
            waits.set()
            await leaves.wait()
            return {"type": "http.disconnect"}
        return messages.pop()

    async def send(_message: object) -> None:
        raise AssertionError("reading a body sends nothing")

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    exchange = Exchange({"type": "http", "path": "/v1/completions", "headers": headers}, receive, send)
    with contextlib.ExitStack() as held:
        exchange.admit_when_complete(shares, principal, held)
        return await exchange.read(partial(bodies.parse, CompletionBody))


def test_principals_take_turns_with_large_bodies() -> None:
    """A large body waits for one from each other principal, a small one for none. Bytes count until they are parsed."""

    async def main() -> tuple[list[str], int, int]:
        shares, order = make_shares(100, 100), []

        async def serve(principal: str, body: bytes) -> None:
            await received(shares, principal, body)
            order.append(principal)

        calls = [asyncio.create_task(serve("greedy", LARGE)) for _ in range(4)]
        calls += [asyncio.create_task(serve("large", LARGE)), asyncio.create_task(serve("small", SMALL))]
        await asyncio.sleep(0)
        waiting = shares.body_bytes.num_held()
        await asyncio.gather(*calls)
        return order, waiting, shares.body_bytes.num_held()

    order, waiting, left = asyncio.run(main())

    assert order == ["small", "greedy", "greedy", "large", "greedy", "greedy"]
    assert (waiting, left) == (5 * len(LARGE), 0)


def test_the_event_loop_serves_others_between_large_bodies() -> None:
    """A small body that arrives after the first of two large ones is served before the second."""

    async def main() -> list[str]:
        shares, order = make_shares(100, 100), []

        async def serve(principal: str, body: bytes) -> None:
            await received(shares, principal, body)
            order.append(principal)

        first, second = (asyncio.create_task(serve("greedy", LARGE)) for _ in range(2))
        await first
        await asyncio.gather(second, asyncio.create_task(serve("small", SMALL)))
        return order

    assert asyncio.run(main()) == ["greedy", "small", "greedy"]


def test_the_body_of_a_client_that_left_is_dropped() -> None:
    """A client that disconnects while its body waits for a turn holds neither bytes nor a turn."""

    async def main() -> list[object]:
        shares, leaves = make_shares(100, 100), asyncio.Event()
        wait = [asyncio.Event(), asyncio.Event()]
        await shares.large_bodies.acquire("other")
        leaving = asyncio.create_task(received(shares, "leaving", LARGE, leaves, wait[0]))
        staying = asyncio.create_task(received(shares, "staying", LARGE, waits=wait[1]))
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(each.wait() for each in wait))
        assert shares.body_bytes.num_held() == 2 * len(LARGE)
        leaves.set()
        (outcome,) = await asyncio.gather(leaving, return_exceptions=True)
        held = shares.body_bytes.num_held()
        shares.large_bodies.release()
        return [type(outcome), held, type(await staying)]

    assert asyncio.run(main()) == [ClientGoneError, len(LARGE), CompletionBody]


def test_calls_with_many_choices_take_turns(tmp_path: Path) -> None:
    """While another principal has the turn, a call with nine choices waits; calls with up to eight are served."""

    async def main() -> None:
        async with running_stack(tmp_path) as stack, asyncio.TaskGroup() as group, asyncio.timeout(PATIENCE_S):
            turns = stack.frontend._generator._turns
            waits = asyncio.Event()

            class Waiting(Turns):
                async def acquire(self, principal: str) -> None:
                    waits.set()
                    await turns.acquire(principal)

                def release(self) -> None:
                    turns.release()

            stack.frontend._generator._turns = Waiting()
            await turns.acquire("other")
            many = group.create_task(stack.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "n": 9}))
            await waits.wait()
            few = await stack.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "n": 8})
            assert len(few.json()["choices"]) == 8
            assert len(stack.core.submissions) == 8
            turns.release()
            assert len((await many).json()["choices"]) == 9

    asyncio.run(main())
