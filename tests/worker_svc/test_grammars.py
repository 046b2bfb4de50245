"""Grammars in the engine: every row's output conforms, whatever happens to the row."""

import re
import threading
from hashlib import sha256
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import numpy.typing as npt
import pytest
import torch
from llguidance import LLMatcher, LLParserLimits
from tokenizers import Tokenizer

from checks.driver import Driver, make_engine
from protos.quire.plan.v1 import plan_pb2
from shared.columns import to_column
from shared.frames import MAX_GRAMMARS
from shared.grammars import GrammarTokenizer, compile_grammar
from worker_svc.execution.assembly import make_grammar_store
from worker_svc.execution.engine import Engine
from worker_svc.interface.arrays import NO_IDS
from worker_svc.interface.grammar import GrammarFailureCause, GrammarReport, GrammarRequest
from worker_svc.interface.result import FailureKind
from worker_svc.link.decoding import decode_grammar
from worker_svc.loop import WorkerLoop
from worker_svc.model.loader import ModelDescription
from worker_svc.outputs import grammars
from worker_svc.outputs.grammars import GrammarRows, GrammarStore

DEMO = Path("shared/demo_model")
EOS = 2
PATIENCE_S = 30.0
PATTERN = r"[ab]{6}-\d{4}\."
REGEX = plan_pb2.Grammar(regex=PATTERN).SerializeToString()


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Return an engine with a tokenizer."""
    return make_engine(DEMO, dtype="float32", max_num_seqs=6)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Return the tokenizer."""
    return Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def params(seed: int) -> plan_pb2.SamplingParams:
    """Return parameters with a high temperature, which must not break a grammar."""
    return plan_pb2.SamplingParams(temperature=1.5, top_p=1, seed=seed, stop_token_ids=to_column([EOS]))


def make_store(max_rows: int = 1) -> GrammarStore:
    """A store with the demo model's tokenizer."""
    return GrammarStore(GrammarTokenizer(DEMO / "tokenizer.json", 1024, (EOS,)), (EOS,), max_rows)


def all_reports(store: GrammarStore) -> dict[bytes, GrammarReport]:
    """What has become of the grammars that the store was asked for, by key."""
    for thread in (store._cheap, store._costly):
        thread.submit(int).result()
    reports: dict[bytes, GrammarReport] = {}
    while store.pending:
        reports |= {report.key: report for report in store.take_reports()}
    return reports


def test_rows_conform_beside_others_and_end_after_the_last_character(engine: Engine, tokenizer: Tokenizer) -> None:
    """Each row with a grammar samples a whole match, then only the end of sequence.

    A preempted row is restored. A row without a grammar has the same tokens as alone.
    """
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
    """The failure is the request's own, and says which fields contradict each other."""
    engine.reset()
    driver = Driver(engine)
    stuck = plan_pb2.SamplingParams(allowed_token_ids=to_column([EOS]), stop_token_ids=to_column([EOS]))
    rows = [driver.admit([5, 6], sampling=stuck), driver.admit([5, 6], sampling=params(1))]
    driver.plan.admissions[0].grammar = REGEX
    for row in rows:
        driver.chunk(row, 2)

    assert list(driver.step()) == [rows[1]]
    (failure,) = driver.last_result.failures
    assert (failure.kind, failure.field) == (plan_pb2.ROW_FAILURE_KIND_NO_TOKEN_ALLOWED, "grammar")
    assert "together with allowed_token_ids; relax one of them" in failure.reason


def test_a_grammar_that_ends_before_min_tokens_fails_the_row_there(engine: Engine) -> None:
    """Once the output is complete, only the end of sequence could follow, which min_tokens forbids."""
    engine.reset()
    driver = Driver(engine)
    sampling = params(3)
    sampling.min_tokens = 100
    row = driver.admit([5, 6, 7], sampling=sampling)
    driver.plan.admissions[0].grammar = REGEX
    driver.chunk(row, 3)
    while not driver.last_result.failures:
        driver.step()

    (failure,) = driver.last_result.failures
    assert (failure.kind, failure.field) == (plan_pb2.ROW_FAILURE_KIND_NO_TOKEN_ALLOWED, "grammar")
    assert "together with min_tokens;" in failure.reason
    assert len(driver.rows[row].tokens) > 3


