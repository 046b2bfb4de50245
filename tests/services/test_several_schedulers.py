"""A front end with the addresses of several schedulers finds the one that leads."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.link.core_link import CoreLink
from tests.services.stack import PATIENCE_S, TestCore


@asynccontextmanager
async def _connected(*addresses: str) -> AsyncIterator[tuple[CoreLink, asyncio.Event]]:
    changed = asyncio.Event()
    link = CoreLink(",".join(addresses), "f", families=list, on_state=changed.set)
    link.start()
    try:
        yield link, changed
    finally:
        await link.close()


async def _until_ready(link: CoreLink, changed: asyncio.Event, *, restarts: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not link.ready or link.num_restarts < restarts:
            changed.clear()
            await changed.wait()


def test_a_front_end_stays_with_the_address_that_responds_and_then_finds_the_next(tmp_path: Path) -> None:
    """The link connects to all addresses at the same time, finds the leader at any of them, and drops dead ones."""

    async def main() -> None:
        addresses = [f"ipc://{tmp_path}/{name}" for name in "ab"]
        async with _connected(*addresses) as (link, changed):
            for restarts, leading in enumerate((1, 0, 1)):
                core = TestCore(addresses[leading])
                await _until_ready(link, changed, restarts=restarts)
                core.kill()

            assert link.num_restarts == 2

    asyncio.run(main())
