"""Every id that a client gets from an API means its request."""

import pytest

from shared.request_names import may_mean, meant

IDS = ["req-1", "req-2-0", "req-2-1", "job", "job-1", "score-0", "score-0-other", "cmpl-own"]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("req-1", {"req-1"}),
        ("chatcmpl-req-1", {"req-1"}),
        ("resp_req-1", {"req-1"}),
        ("msg_req-1", {"req-1"}),
        ("cmpl-req-2", {"req-2-0", "req-2-1"}),
        ("req-2", {"req-2-0", "req-2-1"}),
        ("score", {"score-0", "score-0-other"}),
        ("job", {"job"}),
        ("cmpl-own", {"cmpl-own"}),
        ("request", set()),
        ("other", set()),
    ],
)
def test_an_id_means_the_request_or_the_parts_of_its_call(name: str, found: set[str]) -> None:
    """An exact id comes first, then a response's id without the prefix, then the parts of a call."""
    assert meant(name, IDS) == found
    assert found <= {each for each in IDS if may_mean(name, each)}
