"""Runs the parts of one call concurrently."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TypeVar

from shared.errors import QuireError

Result = TypeVar("Result")


async def run_together(calls: Sequence[Coroutine[None, None, Result]], at_most: int | None = None) -> list[Result]:
    """Run the calls concurrently and return their results in order; the first error cancels all.

    Args:
        calls: the parts.
        at_most: maximum number of parts that run at the same time; None for no limit.

    Raises:
        QuireError: a call failed.
    """
    free = asyncio.Semaphore(at_most or len(calls))

    async def run(call: Coroutine[None, None, Result]) -> Result:
        async with free:
            return await call

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(run(call)) for call in calls]
    except* QuireError as failed:
        error = failed.exceptions[0]
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        failure = error
    else:
        return [task.result() for task in tasks]
    finally:
        for call in calls:
            call.close()  # A part that was cancelled before it started has nothing to clean up.
    raise failure
