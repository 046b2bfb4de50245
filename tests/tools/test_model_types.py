"""docs/models.md lists the types that the last survey found, and the survey tells types apart."""

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tools.model_types import PAGE, Finding, read_result, section, survey, surveyed, written

SERVED = {"own code", "attention interface", "cache interface"}
IN_TRANSFORMERS = "its class in transformers"


def test_the_page_has_the_result_of_the_survey() -> None:
    """The lists are those of measure/results/model_types.json: run `python -m tools.model_types`."""
    page = PAGE.read_text("utf-8")

    assert written(page, section(*read_result())) == page


def test_no_surveyed_type_differs_or_fails() -> None:
    """A type is served with equal tokens, refused in one line, or not tested."""
    findings, _ = read_result()

    assert {each.status for each in findings.values()} <= {*SERVED, "refused", "not built"}
    assert all("\n" not in each.why for each in findings.values())
    assert sum(each.status in SERVED for each in findings.values()) >= 110


@pytest.mark.release
@pytest.mark.timeout(7200)
def test_every_type_is_as_surveyed() -> None:
    """Each causal type of the installed transformers is served with equal tokens or refused, as the page says."""
    findings, version = read_result()

    assert version == transformers.__version__
    assert dict(surveyed(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))) == findings


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("qwen2", Finding("Qwen2ForCausalLM", "own code", kinds="full")),
        ("olmo2", Finding("Olmo2ForCausalLM", "attention interface", kinds="full")),
        ("deepseek_v3", Finding("DeepseekV3ForCausalLM", "attention interface", kinds="latent")),
        (
            "rwkv",
            Finding("RwkvForCausalLM", "refused", "its class in transformers keeps recurrent state outside of a cache"),
        ),
    ],
)
def test_a_type_is_served_or_refused(model_type: str, expected: Finding) -> None:
    """A tiny model of the type is served by own code, through transformers, or refused with the worker's reason."""
    assert survey(model_type) == expected