def test_a_grammar_that_takes_too_much_work_fails_its_row_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grammar that exceeds the library's limits during the output fails only its own row, with the remedy.

    The check in the front end cannot find this.
    """
    limits = LLParserLimits(max_lexer_states=30, max_grammar_size=300_000, verbose_errors=False)
    engine.reset()
    driver = Driver(engine)
    rows = [driver.admit([5, 6], sampling=params(seed)) for seed in range(2)]
    regex = r"(a|b)*a(a|b){12}c"
    driver.plan.admissions[0].grammar = plan_pb2.Grammar(regex=regex).SerializeToString()
    for row in rows:
        driver.chunk(row, 2)
    with monkeypatch.context() as patch:
        patch.setattr("shared.grammars._OTHER_LIMITS", limits)
        driver.step()
    while not driver.last_result.failures:
        driver.step()

    (failure,) = driver.last_result.failures
    assert (failure.row, failure.kind) == (rows[0], plan_pb2.ROW_FAILURE_KIND_GRAMMAR_TOO_COSTLY)
    assert failure.field == "grammar"
    assert "simplify it" in failure.reason
    assert list(driver.step()) == [rows[1]]


def test_grammars_are_compiled_in_a_thread_and_reported() -> None:
    """Good grammars are reported without a failure, bad ones with the reason and the grammar as the cause."""
    store = make_store()
    requests = {
        b"good": REGEX,
        b"bad": plan_pb2.Grammar(regex="(").SerializeToString(),
        b"none": b"",
        b"noise": b"\xff\xff",
    }
    for key, grammar in requests.items():
        store.prepare(GrammarRequest(decode_grammar(key, grammar)))
    reports = all_reports(store)

    good = reports.pop(b"good")
    assert (good.failure, good.cause) == ("", None)
    for report in reports.values():
        assert report.failure
        assert report.cause == GrammarFailureCause.GRAMMAR


def test_a_failure_of_the_worker_is_not_the_grammars_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where memory ran out, for example, another worker may compile the grammar."""
    monkeypatch.setattr("worker_svc.outputs.grammars.compile_grammar", Mock(side_effect=MemoryError))
    store = make_store()
    store.prepare(GrammarRequest(decode_grammar(b"g", REGEX)))

    report = all_reports(store)[b"g"]

    assert report.failure == "compilation failed on this worker: MemoryError"
    assert report.cause == GrammarFailureCause.WORKER


