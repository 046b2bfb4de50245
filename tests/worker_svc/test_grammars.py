"""Grammars in the engine: every row's output conforms, whatever happens to the row."""

import re
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from protos.quire.plan.v1 import plan_pb2
from shared.columns import to_column
from tests.worker_svc.driver import Driver, make_engine
from worker_svc.engine import Engine
from worker_svc.grammars import GrammarRows, GrammarStore

DEMO = Path("shared/demo_model")
EOS = 2
PATTERN = r"[ab]{6}-\d{4}\."
REGEX = plan_pb2.Grammar(regex=PATTERN).SerializeToString()


@pytest.fixture(scope="module")
def engine() -> Engine:
    return make_engine(DEMO, dtype="float32", max_num_seqs=6)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def params(seed: int) -> plan_pb2.SamplingParams:
    """Hot sampling, which a grammar must bear."""
    return plan_pb2.SamplingParams(temperature=1.5, top_p=1, seed=seed, stop_token_ids=to_column([EOS]))


def test_rows_conform_beside_others_and_end_after_the_last_character(engine: Engine, tokenizer: Tokenizer) -> None:
    """Each row with a grammar samples a whole match, then only the end of sequence, however often; a row that was
    paused is brought to where it was; a row without a grammar has the tokens it would have had alone."""
    engine.reset()
    driver = Driver(engine)
    alone = driver.generate([5, 6, 7], 24, sampling=params(9))
    plain = driver.admit([5, 6, 7], sampling=params(9))
    rows = [driver.admit([5, 6, 7, 8], sampling=params(seed)) for seed in range(4)]
    for admission in driver.plan.admissions[1:]:
        admission.grammar = REGEX
    for row in (plain, *rows):
        driver.chunk(row, driver.rows[row].num_known)
    for _ in range(5):
        driver.step()
    paused = rows[1]
    known = driver.leave(paused)
    driver.admit(known, row=paused, sampling=params(1))
    driver.plan.admissions[-1].grammar = REGEX
    driver.plan.admissions[-1].num_prompt_tokens = 4
    driver.chunk(paused, len(known))
    while len(driver.rows[plain].tokens) < 3 + 24:
        driver.step()

    assert driver.rows[plain].tokens[3:27] == alone
    for row in rows:
        output = driver.rows[row].tokens[4:]
        end = output.index(EOS)
        assert re.fullmatch(PATTERN, tokenizer.decode(output[:end]))
        assert set(output[end:]) == {EOS}, "after the end nothing else is allowed, and the matcher is left alone"


def test_options_that_leave_a_grammar_nothing_fail_the_row_alone(engine: Engine) -> None:
    """The reason says so."""
    engine.reset()
    driver = Driver(engine)
    stuck = plan_pb2.SamplingParams(allowed_token_ids=to_column([EOS]), stop_token_ids=to_column([EOS]))
    rows = [driver.admit([5, 6], sampling=stuck), driver.admit([5, 6], sampling=params(1))]
    driver.plan.admissions[0].grammar = REGEX
    for row in rows:
        driver.chunk(row, 2)

    assert list(driver.step()) == [rows[1]]
    assert "grammar" in driver.last_result.failures[0].reason


def test_grammars_are_compiled_in_a_thread_and_reported() -> None:
    """Good ones without a failure, bad ones with its reason; reports of an epoch that is over are forgotten."""
    store = GrammarStore(DEMO / "tokenizer.json", 1024, (EOS,))
    requests = {
        b"good": REGEX,
        b"bad": plan_pb2.Grammar(regex="(").SerializeToString(),
        b"none": b"",
        b"noise": b"\xff\xff",
    }
    for key, grammar in requests.items():
        store.prepare(plan_pb2.PrepareGrammar(key=key, grammar=grammar))
    reports: dict[bytes, str] = {}
    store._pool.shutdown(wait=True)
    while store.pending:
        reports |= {report.key: report.failure for report in store.take_reports()}

    assert reports.pop(b"good", None) == ""
    assert all(reports.values())


@pytest.mark.parametrize("wrong", ["store", "output", "grammar"])
def test_a_row_whose_grammar_cannot_be_used_may_sample_nothing(wrong: str) -> None:
    """No tokenizer, an output that does not conform, or a grammar that does not compile: the row fails alone."""
    store = None if wrong == "store" else GrammarStore(DEMO / "tokenizer.json", 1024, (EOS,))
    rows = GrammarRows(store, 1024)
    grammar = plan_pb2.Grammar(regex="(").SerializeToString() if wrong == "grammar" else REGEX
    output = np.array([EOS, 900] if wrong == "output" else [], np.int32)

    rows.admit(3, grammar, np.zeros(0, np.int32), output)

    assert not rows.allowed((3,)).any()
    rows.note_token(3, 5)
    rows.leave(3)
    assert len(rows) == 0
