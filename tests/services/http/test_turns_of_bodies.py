"""Large bodies are parsed in turn, because parsing them blocks the event loop."""

import asyncio
import contextlib
from functools import partial

from services.access.shares import Shares, make_shares
from services.http import bodies
from services.http.endpoint import SMALL_BODY_BYTES, Exchange
from services.http.schema import CompletionBody

SMALL = b'{"prompt": "small"}'
LARGE = b'{"prompt": [%s]}' % b",".join([b"1"] * SMALL_BODY_BYTES)


async def received(shares: Shares, principal: str, body: bytes) -> CompletionBody:
    """Read and parse a body that has arrived."""

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": body}

    async def send(_message: object) -> None:
        raise AssertionError("reading a body sends nothing")

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    exchange = Exchange({"type": "http", "path": "/v1/completions", "headers": headers}, receive, send)
    with contextlib.ExitStack() as held:
        exchange.admit_when_complete(shares, principal, held)
        return await exchange.read(partial(bodies.parse, CompletionBody))


def test_principals_take_turns_with_large_bodies() -> None:
    """A large body waits for one of each other principal, a small one for none. Bytes count until they are parsed."""

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

    assert order == ["greedy", "small", "greedy", "large", "greedy", "greedy"]
    assert (waiting, left) == (4 * len(LARGE), 0)


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
