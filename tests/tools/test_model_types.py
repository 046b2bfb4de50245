"""docs/models.md lists the types that the last survey found, and the survey tells types apart."""

import pytest

from tools.model_types import PAGE, Finding, read_result, section, survey, written


def test_the_page_has_the_result_of_the_survey() -> None:
    """The lists are those of measure/results/model_types.json: run `python -m tools.model_types`."""
    page = PAGE.read_text("utf-8")

    assert written(page, section(*read_result())) == page


def test_no_surveyed_type_differs_or_fails() -> None:
    """A type is served with equal tokens, refused in one line, or not tested."""
    findings, _ = read_result()

    assert {each.status for each in findings.values()} <= {"own code", "transformers", "refused", "not built"}
    assert all("\n" not in each.why for each in findings.values())


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("qwen2", Finding("Qwen2ForCausalLM", "own code")),
        ("olmo2", Finding("Olmo2ForCausalLM", "transformers")),
        (
            "gptj",
            Finding(
                "GPTJForCausalLM", "refused", "its class in transformers does not declare attention-backend support"
            ),
        ),
    ],
)
def test_a_type_is_served_or_refused(model_type: str, expected: Finding) -> None:
    """A tiny model of the type is served by own code, through transformers, or refused with the worker's reason."""
    assert survey(model_type) == expected
