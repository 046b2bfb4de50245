"""The results of `measure.studies.start`: medians, ranges, and the ratio to importing torch in the same round."""

from typing import Any

from measure.studies.start import summary


def measured(ready_s: float, said_s: float | None) -> dict[str, Any]:
    """One round of a tree."""
    return {
        "ready_s": ready_s,
        "said_s": said_s,
        "cpu_s": {"worker": 2.0},
        "rss_mib": {"worker": 500.0},
        "before_model": {"cpu_s": 1.5, "modules": 1492},
    }


def test_the_ratio_is_that_of_each_round() -> None:
    """A slow round of the machine does not change the ratio, because torch was slow in it too."""
    torch = [{"wall_s": 2.0, "cpu_s": 1.9}, {"wall_s": 6.0, "cpu_s": 4.0}, {"wall_s": 1.0, "cpu_s": 1.0}]

    rows = summary(torch, [measured(3.0, 0.25), measured(9.0, 0.5), measured(2.0, 0.125)])

    assert rows["ready_s"] == "3.00 (2.00-9.00)"
    assert rows["ratio"] == "1.50 (1.50-2.00)"
    assert rows["said_s"] == "0.25 (0.12-0.50)"
    assert rows["worker cpu_s"] == "2.00 (2.00-2.00)"
    assert rows["worker before a model modules"] == "1492.00 (1492.00-1492.00)"
    assert summary(torch[:1], [measured(3.0, None)])["said_s"] == "no line"
