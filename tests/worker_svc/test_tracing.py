"""Spans of the worker: steps and rows, linked both ways, without a word of a prompt."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from checks.driver import Driver, make_engine
from measure.testbed.checkpoints import make_checkpoint
from shared.telemetry import MAX_LINKS
from worker_svc.speculation.ngram import NgramProposer

ATTEMPT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
STEP = "00-1af7651916cd43dd8448eb211c80319c-c7ad6b7169203331-01"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small checkpoint."""
    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


class Traced:
    """A driver whose engine exports spans to memory."""

    def __init__(self, checkpoint: Path, max_rows: int, speculation: str = "off") -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        engine = make_engine(
            checkpoint,
            tracer=provider.get_tracer("test"),
            max_num_seqs=max_rows,
            max_num_batched_tokens=200,
            speculation=speculation,
        )
        self.driver = Driver(engine)

    def spans(self, name: str) -> list[ReadableSpan]:
        """Finished spans of that name, in order of their end."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]


def linked(spans: Sequence[ReadableSpan]) -> set[int]:
    """Ids of the spans that these link to."""
    return {link.context.span_id for span in spans for link in span.links}


def span_ids(spans: Sequence[ReadableSpan]) -> set[int]:
    """Return the ids of spans."""
    return {span.context.span_id for span in spans if span.context is not None}


def test_steps_and_rows_are_linked_both_ways(checkpoint: Path) -> None:
    """A traced row's span hangs under its attempt and links to its traced steps, which link back to it."""
    traced = Traced(checkpoint, max_rows=2)
    driver = traced.driver
    row = driver.admit([1, 2, 3], traceparent=ATTEMPT)
    other = driver.admit([4, 5])
    for chunked, length in ((row, 3), (other, 2)):
        driver.chunk(chunked, length)
    for step in range(3):
        driver.plan.traceparent = STEP if step < 2 else ""
        driver.step()
    driver.leave(row)
    driver.step()

    (row_span,), steps = traced.spans("quire.worker.row"), traced.spans("quire.worker.step")
    assert row_span.parent is not None
    assert f"{row_span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert row_span.attributes == {
        "quire.request_id": "request-0",
        "quire.row": 0,
        "quire.generation": 1,
        "quire.prompt_tokens": 3,
        "quire.tokens_computed": 5,
        "quire.worker": "",
    }
    assert [step.attributes for step in steps] == [
        {"quire.worker": "", "quire.step": 1, "quire.rows": 2, "quire.tokens": 5, "quire.prefill_tokens": 5},
        {"quire.worker": "", "quire.step": 2, "quire.rows": 2, "quire.tokens": 2, "quire.prefill_tokens": 0},
    ]
    assert all(step.parent is not None and f"{step.parent.span_id:016x}" == "c7ad6b7169203331" for step in steps)
    assert linked([row_span]) == span_ids(steps)
    assert linked(steps) == span_ids([row_span])


def test_links_beyond_the_limit_go_to_continuations(checkpoint: Path) -> None:
    """A step with more traced rows than a span keeps links for loses none of them."""
    traced = Traced(checkpoint, max_rows=MAX_LINKS + 5)
    driver = traced.driver
    for _ in range(MAX_LINKS + 5):
        driver.chunk(driver.admit([7], traceparent=ATTEMPT), 1)
    driver.plan.traceparent = STEP
    driver.step()
    driver.engine.reset()

    steps, rows = traced.spans("quire.worker.step"), traced.spans("quire.worker.row")
    assert [len(step.links) for step in steps] == [MAX_LINKS, 5]
    assert linked(steps) == span_ids(rows)
    assert len(rows) == MAX_LINKS + 5


def test_a_row_keeps_its_first_links(checkpoint: Path) -> None:
    """A row that takes part in more steps than a span keeps links for stops linking; none is dropped silently."""
    traced = Traced(checkpoint, max_rows=1)
    driver = traced.driver
    driver.chunk(driver.admit([7], traceparent=ATTEMPT), 1)
    for _ in range(MAX_LINKS + 3):
        driver.plan.traceparent = STEP
        driver.step()
    driver.engine.reset()

    (row,) = traced.spans("quire.worker.row")
    assert (len(row.links), row.dropped_links) == (MAX_LINKS, 0)


def test_the_end_of_an_epoch_ends_every_span(checkpoint: Path) -> None:
    """Nothing stays open when all rows are dropped, and without traces nothing is recorded."""
    traced = Traced(checkpoint, max_rows=2)
    driver = traced.driver
    driver.chunk(driver.admit([7], traceparent=ATTEMPT), 1)
    driver.chunk(driver.admit([8]), 1)
    driver.step()

    driver.engine.reset()

    assert len(traced.spans("quire.worker.row")) == 1
    assert traced.spans("quire.worker.step") == []


def test_a_malformed_traceparent_is_no_trace(checkpoint: Path) -> None:
    """A text that names no span begins no trace; the step is computed."""
    traced = Traced(checkpoint, max_rows=1)
    driver = traced.driver
    row = driver.admit([7], traceparent="nonsense")
    driver.chunk(row, 1)
    driver.plan.traceparent = "00-zz"

    assert set(driver.step()) == {row}
    driver.engine.reset()
    assert traced.spans("quire.worker.row") == traced.spans("quire.worker.step") == []


def test_the_span_of_a_row_has_its_drafts(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that verified drafts has their number and the number of accepted ones; others have no such attribute."""
    traced = Traced(checkpoint, max_rows=2, speculation="ngram")
    driver = traced.driver
    monkeypatch.setattr(NgramProposer, "_continue", lambda self, row, most: range(5, 5 + most))
    rows = [driver.admit([1, 2, 3] * 4, traceparent=ATTEMPT) for _ in range(2)]
    for row in rows:
        driver.chunk(row, 12)
    driver.speculate(rows[0], 4)
    for _ in range(30):
        driver.step()
    for row in rows:
        driver.leave(row)
    driver.step()

    spans = {
        span.attributes["quire.row"]: span.attributes for span in traced.spans("quire.worker.row") if span.attributes
    }
    assert driver.num_drafted > 0
    assert spans[rows[0]]["quire.draft_tokens"] == driver.num_drafted
    assert spans[rows[0]]["quire.accepted_draft_tokens"] == driver.num_accepted
    assert "quire.draft_tokens" not in spans[rows[1]]
