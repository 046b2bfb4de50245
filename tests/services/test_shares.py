"""Shares of limited resources."""

import asyncio
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.access.shares import Pace, Share, Slices, Turns, make_shares
from services.text.tokenizer import TextTokenizer
from shared.errors import OverloadedError
from tests.services.tokenizers_for_tests import byte_level


@given(
    st.integers(1, 100),
    st.integers(1, 8),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5), st.booleans()), max_size=200),
)
def test_a_share_is_never_exceeded_and_all_is_given_back(
    limit: int, weight: int, steps: list[tuple[str, int, bool]]
) -> None:
    """Whatever principals take and return, the limit holds, and a newcomer may have one unit if one is free."""
    share, held = Share("things", limit, weight=weight), []
    for principal, amount, takes in steps:
        if takes and share.take(principal, amount):
            held.append((principal, amount))
        elif held and not takes:
            share.give_back(*held.pop(0))
        assert share.num_held() == sum(amount for _, amount in held) <= limit
        if share.num_held() < limit:
            assert share.take("newcomer")
            share.give_back("newcomer")
    for each in held:
        share.give_back(*each)

    assert share.num_held() == 0
    assert share.take("a", 1)


@pytest.mark.parametrize(("weight", "alone"), [(1, 50), (8, 89)])
def test_greedy_principals_come_to_hold_equal_parts(weight: int, alone: int) -> None:
    """A principal alone gets most of a resource. As its parts end, a second greedy one gets the same amount."""
    share, held = Share("things", 100, weight=weight), {"first": 0, "second": 0}
    while share.take("first"):
        held["first"] += 1
    assert held["first"] == alone

    for _ in range(200):
        largest = max(held, key=lambda principal: held[principal])
        share.give_back(largest)
        held[largest] -= 1
        for principal in ("second", "first"):
            held[principal] += share.take(principal)

    assert abs(held["first"] - held["second"]) <= 2
    assert held["second"] > 30


@pytest.mark.parametrize(("limit", "alone"), [(1, 1), (8, 8), (9, 8), (16, 15)])
def test_a_small_resource_may_belong_to_one_principal(limit: int, alone: int) -> None:
    """A single principal may hold all of a resource that is too small to divide; some of a larger one stays free."""
    share = Share("things", limit, weight=8)

    assert sum(share.take("only") for _ in range(limit)) == alone


def test_a_refusal_is_counted_and_says_what_to_do() -> None:
    """The error names the resource; `refusals` counts for the metric."""
    share = Share("calls in progress", 1, weight=1)
    with (
        share.holding("a"),
        pytest.raises(OverloadedError, match=r"calls in progress: your share .* try again later"),
        share.holding("b"),
    ):
        pass

    assert (share.num_refusals(), share.num_held()) == (1, 0)


def test_principals_take_turns() -> None:
    """A principal with many waiting tasks delays another by one turn; tasks that leave are skipped."""

    async def main() -> list[str]:
        turns, order = Turns(), []

        async def work(principal: str, name: str) -> None:
            await turns.acquire(principal)
            order.append(name)
            await asyncio.sleep(0)
            turns.release()

        await turns.acquire("holder")
        tasks = [asyncio.create_task(work("greedy", f"greedy {number}")) for number in range(4)]
        tasks += [asyncio.create_task(work("modest", f"modest {number}")) for number in range(2)]
        leaves = asyncio.create_task(work("modest", "leaves"))
        await asyncio.sleep(0)
        leaves.cancel()
        turns.release()
        await asyncio.gather(*tasks, leaves, return_exceptions=True)
        assert turns._free == 1
        return order

    order = asyncio.run(main())

    assert order == ["greedy 0", "modest 0", "greedy 1", "modest 1", "greedy 2", "greedy 3"]


def test_a_task_that_is_cancelled_when_its_turn_comes_loses_no_place() -> None:
    """The share is released before a cancelled task has run: it goes to the next live task, or is free again."""

    async def main() -> tuple[list[object], int]:
        turns = Turns()
        await turns.acquire("holder")
        tasks = [asyncio.create_task(turns.acquire(each)) for each in ("a", "a", "b")]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[2].cancel()
        turns.release()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        turns.release()
        return list(map(type, outcomes)), turns._free

    assert asyncio.run(main()) == ([asyncio.CancelledError, type(None), asyncio.CancelledError], 1)


def test_long_work_leaves_the_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tasks run between its slices, two principals take turns, and short work is done at once."""
    monkeypatch.setattr(Slices, "SLICE_S", 0.0)

    async def main() -> tuple[list[str], list[int], int]:
        slices, order = Slices(), []

        def steps(name: str, count: int) -> Iterator[int]:
            for number in range(count):
                order.append(name)
                yield number

        async def tick() -> None:
            while True:
                order.append(".")
                await asyncio.sleep(0)

        ticking = asyncio.create_task(tick())
        long = asyncio.gather(
            slices.run("greedy", steps("g", 3)),
            slices.run("greedy", steps("h", 3)),
            slices.run("modest", steps("m", 3)),
        )
        results = await long
        ticking.cancel()
        monkeypatch.setattr(Slices, "SLICE_S", 60.0)
        before = len(order)
        await slices.run("modest", steps("m", 100))
        return order, results[0], len(order) - before

    order, result, short = asyncio.run(main())

    worked = "".join(each for each in order if each != ".")
    assert worked[:9] == "gghmgmhmh"
    assert result == [0, 1, 2]
    assert short == 100
    assert "".join(order[order.index("m") :]).count(".") >= 5


def test_an_address_that_took_too_much_time_waits() -> None:
    """It waits for four times the time beyond its burst, others do not, and the record of addresses is bounded."""
    pace = Pace()
    pace.charge("greedy", 0.02)
    assert pace.wait_s("greedy") <= 0 >= pace.wait_s("modest")

    pace.charge("greedy", 10.03)

    assert 39 < pace.wait_s("greedy") <= 40
    assert pace.wait_s("modest") <= 0
    for number in range(1000):
        pace.charge(f"address {number}", 0.0)
    assert len(pace._paid) < 100
    assert pace.wait_s("greedy") > 39


def test_every_share_is_documented() -> None:
    """The table of shared resources in docs/reliability.md lists each share by metric name, with its fraction."""
    table = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    documented = {row[3].strip("`"): row[2].partition(",")[0] for row in rows if len(row) == 5}
    shares = [*make_shares(9000, 9000), TextTokenizer(byte_level(), None).text_bytes]
    fractions = {Fraction(8, 9): "8/9", Fraction(15, 16): "8/9", Fraction(1, 2): "1/2"}

    for share in shares:
        part = Fraction(share.largest_part, share.limit).limit_denominator(20)
        assert documented.get(share.name) == fractions[part], share.name
