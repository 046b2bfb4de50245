"""The comparison of load tools: when two of them agree, and how this is shown."""

from measure.load.figures import Interval
from measure.studies.load_tools import Means, overlap, summary, table


def test_tools_agree_if_their_intervals_overlap() -> None:
    """A common point suffices."""
    assert overlap(Interval(10.0, 1.0), Interval(12.0, 1.0))
    assert not overlap(Interval(10.0, 1.0), Interval(12.1, 1.0))


def test_the_table_says_for_each_figure_whether_the_first_tool_agrees_with_all() -> None:
    """Equal times to the first token, different times per token."""
    ours = [Means(10.0, 1.0, 30.0, 5), Means(12.0, 1.1, 32.0, 5)]
    theirs = [Means(11.0, 5.0, 31.0, 5), Means(11.5, 5.1, 31.0, 5)]

    head, _, ttft, tpot, _ = table(summary({"ours": ours, "theirs": theirs})).splitlines()

    assert head == "| | ours | theirs | intervals overlap |"
    assert ttft.startswith("| TTFT, ms | 11.00 ± 12.71 | 11.25 ±")
    assert ttft.endswith("| yes |")
    assert tpot.endswith("| no |")
