"""`python -m measure.claims`: the page shows the results, and each study measures what its claim is about."""

import json
import re
import subprocess
import sys

import pytest

from measure.claims import computed, live, parts, virtual
from measure.claims.page import PAGE, PLOTS, filled
from measure.claims.table import claims
from measure.strategies import report
from measure.strategies.claims import Verdict, at_least


def test_the_page_shows_the_results() -> None:
    """docs/strategies.md and its plots are those of the JSON files (`python -m measure.claims --parts none`)."""
    strategies = parts.strategies()

    assert PAGE.read_text("utf-8") == filled(PAGE.read_text("utf-8"), parts.read(), strategies)
    for name, svg in report.plots(strategies["results"]).items():
        assert (PLOTS / f"strategies-{name}.svg").read_text("utf-8") == svg


def test_every_part_has_results_and_claims() -> None:
    """No part is missing in the file, and each part is named by at least one claim."""
    results = parts.read()

    assert set(results) | {parts.STRATEGIES_PART} == set(parts.NAMES)
    found = claims(results, parts.strategies()["results"])
    assert {claim.part for claim in found} == set(parts.NAMES)
    assert len({claim.claim for claim in found}) == len(found)


def test_a_claim_without_results_is_omitted() -> None:
    """A part that has not run leaves no row and no error."""
    results = {"buckets": parts.read()["buckets"]}

    assert [claim.part for claim in claims(results, [])] == ["buckets"]


@pytest.mark.parametrize(
    ("value", "verdict"), [(10.0, Verdict.HOLDS), (9.9, Verdict.IN_PART), (1.1, Verdict.IN_PART), (1.0, Verdict.WRONG)]
)
def test_a_verdict_follows_from_the_gain(value: float, verdict: Verdict) -> None:
    """A claimed gain of 10 holds from 10 on; without any gain it is wrong."""
    assert at_least(value, 10.0) is verdict


@pytest.mark.parametrize("name", ["buckets", "flags", "kv_budget", "parallel"])
def test_computed_parts_are_those_of_the_present_code(name: str) -> None:
    """Flags and capacities on the page are the present ones."""
    study = getattr(computed, name)

    assert json.loads(json.dumps(study())) == parts.read()[name]["values"]


def test_parts_in_virtual_time_can_be_repeated() -> None:
    """Equal code gives equal results, and chunks shorten the longest gap between two tokens."""
    found = virtual.chunks()

    assert found == virtual.chunks()
    assert found["chunks of 512"]["longest_gap_s"] < found["whole prompts"]["longest_gap_s"]  # type: ignore[index]


def test_the_highest_load_is_found_by_bisection() -> None:
    """The result is the highest tried load within the limit; 0 if none is."""
    assert virtual._highest(lambda load: load <= 0.62) == 0.6
    assert virtual._highest(lambda _: True) == 1.2
    assert virtual._highest(lambda _: False) == 0.0


def test_generate_computes_a_batch_until_its_longest_row() -> None:
    """The library itself pads the rows that have ended; only their own tokens count."""
    baseline = live._Generate()

    assert baseline.batch(live._prompts(3), [2, 5, 1]) == [2, 5, 1]


def test_an_unknown_part_is_named() -> None:
    """The error lists the parts."""
    run = subprocess.run(
        [sys.executable, "-m", "measure.claims", "--parts", "x"], capture_output=True, text=True, check=False
    )

    assert run.returncode == 2
    assert re.search(r"unknown part 'x'; use all, none or some of buckets, ", run.stderr)