def test_a_cheap_grammar_does_not_wait_for_a_costly_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compiled and reported while the costly one that came before it is still being compiled."""
    begun, go = threading.Event(), threading.Event()

    def compile_slowly(kind: str, text: str, tokenizer: GrammarTokenizer) -> LLMatcher:
        if text == "a+":
            begun.set()
            assert go.wait(PATIENCE_S)
        return compile_grammar(kind, text, tokenizer)

    monkeypatch.setattr("worker_svc.outputs.grammars.compile_grammar", compile_slowly)
    store = make_store()
    costly = plan_pb2.Grammar(regex="a+", costly=True).SerializeToString()
    store.prepare(GrammarRequest(decode_grammar(b"costly", costly)))
    assert begun.wait(PATIENCE_S)
    store.prepare(GrammarRequest(decode_grammar(b"cheap", REGEX)))
    store._cheap.submit(int).result()

    assert [report.key for report in store.take_reports()] == [b"cheap"]
    assert store.pending
    go.set()
    assert all_reports(store)[b"costly"].failure == ""


def test_a_worker_without_a_tokenizer_leaves_grammars_to_others(tmp_path: Path) -> None:
    """It starts all the same, and reports each grammar as a failure of its own."""
    description = ModelDescription(
        name="m",
        folder=tmp_path,
        architecture="A",
        fingerprint="f",
        max_model_len=8,
        vocab_size=4,
        dtype=torch.float32,
        kv_dtype=torch.float32,
        eos_token_ids=(EOS,),
        break_even_context=0,
        weights_per_layer=0,
    )

    store = make_grammar_store(description, max_rows=1)
    link = Mock()
    WorkerLoop(link, Mock(grammars=store), Mock(), Mock())._prepare_grammar(GrammarRequest(decode_grammar(b"g", REGEX)))

    (report,) = link.send_grammar_report.call_args.args
    assert (report.key, report.cause) == (b"g", GrammarFailureCause.WORKER)
    assert "tokenizer" in report.failure


def test_the_scheduler_decides_which_grammars_are_dropped() -> None:
    """The worker drops the grammars that the scheduler names, and retains longest those it requested in this epoch.

    Grammars of an earlier epoch are kept while there is room.
    """
    max_rows = 2
    store = make_store(max_rows)
    texts = [plan_pb2.Grammar(regex=f"{number}").SerializeToString() for number in range(MAX_GRAMMARS + max_rows + 1)]
    keys = [sha256(text).digest() for text in texts]
    for key, text in zip(keys, texts, strict=True):
        store.prepare(GrammarRequest(decode_grammar(key, text)))
    all_reports(store)
    store.prepare(GrammarRequest(decode_grammar(keys[1], texts[1]), drop=tuple(keys[5:7])))
    for name in (b"new", b"newer", b"newest"):
        store.prepare(GrammarRequest(decode_grammar(name, REGEX)))
    all_reports(store)

    assert [number for number, key in enumerate(keys) if key not in store] == [0, 2, 5, 6]


def test_only_masks_that_changed_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask is sent when it differs from the row's last one, and each row's logits obey its own mask."""
    sent: list[tuple[int, ...]] = []

    def upload(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
        sent.append(array.shape)
        return torch.from_numpy(array).to(device)

    monkeypatch.setattr(grammars, "upload", upload)
    vocab_size = 1024
    rows = GrammarRows(make_store(), vocab_size, 4, torch.device("cpu"))
    text = plan_pb2.Grammar(regex=r"[ab]{3}c").SerializeToString()
    for row in (3, 1):
        rows.admit(row, decode_grammar(sha256(text).digest(), text), NO_IDS, NO_IDS)
    places = torch.tensor([0, 2])
    found = []
    a = int(np.flatnonzero(as_bools(rows.allowed(3)))[0])
    for tokens in ((), (3,), (), (3, 1)):
        sent.clear()
        for row in tokens:
            rows.note_token(row, a)
        logits = torch.zeros(3, vocab_size)
        rows.mask(logits, (3, 1), torch.tensor([3, 1]), places)
        found.append([shape for shape in sent if len(shape) == 2])
        for place, row in zip(places.tolist(), (3, 1), strict=True):
            assert torch.equal(logits[place].isfinite(), torch.from_numpy(as_bools(rows.allowed(row)))[:vocab_size])
        assert logits[1].isfinite().all()

    assert found[0] == [(2, vocab_size // 32)]
    assert found[2] == []
    assert len(found[1]) <= 1
    assert len(found[3]) == 1


def as_bools(mask: npt.NDArray[np.int32]) -> npt.NDArray[np.bool_]:
    """The bits of a mask, one per token."""
    return np.unpackbits(mask.view(np.uint8), bitorder="little").astype(np.bool_)


@pytest.mark.parametrize("wrong", ["store", "output", "grammar"])
def test_a_row_whose_grammar_cannot_be_used_may_sample_nothing(wrong: str) -> None:
    """A row whose grammar cannot be used fails alone, and the failure does not blame the request.

    There is no tokenizer, an earlier output does not conform, or the grammar does not compile.
    """
    store = None if wrong == "store" else make_store()
    rows = GrammarRows(store, 1024, 4, torch.device("cpu"))
    grammar = plan_pb2.Grammar(regex="(").SerializeToString() if wrong == "grammar" else REGEX
    output = np.array([EOS, 900] if wrong == "output" else [], np.int32)

    rows.admit(3, decode_grammar(sha256(grammar).digest(), grammar), NO_IDS, output)

    assert not rows.allowed(3).any()
    failure = rows.explain(3, 7)
    assert failure is not None
    assert (failure.row, failure.generation, failure.kind, failure.field) == (3, 7, FailureKind.INTERNAL, "")
    assert failure.reason
    rows.note_token(3, 5)
    rows.leave(3)
    assert len(rows) == 0
