"""The page about foreign clients shows what `make clients` found."""

import pytest

from measure.testbed.environments import environments
from tests.clients.__main__ import PAGE, PUBLISHED, main, with_tables
from tests.clients.matrix import FEATURES, Outcome, matrix_of, read, tables, to_json


def test_the_tables_of_the_page_are_the_published_outcomes() -> None:
    """After `make clients ARGS=--publish`, page and outcomes agree; a table that was edited by hand is found."""
    page = PAGE.read_text("utf-8")

    assert with_tables(page, tables(read(PUBLISHED))) == page, "make clients ARGS=--publish"


def test_every_version_of_a_client_is_locked() -> None:
    """Each environment has a lock with exact versions, so that a run can be repeated."""
    found = environments()

    assert len(found) >= 8
    for each in found:
        assert each.lock.exists(), each.name
        if not each.is_node:
            assert all("==" in line for line in each.lock.read_text().splitlines()), each.name


def test_what_a_client_does_not_try_is_absent() -> None:
    """The matrix has a cell per feature, a failure is shown with its reason, and JSON contains everything."""
    failed = Outcome("c", "c 1.0", "stream", "fail", "boom")
    matrix = matrix_of([Outcome("c", "c 1.0", "create", "pass"), failed])

    assert [each.result for each in matrix["c"].values()].count("absent") == len(FEATURES) - 2
    assert "| stream | **no** | boom | c |" in tables(matrix)
    assert "| yes | **no** |" in tables(matrix)
    with pytest.raises(ValueError, match="unknown feature"):
        Outcome("c", "c 1.0", "streams", "pass")
    assert to_json(matrix_of(matrix["c"].values())) == to_json(matrix)


@pytest.mark.release
@pytest.mark.timeout(3600)
def test_all_clients_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """No feature of a client fails. Needs the package indexes of Python and Node, or build/clients."""
    monkeypatch.setattr("sys.argv", ["clients"])

    assert main() == 0
