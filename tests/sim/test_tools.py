"""Tools based on the simulator's model worker: mutants of the core, and plots of its promises."""

import ast
import itertools
import random
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from checks.mutation.mutators import mutant, mutations
from measure.load.svg import Series, bars, lines
from measure.plots.claims import CLAIMS
from measure.plots.world import STEP_S, Job, run
from scheduler_svc.core.interface.config import CoreConfig

SOURCE = '''
"""A module."""

def first(values: list[int]) -> int:
    """The first."""
    assert len(values) > 0, "none"
    if not values or values[0] < 3:
        values.append(1)
    return min(values) + 1

def validate() -> None:
    assert 1 < 2
'''


def test_every_mutation_is_another_program() -> None:
    """Each mutation changes the module in one statement, and no two are the same."""
    found = mutations(SOURCE)
    changed = [mutant(SOURCE, number) for number in range(len(found))]
    assert len({ast.unparse(ast.parse(SOURCE)), *changed}) == len(found) + 1
    kinds = {mutation.kind for mutation in found}
    assert kinds == {"comparison", "and/or", "negation", "negated test", "constant", "sign", "removed", "min/max"}
    for mutation, source in zip(found, changed, strict=True):
        assert mutation.before in ast.unparse(ast.parse(SOURCE))
        assert mutation.after in source


def test_checks_are_not_mutated() -> None:
    """Assertions, texts and `validate` stay as they are."""
    for number in range(len(mutations(SOURCE))):
        source = mutant(SOURCE, number)
        assert "assert len(values) > 0, 'none'" in source
        assert "assert 1 < 2" in source


def test_every_job_ends_without_faults() -> None:
    """Every job generates its tokens, one per step from its first plan on."""
    rng = random.Random(1)
    jobs = [Job(0.1 * number, [rng.randrange(9)] * 20, 5 + number) for number in range(10)]
    run(CoreConfig(max_num_seqs=4, max_num_batched_tokens=64), jobs)
    for job in jobs:
        assert len(job.token_times) == job.output
        assert job.latency >= job.output * STEP_S


@pytest.mark.parametrize(
    "text",
    [
        lines("a < b & c", "x", "y", [Series("one", [(0, 0), (1, 2)]), Series("bound", [(0, 3), (1, 3)], True)]),
        bars("bars", "y", ["a", "b"], [("one", [1.0, 2.0]), ("two", [3.0, 0.0])]),
    ],
)
def test_a_chart_is_well_formed(text: str) -> None:
    """Charts are XML with everything inside the picture."""
    root = ElementTree.fromstring(text)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for node in root.iter():
        assert 0 <= float(node.get("x", "0").rstrip("%")) <= width
        assert 0 <= float(node.get("y", "0").rstrip("%")) <= height


def test_every_claim_has_its_plot_in_the_docs() -> None:
    """docs/scheduling.md shows exactly the plots from `make plots`; every plot in docs is shown on a page."""
    docs = Path(__file__).resolve().parents[2] / "docs"
    shown = {
        page.name: sorted(re.findall(r"!\[[^\]]+\]\(plots/([\w-]+)\.svg\)", page.read_text()))
        for page in docs.glob("*.md")
    }
    assert shown["scheduling.md"] == sorted(CLAIMS)
    assert sorted(itertools.chain(*shown.values())) == sorted(path.stem for path in (docs / "plots").glob("*.svg"))
