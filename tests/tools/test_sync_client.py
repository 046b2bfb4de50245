"""quire/client.py is the blocking form of quire/aio.py."""

from tools.sync_client import MADE, SOURCE, make

ASYNCHRONOUS = '''"""Docstring of the source."""

from collections.abc import AsyncIterator, Iterable


class AsyncClient:
    async def all(self, them: AsyncIterator[int]) -> Iterable[int]:
        async with self._lock:
            return [await self._take(each) for each in [each async for each in them]]
'''


def test_what_is_asynchronous_becomes_blocking() -> None:
    """`async` and `await` go, names lose their prefix, and the docstring is that of the blocking client."""
    made = make(ASYNCHRONOUS)

    assert made.startswith('"""Blocking Python client.')
    assert made.endswith(
        """from collections.abc import Iterable, Iterator


class Client:
    def all(self, them: Iterator[int]) -> Iterable[int]:
        with self._lock:
            return [self._take(each) for each in list(them)]
"""
    )


def test_the_blocking_client_is_up_to_date() -> None:
    """A change of the asyncio client reaches the blocking one: run `python -m tools.sync_client`."""
    assert MADE.read_text("utf-8") == make(SOURCE.read_text("utf-8"))
